"""Anchors, labels and rows by hand; documents that share a row see nothing of each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.drafter_module import DrafterModule
from drafters.training_batch import (
    IGNORED,
    Document,
    TrainingBatch,
    anchor_places,
    first_fit,
    pack_documents,
    pad_documents,
    random_anchors,
)
from tests.toy_dflash import toy_dflash
from tests.toy_mtp import rows_of, toy_mtp
from tests.toy_target import toy_model


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def document(length: int, anchors: list[int], first_id: int = 0, end: int | None = None, width: int = 2) -> Document:
    """Counts up from `first_id`; features are 1.0 everywhere."""
    return Document(
        ids_T=first_id + torch.arange(length),
        features_TF=torch.ones(length - 1, width),
        anchors_A=torch.tensor(anchors),
        ends_A=torch.full((len(anchors),), length if end is None else end),
    )


@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=4),
    count=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_anchors_lie_where_drafting_happens(shapes, count, seed):
    spans, place = [], 0
    for before, response in shapes:
        spans.append((place + before, place + before + response))
        place += before + response
    anchors, ends = random_anchors(spans, count, generator(seed))
    usable = sum(max(0, response - 1) for _, response in shapes)
    assert len(anchors) == len(ends) == len(set(anchors.tolist())) == min(count, usable)
    assert anchors.tolist() == sorted(anchors.tolist())
    for p, end in zip(anchors.tolist(), ends.tolist(), strict=True):
        assert [(first, last) for first, last in spans if first - 1 <= p <= last - 3] == [
            (first, last) for first, last in spans if last == end and last - first > 1
        ]


def test_all_anchors_are_drawn_and_evenly():
    counts = torch.zeros(30)
    for seed in range(400):
        counts[random_anchors([(5, 20)], 4, generator(seed))[0]] += 1
    drawn = counts[4:18]  # pairs 4 .. 17: from the last prompt token to the last but two
    assert counts.sum() == drawn.sum() == 1600
    assert (drawn - 1600 / 14).abs().max() < 50


def test_the_generator_decides():
    first, again = (random_anchors([(3, 40)], 6, generator(1))[0] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, random_anchors([(3, 40)], 6, generator(2))[0])


def test_all_places_of_two_turns():
    places, ends = anchor_places([(2, 6), (9, 10), (12, 15)])
    assert places.tolist() == [1, 2, 3, 11, 12]  # a turn of one token gives none
    assert ends.tolist() == [6, 6, 6, 15, 15]


def test_step_k_is_labelled_with_the_token_k_plus_one_after_the_pair():
    batch = pad_documents([document(8, [0, 3]), document(5, [2, 0], first_id=100)])
    assert batch.labels(3).tolist() == [
        [[2, 3, 4], [5, 6, 7]],
        [[104, IGNORED, IGNORED], [102, 103, 104]],  # past the end of the shorter document nothing is known
    ]


def test_labels_end_with_the_turn():
    """What follows is the user's: no drafter has to foresee it."""
    batch = pad_documents([document(9, [1, 2], end=5)])
    assert batch.labels(3).tolist() == [[[3, 4, IGNORED], [4, IGNORED, IGNORED]]]


def test_features_before_a_label_are_those_of_the_token_before_it():
    features = torch.arange(8.0)[None, :, None] * torch.tensor([1.0, 100.0])  # two taps of width 1
    batch = rows_of(torch.arange(8)[None], features, torch.tensor([[0, 3]]))
    assert batch.features_before_labels(3, 1)[..., 0].tolist() == [[[100, 200, 300], [400, 500, 600]]]
    assert (batch.labels(3) - 1).tolist() == [[[1, 2, 3], [4, 5, 6]]]  # the label at p + 1 + k follows position p + k


def test_token_0_is_a_label_like_any_other():
    batch = rows_of(torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, 6, 1), torch.tensor([[1]]), torch.tensor([5]))
    assert batch.labels(3).tolist() == [[[0, 0, IGNORED]]]


