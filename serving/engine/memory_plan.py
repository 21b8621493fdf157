"""What an engine takes (weights, slots, a pass) and how many slots a budget holds; known before anything is loaded.

In: the target's config and the headers of its weights, the drafter's. Out: a `MemoryPlan`, in bytes as they are held.
While weights are loaded and packed they exist twice for a moment, which is not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from drafters.checkpoint import WEIGHTS, read_config
from drafters.dflash import DFlashConfig
from drafters.dflash_drafter import DFlashDrafter
from drafters.gemma_assistant import GemmaAssistantConfig
from drafters.gemma_assistant_drafter import GemmaAssistantDrafter
from drafters.mtp import MtpConfig
from drafters.mtp_drafter import RecursiveDrafter
from drafters.own_mtp_drafter import OwnMtpDrafter
from drafters.own_mtp_module import OwnMtpConfig
from drafters.target import is_mtp_tensor
from drafters.target_source import safetensors_header, weight_files
from serving.engine.engine_config import EngineConfig
from serving.engine.kv_layout import kv_layout, kv_numbers
from serving.engine.native_memory import kv_slot_bytes
from serving.engine.native_pack import packed_bytes
from serving.engine.native_recursive_drafter import NativeRecursiveDrafter

MOST_SLOTS = 64  # chosen by a budget; more sequences than that are rarely worth their wait for each other

# How linear layers are held: by the native backend, packed for the torch backend's modules, or as torch has them.
Form = Literal["native", "packed", "plain"]


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by part, for `num_slots` sequences of up to `max_len` tokens."""

    num_slots: int
    max_len: int
    target_bytes: int  # its weights
    drafter_bytes: int  # its weights, with its own copies of those that it borrows from the target
    kv_bytes: int  # of the target
    drafter_kv_bytes: int
    pending_bytes: int  # features that wait for a drafter, if all of every slot do, and those kept for the next one
    pass_bytes: int  # what the largest pass makes for a moment, roughly
    budget_bytes: int | None  # None: nobody asked

    @property
    def total_bytes(self) -> int:
        weights = self.target_bytes + self.drafter_bytes
        return weights + self.kv_bytes + self.drafter_kv_bytes + self.pending_bytes + self.pass_bytes

    def describe(self) -> str:
        """One line."""
        drafter = f", drafter {_size(self.drafter_bytes)}" if self.drafter_bytes else ""
        state = f" + {_size(self.drafter_kv_bytes)}" if self.drafter_kv_bytes else ""
        pending = f", features {_size(self.pending_bytes)}" if self.pending_bytes else ""
        budget = "" if self.budget_bytes is None else f", of {_size(self.budget_bytes)}"
        return (
            f"target {_size(self.target_bytes)}{drafter}, KV {self.num_slots} slots x {self.max_len} tokens: "
            f"{_size(self.kv_bytes)}{state}{pending}, a pass {_size(self.pass_bytes)}; "
            f"{_size(self.total_bytes)} in all{budget}"
        )


@dataclass(frozen=True, kw_only=True)
class DrafterPlan:
    """Bytes of a drafter that has a process of its own, for the engine's slots."""

    num_slots: int
    max_len: int
    drafter_bytes: int  # its weights, with its own copies of those that it borrows from the target
    state_bytes: int  # of all slots

    @property
    def total_bytes(self) -> int:
        return self.drafter_bytes + self.state_bytes

    def describe(self) -> str:
        """One line."""
        state = f", {self.num_slots} slots x {self.max_len} tokens: {_size(self.state_bytes)}"
        return f"drafter {_size(self.drafter_bytes)}{state if self.state_bytes else ''}"


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """What the weights take, and what every slot does."""

    max_len: int
    target_bytes: int
    drafter_bytes: int
    prefill_bytes: int  # of a pass with as many prompt rows as it may have
    slot_kv_bytes: int
    slot_drafter_bytes: int
    slot_pending_bytes: int
    slot_pass_bytes: int

    def plan(self, num_slots: int, budget_bytes: int | None = None) -> MemoryPlan:
        return MemoryPlan(
            num_slots=num_slots,
            max_len=self.max_len,
            target_bytes=self.target_bytes,
            drafter_bytes=self.drafter_bytes,
            kv_bytes=num_slots * self.slot_kv_bytes,
            drafter_kv_bytes=num_slots * self.slot_drafter_bytes,
            pending_bytes=num_slots * self.slot_pending_bytes,
            pass_bytes=num_slots * self.slot_pass_bytes + self.prefill_bytes,
            budget_bytes=budget_bytes,
        )

    def most_slots(self, budget_bytes: int) -> int:
        """How many slots a budget holds, MOST_SLOTS at most; 0 if not even one."""
        return max((n for n in range(1, MOST_SLOTS + 1) if self.plan(n).total_bytes <= budget_bytes), default=0)


