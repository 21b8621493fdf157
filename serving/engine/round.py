"""One round as functions: ask the drafter, lay out the rows, decide what the target keeps.

`Engine.step` calls them in this order; generate, evaluate and serve all decode through them. Plain decoding is the same
path with no drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafters import random_stream
from drafters.drafter import DraftReply, DraftRequest, SparseProbs
from drafters.verify import sample, verify_sampled, verify_tokens
from serving.engine.rows import Rows, make_rows
from serving.engine.sampling import target_probs
from serving.engine.scheduler import Plan
from serving.engine.sequence import Sequence


@dataclass(frozen=True)
class Drafts:
    """The drafts of one round as the engine uses them: per decoding sequence a list, and their distribution if any."""

    tokens: list[list[int]]  # B lists of 0..K drafts
    probs: SparseProbs | None = None

    @classmethod
    def none(cls, batch: int) -> Drafts:
        return cls([[] for _ in range(batch)])

    def spread(self, places: list[int], batch: int) -> Drafts:
        """The same drafts for the sequences at `places` of a larger batch; the others get none."""
        if len(places) == batch:
            return self
        tokens: list[list[int]] = [[] for _ in range(batch)]
        for place, row in zip(places, self.tokens, strict=True):
            tokens[place] = row
        if self.probs is None:
            return Drafts(tokens)
        source = torch.zeros(batch, dtype=torch.int64)  # rows without drafts repeat the first distribution, unused
        source[torch.tensor(places)] = torch.arange(len(places))
        return Drafts(tokens, SparseProbs(ids_BKC=self.probs.ids_BKC[source], probs_BKC=self.probs.probs_BKC[source]))


@dataclass(frozen=True)
class Outcome:
    """What the target decided for one sequence of the pass."""

    num_accepted: int
    new_tokens: list[int]  # accepted drafts, then the bonus token; empty while the prompt is being fed


def draft_request(sequences: list[Sequence], num_draft_tokens: int, columns: slice | Tensor | None) -> DraftRequest:
    """Collect the pairs that the drafter has not seen. `columns` picks the drafter's taps; None: it taps nothing."""
    counts = [s.cached - s.observed for s in sequences]
    tokens = [token for s in sequences for token in s.tokens[s.observed + 1 : s.cached + 1]]
    features = None
    if columns is not None:
        features = torch.cat([chunk for s in sequences for chunk in s.pending_features])[:, columns]
    return DraftRequest(
        slots=[s.slot for s in sequences],
        epochs=[s.epoch for s in sequences],
        counts=counts,
        starts=[s.observed for s in sequences],
        first_tokens=[s.tokens[0] for s in sequences],
        tokens_N=torch.tensor(tokens, dtype=torch.int64),
        features_NF=features,
        num_draft_tokens=num_draft_tokens,
        temperatures=[s.sampling.temperature for s in sequences],
        seeds=[s.sampling.seed for s in sequences],
    )


def usable_drafts(reply: DraftReply, room: list[int], vocab_size: int) -> Drafts:
    """The reply's drafts, cut to `counts` and to the cache room of each sequence. Raises ValueError on a bad reply."""
    tokens = reply.tokens_BK.tolist()
    if len(tokens) != len(room):
        raise ValueError(f"the drafter answered for {len(tokens)} sequences instead of {len(room)}")
    counts = [reply.tokens_BK.shape[1]] * len(tokens) if reply.counts is None else reply.counts
    drafts = [row[: max(0, min(count, limit))] for row, count, limit in zip(tokens, counts, room, strict=True)]
    if any(not 0 <= token < vocab_size for row in drafts for token in row):
        raise ValueError(f"the drafter proposed a token outside the target's vocabulary of {vocab_size}")
    return Drafts(drafts, reply.probs)


def assemble_rows(plan: Plan, drafts: Drafts, with_features: bool) -> Rows:
    """Rows of the pass: first [anchor, drafts] of every decoding sequence, then the prompts' chunks."""
    runs = [(s.slot, s.cached, [s.tokens[-1], *d]) for s, d in zip(plan.decoding, drafts.tokens, strict=True)]
    wanted = list(range(sum(len(tokens) for _, _, tokens in runs)))
    row = len(wanted)
    for s, count in plan.prefilling:
        runs.append((s.slot, s.cached, s.tokens[s.cached : s.cached + count]))
        row += count
        if s.cached + count == s.prompt_len:
            wanted.append(row - 1)
    return make_rows(runs, wanted, with_features)


