"""MTP drafters at work: pairs in, drafts out, with the recursive head's keys and values kept in slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.draft_tree import MAX_TREE_NODES, ROOT, TreeBuilder, pad_trees
from drafters.drafter import DraftReply, DraftRequest, empty_reply
from drafters.mtp import IndependentHeads, MtpConfig, RecursiveHead
from drafters.pair_ledger import PairLedger

MAX_FRONTIER = 16  # nodes of one depth that are expanded; the native drafter has the same limits
MAX_CHILDREN = 16  # of one node
MAX_DRAFT_TOKENS = 16  # of a recursive drafter, unless it is told otherwise
WIDE = 32  # sequences with more new pairs than this (a fresh prompt) are taken note of one by one, unpadded


class IndependentDrafter:
    """K heads read the newest pair; nothing is kept between rounds. Drafts chains of their argmax, or trees."""

    def __init__(self, module: IndependentHeads, name: str = "mtp-independent"):
        self.module = module.eval()
        self.name = name
        self.target_layer_ids = module.config.target_layer_ids
        self.max_draft_tokens = module.config.num_draft_tokens
        self.max_tree_nodes = MAX_TREE_NODES

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
        anchors_B = request.tokens_N[last_B].to(like.device)
        logits_BKW = self.module.step_logits(features, anchors_B)[:, : request.num_draft_tokens]
        if request.tree_nodes > 0:
            return self._trees(logits_BKW, min(request.tree_nodes, self.max_tree_nodes))
        return DraftReply(tokens_BK=self.module.draft_vocab_ids[logits_BKW.argmax(dim=-1)].cpu())

    def _trees(self, logits_BKW: Tensor, budget: int) -> DraftReply:
        """A tree of each sequence. No head sees another one's drafts: all nodes of a depth have the same children."""
        log_probs_BKW = torch.log_softmax(logits_BKW.float(), dim=-1)
        top = log_probs_BKW.topk(min(budget, log_probs_BKW.shape[-1]), dim=-1)
        tokens_BKC, log_probs_BKC = self.module.draft_vocab_ids[top.indices].tolist(), top.values.tolist()
        trees = []
        for tokens_KC, log_probs_KC in zip(tokens_BKC, log_probs_BKC, strict=True):
            tree = TreeBuilder(budget)
            for tokens, log_probs in zip(tokens_KC, log_probs_KC, strict=True):
                width = len(tree.frontier)
                tree.extend([tokens] * width, [log_probs] * width)
            trees.append(tree)
        tokens_BN, parents_BN, confidence_BN, counts = pad_trees(trees)
        return DraftReply(tokens_BK=tokens_BN, counts=counts, parents_BK=parents_BN, confidence_BK=confidence_BN)


