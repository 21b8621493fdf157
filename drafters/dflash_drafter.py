"""The DFlash drafter at work: pairs in, a block drafted in one pass, a chain or a tree out.

Of every verified pair each layer keeps the keys and values of its context feature, in slots. The block's own lie behind
them for the length of a pass: they are never part of the context, and the next pairs or block overwrite them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters import random_stream
from drafters.dflash import DFlashConfig, DFlashModule
from drafters.dflash_selector import Candidates
from drafters.draft_tree import MAX_TREE_NODES, ROOT, TreeBuilder, pad_trees
from drafters.drafter import DraftReply, DraftRequest, SparseProbs, empty_reply
from drafters.pair_ledger import PairLedger
from drafters.verify import sample


class DFlashDrafter:
    """Drafts the whole block, then cuts it.

    Without a selector it proposes its argmax, at any temperature (one-hot rule). With one it walks the candidates slot
    by slot, and samples them where the request samples. Trees are always the likeliest paths.
    """

    def __init__(self, module: DFlashModule, name: str = "dflash"):
        self.module = module.eval()
        self.name = name
        self.target_layer_ids = module.config.target_layer_ids
        self.max_draft_tokens = module.config.num_draft_tokens
        self.max_tree_nodes = MAX_TREE_NODES
        self._keys_LSTGD = self._values_LSTGD = torch.empty(0)  # of layers and slots
        self._ledger = PairLedger(0)

    def allocate(self, num_slots: int, max_len: int) -> None:
        """Room for every slot's context, and for a block that reaches past a full slot."""
        config, like = self.module.config, self.module.lm_head_WD
        length = max_len + config.block_size
        shape = (config.num_hidden_layers, num_slots, length, config.num_key_value_heads, config.head_dim)
        self._keys_LSTGD = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self._values_LSTGD = torch.zeros_like(self._keys_LSTGD)
        self._ledger = PairLedger(num_slots)

    @staticmethod
    def slot_bytes(config: DFlashConfig, max_len: int, dtype: torch.dtype) -> int:
        """Bytes that `allocate` takes for a slot."""
        entries = config.num_hidden_layers * (max_len + config.block_size)
        return 2 * entries * config.num_key_value_heads * config.head_dim * dtype.itemsize

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftReply:
        """See `Drafter`. Raises ValueError if pairs are missing."""
        self._ledger.note(request)
        context_ND = self._observe(request)
        num, module = request.num_draft_tokens, self.module
        if num == 0:
            return empty_reply(len(request.slots))
        last_B = torch.tensor(request.counts).cumsum(0) - 1
        anchors_B = request.tokens_N[last_B].to(context_ND.device)
        hidden_BKD = self._block(request, anchors_B, context_ND[last_B.to(context_ND.device)])[:, :num]
        logits_BKW = module.head(hidden_BKD)
        if request.tree_nodes > 0:
            return self._trees(anchors_B, hidden_BKD, logits_BKW, min(request.tree_nodes, MAX_TREE_NODES))
        if module.candidate_selector is None and module.confidence is None:
            return DraftReply(tokens_BK=module.draft_vocab_ids[logits_BKW.argmax(dim=-1)].cpu())
        return self._chain(request, anchors_B, hidden_BKD, logits_BKW)

    # -- the block -----------------------------------------------------------------------------------------------------

    def _observe(self, request: DraftRequest) -> Tensor:
        """Keep the new pairs' keys and values; returns their context features [N, D]."""
        assert request.features_NF is not None
        like = self.module.lm_head_WD
        context_ND = self.module.fuse(request.features_NF.to(like.device, like.dtype))
        pieces = [range(s, s + c) for s, c in zip(request.starts, request.counts, strict=True)]
        position_N = torch.tensor([p for piece in pieces for p in piece], device=like.device)
        slot_N = torch.tensor(request.slots, device=like.device).repeat_interleave(
            torch.tensor(request.counts, device=like.device)
        )
        angles = self.module.angles(position_N)
        for i, (layer, _) in enumerate(self.module.stack()):
            key, value = layer.self_attn.keys_values(context_ND, angles)
            self._keys_LSTGD[i, slot_N, position_N], self._values_LSTGD[i, slot_N, position_N] = key, value
        return context_ND

    def _block(self, request: DraftRequest, anchors_B: Tensor, last_context_BD: Tensor) -> Tensor:
        """[B, block_size - 1, D] normalised hidden states of the slots to draft."""
        module, size, device = self.module, self.module.config.block_size, anchors_B.device
        lengths = [s + c for s, c in zip(request.starts, request.counts, strict=True)]  # of the contexts
        position_BS = torch.tensor(lengths, device=device)[:, None] + torch.arange(size, device=device)
        end = max(lengths) + size
        key_T = torch.arange(end, device=device)
        ragged_B1T = None if len(lengths) == 1 else key_T <= position_BS[:, -1:, None]
        x = module.block_input(anchors_B, last_context_BD)
        angles = module.angles(position_BS)
        for i, (layer, window) in enumerate(module.stack()):
            visible = ragged_B1T
            if window is not None:
                near = (position_BS[:, :, None] - key_T).abs() < window
                visible = near if ragged_B1T is None else near & ragged_B1T
            x = layer(x, angles, partial(self._attend, i, request.slots, position_BS, visible, end))
        return module.norm(x[:, 1:])

    def _attend(
        self, layer: int, slots: list[int], position_BS: Tensor, visible: Tensor | None, end: int, *block: Tensor
    ) -> Tensor:
        """Attention of the blocks' (queries, keys, values) over contexts and blocks; None: everything is visible."""
        query, key, value = block
        keys, values = self._keys_LSTGD[layer], self._values_LSTGD[layer]
        if len(slots) == 1:
            begin = end - position_BS.shape[1]
            keys[slots[0], begin:end], values[slots[0], begin:end] = key[0], value[0]
            keys_BTGD, values_BTGD = keys[slots[0], None, :end], values[slots[0], None, :end]
        else:
            slot_B = torch.tensor(slots, device=query.device)
            keys[slot_B[:, None], position_BS], values[slot_B[:, None], position_BS] = key, value
            keys_BTGD, values_BTGD = keys[slot_B, :end], values[slot_B, :end]
        kv_heads, size = key.shape[2], position_BS.shape[1]
        # the query heads of a KV head are further rows of it
        folded = query.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = None
        if visible is not None:
            mask = visible.expand(-1, size, -1).repeat(1, query.shape[2] // kv_heads, 1)[:, None]
        attended = F.scaled_dot_product_attention(
            folded, keys_BTGD.transpose(1, 2), values_BTGD.transpose(1, 2), attn_mask=mask
        )
        return attended.unflatten(2, (-1, size)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    # -- what is read off it -------------------------------------------------------------------------------------------

    def _chain(self, request: DraftRequest, anchors_B: Tensor, hidden_BKD: Tensor, logits_BKW: Tensor) -> DraftReply:
        """One draft per slot: the best candidate, or one drawn from the softmax of scores / temperature."""
        module, device = self.module, anchors_B.device
        found = module.candidates(hidden_BKD, logits_BKW, module.config.selector_top_k or 1)
        temperature_B1 = torch.tensor(request.temperatures, device=device)[:, None]
        sampling = module.candidate_selector is not None and bool((temperature_B1 > 0).any())
        uniforms_BK = torch.from_numpy(_draft_uniforms(request, hidden_BKD.shape[1])).to(device)
        rows_B, previous_B = torch.arange(len(anchors_B), device=device), module.draft_labels(anchors_B)
        path, log_probs, probs = [], [], []
        for slot in range(hidden_BKD.shape[1]):
            scores_BC = module.candidate_scores(found, rows_B, slot, previous_B).float()
            choice_B = scores_BC.argmax(dim=-1)
            if sampling:
                greedy_BC = F.one_hot(choice_B, scores_BC.shape[-1]).float()
                sampled_BC = torch.softmax(scores_BC / torch.where(temperature_B1 > 0, temperature_B1, 1.0), dim=-1)
                probs.append(torch.where(temperature_B1 > 0, sampled_BC, greedy_BC))
                choice_B = sample(probs[-1], uniforms_BK[:, slot])
            log_probs.append(scores_BC.log_softmax(dim=-1).gather(1, choice_B[:, None])[:, 0])
            previous_B = found.index_NKC[rows_B, slot, choice_B]
            path.append(previous_B)
        confidence_BK = None
        if module.confidence is not None:
            log_prob_BK = torch.stack(log_probs, dim=1) + found.log_mass().float()
            confidence_BK = module.confidence(hidden_BKD, log_prob_BK).sigmoid().cumprod(dim=1).cpu()
        sparse = None
        if sampling:
            ids_BKC = module.draft_vocab_ids[found.index_NKC].cpu()
            sparse = SparseProbs(ids_BKC=ids_BKC, probs_BKC=torch.stack(probs, dim=1).cpu())
        tokens_BK = module.draft_vocab_ids[torch.stack(path, dim=1)].cpu()
        return DraftReply(tokens_BK=tokens_BK, probs=sparse, confidence_BK=confidence_BK)

    def _trees(self, anchors_B: Tensor, hidden_BKD: Tensor, logits_BKW: Tensor, budget: int) -> DraftReply:
        """Trees of the likeliest paths. Without a selector all nodes of a depth have the same children."""
        module, device = self.module, anchors_B.device
        width = module.config.selector_top_k or min(budget, logits_BKW.shape[-1])
        found = module.candidates(hidden_BKD, logits_BKW, width)
        roots = module.draft_labels(anchors_B).tolist()
        trees = [TreeBuilder(budget) for _ in roots]
        for slot in range(hidden_BKD.shape[1]):
            nodes = [(b, node) for b, tree in enumerate(trees) for node in tree.frontier]
            if not nodes:
                break
            previous = [roots[b] if node == ROOT else trees[b].nodes[node].token for b, node in nodes]
            rows_F = torch.tensor([b for b, _ in nodes], device=device)
            tokens_FC, log_probs_FC = self._children(found, rows_F, slot, torch.tensor(previous, device=device))
            first = 0
            for tree in trees:
                last = first + len(tree.frontier)
                tree.extend(tokens_FC[first:last], log_probs_FC[first:last])
                first = last
        index_BN, parents_BN, confidence_BN, counts = pad_trees(trees)
        tokens_BN = module.draft_vocab_ids.cpu()[index_BN]
        return DraftReply(tokens_BK=tokens_BN, counts=counts, parents_BK=parents_BN, confidence_BK=confidence_BN)

    def _children(
        self, found: Candidates, rows_F: Tensor, slot: int, previous_F: Tensor
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probabilities of F nodes' next tokens, likeliest first: softmax of the scores, times the
        probability that the slot gives all its candidates together."""
        scores_FC = self.module.candidate_scores(found, rows_F, slot, previous_F).float()
        log_probs_FC = scores_FC.log_softmax(dim=-1) + found.log_mass().float()[rows_F, slot, None]
        best = log_probs_FC.sort(dim=-1, descending=True)
        tokens_FC = found.index_NKC[rows_F, slot].gather(1, best.indices)
        return tokens_FC.tolist(), best.values.tolist()


def _draft_uniforms(request: DraftRequest, num_draft_tokens: int) -> np.ndarray:
    """[B, K] in [0, 1): the sequences' drafting streams at the positions of the drafts."""
    anchors_B = np.array([s + c for s, c in zip(request.starts, request.counts, strict=True)])
    positions_BK = anchors_B[:, None] + 1 + np.arange(num_draft_tokens)
    seeds_BK = np.broadcast_to(np.array(request.seeds)[:, None], positions_BK.shape)
    return random_stream.uniforms(seeds_BK, positions_BK, random_stream.DRAFT)
