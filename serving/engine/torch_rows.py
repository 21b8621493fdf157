"""The `torch` backend: any Hugging Face decoder with full or sliding-window attention, on CPU or GPU.

The model's own modules do everything but attention, which is replaced by `slot_attention`: it writes the rows' keys and
values into the slots and lets every row attend to its own slot. Source of the hook: transformers' AttentionInterface.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from serving.engine.rows import Rows, RowsOutput

ATTENTION_NAME = "draftloop_slots"
LAYER_TYPES = {"full_attention", "sliding_attention"}
RECURRENT_TYPES = {"mamba", "mamba2", "rwkv", "recurrent_gemma", "jamba", "bamba", "zamba", "zamba2"}
RECURRENT_KEYS = ("ssm_cfg", "mamba_d_state", "linear_num_key_heads", "rwkv_hidden_size")  # of other families
MAX_PADDED_RUN = 32  # runs up to this many rows share one padded attention call; longer ones (prefill) get their own


class UnsupportedTargetError(ValueError):
    """The target keeps state that slots cannot roll back, or attends in a way that rows cannot express."""


def unsupported_reason(config: Any) -> str | None:
    """Why a target with this text config cannot be served, in one line; None if it can."""
    types = set(getattr(config, "layer_types", None) or ["full_attention"]) - LAYER_TYPES
    if types:
        return f"{config.model_type} has layers of type {', '.join(sorted(types))}, whose state cannot be rolled back"
    if getattr(config, "is_encoder_decoder", False):
        return f"{config.model_type} is an encoder-decoder; Draftloop decodes decoder-only targets"
    if config.model_type in RECURRENT_TYPES or any(hasattr(config, key) for key in RECURRENT_KEYS):
        return f"{config.model_type} has recurrent or linear-attention state, which cannot be rolled back"
    if getattr(config, "num_kv_shared_layers", 0):
        return f"{config.model_type} shares keys and values between layers, which the slot cache does not hold"
    return None


@dataclass
class _Group:
    """Rows that attend in one call: `slots` consecutive slots of the cache, each with `width` (padded) rows."""

    first_slot: int
    slots: int
    width: int
    gather: Tensor | None  # [slots * width] row of each padded place; None: the rows lie like that already
    scatter: Tensor | None  # rows' places in the padded layout, for the rows of `rows`
    rows: slice | Tensor  # which rows of the pass belong to the group
    positions: Tensor  # [slots, width] position of every place; padding repeats position 0
    length: int  # keys to look at
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """Additive mask [slots, 1, width, length], or None where every key may be seen."""
        if window is not None and window >= self.length:
            window = None
        if window not in self.masks:
            key_L = torch.arange(self.length, device=like.device)
            query = self.positions[:, :, None]
            seen = key_L <= query
            if window is not None:
                seen &= key_L > query - window
            single = self.slots == 1 and self.width == 1 and window is None
            self.masks[window] = (
                None if single else torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, float("-inf"))[:, None]
            )
        return self.masks[window]


@dataclass
class _Pass:
    """What the attention of every layer needs to know about one forward pass."""

    keys: list[Tensor]  # per layer [slots, max_len, kv_heads, head_dim]
    values: list[Tensor]
    flat_R: Tensor  # slot * max_len + position
    groups: list[_Group]


def slot_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, R, head_dim]
    key: Tensor,  # [1, kv_heads, R, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    slot_pass: _Pass,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write keys and values into the slots, attend each row to its own slot; returns [1, R, heads, head_dim]."""
    layer = module.layer_idx
    keys, values = slot_pass.keys[layer], slot_pass.values[layer]  # type: ignore[index]
    keys.flatten(0, 1).index_copy_(0, slot_pass.flat_R, key[0].transpose(0, 1).to(keys.dtype))
    values.flatten(0, 1).index_copy_(0, slot_pass.flat_R, value[0].transpose(0, 1).to(values.dtype))
    query_RHD = query[0].transpose(0, 1)
    if len(slot_pass.groups) == 1:
        out = _attend(query_RHD, keys, values, slot_pass.groups[0], scaling, sliding_window, softcap, s_aux)
        return out[None], None
    out = torch.empty_like(query_RHD, memory_format=torch.contiguous_format)
    for group in slot_pass.groups:
        rows = group.rows
        out[rows] = _attend(query_RHD[rows], keys, values, group, scaling, sliding_window, softcap, s_aux)
    return out[None], None