class RecursiveDrafter:
    """Runs the head over new pairs (step 1), then K - 1 times over its own output. Proposes its argmax."""

    def __init__(self, module: RecursiveHead, name: str = "mtp-recursive", max_draft_tokens: int = MAX_DRAFT_TOKENS):
        self.module = module.eval()
        self.name = name
        self.target_layer_ids = module.config.target_layer_ids
        self.max_draft_tokens = max_draft_tokens
        self.max_tree_nodes = MAX_TREE_NODES
        self._keys = self._values = torch.empty(0)
        self._ledger = PairLedger(0)

    def allocate(self, num_slots: int, max_len: int) -> None:
        """Room for every slot's pairs, and for drafts and padding that reach past a full slot."""
        config, like = self.module.config, self.module.lm_head_WD
        shape = (num_slots, _capacity(max_len, self.max_draft_tokens), config.num_key_value_heads, config.head_dim)
        self._keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self._values = torch.zeros_like(self._keys)
        self._ledger = PairLedger(num_slots)

    @staticmethod
    def slot_bytes(config: MtpConfig, max_len: int, dtype: torch.dtype) -> int:
        """Bytes that `allocate` takes for a slot."""
        room = _capacity(max_len, MAX_DRAFT_TOKENS)
        return 2 * room * config.num_key_value_heads * config.head_dim * dtype.itemsize

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftReply:
        """See `Drafter`. Raises ValueError if pairs are missing."""
        self._ledger.note(request)
        hidden_BD = self._observe(request)
        tokens, num = [], request.num_draft_tokens
        if num == 0:
            return empty_reply(len(request.slots))
        if request.tree_nodes:
            return self._draft_trees(request, hidden_BD)
        slots, device = request.slots, hidden_BD.device
        positions = torch.tensor(_newest(request), device=device)
        longest = int(positions.max()) + 1
        for k in range(1, num + 1):
            token_B = self.module.draft_vocab_ids[self.module.logits(hidden_BD).argmax(dim=-1)]
            tokens.append(token_B)
            if k < num:
                x = self.module.enter(token_B[:, None], hidden_BD[:, None])
                hidden_BD = self._layer(x, slots, (positions + k)[:, None], longest + k)[:, 0]
        return DraftReply(tokens_BK=torch.stack(tokens, dim=1).cpu())

    def _draft_trees(self, request: DraftRequest, hidden_BD: Tensor) -> DraftReply:
        """Trees of all sequences, depth by depth; a step's rows are the trees' frontiers, padded to the widest."""
        growths = [_Growth(TreeBuilder(min(request.tree_nodes, MAX_TREE_NODES)), p) for p in _newest(request)]
        device, hidden_BFD = hidden_BD.device, hidden_BD[:, None]
        batch_B1 = torch.arange(len(growths), device=device)[:, None]
        for depth in range(1, request.num_draft_tokens + 1):
            log_probs = torch.log_softmax(self.module.logits(hidden_BFD).float(), dim=-1)
            best = log_probs.topk(min(growths[0].tree.budget, MAX_CHILDREN, log_probs.shape[-1]), dim=-1)
            tokens, scores = self.module.draft_vocab_ids[best.indices].tolist(), best.values.tolist()
            for growth, ids, values in zip(growths, tokens, scores, strict=True):
                growth.extend(ids, values)
            width = max(len(growth.tree.frontier) for growth in growths)
            if depth == request.num_draft_tokens or not width:
                break
            rows = [growth.rows(width) for growth in growths]
            ids_BW, sources_BW, entries_BW = torch.tensor([row[:3] for row in rows], device=device).unbind(dim=1)
            positions_BW = torch.tensor([[g.newest + depth] * width for g in growths], device=device)
            x = self.module.enter(ids_BW, hidden_BFD[batch_B1, sources_BW])
            seen = _seen(growths, [row[3] for row in rows], int(entries_BW.max()) + 1)
            hidden_BFD = self._tree_layer(x, request.slots, positions_BW, entries_BW, seen.to(device))
        tokens_BK, parents_BK, confidence_BK, counts = pad_trees([growth.tree for growth in growths])
        return DraftReply(tokens_BK=tokens_BK, counts=counts, parents_BK=parents_BK, confidence_BK=confidence_BK)

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
        module = self.module
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
        return self._attend(x_BWD, normed, positions_BW, keys, values, mask)

    def _tree_layer(
        self, x_BWD: Tensor, slots: list[int], positions_BW: Tensor, entries_BW: Tensor, seen_BWL: Tensor
    ) -> Tensor:
        """The layer over rows of trees, whose keys and values go to entries of their own."""
        normed = self.module.attention_norm(x_BWD)
        slot_B1 = torch.tensor(slots, device=x_BWD.device)[:, None]
        key, value = self.module.keys_values(normed, positions_BW)
        self._keys[slot_B1, entries_BW], self._values[slot_B1, entries_BW] = key, value
        end = seen_BWL.shape[2]
        keys, values = self._keys[slot_B1[:, 0], :end], self._values[slot_B1[:, 0], :end]
        return self._attend(x_BWD, normed, positions_BW, keys, values, seen_BWL)

    def _attend(
        self, x_BWD: Tensor, normed: Tensor, positions_BW: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attention over keys and values [B, L, ..] by a mask [B, W, L], and what follows it in the layer."""
        module, config, width = self.module, self.module.config, positions_BW.shape[1]
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


def _capacity(max_len: int, max_draft_tokens: int) -> int:
    """Entries of a slot: its pairs, and drafts or padding behind a full one."""
    return max_len + max(max_draft_tokens * MAX_FRONTIER, WIDE)


def _newest(request: DraftRequest) -> list[int]:
    """By sequence, the position p of its newest pair."""
    return [start + count - 1 for start, count in zip(request.starts, request.counts, strict=True)]


@dataclass
class _Growth:
    """A tree, and where its expanded nodes lie in the slot."""

    tree: TreeBuilder
    newest: int  # position of the sequence's newest pair
    parents: list[int] = field(default_factory=list)  # the frontier before the last step
    entries: dict[int, int] = field(default_factory=dict)  # by node

    def extend(self, tokens_FC: list[list[int]], log_probs_FC: list[list[float]]) -> None:
        self.parents = self.tree.frontier
        count = len(self.parents)  # padding comes after these
        self.tree.extend(tokens_FC[:count], log_probs_FC[:count])
        del self.tree.frontier[MAX_FRONTIER:]

    def rows(self, width: int) -> tuple[list[int], list[int], list[int], list[list[int]]]:
        """The frontier as rows: tokens, rows of the last step that they carry on, entries, entries of their paths.

        Padded with rows in an entry that no other row sees.
        """
        tokens, sources, entries, paths = [], [], [], []
        for node in self.tree.frontier:
            self.entries[node] = self.newest + 1 + len(self.entries)
            found = self.tree.nodes[node]
            path, above = [self.entries[node]], found.parent
            while above != ROOT:
                path.append(self.entries[above])
                above = self.tree.nodes[above].parent
            tokens.append(found.token)
            sources.append(self.parents.index(found.parent))
            entries.append(self.entries[node])
            paths.append(path)
        missing = width - len(tokens)
        spare = self.newest + 1 + len(self.entries)
        zeros = [0] * missing
        return tokens + zeros, sources + zeros, entries + [spare] * missing, paths + [[spare]] * missing


def _seen(growths: list[_Growth], paths_BW: list[list[list[int]]], end: int) -> Tensor:
    """[B, W, end] bool: what each row of trees sees of its slot, all up to the newest pair and its own path."""
    seen = np.zeros((len(growths), len(paths_BW[0]), end), dtype=bool)  # numpy: a tensor's small writes cost 10 us each
    for b, (growth, paths) in enumerate(zip(growths, paths_BW, strict=True)):
        seen[b, :, : growth.newest + 1] = True
        for w, path in enumerate(paths):
            seen[b, w, path] = True
    return torch.from_numpy(seen)
