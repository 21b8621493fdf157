"""Which rows every training step reads: the lengths of all rows in, packs of row places out. No features, no Ray.

A step trains on one pack of each lane. A lane owns a fixed part of the rows and walks over it for ever; what it gives
is a function of seed and lane alone, so that any number of workers shares the same steps, and a run that was killed
goes on at its place. Rows are shuffled within windows of chunks, which is as much as a worker holds at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

MAX_CHUNK_ROWS = 64
CHUNKS_PER_LANE = 8  # at least, where there are rows enough: lanes are then of about the same size


@dataclass(frozen=True)
class Chunk:
    """Rows of one shard that are read together."""

    shard: int  # among all shards of all sets
    rows: tuple[int, ...]  # places in the shard, ascending
    lengths: tuple[int, ...]  # tokens of each
    weight: float = 1.0  # times that it is read per epoch

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def every_nth_row(chunks: Sequence[Chunk], n: int, first: int) -> list[Chunk]:
    """Of all rows of the chunks, every n-th from the `first` on (counted from 0), in chunks as before."""
    parts, place = [], 0
    for chunk in chunks:
        kept = slice((first - place) % n, None, n)
        if rows := chunk.rows[kept]:
            parts.append(replace(chunk, rows=rows, lengths=chunk.lengths[kept]))
        place += len(chunk.rows)
    return parts


@dataclass(frozen=True)
class Pack:
    """Rows of one lane's part of a step."""

    rows: list[tuple[int, int]]  # (chunk, place in the chunk)
    window: int  # of its first row: no earlier window is needed any more
    last_window: int  # of its last row


@dataclass(frozen=True, kw_only=True)
class OrderConfig:
    """How steps are made up."""

    lanes: int  # packs of a step
    pack_tokens: int  # most tokens of a pack; a longer row is a pack of its own
    window_tokens: int  # about so many tokens are shuffled together in a lane
    seed: int


def chunk_rows(shard: int, rows: Sequence[int], lengths: Sequence[int], size: int, weight: float = 1.0) -> list[Chunk]:
    """The rows of a shard in chunks of `size`."""
    return [
        Chunk(shard, tuple(rows[i : i + size]), tuple(lengths[i : i + size]), weight) for i in range(0, len(rows), size)
    ]


def chunk_size(rows: int, lanes: int) -> int:
    """Rows of a chunk, given all rows of the training set."""
    return max(1, min(MAX_CHUNK_ROWS, rows // (lanes * CHUNKS_PER_LANE)))


def deal(chunks: Sequence[Chunk], lanes: int) -> list[list[int]]:
    """Chunks by lane, so that all lanes have about the same number of tokens. Raises ValueError if a lane gets none."""
    if len(chunks) < lanes:
        raise ValueError(f"{len(chunks)} chunks of rows cannot feed {lanes} parts of a step")
    dealt: list[list[int]] = [[] for _ in range(lanes)]
    tokens = [0.0] * lanes
    for c in sorted(range(len(chunks)), key=lambda c: (-chunks[c].tokens * chunks[c].weight, c)):
        lane = min(range(lanes), key=lambda i: (tokens[i], i))
        dealt[lane].append(c)
        tokens[lane] += chunks[c].tokens * chunks[c].weight
    return [sorted(lane) for lane in dealt]


class Lane:
    """The endless walk over one lane's chunks."""

    def __init__(self, chunks: Sequence[Chunk], own: Sequence[int], config: OrderConfig, number: int):
        self.chunks, self.own, self.config, self.number = chunks, list(own), config, number

    def windows(self) -> Iterator[list[int]]:
        """Chunks that are shuffled together, window by window, epoch after epoch."""
        for epoch in itertools.count():
            drawn = self._generator(0, epoch)
            times = [int(self.chunks[c].weight + drawn.random()) for c in self.own]  # 1.0 is once, for any draw below 1
            visits = [c for c, count in zip(self.own, times, strict=True) for _ in range(count)]
            window: list[int] = []
            tokens = 0
            for c in drawn.permutation(np.array(visits, dtype=np.int64)).tolist():
                window.append(c)
                tokens += self.chunks[c].tokens
                if tokens >= self.config.window_tokens:
                    yield window
                    window, tokens = [], 0
            if window:
                yield window

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """(window, chunk, place in the chunk) of every row in order."""
        for number, window in enumerate(self.windows()):
            rows = [(number, c, place) for c in window for place in range(len(self.chunks[c].rows))]
            for i in self._generator(1, number).permutation(len(rows)).tolist():
                yield rows[i]

    def packs(self) -> Iterator[Pack]:
        """Rows in order, as many as fit; none is cut or left out."""
        taken: list[tuple[int, int, int]] = []
        tokens = 0
        for row in self.rows():
            length = self.chunks[row[1]].lengths[row[2]]
            if taken and tokens + length > self.config.pack_tokens:
                yield Pack([(c, place) for _, c, place in taken], taken[0][0], taken[-1][0])
                taken, tokens = [], 0
            taken.append(row)
            tokens += length

    def packs_of(self, epochs: float) -> int:
        """How many packs hold about `epochs` passes over the lane's rows; at least 1."""
        wanted = epochs * sum(self.chunks[c].tokens * self.chunks[c].weight for c in self.own)
        seen = count = 0
        for pack in self.packs():
            seen += sum(self.chunks[c].lengths[place] for c, place in pack.rows)
            count += 1
            if seen >= wanted:
                break
        return count

    def _generator(self, kind: int, number: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, self.number, kind, number])


class StepOrder:
    """All lanes over the chunks of a training set."""

    def __init__(self, chunks: Sequence[Chunk], config: OrderConfig):
        self.chunks, self.config = chunks, config
        self.lanes = [Lane(chunks, own, config, number) for number, own in enumerate(deal(chunks, config.lanes))]

    def steps_of(self, epochs: float) -> int:
        """Steps of about `epochs` passes over all rows; at least 1."""
        return max(lane.packs_of(epochs) for lane in self.lanes)  # lanes differ by some rows: none is left out
