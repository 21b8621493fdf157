"""One round as functions: ask the drafter, lay out the rows, decide what the target keeps.

`Engine.step` calls them in this order; generate, evaluate and serve all decode through them. Plain decoding is the same
path with no drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafters.drafter import DraftReply, DraftRequest, SparseProbs
from serving.engine.logprobs import TokenLogprobs
from serving.engine.rows import Move, Rows, RowsOutput, Run, make_rows
from serving.engine.scheduler import Plan
from serving.engine.sequence import Sequence, first_of, joined
from serving.engine.verification import Verification


@dataclass(frozen=True)
class Drafts:
    """The drafts of one round as the engine uses them, by decoding sequence. Any beginning of a tree is a tree."""

    tokens: list[list[int]]  # B lists of 0..K drafts
    probs: SparseProbs | None = None  # the distributions that they were drawn from, if any
    parents: list[list[int]] | None = None  # of trees, see DraftReply; None: chains
    confidence: list[list[float]] | None = None  # the drafter's own, see DraftReply
    offered: list[int] | None = None  # drafts before some were left out as not worth their rows; None: all are here

    @classmethod
    def none(cls, batch: int) -> Drafts:
        return cls([[] for _ in range(batch)])

    def cut(self, counts: list[int]) -> Drafts:
        """The first `counts[b]` drafts of each sequence."""

        def first(lists: list[list[Any]] | None) -> list[list[Any]] | None:
            return None if lists is None else [part[:n] for part, n in zip(lists, counts, strict=True)]

        tokens = [part[:n] for part, n in zip(self.tokens, counts, strict=True)]
        return Drafts(tokens, self.probs, first(self.parents), first(self.confidence))

    def of(self, rows: list[int]) -> Drafts:
        """Those of the sequences at `rows` alone."""
        if rows == list(range(len(self.tokens))):
            return self

        def some(lists: list[list[Any]] | None) -> list[list[Any]] | None:
            return None if lists is None else [lists[row] for row in rows]

        probs = None
        if self.probs is not None:
            probs = SparseProbs(ids_BKC=self.probs.ids_BKC[rows], probs_BKC=self.probs.probs_BKC[rows])
        offered = None if self.offered is None else [self.offered[row] for row in rows]
        tokens = [self.tokens[row] for row in rows]
        return Drafts(tokens, probs, some(self.parents), some(self.confidence), offered)

    def spread(self, places: list[int], batch: int) -> Drafts:
        """The same drafts for the sequences at `places` of a larger batch; the others get none."""
        if len(places) == batch:
            return self

        def wide(lists: list[list[Any]]) -> list[list[Any]]:
            spread: list[list[Any]] = [[] for _ in range(batch)]
            for place, part in zip(places, lists, strict=True):
                spread[place] = part
            return spread

        probs = None
        if self.probs is not None:
            source = torch.zeros(batch, dtype=torch.int64)  # rows without drafts repeat the first distribution, unused
            source[torch.tensor(places)] = torch.arange(len(places))
            probs = SparseProbs(ids_BKC=self.probs.ids_BKC[source], probs_BKC=self.probs.probs_BKC[source])
        parents, confidence = (None if part is None else wide(part) for part in (self.parents, self.confidence))
        offered = None
        if self.offered is not None:
            offered = [0] * batch
            for place, count in zip(places, self.offered, strict=True):
                offered[place] = count
        return Drafts(wide(self.tokens), probs, parents, confidence, offered)

    def depths(self, b: int) -> list[int]:
        """How far below the anchor each row of sequence b stands: the anchor's own 0, then those of its drafts."""
        if self.parents is None:
            return list(range(len(self.tokens[b]) + 1))
        found = [0]
        for parent in self.parents[b]:
            found.append(found[parent + 1] + 1)
        return found


@dataclass(frozen=True)
class Outcome:
    """What the target decided for one sequence of the pass."""

    path: list[int]  # accepted drafts, as places among the sequence's drafts; in a chain the first few
    new_tokens: list[int]  # accepted drafts, then the bonus token; empty while the prompt is being fed
    num_drafts: int = 0  # drafts that were verified
    logprobs: list[TokenLogprobs] | None = None  # of the new tokens, if the request wants them

    @property
    def num_accepted(self) -> int:
        return len(self.path)


def draft_request(
    sequences: list[Sequence],
    num_draft_tokens: int,
    columns: slice | Tensor | None,
    tree_nodes: int = 0,
    sampled: bool = True,
) -> DraftRequest:
    """Collect the pairs that the drafter has not seen. `columns` picks the drafter's taps; None: it taps nothing.

    `sampled` False asks for the likeliest drafts at any temperature.
    """
    features = None
    if columns is not None:
        features = _pending([chunk for s in sequences for chunk in s.pending_features], columns)
    counts = [s.cached - s.observed for s in sequences]
    return _request(sequences, counts, features, num_draft_tokens, tree_nodes, sampled)


def note_request(s: Sequence, count: int, columns: slice | Tensor | None) -> DraftRequest:
    """The next `count` pairs of one sequence, to be taken note of and nothing else."""
    features = None if columns is None else _pending(first_of(s.pending_features, count), columns)
    return _request([s], [count], features, 0, 0, False)


def _pending(chunks: list[Tensor], columns: slice | Tensor) -> Tensor:
    features = joined(chunks)
    return features[:, columns if isinstance(columns, slice) else columns.to(features.device)]


