"""The one call that a target answers: rows in, logits and features out (prefill, decoding, verification, any mix).

A row is one token of one sequence at one position. Backends: `torch_rows` (any Hugging Face decoder, CPU and GPU) and
`native_rows` (a C++ forward for Llama-like targets on CPUs). Both keep the KV cache in slots: per layer one
[slots, kv_heads, max_len, head_dim] buffer, in which a row sees the entries of its own slot at positions <= its own;
a row of a draft tree sees its ancestors alone of the pass's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rows:
    """R rows of one forward pass, on the host.

    The rows of one slot lie together. The first of them follows the slot's cached entries, and each other one the row
    before it or, in a tree, the row of the pass that `parents_R` names: one position further. The pass writes the keys
    and values of a slot's rows side by side from the first one's position on: in a chain a row's entry lies at its
    position, in a tree siblings share a position and not an entry. So an entry that a rejected draft left behind is
    overwritten before any row can see it.
    """

    ids_R: Tensor  # int64, token ids
    slots_R: Tensor  # int64, cache slot of each row
    positions_R: Tensor  # int64, absolute position of each row
    parents_R: Tensor | None = None  # int64, the earlier row of its slot that each row follows, -1 for a slot's first
    logit_rows: Tensor | None = None  # int64, N rows whose logits are wanted, ascending; None: all R
    with_features: bool = True  # False: nobody needs the tapped layers in this pass

    def runs(self) -> list[tuple[int, int, int, int]]:
        """(slot, first row, number of rows, first position) of each slot's run of rows, in row order."""
        slots, positions = self.slots_R.tolist(), self.positions_R.tolist()
        starts = [0] + [i for i in range(1, len(slots)) if slots[i] != slots[i - 1]]
        ends = [*starts[1:], len(slots)]
        return [(slots[s], s, e - s, positions[s]) for s, e in zip(starts, ends, strict=True)]


class Run(NamedTuple):
    """The rows of one slot: an anchor and its drafts, or a part of a prompt."""

    slot: int
    start: int  # position of the first row
    tokens: list[int]
    parents: list[int] | None = None  # per row the place in the run of the row it follows, -1 first; None: a chain


def entries_of(rows: Rows) -> Tensor:
    """[R] where in its slot each row's key and value lie."""
    if rows.parents_R is None:
        return rows.positions_R
    parts = [torch.arange(start, start + count) for _, _, count, start in rows.runs()]
    return torch.cat(parts)


def make_rows(
    runs: Sequence[Run | tuple[int, int, list[int]]], logit_rows: list[int] | None = None, with_features: bool = True
) -> Rows:
    """Rows from runs, one after another."""
    named = [Run(*run) for run in runs]
    ids = [token for run in named for token in run.tokens]
    slots = [run.slot for run in named for _ in run.tokens]
    positions = [run.start + depth for run in named for depth in _depths(run)]
    packed = torch.tensor([ids, slots, positions], dtype=torch.int64)
    return Rows(
        ids_R=packed[0],
        slots_R=packed[1],
        positions_R=packed[2],
        parents_R=_parents(named) if any(run.parents is not None for run in named) else None,
        logit_rows=None if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64),
        with_features=with_features,
    )


def _parents(runs: list[Run]) -> Tensor:
    parents: list[int] = []
    for run in runs:
        first = len(parents)
        above = range(-1, len(run.tokens) - 1) if run.parents is None else run.parents
        parents += [-1 if parent < 0 else first + parent for parent in above]
    return torch.tensor(parents, dtype=torch.int64)


def _depths(run: Run) -> list[int]:
    if run.parents is None:
        return list(range(len(run.tokens)))
    depths: list[int] = []
    for parent in run.parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


class Move(NamedTuple):
    """Entries of a slot that become its entries `start`, `start` + 1, ...: an entry is a row's key and value."""

    slot: int
    start: int
    entries: list[int]  # ascending, none before its new place


def check_moves(backend: RowsBackend, moves: Sequence[Move]) -> None:
    """Raise ValueError unless all entries can be moved one after another."""
    for slot, start, entries in moves:
        fits = 0 <= slot < backend.num_slots and start >= 0 and all(e < backend.max_len for e in entries)
        if not fits or any(e < start + i for i, e in enumerate(entries)) or sorted(set(entries)) != entries:
            raise ValueError(f"entries {entries} of slot {slot} do not fit at {start}; give later, ascending ones")


@dataclass(frozen=True, kw_only=True)
class RowsOutput:
    """What a pass gives back, on the backend's device. Valid until the next `forward`: copy what must live longer."""

    logits_NV: Tensor  # float32 or the backend's dtype, N = len(logit_rows) or R
    features_RF: Tensor | None  # [R, taps * width] in the order of `target_layer_ids`; None if none are wanted
    best_N: Tensor | None = None  # int64, argmax of each row's logits, where the backend has it at hand


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

    def move_entries(self, moves: Sequence[Move]) -> None:
        """Let the paths that were accepted in trees become parts of their sequences."""
        ...

    def kv_bytes(self) -> int:
        """Bytes that the KV slots take."""
        ...
