"""Attention over KV slots for Hugging Face models, registered under `ATTENTION_NAME`.

In: queries, keys and values of a pass's rows, and a `SlotPass` that says where they lie. Out: each row's attention over
its own slot, after the keys and values were written there. Source of the hook: transformers' AttentionInterface.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from serving.engine.kv_layout import UnsupportedTargetError
from serving.engine.rows import Rows

ATTENTION_NAME = "draftloop_slots"
MAX_PADDED_RUN = 32  # runs up to this many rows share one padded attention call; longer ones (prefill) get their own


@dataclass
class TreeSight:
    """What the places of a group see where rows form trees: a beginning of the slot, and some of the run's entries."""

    prefixes: Tensor  # [slots, width] entries from the slot's beginning; the run's own entries begin there
    ancestors: Tensor  # bool [slots, width, width] which of the run's rows a place sees, itself included

    def seen(self, positions: Tensor, length: int, window: int | None) -> Tensor:
        """[slots, width, length] bool; `positions` [slots, width] are those of the places."""
        width = positions.shape[1]
        key_L = torch.arange(length + width, device=positions.device)  # runs shorter than the longest reach past it
        seen = key_L < self.prefixes[:, :, None]
        ancestors = self.ancestors
        if window is not None:
            seen &= key_L > positions[:, :, None] - window
            ancestors = ancestors & (positions[:, None, :] > positions[:, :, None] - window)
        entries = self.prefixes[:, :, None] + torch.arange(width, device=positions.device)
        return seen.scatter(2, entries, ancestors)[:, :, :length]


@dataclass
class RowGroup:
    """Rows that attend in one call: `slots` consecutive slots of the cache, each with `width` (padded) rows."""

    first_slot: int
    slots: int
    width: int
    gather: Tensor | None  # [slots * width] row of each padded place; None: the rows lie like that already
    scatter: Tensor | None  # rows' places in the padded layout, for the rows of `rows`
    rows: slice | Tensor  # which rows of the pass belong to the group
    positions: Tensor  # [slots, width] position of every place; padding repeats position 0
    length: int  # keys to look at
    sight: TreeSight | None = None  # of trees; None: every row sees the keys up to its position
    has_later_keys: bool = False  # keys past a lone row's own position are among them, and need a mask
    masks: dict[tuple[int | None, int], Tensor | None] = field(default_factory=dict)  # by window and repeats

    def mask(self, window: int | None, repeats: int, like: Tensor) -> Tensor | None:
        """Additive mask [slots, 1, repeats * width, length], or None where every key may be seen.

        Made once a pass. `repeats` query heads share a KV head, their rows one after another.
        """
        if window is not None and window >= self.length:
            window = None
        if (window, repeats) not in self.masks:
            if self.sight is not None:
                seen = self.sight.seen(self.positions, self.length, window)
            else:
                key_L = torch.arange(self.length, device=like.device)
                query = self.positions[:, :, None]
                seen = key_L <= query
                if window is not None:
                    seen &= key_L > query - window
            single = self.slots == 1 and self.width == 1 and window is None and not self.has_later_keys
            mask = None
            if not single:
                mask = torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, float("-inf"))
                mask = mask.repeat(1, repeats, 1)[:, None]
            self.masks[window, repeats] = mask
        return self.masks[window, repeats]


@dataclass
class SlotPass:
    """What the attention of every layer needs to know about one forward pass."""

    keys: list[Tensor]  # per layer [slots, max_len, kv_heads, head_dim]; that of values may be another one
    values: list[Tensor]
    flat_R: Tensor  # slot * max_len + entry
    groups: list[RowGroup]