def _attend(
    query_RHD: Tensor,
    keys: Tensor,
    values: Tensor,
    group: _Group,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    heads, kv_heads, dim = query_RHD.shape[1], keys.shape[2], query_RHD.shape[2]
    if group.gather is not None:
        query_RHD = query_RHD.index_select(0, group.gather)
    # Query heads that share a KV head lie side by side as more queries of that head: no key is copied.
    folded = query_RHD.view(group.slots, group.width, kv_heads, heads // kv_heads, dim)
    folded = folded.permute(0, 2, 3, 1, 4).reshape(group.slots, kv_heads, -1, dim)
    slots = slice(group.first_slot, group.first_slot + group.slots)
    key_SHLD = keys[slots, : group.length].transpose(1, 2)
    value_SHLD = values[slots, : group.length].transpose(1, 2)
    mask = group.mask(window, query_RHD)
    if mask is not None and heads != kv_heads:
        mask = mask.repeat(1, 1, heads // kv_heads, 1)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(folded, key_SHLD, value_SHLD, attn_mask=mask, scale=scaling)
    else:
        out = _attend_explicitly(folded, key_SHLD, value_SHLD, mask, scaling, softcap, sinks)
    out = out.view(group.slots, kv_heads, heads // kv_heads, group.width, dim).permute(0, 3, 1, 2, 4)
    out = out.reshape(group.slots * group.width, heads, dim)
    return out if group.scatter is None else out.index_select(0, group.scatter)


def _attend_explicitly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with soft-capped scores (Gemma 2) or attention sinks (gpt-oss), which the fused kernels lack."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    scores = scores.float()
    if sinks is not None:
        kv_heads, width = key.shape[1], query.shape[2]
        per_query = sinks.float().view(kv_heads, -1).repeat_interleave(width * kv_heads // sinks.numel(), dim=1)
        scores = torch.cat([scores, per_query[None, :, :, None].expand(len(scores), -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(value.dtype)
    return torch.matmul(weights, value)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, slot_attention)


class TorchRows:
    """`RowsBackend` over a Hugging Face causal LM. The model is taken over: its attention implementation changes."""

    name = "torch"

    def __init__(self, model: PreTrainedModel, *, num_slots: int, max_len: int, target_layer_ids: tuple[int, ...] = ()):
        config = model.config.get_text_config()
        reason = unsupported_reason(config)
        if reason:
            raise UnsupportedTargetError(f"{reason}; choose another target")
        for layer in target_layer_ids:
            if not 0 <= layer < config.num_hidden_layers:
                raise ValueError(
                    f"tapped layer {layer} does not exist: the target has {config.num_hidden_layers} layers"
                )
        self.model = model.eval().requires_grad_(False)
        self.model.set_attn_implementation(ATTENTION_NAME)
        self.num_slots, self.max_len = num_slots, max_len
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.target_layer_ids = tuple(target_layer_ids)
        self.dtype, self.device = model.dtype, model.device
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (num_slots, max_len, kv_heads, head_dim)
        layers = range(config.num_hidden_layers)
        self._keys = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in layers]
        self._values = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in layers]
        self._tapped: dict[int, Tensor] = {}
        decoder_layers = _decoder_layers(model, config.num_hidden_layers)
        for layer in self.target_layer_ids:
            decoder_layers[layer].register_forward_hook(self._tap(layer))

    def _tap(self, layer: int):
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:  # a reference, no copy
            self._tapped[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep

    @torch.inference_mode()
    def forward(self, rows: Rows) -> RowsOutput:
        """One pass; see `RowsBackend`. Raises ValueError if a row's slot or position does not exist."""
        if len(rows.ids_R) == 0:
            raise ValueError("a pass needs at least one row")
        if int(rows.positions_R.max()) >= self.max_len or int(rows.slots_R.max()) >= self.num_slots:
            raise ValueError(f"a row lies outside the {self.num_slots} slots of {self.max_len} tokens")
        flat_R = (rows.slots_R * self.max_len + rows.positions_R).to(self.device)
        slot_pass = _Pass(self._keys, self._values, flat_R, self._group(rows.runs()))
        keep: Tensor | int = 0 if rows.logit_rows is None else rows.logit_rows.to(self.device)
        output = self.model(
            input_ids=rows.ids_R[None].to(self.device),
            position_ids=rows.positions_R[None].to(self.device),
            use_cache=False,
            logits_to_keep=keep,
            slot_pass=slot_pass,
        )
        features = None
        if self.target_layer_ids and rows.with_features:
            features = torch.cat([self._tapped.pop(layer) for layer in self.target_layer_ids], dim=-1)
        return RowsOutput(logits_NV=output.logits[0], features_RF=features)

    def _group(self, runs: list[tuple[int, int, int, int]]) -> list[_Group]:
        short = sorted(run for run in runs if run[2] <= MAX_PADDED_RUN)
        groups = [self._padded_group(part, total=len(runs)) for part in _neighbours(short)]
        for slot, first, count, position in runs:
            if count > MAX_PADDED_RUN:
                positions = torch.arange(position, position + count, device=self.device)[None]
                groups.append(
                    _Group(slot, 1, count, None, None, slice(first, first + count), positions, position + count)
                )
        return groups

    def _padded_group(self, runs: list[tuple[int, int, int, int]], total: int) -> _Group:
        first_slot, num_slots = runs[0][0], runs[-1][0] - runs[0][0] + 1
        width = max(count for _, _, count, _ in runs)
        length = max(position + count for _, _, count, position in runs)
        gather = [0] * (num_slots * width)
        positions = [0] * (num_slots * width)
        scatter, rows = [], []
        for slot, first, count, position in sorted(runs, key=lambda run: run[1]):
            base = (slot - first_slot) * width
            for i in range(count):
                gather[base + i], positions[base + i] = first + i, position + i
                scatter.append(base + i)
                rows.append(first + i)
        dense = gather == list(range(len(rows))) and len(runs) == total
        packed = torch.tensor([gather, positions], device=self.device)
        rows_R = torch.tensor(rows, device=self.device)
        if len(runs) < total:  # the group sees its own rows only: count places within them
            place = {row: i for i, row in enumerate(rows)}
            packed[0] = torch.tensor([place.get(row, 0) for row in gather], device=self.device)
        return _Group(
            first_slot,
            num_slots,
            width,
            None if dense else packed[0],
            None if dense else torch.tensor(scatter, device=self.device),
            slice(None) if len(runs) == total else rows_R,
            packed[1].view(num_slots, width),
            length,
        )

    def kv_bytes(self) -> int:
        """Bytes that the KV slots take."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values))


def _neighbours(runs: list[tuple[int, int, int, int]]) -> list[list[tuple[int, int, int, int]]]:
    """Split runs (sorted by slot) where too many idle slots lie between, so that padding stays below the work."""
    parts: list[list[tuple[int, int, int, int]]] = []
    for run in runs:
        if parts and run[0] - parts[-1][-1][0] <= 2:
            parts[-1].append(run)
        else:
            parts.append([run])
    return parts


def _decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """The model's list of decoder layers, found by its length."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and name.endswith("layers"):
            return module
    raise UnsupportedTargetError(f"no list of {count} decoder layers in {type(model).__name__}; choose another target")
