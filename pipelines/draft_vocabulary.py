"""Which of the target's tokens a drafter can propose: training sequences in, token ids out. No Ray.

The size follows from a share of the response tokens to come, not of those at hand: a small rollout set covers itself
with very few tokens and the next text badly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipelines.training import TrainingSequence

SIZE_STEP = 256  # sizes are multiples of it
MIN_SIZE = 2048  # below that the projection costs next to nothing, and few sequences estimate badly
FOLDS = 10  # parts of the sequences that take turns in being unseen text


@dataclass(frozen=True)
class TokenCounts:
    """How often each token occurs, in responses and in prompts. int64 [V] each."""

    responses_V: Tensor
    prompts_V: Tensor

    @classmethod
    def of(cls, sequences: list[TrainingSequence], vocab_size: int) -> TokenCounts:
        """Count; `vocab_size` is the target's."""
        empty = torch.empty(0, dtype=torch.int64)
        responses = torch.cat([empty, *(s.ids[s.prompt_len :] for s in sequences)])
        prompts = torch.cat([empty, *(s.ids[: s.prompt_len] for s in sequences)])
        return cls(*(torch.bincount(ids, minlength=vocab_size) for ids in (responses, prompts)))

    def without(self, other: TokenCounts) -> TokenCounts:
        """The counts of all sequences but the other's."""
        return TokenCounts(self.responses_V - other.responses_V, self.prompts_V - other.prompts_V)

    def order(self) -> Tensor:
        """All tokens [V], the likeliest of a response first.

        By count in responses, then in prompts (answers take up their question's words), then by lower id: in a BPE
        vocabulary those are the more frequent merges, which is all that is known of tokens never seen.
        """
        order_V = self.prompts_V.argsort(descending=True, stable=True)
        return order_V[self.responses_V[order_V].argsort(descending=True, stable=True)]


def draft_vocabulary(sequences: list[TrainingSequence], vocab_size: int, size: int | None, coverage: float) -> Tensor:
    """Token ids [N] of the draft vocabulary, ascending. N is `size` (0: all) or, if None, follows from `coverage`."""
    if size is None:
        size = size_for(coverage, unseen_coverage(sequences, vocab_size))
    return TokenCounts.of(sequences, vocab_size).order()[: size or vocab_size].sort().values


def unseen_coverage(sequences: list[TrainingSequence], vocab_size: int) -> Tensor:
    """[V] float64: entry n - 1 is the share of unseen response tokens that n draft tokens are expected to cover.

    Cross-validation: every part of the sequences is covered with tokens chosen from the other parts.
    """
    parts = [TokenCounts.of(sequences[i::FOLDS], vocab_size) for i in range(min(FOLDS, len(sequences)))]
    whole = TokenCounts.of(sequences, vocab_size)
    covered_V = torch.zeros(vocab_size, dtype=torch.int64)
    for part in parts:
        covered_V += part.responses_V[whole.without(part).order()].cumsum(dim=0)
    return covered_V.double() / whole.responses_V.sum().clamp(min=1)


def size_for(coverage: float, coverage_V: Tensor) -> int:
    """The smallest size that covers `coverage`, as a multiple of SIZE_STEP within MIN_SIZE and the vocabulary."""
    vocab_size = len(coverage_V)
    needed = int((coverage_V < coverage - 1e-12).sum()) + 1  # the curve never falls
    return min(vocab_size, max(MIN_SIZE, -(-needed // SIZE_STEP) * SIZE_STEP))


def coverage_of(vocabulary: Tensor, sequences: list[TrainingSequence]) -> float | None:
    """Share of the sequences' response tokens that lie in the vocabulary (ids [N]); None without any."""
    responses = torch.cat([s.ids[s.prompt_len :] for s in sequences]) if sequences else torch.empty(0)
    return float(torch.isin(responses, vocabulary.cpu()).double().mean()) if len(responses) else None
