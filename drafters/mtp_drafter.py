"""MTP drafters at work: pairs in, drafts out, with the recursive head's keys and values kept in slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.drafter import DraftReply, DraftRequest, empty_reply
from drafters.mtp import IndependentHeads, RecursiveHead
from drafters.pair_ledger import PairLedger

WIDE = 32  # sequences with more new pairs than this (a fresh prompt) are taken note of one by one, unpadded


class IndependentDrafter:
    """K heads read the features of the newest pair; nothing is kept between rounds."""

    def __init__(self, module: IndependentHeads, name: str = "mtp-independent"):
        self.module = module.eval()
        self.name = name
        self.target_layer_ids = module.config.target_layer_ids
        self.max_draft_tokens = module.config.num_draft_tokens
        self.max_tree_nodes = 0

    def allocate(self, num_slots: int, max_len: int) -> None:
        """Nothing to make room for."""

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftReply:
        """See `Drafter`."""
        if request.num_draft_tokens == 0:
            return empty_reply(len(request.slots))
        assert request.features_NF is not None
        last_B = torch.tensor(request.counts).cumsum(0) - 1
        like = self.module.lm_head_WD
        features = request.features_NF[last_B].to(like.device, like.dtype)
        choice_BK = self.module.step_logits(features).argmax(dim=-1)[:, : request.num_draft_tokens]
        return DraftReply(tokens_BK=self.module.draft_vocab_ids[choice_BK].cpu())


class RecursiveDrafter:
    """Runs the head over new pairs (step 1), then K - 1 times over its own output. Proposes its argmax."""

    def __init__(self, module: RecursiveHead, name: str = "mtp-recursive", max_draft_tokens: int = 16):
        self.module = module.eval()
        self.name = name
        self.target_layer_ids = module.config.target_layer_ids
        self.max_draft_tokens = max_draft_tokens
        self.max_tree_nodes = 0
        self._keys = self._values = torch.empty(0)
        self._ledger = PairLedger(0)

    def allocate(self, num_slots: int, max_len: int) -> None:
        """Room for every slot's pairs, and for drafts and padding that reach past a full slot."""
        config, like = self.module.config, self.module.lm_head_WD
        shape = (num_slots, max_len + max(self.max_draft_tokens, WIDE), config.num_key_value_heads, config.head_dim)
        self._keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self._values = torch.zeros_like(self._keys)
        self._ledger = PairLedger(num_slots)

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftReply:
        """See `Drafter`. Raises ValueError if pairs are missing."""
        self._ledger.note(request)
        hidden_BD = self._observe(request)
        tokens, num = [], request.num_draft_tokens
        if num == 0:
            return empty_reply(len(request.slots))
        slots, device = request.slots, hidden_BD.device
        positions = torch.tensor(
            [s + c - 1 for s, c in zip(request.starts, request.counts, strict=True)], device=device
        )
        longest = int(positions.max()) + 1
        for k in range(1, num + 1):
            token_B = self.module.draft_vocab_ids[self.module.logits(hidden_BD).argmax(dim=-1)]
            tokens.append(token_B)
            if k < num:
                x = self.module.enter(token_B[:, None], hidden_BD[:, None])
                hidden_BD = self._layer(x, slots, (positions + k)[:, None], longest + k)[:, 0]
        return DraftReply(tokens_BK=torch.stack(tokens, dim=1).cpu())

    def _observe(self, request: DraftRequest) -> Tensor:
        """Step 1 over the new pairs; returns the output [B, D] at each sequence's newest pair."""
        assert request.features_NF is not None
        like = self.module.lm_head_WD
        hidden_ND = self.module.fuse(request.features_NF.to(like.device, like.dtype))
        x_ND = self.module.enter(request.tokens_N.to(like.device), hidden_ND)
        if max(request.counts) <= WIDE:
            return self._observe_padded(x_ND, request.slots, request.starts, request.counts)
        parts = x_ND.split(request.counts)
        outs = [
            self._observe_padded(x, [slot], [start], [count])
            for x, slot, start, count in zip(parts, request.slots, request.starts, request.counts, strict=True)
        ]
        return torch.cat(outs)

    def _observe_padded(self, x_ND: Tensor, slots: list[int], starts: list[int], counts: list[int]) -> Tensor:
        width, device = max(counts), x_ND.device
        start_B1 = torch.tensor(starts, device=device)[:, None]
        last_B = torch.tensor(counts, device=device) - 1
        offset_W = torch.arange(width, device=device)
        if min(counts) == width:
            x = x_ND.view(len(slots), width, -1)
        else:  # padding lies past the sequence's newest pair: it is overwritten before anything may see it
            first_B1 = torch.tensor([0, *counts[:-1]], device=device).cumsum(0)[:, None]
            x = x_ND[first_B1 + torch.minimum(offset_W[None, :], last_B[:, None])]
        end = max(s + width for s in starts)
        out = self._layer(x, slots, start_B1 + offset_W, end)
        return out[torch.arange(len(slots), device=device), last_B]

    def _layer(self, x_BWD: Tensor, slots: list[int], positions_BW: Tensor, end: int) -> Tensor:
        """The transformer layer over W rows per sequence; writes their keys and values, sees those up to each row."""
        module, config = self.module, self.module.config
        normed = module.attention_norm(x_BWD)
        key, value = module.keys_values(normed, positions_BW)
        slot_B1 = torch.tensor(slots, device=x_BWD.device)[:, None]
        width = positions_BW.shape[1]
        if len(slots) == 1:
            begin = end - width
            self._keys[slots[0], begin:end], self._values[slots[0], begin:end] = key[0], value[0]
            keys, values = self._keys[slots[0], None, :end], self._values[slots[0], None, :end]
        else:
            self._keys[slot_B1, positions_BW], self._values[slot_B1, positions_BW] = key, value
            keys, values = self._keys[slot_B1[:, 0], :end], self._values[slot_B1[:, 0], :end]
        mask = None
        if len(slots) > 1 or width > 1:
            mask = torch.arange(end, device=x_BWD.device)[None, None, :] <= positions_BW[:, :, None]
        query = module.queries(normed, positions_BW)  # [B, W, heads, head_dim]
        group = config.num_attention_heads // config.num_key_value_heads
        folded = query.unflatten(2, (config.num_key_value_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        attended = F.scaled_dot_product_attention(
            folded,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=None if mask is None else mask.repeat(1, group, 1)[:, None],
        )
        attended = attended.unflatten(2, (group, width)).permute(0, 3, 1, 2, 4).flatten(2, 3)
        return module.leave(x_BWD, attended)
