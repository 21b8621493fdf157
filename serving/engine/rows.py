"""The one call that a target answers: rows in, logits and features out (prefill, decoding, verification, any mix).

A row is one token of one sequence at one position. Backends: `torch_rows` (any Hugging Face decoder, CPU and GPU) and
`native_rows` (a C++ forward for Llama-like targets on CPUs). Both keep the KV cache in slots: per layer one
[slots, kv_heads, max_len, head_dim] buffer, in which a row sees the entries of its own slot at positions <= its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rows:
    """R rows of one forward pass, on the host.

    The rows of one slot lie together and their positions ascend by one. The pass writes the key and value of every row
    at its position, so an entry that a rejected draft left behind is overwritten before any row can see it.
    """

    ids_R: Tensor  # int64, token ids
    slots_R: Tensor  # int64, cache slot of each row
    positions_R: Tensor  # int64, absolute position of each row
    logit_rows: Tensor | None = None  # int64, N rows whose logits are wanted, ascending; None: all R
    with_features: bool = True  # False: nobody needs the tapped layers in this pass

    def runs(self) -> list[tuple[int, int, int, int]]:
        """(slot, first row, number of rows, first position) of each slot's run of rows, in row order."""
        slots, positions = self.slots_R.tolist(), self.positions_R.tolist()
        starts = [0] + [i for i in range(1, len(slots)) if slots[i] != slots[i - 1]]
        ends = [*starts[1:], len(slots)]
        return [(slots[s], s, e - s, positions[s]) for s, e in zip(starts, ends, strict=True)]


def make_rows(
    runs: list[tuple[int, int, list[int]]], logit_rows: list[int] | None = None, with_features: bool = True
) -> Rows:
    """Rows from runs of (slot, first position, token ids)."""
    ids = [token for _, _, tokens in runs for token in tokens]
    slots = [slot for slot, _, tokens in runs for _ in tokens]
    positions = [start + i for _, start, tokens in runs for i in range(len(tokens))]
    packed = torch.tensor([ids, slots, positions], dtype=torch.int64)
    wanted = None if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64)
    return Rows(
        ids_R=packed[0], slots_R=packed[1], positions_R=packed[2], logit_rows=wanted, with_features=with_features
    )


@dataclass(frozen=True, kw_only=True)
class RowsOutput:
    """What a pass gives back, on the backend's device. Valid until the next `forward`: copy what must live longer."""

    logits_NV: Tensor  # float32 or the backend's dtype, N = len(logit_rows) or R
    features_RF: Tensor | None  # [R, taps * width] in the order of `target_layer_ids`; None if none are wanted


class RowsBackend(Protocol):
    """A target with its KV slots."""

    name: str  # "torch" or "native"
    dtype: torch.dtype
    device: torch.device
    num_slots: int
    max_len: int  # tokens that fit into a slot
    vocab_size: int
    hidden_size: int  # width of one tap
    target_layer_ids: tuple[int, ...]  # tapped layers, counted from 0 at the first decoder layer's output
    native_threads: int | None  # of the native kernels, where it runs on them
    wants_equal_runs: bool  # whether passes are much cheaper when every sequence brings as many rows

    def forward(self, rows: Rows) -> RowsOutput:
        """Run the rows through the target, writing their keys and values into the slots."""
        ...

    def kv_bytes(self) -> int:
        """Bytes that the KV slots take."""
        ...