def memory_needs(
    target_path: Path,
    config: Any,
    drafter_path: Path | None,
    *,
    dtype: torch.dtype,
    form: Form,
    max_len: int,
    taps: tuple[int, ...],
    engine_config: EngineConfig,
) -> MemoryNeeds:
    """Of a target with this text config. Raises TargetError or CheckpointError for files that cannot be read."""
    first = kv_layout(config)[0]
    layers, width, size = config.num_hidden_layers, config.hidden_size, dtype.itemsize
    slot_kv = kv_numbers(config) * max_len * size
    if form == "native":  # keys and values are float32 in any dtype, and so is what comes out of a pass
        slot_kv, size = kv_slot_bytes((layers, first.kv_heads), max_len=max_len, head_dim=first.key_dim), 4
    drafter = (0, 0) if drafter_path is None else _drafter(drafter_path, target_path, dtype, form, max_len)
    hidden = (len(taps) * width + 8 * width + 3 * getattr(config, "intermediate_size", 4 * width)) * size
    logits = config.vocab_size * (size + 3 * 8)  # those who sample make probabilities of them in float64
    drafts = max(engine_config.num_draft_tokens, engine_config.tree_nodes)  # also of one elsewhere, or swapped in
    return MemoryNeeds(
        max_len=max_len,
        target_bytes=_target(target_path, config, dtype, form, max_len * first.key_dim),
        drafter_bytes=drafter[0],
        prefill_bytes=engine_config.max_prefill_rows * hidden,
        slot_kv_bytes=slot_kv,
        slot_drafter_bytes=drafter[1],
        slot_pending_bytes=max_len * len(taps) * width * (size + (2 if engine_config.keep_history else 0)),
        slot_pass_bytes=(drafts + 1) * (hidden + logits),
    )


def plan_drafter(
    path: Path, target_path: Path, *, dtype: torch.dtype, form: Form, num_slots: int, max_len: int
) -> DrafterPlan:
    """Of a drafter apart from its target. Raises CheckpointError or TargetError for files that cannot be read."""
    weights, slot = _drafter(path, target_path, dtype, form, max_len)
    return DrafterPlan(num_slots=num_slots, max_len=max_len, drafter_bytes=weights, state_bytes=num_slots * slot)


