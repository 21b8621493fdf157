"""A toy target (two layers, byte vocabulary) and test drafters: always right, always wrong, half right, random."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import random_stream
from drafters.drafter import DraftReply, DraftRequest, SparseProbs

VOCAB = 256


def toy_config(**changes) -> LlamaConfig:
    """Two layers of width 32 over a byte vocabulary; `changes` override single fields."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.35,  # wide enough for peaked, varied continuations
    }
    return LlamaConfig(**(fields | changes))


def toy_model(seed: int = 0, **changes) -> LlamaForCausalLM:
    """A random toy target in fp32, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(toy_config(**changes)).eval()


def toy_prompts(count: int, seed: int = 0, low: int = 3, high: int = 20) -> list[list[int]]:
    """`count` random byte prompts of `low` to `high` tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(low, high + 1)).tolist() for _ in range(count)]


class _TargetDrafter:
    """Drafts with the target itself, re-reading each sequence from its tokens: slow, and exactly right."""

    name = "toy"
    target_layer_ids: tuple[int, ...] = ()
    max_draft_tokens = 8
    max_tree_nodes = 0

    def __init__(self, model: LlamaForCausalLM):
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.argmax: dict[tuple[int, ...], int] = {}  # of sequences seen before
        self.sequences: dict[int, tuple[int, dict[int, int]]] = {}  # slot -> (epoch, position -> token)

    def allocate(self, num_slots: int, max_len: int) -> None:
        self.sequences.clear()

    def _observe(self, request: DraftRequest) -> list[list[int]]:
        sequences, offset, tokens = [], 0, request.tokens_N.tolist()
        asked = zip(request.slots, request.epochs, request.counts, request.starts, request.first_tokens, strict=True)
        for b, (slot, epoch, count, start, first) in enumerate(asked):
            known_epoch, known = self.sequences.get(slot, (None, {}))
            if known_epoch != epoch and request.reused_epoch(b) >= 0:
                assert known_epoch == request.reused_epoch(b), "an epoch goes on from the one before it"
                known = {p: known[p] for p in range(start + 1)}
            elif known_epoch != epoch:
                assert start == 0, "an epoch starts at position 0"
                known = {0: first}
            assert known[0] == first
            assert len(known) == start + 1, "pairs must continue where the last request ended"
            known.update({start + 1 + i: tokens[offset + i] for i in range(count)})
            self.sequences[slot] = (epoch, known)
            sequences.append([known[p] for p in sorted(known)])
            offset += count
        assert offset == len(tokens)
        return sequences

    def _continue(self, sequences: list[list[int]], count: int) -> list[list[int]]:
        paths = [tuple(s) for s in sequences]
        for _ in range(count):
            self._learn(paths)
            paths = [(*path, self.argmax[path]) for path in paths]
        return [list(path[len(s) :]) for path, s in zip(paths, sequences, strict=True)]

    @torch.inference_mode()
    def _learn(self, paths: list[tuple[int, ...]]) -> None:
        """Look up the target's next token of all unknown paths, those of one length in one pass."""
        unknown = {path for path in paths if path not in self.argmax}
        for length in {len(path) for path in unknown}:
            group = sorted(path for path in unknown if len(path) == length)
            tokens = self.model(torch.tensor(group), logits_to_keep=1).logits[:, -1].argmax(dim=-1)
            self.argmax.update(zip(group, tokens.tolist(), strict=True))

    def _spoil(self, drafts_BK: torch.Tensor) -> torch.Tensor:
        return drafts_BK

    def draft(self, request: DraftRequest) -> DraftReply:
        drafts = self._continue(self._observe(request), request.num_draft_tokens)
        drafts_BK = torch.tensor(drafts, dtype=torch.int64).reshape(len(drafts), request.num_draft_tokens)
        return DraftReply(tokens_BK=self._spoil(drafts_BK))


class AlwaysRight(_TargetDrafter):
    """Proposes the target's own greedy continuation."""

    name = "always-right"


class AlwaysWrong(_TargetDrafter):
    """Proposes another token than the target's argmax, everywhere."""

    name = "always-wrong"

    def _spoil(self, drafts_BK: torch.Tensor) -> torch.Tensor:
        return (drafts_BK + 1) % self.vocab_size


class HalfRight(_TargetDrafter):
    """Right in even slots of a draft, wrong in odd ones."""

    name = "half-right"

    def _spoil(self, drafts_BK: torch.Tensor) -> torch.Tensor:
        wrong = torch.arange(drafts_BK.shape[1]) % 2 == 1
        return torch.where(wrong, (drafts_BK + 1) % self.vocab_size, drafts_BK)