def decide(plan: Plan, drafts: Drafts, logits_NV: Tensor) -> list[Outcome]:
    """Verify the drafts and choose the bonus tokens: one outcome per decoding, then per prefilling sequence."""
    finishing = [s for s, count in plan.prefilling if s.cached + count == s.prompt_len]
    sequences = plan.decoding + finishing
    tokens = drafts.tokens + [[] for _ in finishing]
    if not sequences:
        return [Outcome(0, []) for _ in plan.prefilling]
    counts = np.array([len(t) for t in tokens])
    width = int(counts.max()) + 1
    # Row of sequence b's draft position j in `logits_NV`; places past a sequence's own rows repeat its last one.
    first = np.concatenate([[0], np.cumsum(counts[:-1] + 1)])
    rows_BJ = first[:, None] + np.minimum(np.arange(width)[None, :], counts[:, None])
    drafts_BK = torch.tensor([t + [-1] * (width - 1 - len(t)) for t in tokens], dtype=torch.int64).view(len(tokens), -1)
    if drafts.probs is not None and width > 1:
        accepted, bonus = _decide_by_rejection(sequences, drafts_BK, drafts.probs, counts, rows_BJ, logits_NV)
    else:
        target_tokens_BJ = _target_tokens(sequences, counts, logits_NV)[torch.from_numpy(rows_BJ)]
        verdict = verify_tokens(target_tokens_BJ, drafts_BK, torch.from_numpy(counts))
        accepted, bonus = verdict.accepted_B.tolist(), verdict.bonus_B.tolist()
    outcomes = [Outcome(a, [*t[:a], b]) for t, a, b in zip(tokens, accepted, bonus, strict=True)]
    first_tokens = iter(outcomes[len(plan.decoding) :])
    prefilled = [
        next(first_tokens) if s.cached + count == s.prompt_len else Outcome(0, []) for s, count in plan.prefilling
    ]
    return outcomes[: len(plan.decoding)] + prefilled


def _target_tokens(sequences: list[Sequence], counts: np.ndarray, logits_NV: Tensor) -> Tensor:
    """The target's own token after every row, on the host: its argmax, or a draw from the sequence's stream."""
    if logits_NV.device.type == "cpu" and logits_NV.dtype == torch.float32:
        # numpy's argmax is one thread without a team of workers, which would spin into the next forward pass
        tokens_N = torch.from_numpy(logits_NV.numpy().argmax(axis=-1))
    else:
        tokens_N = logits_NV.argmax(dim=-1)
    if any(s.sampling.temperature > 0 for s in sequences):
        row_of = np.repeat(np.arange(len(sequences)), counts + 1)
        rows = np.flatnonzero([sequences[b].sampling.temperature > 0 for b in row_of])
        positions = np.concatenate([len(s.tokens) + np.arange(c + 1) for s, c in zip(sequences, counts, strict=True)])
        sampled = [sequences[b] for b in row_of[rows]]
        index = torch.from_numpy(rows).to(logits_NV.device)
        u = random_stream.uniforms(np.array([s.sampling.seed for s in sampled]), positions[rows], random_stream.TARGET)
        probs_NV = _probs(sampled, logits_NV[index])
        tokens_N[index] = sample(probs_NV, torch.from_numpy(u).to(logits_NV.device))
    return tokens_N.cpu()


def _probs(sequences: list[Sequence], logits_NV: Tensor) -> Tensor:
    """Target probabilities of N rows, row i shaped by the sampling parameters of `sequences[i]`."""
    device = logits_NV.device
    return target_probs(
        logits_NV,
        torch.tensor([s.sampling.temperature for s in sequences], device=device),
        torch.tensor([s.sampling.top_k for s in sequences], device=device),
        torch.tensor([s.sampling.top_p for s in sequences], device=device),
    )


def _decide_by_rejection(
    sequences: list[Sequence],
    drafts_BK: Tensor,
    probs: SparseProbs,
    counts: np.ndarray,
    rows_BJ: np.ndarray,
    logits_NV: Tensor,
) -> tuple[list[int], list[int]]:
    """The classical rule, for drafts that come with their distribution."""
    batch, width = rows_BJ.shape
    per_row = [s for s in sequences for _ in range(width)]
    logits = logits_NV[torch.from_numpy(rows_BJ).flatten().to(logits_NV.device)]
    target_probs_BJV = _probs(per_row, logits).view(batch, width, -1).cpu()
    seeds = np.array([s.sampling.seed for s in sequences])[:, None]
    positions = np.array([len(s.tokens) for s in sequences])[:, None] + np.arange(width)[None, :]
    seeds_BJ = np.broadcast_to(seeds, positions.shape)
    accept_u = random_stream.uniforms(seeds_BJ, positions, random_stream.ACCEPT)[:, : width - 1]
    bonus_u = random_stream.uniforms(seeds_BJ, positions, random_stream.TARGET)
    verdict = verify_sampled(
        target_probs_BJV,
        drafts_BK.clamp(min=0),
        _padded(probs, batch, width - 1),
        torch.from_numpy(counts),
        torch.from_numpy(accept_u),
        torch.from_numpy(bonus_u),
    )
    return verdict.accepted_B.tolist(), verdict.bonus_B.tolist()


def _padded(probs: SparseProbs, batch: int, width: int) -> SparseProbs:
    """Cut the drafts' distributions to `width` slots and add rows for sequences that have no drafts in this pass."""
    ids, values = probs.ids_BKC[:, :width].cpu(), probs.probs_BKC[:, :width].cpu()
    missing = batch - len(ids)
    if missing:
        ids = torch.cat([ids, ids[:1].expand(missing, -1, -1)])
        values = torch.cat([values, torch.zeros_like(values[:1]).expand(missing, -1, -1)])
    return SparseProbs(ids_BKC=ids, probs_BKC=values)