def test_a_row_of_two_documents_by_hand():
    documents = [
        document(3, [0], first_id=10),
        document(5, [1, 2], first_id=20),
        document(2, [], first_id=30),
    ]
    batch = pack_documents(documents, row_tokens=6)
    assert batch.ids_BT.tolist() == [[10, 11, 12, 30, 31], [20, 21, 22, 23, 24]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert batch.features_BTF[:, :, 0].tolist() == [[1, 1, 0, 1, 0], [1, 1, 1, 1, 0]]  # none of a last token
    assert batch.anchors_BA.tolist() == [[0, 0], [1, 2]]  # an unused place repeats a used one
    assert batch.anchor_mask_BA.tolist() == [[True, False], [True, True]]
    assert batch.document_starts().tolist() == [[0, 0], [0, 0]]
    assert batch.labels(2).tolist() == [[[12, IGNORED], [IGNORED, IGNORED]], [[23, 24], [24, IGNORED]]]
    assert batch.pairs_seen().tolist() == [[True] + [False] * 4, [True] * 3 + [False] * 2]


def test_anchors_of_a_second_document_count_from_its_own_start():
    batch = pack_documents([document(4, [1]), document(5, [2], first_id=50)], row_tokens=9)
    assert batch.anchors_BA.tolist() == [[1, 6]]
    assert batch.anchor_positions().tolist() == [[1, 2]]
    assert batch.document_starts().tolist() == [[0, 4]]
    assert batch.ends_BA.tolist() == [[4, 9]]
    assert batch.labels(2).tolist() == [[[3, IGNORED], [54, IGNORED]]]
    assert batch.pairs_seen().tolist() == [[True, True, False, False, True, True, True, False, False]]
    hidden = batch.pairs_hidden()[0]
    assert (~hidden[0]).nonzero().flatten().tolist() == [0, 1]
    assert (~hidden[1]).nonzero().flatten().tolist() == [4, 5, 6]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), row_tokens=st.integers(1, 60))
def test_every_document_is_in_one_row_whole(lengths, row_tokens):
    rows = first_fit(lengths, row_tokens)
    assert sorted(d for row in rows for d in row) == list(range(len(lengths)))
    fullest = max(sum(lengths[d] for d in row) for row in rows)
    assert fullest <= max(row_tokens, *lengths)
    sums = sorted(sum(lengths[d] for d in row) for row in rows)
    assert len(sums) < 2 or sums[0] + sums[1] > max(row_tokens, *lengths), "two rows would fit into one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_come_in_the_wanted_dtype(dtype):
    assert pack_documents([document(3, [0])], 8, dtype).features_BTF.dtype == dtype


# -- documents that share a row ---------------------------------------------------------------------------------------

MODULES = {
    "recursive": lambda model: toy_mtp(model),
    "independent": lambda model: toy_mtp(model, "independent", anchor_embedding=True),
    "dflash": lambda model: toy_dflash(model, slot_context=True),
    "dflash, sliding": lambda model: toy_dflash(model, sliding_window=4, layer_types=("sliding_attention",) * 2),
}


@pytest.fixture(scope="module", params=list(MODULES))
def module(request) -> DrafterModule:
    return MODULES[request.param](toy_model())


def random_documents(lengths: list[int], seed: int = 0) -> list[Document]:
    drawn = generator(seed)
    documents = []
    for length in lengths:
        anchors, ends = random_anchors([(2, length)], 4, drawn)
        ids = torch.randint(0, 256, (length,), generator=drawn)
        features = torch.randn(length - 1, 64, generator=drawn)
        documents.append(Document(ids_T=ids, features_TF=features, anchors_A=anchors, ends_A=ends))
    return documents


def labelled_logits(module: DrafterModule, batch: TrainingBatch) -> torch.Tensor:
    """[B, A, K, W]; 0 at steps without a label, which are fed whatever comes after the document."""
    logits = module(batch).logits_BAKW
    return logits * (batch.labels(logits.shape[2]) != IGNORED)[..., None]


@torch.no_grad()
def test_logits_in_a_shared_row_are_those_of_a_row_alone(module):
    documents = random_documents([11, 7, 16, 9])
    packed = labelled_logits(module, pack_documents(documents, 20))
    assert first_fit([11, 7, 16, 9], 20) == [[0, 1], [2], [3]]
    alone = [labelled_logits(module, pad_documents([d]))[0] for d in documents]
    shared = [packed[0, :4], packed[0, 4:8], packed[1, :4], packed[2, :4]]
    for ours, theirs in zip(shared, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_nothing_leaks_from_one_document_into_another(module):
    documents = random_documents([9, 10, 8])
    before = labelled_logits(module, pack_documents(documents, 27))[0]
    changed = random_documents([9, 10, 8], seed=1)
    for d in range(3):
        other = [changed[i] if i == d else documents[i] for i in range(3)]
        other = [
            Document(ids_T=o.ids_T, features_TF=o.features_TF, anchors_A=was.anchors_A, ends_A=was.ends_A)
            for o, was in zip(other, documents, strict=True)
        ]
        after = labelled_logits(module, pack_documents(other, 27))[0]
        same = [torch.equal(after[4 * i : 4 * i + 4], before[4 * i : 4 * i + 4]) for i in range(3)]
        assert same == [i != d for i in range(3)]
