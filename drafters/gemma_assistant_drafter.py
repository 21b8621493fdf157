"""A Gemma 4 assistant at work: pairs in, drafts out, the target's keys and values of verified pairs in slots."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.draft_tree import MAX_TREE_NODES, TreeBuilder, pad_trees
from drafters.drafter import DraftReply, DraftRequest, empty_reply
from drafters.gemma_assistant import SLIDING, GemmaAssistant, GemmaAssistantConfig, Sight
from drafters.mtp_drafter import MAX_CHILDREN, MAX_DRAFT_TOKENS, MAX_FRONTIER
from drafters.pair_ledger import PairLedger


class GemmaAssistantDrafter:
    """Drafts chains of its argmax, at any temperature (one-hot rule), or trees.

    Of rejected drafts nothing is ever kept. transformers has their keys and values there for one more round, at the
    anchor's position and past it: it drafts the same in the first round of a text and wherever all drafts were kept.
    """

    def __init__(self, module: GemmaAssistant, name: str = "gemma-assistant"):
        self.module = module.eval()
        self.name = name
        self.target_layer_ids = module.config.target_layer_ids
        self.max_draft_tokens = MAX_DRAFT_TOKENS
        self.max_tree_nodes = MAX_TREE_NODES
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}  # by layer type; [slots, max_len, G, head_dim] each
        self._ledger = PairLedger(0)

    def allocate(self, num_slots: int, max_len: int) -> None:
        """Room for every slot's pairs: of sliding layers too, since a later sequence may go on from early ones."""
        like = self.module.embedding_VD
        for kind, shared in self.module.config.shared_layers.items():
            shape = (num_slots, max_len, shared.num_key_value_heads, shared.head_dim)
            keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
            self._kept[kind] = (keys, torch.zeros_like(keys))
        self._ledger = PairLedger(num_slots)

    @staticmethod
    def slot_bytes(config: GemmaAssistantConfig, max_len: int, dtype: torch.dtype) -> int:
        """Bytes that `allocate` takes for a slot."""
        numbers = sum(shared.num_key_value_heads * shared.head_dim for shared in config.shared_layers.values())
        return 2 * max_len * numbers * dtype.itemsize

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftReply:
        """See `Drafter`. Raises ValueError if pairs are missing."""
        self._ledger.note(request)
        module, like = self.module, self.module.embedding_VD
        assert request.features_NF is not None
        features_NF = request.features_NF.to(like.device, like.dtype)
        self._observe(request, features_NF)
        if request.num_draft_tokens == 0:
            return empty_reply(len(request.slots))
        last_B = torch.tensor(request.counts).cumsum(0) - 1
        token_B1 = request.tokens_N[last_B][:, None].to(like.device)
        hidden_B1D = module.first_hidden(features_NF[last_B.to(like.device)])[:, None]
        sight = self._sight(request)
        output_B1 = module.step(token_B1, hidden_B1D, sight)
        if request.tree_nodes:
            return self._draft_trees(request, output_B1, sight)
        tokens = [module.scores(output_B1).argmax(dim=-1)]
        while len(tokens) < request.num_draft_tokens:
            output_B1 = module.step(tokens[-1], module.post_projection(output_B1), sight)
            tokens.append(module.scores(output_B1).argmax(dim=-1))
        return DraftReply(tokens_BK=torch.cat(tokens, dim=1).cpu())

    def _draft_trees(self, request: DraftRequest, output_BF: Tensor, sight: Sight) -> DraftReply:
        """Trees of all sequences, depth by depth; a step's rows are the trees' frontiers, padded to the widest.

        Rows keep nothing that others could see: every node is its parent's output and its own token.
        """
        trees = [TreeBuilder(min(request.tree_nodes, MAX_TREE_NODES)) for _ in request.slots]
        batch_B1 = torch.arange(len(trees), device=output_BF.device)[:, None]
        for depth in range(1, request.num_draft_tokens + 1):
            log_probs = torch.log_softmax(self.module.scores(output_BF).float(), dim=-1)
            best = log_probs.topk(min(trees[0].budget, MAX_CHILDREN, log_probs.shape[-1]), dim=-1)
            rows = []
            for tree, tokens, values in zip(trees, best.indices.tolist(), best.values.tolist(), strict=True):
                parents = tree.frontier
                tree.extend(tokens[: len(parents)], values[: len(parents)])
                del tree.frontier[MAX_FRONTIER:]
                found = [tree.nodes[i] for i in tree.frontier]
                rows.append([(node.token, parents.index(node.parent)) for node in found])
            width = max(map(len, rows))
            if depth == request.num_draft_tokens or not width:
                break
            padded = [row + [(0, 0)] * (width - len(row)) for row in rows]
            token_BF, source_BF = torch.tensor(padded, device=output_BF.device).unbind(dim=-1)
            hidden_BFD = self.module.post_projection(output_BF)[batch_B1, source_BF]
            output_BF = self.module.step(token_BF, hidden_BFD, sight)
        tokens_BK, parents_BK, confidence_BK, counts = pad_trees(trees)
        return DraftReply(tokens_BK=tokens_BK, counts=counts, parents_BK=parents_BK, confidence_BK=confidence_BK)

    def _observe(self, request: DraftRequest, features_NF: Tensor) -> None:
        """Keep keys and values of the new pairs' positions."""
        device = features_NF.device
        pieces = [range(s, s + c) for s, c in zip(request.starts, request.counts, strict=True)]
        position_N = torch.tensor([p for piece in pieces for p in piece], device=device)
        slots = [slot for slot, piece in zip(request.slots, pieces, strict=True) for _ in piece]
        slot_N = torch.tensor(slots, device=device)
        for kind, made in self.module.keys_values(features_NF, position_N).items():
            for kept, new_NGH in zip(self._kept[kind], made, strict=True):
                kept[slot_N, position_N] = new_NGH

    def _sight(self, request: DraftRequest) -> Sight:
        """What each sequence's drafts see: its pairs, in sliding layers the newest of them."""
        newest = [s + c - 1 for s, c in zip(request.starts, request.counts, strict=True)]
        device = self.module.embedding_VD.device
        newest_B1, slot_B1 = (torch.tensor(values, device=device)[:, None] for values in (newest, request.slots))
        longest, near = max(newest) + 1, self.module.sliding_window + 1
        keys_values, visible = {}, {}
        for kind, parts in self._kept.items():
            if kind == SLIDING and longest > near:
                entry_BL = newest_B1 - near + 1 + torch.arange(near, device=device)
                seen_BL: Tensor = entry_BL >= 0
                chosen = [part[slot_B1, entry_BL.clamp(min=0)] for part in parts]
            else:
                seen_BL = torch.arange(longest, device=device) <= newest_B1
                one = slice(request.slots[0], request.slots[0] + 1)
                chosen = [part[one, :longest] if len(newest) == 1 else part[slot_B1[:, 0], :longest] for part in parts]
            keys_values[kind] = (chosen[0].transpose(1, 2), chosen[1].transpose(1, 2))
            visible[kind] = None if len(newest) == 1 else seen_BL[:, None, None]
        return Sight(keys_values, visible, self.module.angles(newest_B1 + 1))