def _target(path: Path, config: Any, dtype: torch.dtype, form: Form, rope: int) -> int:
    shapes = _shapes(*weight_files(path))
    if getattr(config, "num_mtp_layers", None):  # a target leaves its MTP layers in the files
        shapes = {n: shape for n, shape in shapes.items() if not is_mtp_tensor(n, config.num_hidden_layers)}
    head = next((name for name in shapes if name.endswith("lm_head.weight")), None)
    embedding = next((shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")), None)
    if config.tie_word_embeddings and head:
        del shapes[head]
    if form == "native":  # a tied head is the embedding
        return sum(_native_bytes(name, shape, dtype) for name, shape in shapes.items()) + rope * 4
    packed = {name for name, shape in shapes.items() if form == "packed" and _is_linear(name, shape)}
    total = sum(
        packed_bytes(shape, dtype) if name in packed else math.prod(shape) * dtype.itemsize
        for name, shape in shapes.items()
    )
    if packed and config.tie_word_embeddings and embedding:
        total += packed_bytes(embedding, dtype)  # the head's packed copy
    return total


def _is_linear(name: str, shape: list[int]) -> bool:
    others = ("embed_tokens.weight", ".gate.weight")  # the latter chooses experts; neither it nor they are `nn.Linear`
    return len(shape) == 2 and name.endswith(".weight") and not name.endswith(others) and ".experts." not in name


def _native_bytes(name: str, shape: list[int], dtype: torch.dtype) -> int:
    """As `native_pack.pack_layer` lays it out."""
    if len(shape) != 2:
        return math.prod(shape) * 4
    outputs, inputs = shape
    if name.endswith(("k_proj.weight", "v_proj.weight")):  # in one matrix with the queries
        return outputs * inputs * dtype.itemsize
    if name.endswith(("gate_proj.weight", "up_proj.weight")):  # in one matrix, sixteen by sixteen
        return (outputs + -outputs % 16) * inputs * dtype.itemsize
    if name.endswith("down_proj.weight"):
        inputs += -inputs % 16
    return packed_bytes((outputs, inputs), dtype)


def _drafter(path: Path, target_path: Path, dtype: torch.dtype, form: Form, max_len: int) -> tuple[int, int]:
    """Bytes of a drafter's weights, and of its state of one slot; see `load_drafter_for`."""
    config, shapes = read_config(path), _shapes(path / WEIGHTS)
    shapes.pop("draft_vocab_ids", None)
    target = _shapes(*weight_files(target_path))
    vocab, width, drafted = config.vocab_size, config.hidden_size, config.draft_vocab_size
    tied = not any(name.endswith("lm_head.weight") for name in target)
    if isinstance(config, GemmaAssistantConfig):
        weights = _assistant(config, shapes, dtype, form) + vocab * 16  # ids of tokens, and their places
        borrowed = dtype if form == "plain" else torch.float32
        weights += (1 if tied else 2) * vocab * width * borrowed.itemsize
        return weights, GemmaAssistantDrafter.slot_bytes(config, max_len, borrowed)
    own_head = drafted < vocab or not tied
    recursive = isinstance(config, MtpConfig) and config.kind == "recursive"
    if form == "plain":
        numbers = sum(math.prod(shape) for shape in shapes.values()) + (vocab + drafted * own_head) * width
        weights, state = numbers * dtype.itemsize, dtype
    else:  # bfloat16 beside a float32 embedding; what is no linear layer stays in float32
        weights = sum(
            packed_bytes(shape, torch.bfloat16) if _is_linear(name, shape) else math.prod(shape) * 4
            for name, shape in shapes.items()
        )
        weights += packed_bytes((drafted, width), torch.bfloat16) + vocab * width * 4
        if own_head and not recursive:
            weights += drafted * width * 4
        state = torch.float32
    weights += drafted * 8  # ids of the draft vocabulary
    if form == "plain" or not recursive:
        weights += vocab * 8  # and each token's place in it
    if isinstance(config, DFlashConfig):
        return weights, DFlashDrafter.slot_bytes(config, max_len, state)
    if isinstance(config, OwnMtpConfig):
        return weights, OwnMtpDrafter.slot_bytes(config, max_len, state)
    if not recursive:
        return weights, 0
    if form == "plain":
        return weights, RecursiveDrafter.slot_bytes(config, max_len, state)
    return weights, NativeRecursiveDrafter.slot_bytes(config, max_len)


def _assistant(config: GemmaAssistantConfig, shapes: dict[str, list[int]], dtype: torch.dtype, form: Form) -> int:
    """Bytes of an assistant's own weights, and of those that make the target's keys and values anew."""
    numbers = sum(at.num_key_value_heads * at.head_dim for at in config.shared_layers.values())
    made = 2 * numbers * config.hidden_size  # at most: keys may be values
    order = shapes.pop("masked_embedding.token_ordering", [0])
    total = order[0] * 8
    for name, shape in shapes.items():
        packed = form != "plain" and len(shape) == 2 and not (order[0] and name.endswith("embed_tokens.weight"))
        size = dtype.itemsize if form == "plain" else 4
        total += packed_bytes(shape, torch.bfloat16) if packed else math.prod(shape) * size
    return total + made * (dtype.itemsize if form == "plain" else 4)


def _shapes(*files: Path) -> dict[str, list[int]]:
    return {name: entry["shape"] for file in files for name, entry in safetensors_header(file)[0].items()}


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.{int(count < 1e7)}f} MB"
