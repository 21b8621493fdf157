"""Anchors, labels and padding by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.training_batch import IGNORED, TrainingBatch, pad_sequences, random_anchors


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=5),
    count=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_anchors_lie_where_drafting_happens(shapes, count, seed):
    prompt_lens, lengths = [p for p, _ in shapes], [p + r for p, r in shapes]
    anchors, mask = random_anchors(prompt_lens, lengths, count, generator(seed))
    assert anchors.shape == mask.shape == (len(shapes), count)
    for b, (prompt_len, response) in enumerate(shapes):
        used = anchors[b][mask[b]].tolist()
        assert len(set(used)) == len(used) == min(count, max(0, response - 1))
        assert all(prompt_len - 1 <= p <= prompt_len + response - 3 for p in used)
        if used:  # unused places repeat a used one: they index into the sequence
            assert set(anchors[b].tolist()) == set(used)


def test_all_anchors_are_drawn_and_evenly():
    counts = torch.zeros(30)
    for seed in range(400):
        anchors, _ = random_anchors([5], [20], 4, generator(seed))
        counts[anchors[0]] += 1
    drawn = counts[4:18]  # pairs 4 .. 17: from the last prompt token to the last but two
    assert counts.sum() == drawn.sum() == 1600
    assert (drawn - 1600 / 14).abs().max() < 50


def test_the_generator_decides():
    first, again = (random_anchors([3], [40], 6, generator(1))[0] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, random_anchors([3], [40], 6, generator(2))[0])


def batch_of(lengths: list[int], anchors: list[list[int]], mask: list[list[bool]] | None = None) -> TrainingBatch:
    """Sequence b counts up from 100 * b."""
    ids, features, lengths_B = pad_sequences(
        [100 * b + torch.arange(n) for b, n in enumerate(lengths)],
        [torch.ones(n - 1, 2) for n in lengths],
        torch.float32,
    )
    anchors_BA = torch.tensor(anchors)
    return TrainingBatch(
        ids_BT=ids,
        features_BTF=features,
        lengths_B=lengths_B,
        anchors_BA=anchors_BA,
        anchor_mask_BA=torch.ones_like(anchors_BA, dtype=torch.bool) if mask is None else torch.tensor(mask),
    )


def test_step_k_is_labelled_with_the_token_k_plus_one_after_the_pair():
    batch = batch_of([8, 5], [[0, 3], [2, 0]])
    assert batch.labels(3).tolist() == [
        [[2, 3, 4], [5, 6, 7]],
        [[104, IGNORED, IGNORED], [102, 103, 104]],  # past the end of the shorter sequence nothing is known
    ]


def test_features_before_a_label_are_those_of_the_token_before_it():
    ids, _, lengths = pad_sequences([torch.arange(8)], [torch.ones(7, 2)], torch.float32)
    features = torch.arange(8.0)[None, :, None] * torch.tensor([1.0, 100.0])  # two taps of width 1
    anchors = torch.tensor([[0, 3]])
    batch = TrainingBatch(
        ids_BT=ids, features_BTF=features, lengths_B=lengths, anchors_BA=anchors, anchor_mask_BA=anchors >= 0
    )
    assert batch.features_before_labels(3, 1)[..., 0].tolist() == [[[100, 200, 300], [400, 500, 600]]]
    assert (batch.labels(3) - 1).tolist() == [[[1, 2, 3], [4, 5, 6]]]  # the label at p + 1 + k follows position p + k


def test_unused_anchors_have_no_labels():
    batch = batch_of([8], [[1, 1]], [[True, False]])
    assert batch.labels(2).tolist() == [[[3, 4], [IGNORED, IGNORED]]]


def test_token_0_is_a_label_like_any_other():
    ids = torch.zeros(1, 6, dtype=torch.int64)
    batch = TrainingBatch(
        ids_BT=ids,
        features_BTF=torch.zeros(1, 6, 1),
        lengths_B=torch.tensor([5]),
        anchors_BA=torch.tensor([[1]]),
        anchor_mask_BA=torch.tensor([[True]]),
    )
    assert batch.labels(3).tolist() == [[[0, 0, IGNORED]]]


def test_padding_by_hand():
    features = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])]
    ids, padded, lengths = pad_sequences([torch.tensor([7, 8]), torch.tensor([1, 2, 3, 4])], features, torch.float32)
    assert ids.tolist() == [[7, 8, 0, 0], [1, 2, 3, 4]]
    assert lengths.tolist() == [2, 4]
    assert padded.shape == (2, 4, 2)
    assert padded[0].tolist() == [[1, 2], [0, 0], [0, 0], [0, 0]]
    assert padded[1].tolist() == [[3, 4], [5, 6], [7, 8], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_come_in_the_wanted_dtype(dtype):
    _, features, _ = pad_sequences([torch.tensor([1, 2])], [torch.ones(1, 3, dtype=torch.bfloat16)], dtype)
    assert features.dtype == dtype
