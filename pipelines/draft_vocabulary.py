"""Which of the target's tokens a drafter can propose: counts of the training text's tokens in, token ids out. No Ray.

The size follows from a share of the response tokens to come, not of those at hand: a small rollout set covers itself
with very few tokens and the next text badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipelines.training_sequence import TrainingSequence

SIZE_STEP = 256  # sizes are multiples of it
MIN_SIZE = 2048  # below that the projection costs next to nothing, and few sequences estimate badly
FOLDS = 10  # parts of the sequences that take turns in being unseen text


@dataclass(frozen=True)
class TokenCounts:
    """How often each token occurs, in responses and in prompts. int64 [V] each."""

    responses_V: Tensor
    prompts_V: Tensor

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence], vocab_size: int) -> TokenCounts:
        """Count; `vocab_size` is the target's. What a conversation holds between the target's turns is prompt."""
        written, all_ids = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for sequence in sequences:
            all_ids.append(sequence.ids)
            written += [sequence.ids[first:end] for first, end in sequence.spans]
        responses_V, all_V = (torch.bincount(torch.cat(ids), minlength=vocab_size) for ids in (written, all_ids))
        return cls(responses_V, all_V - responses_V)

    @classmethod
    def of_numpy(cls, responses_V: np.ndarray, prompts_V: np.ndarray) -> TokenCounts:
        return cls(torch.from_numpy(responses_V), torch.from_numpy(prompts_V))

    @classmethod
    def total(cls, parts: Sequence[TokenCounts]) -> TokenCounts:
        """The counts of all parts together."""
        stacked = [torch.stack([getattr(part, name) for part in parts]) for name in ("responses_V", "prompts_V")]
        return cls(*(counts.sum(dim=0) for counts in stacked))

    def without(self, other: TokenCounts) -> TokenCounts:
        """The counts of all sequences but the other's."""
        return TokenCounts(self.responses_V - other.responses_V, self.prompts_V - other.prompts_V)

    def coverage_of(self, vocabulary: Tensor) -> float | None:
        """Share of the response tokens that lie in the vocabulary (ids [N]); None without any."""
        total = int(self.responses_V.sum())
        return float(self.responses_V[vocabulary.cpu()].sum()) / total if total else None

    def order(self) -> Tensor:
        """All tokens [V], the likeliest of a response first.

        By count in responses, then in prompts (answers take up their question's words), then by lower id: in a BPE
        vocabulary those are the more frequent merges, which is all that is known of tokens never seen.
        """
        order_V = self.prompts_V.argsort(descending=True, stable=True)
        return order_V[self.responses_V[order_V].argsort(descending=True, stable=True)]


def draft_vocabulary(parts: Sequence[TokenCounts], size: int | None, coverage: float) -> Tensor:
    """Token ids [N] of the draft vocabulary, ascending. N is `size` (0: all) or, if None, follows from `coverage`.

    `parts` are the counts of parts of the training text, in which every kind of it occurs.
    """
    whole = TokenCounts.total(parts)
    if size is None:
        size = size_for(coverage, unseen_coverage(parts))
    return whole.order()[: size or len(whole.responses_V)].sort().values


def unseen_coverage(parts: Sequence[TokenCounts]) -> Tensor:
    """[V] float64: entry n - 1 is the share of unseen response tokens that n draft tokens are expected to cover.

    Cross-validation: every part of the text is covered with tokens chosen from the other parts.
    """
    whole = TokenCounts.total(parts)
    covered_V = torch.zeros(len(whole.responses_V), dtype=torch.int64)
    for part in parts:
        covered_V += part.responses_V[whole.without(part).order()].cumsum(dim=0)
    return covered_V.double() / whole.responses_V.sum().clamp(min=1)


def size_for(coverage: float, coverage_V: Tensor) -> int:
    """The smallest size that covers `coverage`, as a multiple of SIZE_STEP within MIN_SIZE and the vocabulary."""
    vocab_size = len(coverage_V)
    needed = int((coverage_V < coverage - 1e-12).sum()) + 1  # the curve never falls
    return min(vocab_size, max(MIN_SIZE, -(-needed // SIZE_STEP) * SIZE_STEP))