def _request(
    sequences: list[Sequence],
    counts: list[int],
    features: Tensor | None,
    num_draft_tokens: int,
    tree_nodes: int,
    sampled: bool,
) -> DraftRequest:
    pieces = (s.tokens[s.observed + 1 : s.observed + 1 + n] for s, n in zip(sequences, counts, strict=True))
    tokens = [token for piece in pieces for token in piece]
    return DraftRequest(
        slots=[s.slot for s in sequences],
        epochs=[s.epoch for s in sequences],
        counts=counts,
        starts=[s.observed for s in sequences],
        first_tokens=[s.tokens[0] for s in sequences],
        tokens_N=torch.tensor(tokens, dtype=torch.int64),
        features_NF=features,
        num_draft_tokens=num_draft_tokens,
        tree_nodes=tree_nodes,
        temperatures=[s.sampling.temperature if sampled else 0.0 for s in sequences],
        seeds=[s.sampling.seed for s in sequences],
        reused_epochs=[s.reused_epoch for s in sequences],
    )


def usable_drafts(reply: DraftReply, room: list[int], vocab_size: int) -> Drafts:
    """The reply's drafts, cut to `counts` and to the cache room of each sequence. Raises ValueError on a bad reply."""
    tokens = reply.tokens_BK.tolist()
    if len(tokens) != len(room):
        raise ValueError(f"the drafter answered for {len(tokens)} sequences instead of {len(room)}")
    offered = [reply.tokens_BK.shape[1]] * len(tokens) if reply.counts is None else reply.counts
    counts = [max(0, min(n, limit)) for n, limit in zip(offered, room, strict=True)]
    parents = None if reply.parents_BK is None else reply.parents_BK.tolist()
    confidence = None if reply.confidence_BK is None else reply.confidence_BK.tolist()
    drafts = Drafts(tokens, reply.probs, parents, confidence).cut(counts)
    if any(not 0 <= token < vocab_size for row in drafts.tokens for token in row):
        raise ValueError(f"the drafter proposed a token outside the target's vocabulary of {vocab_size}")
    if drafts.confidence is not None and any(not 0 <= c <= 1 for row in drafts.confidence for c in row):
        raise ValueError("the drafter is confident by another number than a probability")
    if drafts.parents is not None:
        for row, above in zip(drafts.tokens, drafts.parents, strict=True):
            if any(not -1 <= parent < j for j, parent in enumerate(above)):
                raise ValueError("the drafter's tree has a node before the one that it follows")
            if len(set(zip(above, row, strict=True))) < len(row):
                raise ValueError("the drafter's tree has a node with two equal children")
        if all(above == list(range(-1, len(above) - 1)) for above in drafts.parents):
            return replace(drafts, parents=None)
    return drafts


def assemble_rows(plan: Plan, drafts: Drafts, with_features: bool) -> Rows:
    """Rows of the pass: first [anchor, drafts] of every decoding sequence, then the prompts' chunks."""
    runs = [Run(s.slot, s.cached, [s.tokens[-1], *d]) for s, d in zip(plan.decoding, drafts.tokens, strict=True)]
    if drafts.parents is not None:
        trees = zip(runs, drafts.parents, strict=True)
        runs = [run._replace(parents=[-1, *(parent + 1 for parent in above)]) for run, above in trees]
    wanted = list(range(sum(len(run.tokens) for run in runs)))
    row = len(wanted)
    for s, count in plan.prefilling:
        runs.append(Run(s.slot, s.cached, s.tokens[s.cached : s.cached + count]))
        row += count
        if s.cached + count == s.prompt_len:
            wanted.append(row - 1)
    return make_rows(runs, wanted, with_features)


def decide(plan: Plan, drafts: Drafts, output: RowsOutput) -> list[Outcome]:
    """Verify the drafts and choose the bonus tokens: one outcome per decoding, then per prefilling sequence."""
    finishing = [s for s, count in plan.prefilling if s.cached + count == s.prompt_len]
    sequences = plan.decoding + finishing
    if not sequences:
        return [Outcome([], []) for _ in plan.prefilling]
    all_drafts = drafts.spread(list(range(len(plan.decoding))), len(sequences))
    verify = Verification(sequences, all_drafts, output)
    paths, bonus = verify.trees() if drafts.parents is not None else verify.chains()
    outcomes = []
    for i, (tokens, path, b) in enumerate(zip(all_drafts.tokens, paths, bonus, strict=True)):
        new_tokens = [*(tokens[j] for j in path), b]
        outcomes.append(Outcome(path, new_tokens, len(tokens), verify.logprobs(i, path, new_tokens)))
    first_tokens = iter(outcomes[len(plan.decoding) :])
    prefilled = [
        next(first_tokens) if s.cached + count == s.prompt_len else Outcome([], []) for s, count in plan.prefilling
    ]
    return outcomes[: len(plan.decoding)] + prefilled


def accepted_entries(s: Sequence, outcome: Outcome) -> Move | None:
    """What makes the accepted path of a tree the sequence's next entries; None where it is that already."""
    if not outcome.path or outcome.path[-1] == len(outcome.path) - 1:
        return None
    first = s.cached + 1  # behind the anchor's
    return Move(s.slot, first, [first + j for j in outcome.path])
