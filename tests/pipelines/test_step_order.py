"""Every row once per epoch, in packs within the budget, for any number of workers; fetched when they are needed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.pack_source import PackSource, memory_source
from pipelines.step_order import Chunk, OrderConfig, StepOrder, chunk_rows, chunk_size, deal, every_nth_row
from pipelines.training_sequence import TrainingSequence, spans_of


def config(**changes: int) -> OrderConfig:
    return OrderConfig(**({"lanes": 2, "pack_tokens": 20, "window_tokens": 60, "seed": 1} | changes))


def chunks_of(lengths: Sequence[int], size: int = 2, weight: float = 1.0) -> list[Chunk]:
    return chunk_rows(0, range(len(lengths)), lengths, size, weight)


LENGTHS = [7, 3, 12, 5, 9, 4, 30, 8, 6, 11, 2, 10, 5, 5, 7, 13]


def rows_of_packs(order: StepOrder, lane: int, count: int) -> list[list[tuple[int, int]]]:
    return [pack.rows for pack in itertools.islice(order.lanes[lane].packs(), count)]


def test_chunks_keep_the_rows_in_order_and_their_lengths():
    assert chunk_rows(3, [0, 2, 5], [7, 8, 9], 2) == [Chunk(3, (0, 2), (7, 8)), Chunk(3, (5,), (9,))]
    assert [chunk_size(rows, lanes) for rows, lanes in ((5, 1), (160, 2), (100_000, 4))] == [1, 10, 64]


def test_lanes_have_about_the_same_tokens():
    chunks = chunks_of([50, 40, 30, 20, 10, 10], size=1)
    assert deal(chunks, 2) == [[0, 3, 4], [1, 2, 5]]  # 80 tokens each
    with pytest.raises(ValueError, match="6 chunks of rows cannot feed 7 parts"):
        deal(chunks, 7)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(3, 40), min_size=6, max_size=40),
    lanes=st.integers(1, 3),
    window=st.integers(1, 300),
    seed=st.integers(0, 9),
)
def test_every_row_comes_once_per_epoch_in_packs_within_the_budget(lengths, lanes, window, seed):
    chunks = chunks_of(lengths)
    order = StepOrder(chunks, config(lanes=lanes, window_tokens=window, seed=seed))
    for lane in order.lanes:
        rows = sum(len(chunks[c].rows) for c in lane.own)
        walk = [row[1:] for row in itertools.islice(lane.rows(), 2 * rows)]
        every = {(c, place) for c in lane.own for place in range(len(chunks[c].rows))}
        assert set(walk[:rows]) == set(walk[rows:]) == every, "each epoch visits each row once"
        packs = list(itertools.islice(lane.packs(), 2 * rows))
        assert list(itertools.chain.from_iterable(p.rows for p in packs))[: 2 * rows] == walk, "none is left out"
        for pack, following in itertools.pairwise(packs):
            tokens = sum(chunks[c].lengths[place] for c, place in pack.rows)
            c, place = following.rows[0]
            assert tokens <= 20 or len(pack.rows) == 1
            assert tokens + chunks[c].lengths[place] > 20, "the next row would have fit"
    assert sorted(c for lane in order.lanes for c in lane.own) == list(range(len(chunks)))


def test_the_seed_decides_and_epochs_differ():
    walks = {
        seed: [
            row[1:] for row in itertools.islice(StepOrder(chunks_of(LENGTHS), config(seed=seed)).lanes[0].rows(), 16)
        ]
        for seed in (1, 1, 2)
    }
    assert len(walks) == 2
    assert walks[1] != walks[2]
    assert walks[1][:8] != walks[1][8:]
    again = [row[1:] for row in itertools.islice(StepOrder(chunks_of(LENGTHS), config()).lanes[0].rows(), 16)]
    assert again == walks[1]


def test_rows_are_shuffled_within_a_window_only():
    order = StepOrder(chunks_of([10] * 40, size=2), config(lanes=1, window_tokens=80))
    windows = list(itertools.islice(order.lanes[0].windows(), 5))
    assert [len(window) for window in windows] == [4] * 5
    rows = list(itertools.islice(order.lanes[0].rows(), 40))
    for number, window in enumerate(windows):
        part = rows[8 * number : 8 * number + 8]
        assert {row[0] for row in part} == {number}
        assert {row[1] for row in part} == set(window)
        assert [row[1] for row in part] != sorted((row[1] for row in part), key=window.index), "chunks are mixed"


@pytest.mark.parametrize(("weight", "visits"), [(2.0, 2000), (0.5, 500), (1.25, 1250)])
def test_a_weight_is_the_mean_number_of_visits_per_epoch(weight, visits):
    chunks = [*chunks_of([10] * 10, size=1), Chunk(1, (0,), (10,), weight)]
    lane = StepOrder(chunks, config(lanes=1, window_tokens=10**9)).lanes[0]
    seen = Counter(c for window in itertools.islice(lane.windows(), 1000) for c in window)
    assert {seen[c] for c in range(10)} == {1000}
    assert seen[10] == pytest.approx(visits, abs=70)  # 4 standard deviations of a coin


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_workers_share_rows_out(world):
    chunks = [Chunk(n, tuple(range(n, 3 * n + 1)), tuple(range(2 * n + 1))) for n in range(1, 5)]
    shares = [every_nth_row(chunks, world, rank) for rank in range(world)]
    found = [
        (c.shard, row, length) for share in shares for c in share for row, length in zip(c.rows, c.lengths, strict=True)
    ]
    assert sorted(found) == [(c.shard, r, n) for c in chunks for r, n in zip(c.rows, c.lengths, strict=True)]
    sizes = [sum(len(c.rows) for c in share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_no_lane_leaves_rows_behind():
    chunks = chunks_of([10] * 39 + [3], size=1)
    order = StepOrder(chunks, config(lanes=4, pack_tokens=10))
    packs = order.steps_of(1)
    taken = {row for lane in order.lanes for pack in itertools.islice(lane.packs(), packs) for row in pack.rows}
    assert len(taken) == 40


def test_steps_of_some_epochs():
    chunks = chunks_of([10] * 40)
    assert StepOrder(chunks, config(lanes=1)).steps_of(3) == 60  # two rows of ten tokens a pack
    assert StepOrder(chunks, config(lanes=2)).steps_of(3) == 30
    assert StepOrder(chunks, config(lanes=1)).steps_of(0.01) == 1


# -- where the sequences come from ------------------------------------------------------------------------------------


class Shelf:
    """Hands out chunks and notes which."""

    def __init__(self, chunks: Sequence[Chunk]):
        self.chunks, self.fetched = chunks, []

    def fetch(self, wanted: Sequence[int]) -> Iterator[tuple[int, list[TrainingSequence]]]:
        for c in wanted:
            self.fetched.append(c)
            yield c, [named(c, place) for place in range(len(self.chunks[c].rows))]


def named(chunk: int, place: int) -> TrainingSequence:
    return TrainingSequence(torch.tensor([chunk, place, 0]), 1, torch.zeros(2, 1))


def names(steps) -> list[list[list[tuple[int, int]]]]:
    return [[[tuple(s.ids[:2].tolist()) for s in pack.sequences] for pack in packs] for packs in steps]


@pytest.mark.parametrize("keep_tokens", [0, 50, float("inf")])
@pytest.mark.parametrize("lanes", [[0], [1], [0, 1], [2, 0]])
@pytest.mark.parametrize("first", [1, 4, 17])
def test_steps_are_those_of_the_order_wherever_they_begin_and_whatever_is_kept(first, lanes, keep_tokens):
    chunks = chunks_of(LENGTHS)
    order = StepOrder(chunks, config(lanes=3))
    shelf = Shelf(chunks)
    source = PackSource(order, shelf.fetch, keep_tokens=keep_tokens)
    expected = list(zip(*(rows_of_packs(order, lane, 30) for lane in lanes), strict=True))[first - 1 :]
    assert names(source.steps(lanes, first, 30)) == [list(packs) for packs in expected]
    if keep_tokens == float("inf"):
        assert len(shelf.fetched) == len(set(shelf.fetched)), "what is kept is fetched once"
    if keep_tokens == 0 and lanes == [0, 1]:
        assert max(Counter(shelf.fetched).values()) > 2, "thirty steps are several epochs"


def test_no_more_is_held_than_the_windows_at_work():
    chunks = chunks_of([10] * 200, size=2)
    order = StepOrder(chunks, config(lanes=1, window_tokens=100))
    shelf = Shelf(chunks)
    ahead = []
    for number, _ in enumerate(PackSource(order, shelf.fetch, keep_tokens=0).steps([0], 1, 90)):
        ahead.append(2 * len(shelf.fetched) - 2 * (number + 1))  # rows fetched but not yet given
    assert max(ahead) <= 20  # the window at work and the one that begins


def test_nothing_is_fetched_for_no_step():
    shelf = Shelf(chunks_of(LENGTHS))
    assert list(PackSource(StepOrder(shelf.chunks, config()), shelf.fetch).steps([0], 5, 4)) == []
    assert shelf.fetched == []


def test_sequences_in_memory_are_a_source():
    sequences = [TrainingSequence(torch.arange(n), 1, torch.zeros(n - 1, 1)) for n in LENGTHS]
    source = memory_source(sequences, config())
    packs = [pack for packs in source.steps([0, 1], 1, 40) for pack in packs]
    seen = Counter(id(s) for pack in packs for s in pack.sequences)
    assert set(seen) == {id(s) for s in sequences}
    assert max(seen.values()) - min(seen.values()) <= 3


@pytest.mark.parametrize(
    ("mask", "spans"),
    [([], ()), ([0, 0], ()), ([1], ((0, 1),)), ([0, 1, 1, 0, 1], ((1, 3), (4, 5))), ([1, 0, 0, 1], ((0, 1), (3, 4)))],
)
def test_spans_of_a_mask(mask, spans):
    assert spans_of(mask) == spans
