"""Feeds training steps: an order of rows and a way to fetch chunks in, the sequences of every step's packs out.

Chunks are fetched window by window in the order in which they are needed, and dropped when their window is over. As
many as fit are kept for the next epoch; what is kept changes nothing but what is fetched again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pipelines.step_order import Chunk, Lane, OrderConfig, StepOrder, chunk_size
from pipelines.training_sequence import TrainingSequence

FETCH_AT_ONCE = 512  # chunks that one call fetches, at most

# chunk numbers in, (number, the sequences of its rows in order) out, in the same order
Fetch = Callable[[Sequence[int]], Iterator[tuple[int, list[TrainingSequence]]]]


class LanePack(NamedTuple):
    """One lane's part of a step."""

    lane: int
    sequences: list[TrainingSequence]


class PackSource:
    """Sequences of packs, fetched as they are needed."""

    def __init__(self, order: StepOrder, fetch: Fetch, *, keep_tokens: float = float("inf")):
        """`keep_tokens`: tokens of the chunks that stay in memory."""
        self.order, self.fetch, self.keep_tokens = order, fetch, keep_tokens

    def steps(self, lanes: Sequence[int], first: int, last: int) -> Iterator[list[LanePack]]:
        """The packs of these lanes for the steps `first` to `last` (1-based, both included)."""
        if first > last:
            return
        walks = {i: itertools.islice(self.order.lanes[i].packs(), first - 1, last) for i in lanes}
        heads = {i: next(walk) for i, walk in walks.items()}
        begin = {i: heads[i].window for i in lanes}
        held = _Held(self._fetched(lanes, begin, last), self._kept(lanes))
        for step in range(first, last + 1):
            packs = []
            for i in lanes:
                pack = heads[i] if step == first else next(walks[i])
                held.drop_before(i, pack.window)
                packs.append(LanePack(i, [held.rows(c)[place] for c, place in pack.rows]))
            yield packs

    def _kept(self, lanes: Sequence[int]) -> set[int]:
        """The chunks that stay in memory once they are there."""
        kept, tokens = set(), 0.0
        for c in itertools.chain.from_iterable(self.order.lanes[i].own for i in lanes):
            tokens += self.order.chunks[c].tokens
            if tokens > self.keep_tokens:
                break
            kept.add(c)
        return kept

    def _fetched(
        self, lanes: Sequence[int], begin: dict[int, int], last: int
    ) -> Iterator[tuple[int, int, int, list[TrainingSequence]]]:
        """(lane, window, chunk, sequences), window by window from `begin` on, lanes in turn; kept chunks come once."""
        kept, seen = self._kept(lanes), set[int]()
        wanted: list[tuple[int, int, int]] = []
        ends = {i: _last_window(self.order.lanes[i], last) for i in lanes}
        walks = {i: itertools.islice(enumerate(self.order.lanes[i].windows()), begin[i], ends[i] + 1) for i in lanes}
        for turn in itertools.zip_longest(*walks.values()):
            for i, found in zip(lanes, turn, strict=True):
                if found is None:
                    continue
                window, chunks = found
                for c in dict.fromkeys(chunks):
                    if c not in seen:
                        wanted.append((i, window, c))
                    if c in kept:
                        seen.add(c)
            if len(wanted) >= FETCH_AT_ONCE:
                yield from self._fetch_all(wanted)
                wanted = []
        yield from self._fetch_all(wanted)

    def _fetch_all(self, wanted: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, list[TrainingSequence]]]:
        if wanted:
            for (i, window, c), (found, rows) in zip(wanted, self.fetch([c for *_, c in wanted]), strict=True):
                assert found == c, "chunks must come in the order in which they were asked for"
                yield i, window, c, rows


def _last_window(lane: Lane, packs: int) -> int:
    """The window of the last row of the first `packs` packs."""
    return next(itertools.islice(lane.packs(), packs - 1, None)).last_window


class _Held:
    """The chunks in memory."""

    def __init__(self, incoming: Iterator[tuple[int, int, int, list[TrainingSequence]]], kept: set[int]):
        self._incoming, self._kept = incoming, kept
        self._rows: dict[int, list[TrainingSequence]] = {}
        self._windows: dict[int, tuple[int, int]] = {}  # chunk -> lane and window that it came for

    def rows(self, chunk: int) -> list[TrainingSequence]:
        """The sequences of a chunk. Chunks come in the order in which steps need them."""
        while chunk not in self._rows:
            i, number, c, rows = next(self._incoming)
            self._rows[c], self._windows[c] = rows, (i, number)
        return self._rows[chunk]

    def drop_before(self, lane: int, window: int) -> None:
        """Forget what earlier windows of the lane held."""
        over = [c for c, (i, number) in self._windows.items() if i == lane and number < window and c not in self._kept]
        for c in over:
            del self._rows[c], self._windows[c]


def memory_source(sequences: Sequence[TrainingSequence], config: OrderConfig) -> PackSource:
    """A source over sequences in memory, for training without rollouts on disk."""
    size = chunk_size(len(sequences), config.lanes)
    chunks = [
        Chunk(0, tuple(range(i, min(i + size, len(sequences)))), tuple(len(s.ids) for s in sequences[i : i + size]))
        for i in range(0, len(sequences), size)
    ]

    def fetch(wanted: Sequence[int]) -> Iterator[tuple[int, list[TrainingSequence]]]:
        for c in wanted:
            yield c, [sequences[row] for row in chunks[c].rows]

    return PackSource(StepOrder(chunks, config), fetch)