class RandomProposer(_TargetDrafter):
    """Samples every draft from a fixed distribution over a few candidates, and hands that distribution over."""

    name = "random"

    def __init__(self, model: LlamaForCausalLM, candidates: int = 16, seed: int = 0):
        super().__init__(model)
        rng = np.random.default_rng(seed)
        self.ids = rng.choice(self.vocab_size, candidates, replace=False)
        self.probs = rng.dirichlet(np.ones(candidates))

    def draft(self, request: DraftRequest) -> DraftReply:
        self._observe(request)
        batch, num = len(request.slots), request.num_draft_tokens
        anchors = np.array([s + c for s, c in zip(request.starts, request.counts, strict=True)])
        positions = anchors[:, None] + 1 + np.arange(num)[None, :]
        seeds = np.broadcast_to(np.array(request.seeds)[:, None], positions.shape)
        u = random_stream.uniforms(seeds, positions, random_stream.DRAFT)
        choice = np.minimum(np.searchsorted(np.cumsum(self.probs), u), len(self.ids) - 1)
        return DraftReply(
            tokens_BK=torch.from_numpy(self.ids[choice]).reshape(batch, num),
            probs=SparseProbs(
                ids_BKC=torch.from_numpy(self.ids).expand(batch, num, -1),
                probs_BKC=torch.from_numpy(self.probs).expand(batch, num, -1),
            ),
        )


class RightInATree(_TargetDrafter):
    """Trees in which the target's own token is the second child at every depth; the wrong first child has children too.

    Nodes in order of depth: wrong, right, and below each of them again. The path that is right is never the first.
    """

    name = "right-in-a-tree"
    max_tree_nodes = 63

    def draft(self, request: DraftRequest) -> DraftReply:
        sequences = self._observe(request)
        tokens, parents = [], []
        for right in self._continue(sequences, request.num_draft_tokens):
            row, above, last = [], [], -1
            for depth, token in enumerate(right):
                row += [(token + 1) % self.vocab_size, token, (token + 2) % self.vocab_size]
                above += [last, last, 3 * depth - 3 if depth else -1]  # the third grows on the wrong one
                last = 3 * depth + 1
            tokens.append(row[: request.tree_nodes])
            parents.append(above[: request.tree_nodes])
        width = len(tokens[0])
        shape = (len(tokens), width)
        return DraftReply(
            tokens_BK=torch.tensor(tokens, dtype=torch.int64).view(shape),
            parents_BK=torch.tensor(parents, dtype=torch.int64).view(shape),
            confidence_BK=torch.linspace(0.9, 0.5, width).expand(shape) if width else torch.zeros(shape),
        )


class SampledTrees(RandomProposer):
    """Trees whose siblings are drawn one after another without replacement from a fixed distribution.

    Two children below the anchor, two below the first of them, one below the second.
    """

    name = "sampled-trees"
    max_tree_nodes = 5
    parents = (-1, -1, 0, 0, 1)

    def draft(self, request: DraftRequest) -> DraftReply:
        self._observe(request)
        seeds, batch = np.array(request.seeds), len(request.slots)
        if request.num_draft_tokens == 0:
            return DraftReply(tokens_BK=torch.empty((batch, 0), dtype=torch.int64))
        positions = np.array([s + c + 1 for s, c in zip(request.starts, request.counts, strict=True)])
        nodes: list[np.ndarray] = []
        for node, parent in enumerate(self.parents):
            left = np.tile(self.probs, (batch, 1))
            for sibling in range(node):
                if self.parents[sibling] == parent:
                    left[np.arange(batch), nodes[sibling]] = 0.0
            u = random_stream.uniforms(seeds, positions * 8 + node, random_stream.DRAFT)
            cdf = left.cumsum(axis=1)
            nodes.append((cdf < u[:, None] * cdf[:, -1:]).sum(axis=1))
        chosen_BK = np.stack(nodes, axis=1)
        shape = (batch, len(self.parents), len(self.ids))
        return DraftReply(
            tokens_BK=torch.from_numpy(self.ids[chosen_BK]),
            parents_BK=torch.tensor(self.parents).expand(batch, -1),
            probs=SparseProbs(
                ids_BKC=torch.from_numpy(self.ids).expand(shape), probs_BKC=torch.from_numpy(self.probs).expand(shape)
            ),
        )
