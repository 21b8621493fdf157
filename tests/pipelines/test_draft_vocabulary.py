"""The draft vocabulary: which tokens, and how many for a share of text that nobody has seen yet."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipelines.draft_vocabulary import (
    FOLDS,
    MIN_SIZE,
    SIZE_STEP,
    TokenCounts,
    draft_vocabulary,
    size_for,
    unseen_coverage,
)
from pipelines.training_sequence import TrainingSequence

VOCAB = 20_000


def sequence(prompt: list[int], response: list[int]) -> TrainingSequence:
    ids = torch.tensor(prompt + response)
    return TrainingSequence(ids, len(prompt), torch.zeros(len(ids) - 1, 1))


def coverage_of(vocabulary: torch.Tensor, sequences: list[TrainingSequence]) -> float | None:
    return TokenCounts.of(sequences, VOCAB).coverage_of(vocabulary)


def zipf_text(count: int, length: int, seed: int) -> list[TrainingSequence]:
    """Responses whose tokens follow a power law over shuffled ids: most of them are rare, as in text."""
    rng = np.random.default_rng(seed)
    probs = 1 / np.arange(1, VOCAB + 1)
    names = np.random.default_rng(0).permutation(VOCAB)
    drawn = names[rng.choice(VOCAB, (count, length), p=probs / probs.sum())]
    return [sequence([1], row.tolist()) for row in drawn]


def test_responses_come_first_then_prompts_then_lower_ids():
    one, two = sequence([5, 11, 11, 11], [2, 2, 9, 7]), sequence([9, 3], [7, 7, 9])
    order = TokenCounts.of([one, two], 12).order()
    parts = [TokenCounts.of([s], 12) for s in (one, two)]
    assert order.tolist() == [7, 9, 2, 11, 3, 5, 0, 1, 4, 6, 8, 10]
    assert draft_vocabulary(parts, 3, 0.5).tolist() == [2, 7, 9], "ids are ascending"
    assert draft_vocabulary(parts, 99, 0.5).tolist() == list(range(12))
    assert draft_vocabulary(parts, 0, 0.5).tolist() == list(range(12)), "0 means all"


def test_unseen_coverage_by_hand():
    """Two sequences take turns: each is covered with the other's tokens, then with lower ids."""
    curve = unseen_coverage([TokenCounts.of([sequence([0], ids)], 6) for ids in ([4, 4, 3], [4, 1])])
    # of the first, [1, 4, 0, 2, 3, 5] covers 0 2 2 2 3 3 tokens; of the second, [4, 3, 0, 1, 2, 5] covers 1 1 1 2 2 2
    assert curve.tolist() == pytest.approx([1 / 5, 3 / 5, 3 / 5, 4 / 5, 1, 1])


@pytest.mark.parametrize(
    ("coverage", "first_enough", "size"),
    [(0.9, 1, MIN_SIZE), (0.9, 2049, 2304), (0.9, 2304, 2304), (0.9, 2305, 2560), (0.9, 9999, 10_000)],
)
def test_sizes_are_rounded_up_within_their_bounds(coverage, first_enough, size):
    curve = torch.full((10_000,), 0.5, dtype=torch.float64)
    curve[first_enough - 1 :] = coverage
    assert size_for(coverage, curve) == size
    assert size % SIZE_STEP == 0 or size == 10_000
    assert size_for(0.4, curve) == MIN_SIZE
    assert size_for(1.0, curve) == 10_000, "what cannot be reached takes all tokens"
    assert size_for(0.9, torch.ones(300, dtype=torch.float64)) == 300, "a small vocabulary is taken whole"


@pytest.mark.parametrize("count", [20, 200])
def test_the_share_holds_on_text_that_was_not_seen(count):
    """The share of the sequences at hand would not do: it is reached with far too few tokens."""
    training, unseen = zipf_text(count, 100, seed=1), zipf_text(400, 100, seed=2)
    parts = [TokenCounts.of(training[i::FOLDS], VOCAB) for i in range(FOLDS)]
    vocabulary = draft_vocabulary(parts, None, 0.8)
    assert coverage_of(vocabulary, unseen) == pytest.approx(0.8, abs=0.03)
    counts = TokenCounts.total(parts)
    order = counts.order()
    covered_V = counts.responses_V[order].cumsum(dim=0) / counts.responses_V.sum()
    naive = int((covered_V < 0.8).sum()) + 1
    assert coverage_of(order[:naive], training) >= 0.8
    assert coverage_of(order[:naive], unseen) < 0.72


def test_one_sequence_and_empty_responses_are_no_special_case():
    alone = sequence([3], [5, 6, 5])
    parts = [TokenCounts.of([alone], VOCAB), *(TokenCounts.of([], VOCAB) for _ in range(FOLDS - 1))]
    assert len(draft_vocabulary(parts, None, 0.95)) == MIN_SIZE
    assert coverage_of(torch.tensor([5]), [alone]) == pytest.approx(2 / 3)
    assert coverage_of(torch.tensor([5]), [sequence([3], [])]) is None
    assert coverage_of(torch.tensor([5]), []) is None


def test_what_stands_between_the_targets_turns_is_prompt():
    conversation = TrainingSequence(torch.tensor([1, 2, 3, 4, 5, 6]), 1, torch.zeros(5, 1), turns=((1, 3), (5, 6)))
    counts = TokenCounts.of([conversation], 8)
    assert counts.responses_V.tolist() == [0, 0, 1, 1, 0, 0, 1, 0]
    assert counts.prompts_V.tolist() == [0, 1, 0, 0, 1, 1, 0, 0]