def slot_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, R, head_dim]
    key: Tensor,  # [1, kv_heads, R, head_dim]
    value: Tensor,  # [1, kv_heads, R, value's head_dim]
    attention_mask: Tensor | None,
    *,
    scaling: float,
    slot_pass: SlotPass,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write keys and values into the slots, attend each row to its own slot; returns [1, R, heads, value dim]."""
    layer: Any = module.layer_idx  # an int, which nn.Module's own annotation does not tell
    keys, values = slot_pass.keys[layer], slot_pass.values[layer]
    if (key.shape[1], key.shape[3], value.shape[3]) != (*keys.shape[2:], values.shape[3]):
        raise UnsupportedTargetError(
            f"layer {layer} has keys {tuple(key.shape)} and values {tuple(value.shape)} where slots hold "
            f"{tuple(keys.shape[2:])} and {tuple(values.shape[2:])}; choose another target"
        )
    keys.flatten(0, 1).index_copy_(0, slot_pass.flat_R, key[0].transpose(0, 1).to(keys.dtype))
    values.flatten(0, 1).index_copy_(0, slot_pass.flat_R, value[0].transpose(0, 1).to(values.dtype))
    query_RHD = query[0].transpose(0, 1)
    if len(slot_pass.groups) == 1:
        out = _attend(query_RHD, keys, values, slot_pass.groups[0], scaling, sliding_window, softcap, s_aux)
        return out[None], None
    out = query_RHD.new_empty((*query_RHD.shape[:2], values.shape[3]))
    for group in slot_pass.groups:
        rows = group.rows
        out[rows] = _attend(query_RHD[rows], keys, values, group, scaling, sliding_window, softcap, s_aux)
    return out[None], None


def _attend(
    query_RHD: Tensor,
    keys: Tensor,
    values: Tensor,
    group: RowGroup,
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
    mask = group.mask(window, heads // kv_heads, query_RHD)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(folded, key_SHLD, value_SHLD, attn_mask=mask, scale=scaling)
    else:
        out = _attend_explicitly(folded, key_SHLD, value_SHLD, mask, scaling, softcap, sinks)
    out = out.view(group.slots, kv_heads, heads // kv_heads, group.width, -1).permute(0, 3, 1, 2, 4)
    out = out.reshape(group.slots * group.width, heads, -1)
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


def group_rows(rows: Rows, device: torch.device) -> list[RowGroup]:
    """A pass's runs (`Rows.runs`) as few attention calls: short ones share a padded call, a long one has its own."""
    runs = rows.runs()
    trees = None if rows.parents_R is None else Trees(rows)
    whole = [run for run in runs if run[2] > MAX_PADDED_RUN and (trees is None or trees.is_chain(run))]
    short = sorted(run for run in runs if run not in whole)
    groups = [_padded_group(part, len(runs), device, trees) for part in _neighbours(short)]
    for slot, first, count, position in whole:
        positions = torch.arange(position, position + count, device=device)[None]
        groups.append(RowGroup(slot, 1, count, None, None, slice(first, first + count), positions, position + count))
    return groups


class Trees:
    """Positions, prefixes and paths of a pass's rows."""

    def __init__(self, rows: Rows):
        assert rows.parents_R is not None
        self.positions, self.parents = rows.positions_R.tolist(), rows.parents_R.tolist()

    def is_chain(self, run: tuple[int, int, int, int]) -> bool:
        _, first, count, start = run
        return self.positions[first + count - 1] == start + count - 1

    def sight(
        self,
        first_slot: int,
        num_slots: int,
        width: int,
        runs: list[tuple[int, int, int, int]],
        device: torch.device,
    ) -> TreeSight:
        """Of a group's places. Padding sees the slot's first entry, so that its softmax is defined."""
        prefixes = np.zeros((num_slots, width), dtype=np.int64)
        ancestors = np.zeros((num_slots, width, width), dtype=bool)
        ancestors[:, :, 0] = True
        for slot, first, count, position in runs:
            mine = ancestors[slot - first_slot]
            prefixes[slot - first_slot, :count] = position
            for i in range(1, count):
                mine[i] = mine[self.parents[first + i] - first]
                mine[i, i] = True
        return TreeSight(torch.from_numpy(prefixes).to(device), torch.from_numpy(ancestors).to(device))


def _padded_group(
    runs: list[tuple[int, int, int, int]], total: int, device: torch.device, trees: Trees | None
) -> RowGroup:
    first_slot, num_slots = runs[0][0], runs[-1][0] - runs[0][0] + 1
    width = max(count for _, _, count, _ in runs)
    length = max(position + count for _, _, count, position in runs)
    gather = [0] * (num_slots * width)
    positions = [0] * (num_slots * width)
    scatter, rows = [], []
    sight = None if trees is None else trees.sight(first_slot, num_slots, width, runs, device)
    for slot, first, count, position in sorted(runs, key=lambda run: run[1]):
        base = (slot - first_slot) * width
        for i in range(count):
            row = first + i
            gather[base + i] = row
            positions[base + i] = position + i if trees is None else trees.positions[row]
            scatter.append(base + i)
            rows.append(row)
    dense = gather == list(range(len(rows))) and len(runs) == total
    packed = torch.tensor([gather, positions], device=device)
    rows_R = torch.tensor(rows, device=device)
    if len(runs) < total:  # the group sees its own rows only: count places within them
        place = {row: i for i, row in enumerate(rows)}
        packed[0] = torch.tensor([place.get(row, 0) for row in gather], device=device)
    return RowGroup(
        first_slot,
        num_slots,
        width,
        None if dense else packed[0],
        None if dense else torch.tensor(scatter, device=device),
        slice(None) if len(runs) == total else rows_R,
        packed[1].view(num_slots, width),
        length,
        sight,
    )


def _neighbours(runs: list[tuple[int, int, int, int]]) -> list[list[tuple[int, int, int, int]]]:
    """Split runs (sorted by slot) where too many idle slots lie between, so that padding stays below the work."""
    parts: list[list[tuple[int, int, int, int]]] = []
    for run in runs:
        if parts and run[0] - parts[-1][-1][0] <= 2:
            parts[-1].append(run)
        else:
            parts.append([run])
    return parts


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, slot_attention)
