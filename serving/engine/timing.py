"""Seconds of the engine's parts, by what they depend on: T_base, T_draft and T_verify are read off here.

Windows of the latest samples for medians, and histograms of all of them for `/metrics`. Both have a fixed size, however
long an engine serves.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW = 512  # latest samples kept per key
MOST_KEYS = 1024  # batches and numbers of drafts with a window each: many slots and large trees would make 100,000
ROUND_BUCKETS_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048)


class Histogram:
    """How many values lay at or below each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)  # ascending
        self.counts = [0] * (len(self.bounds) + 1)  # by the first bound that is not below the value; last: above all
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Windows(dict[tuple[int, int], deque[float]]):
    """The latest samples by key. A key too many takes the place of the one that was there first."""

    def __missing__(self, key: tuple[int, int]) -> deque[float]:
        if len(self) >= MOST_KEYS:
            del self[next(iter(self))]
        window = self[key] = deque(maxlen=WINDOW)
        return window


@dataclass
class Timings:
    """Seconds of pure decode rounds (no prompt rows in the pass), by batch and number of drafts."""

    step: Windows = field(default_factory=Windows)  # forward + decide, by (batch, drafts of all sequences together)
    draft: Windows = field(default_factory=Windows)  # by (batch, num_draft_tokens of the longest)
    base_s: Histogram = field(default_factory=lambda: Histogram(ROUND_BUCKETS_S))  # T_base
    verify_s: Histogram = field(default_factory=lambda: Histogram(ROUND_BUCKETS_S))  # T_verify
    draft_s: Histogram = field(default_factory=lambda: Histogram(ROUND_BUCKETS_S))  # T_draft

    def note_step(self, batch: int, drafts: int, seconds: float) -> None:
        """One pass of `batch` sequences that brought so many drafts together."""
        self.step[batch, drafts].append(seconds)
        (self.verify_s if drafts else self.base_s).observe(seconds)

    def note_draft(self, batch: int, num_draft_tokens: int, seconds: float) -> None:
        """One draft block."""
        self.draft[batch, num_draft_tokens].append(seconds)
        self.draft_s.observe(seconds)

    def t_base(self, batch: int) -> float | None:
        """Median seconds of one plain target step."""
        return _median(self.step.get((batch, 0)))

    def t_verify(self, batch: int, drafts: int) -> float | None:
        """Median seconds of one verify pass in which each sequence brought so many drafts, of a tree its nodes."""
        return _median(self.step.get((batch, batch * drafts)))

    def t_draft(self, batch: int, num_draft_tokens: int) -> float | None:
        """Median seconds of one draft block."""
        return _median(self.draft.get((batch, num_draft_tokens)))


def _median(samples: deque[float] | None) -> float | None:
    return statistics.median(samples) if samples else None
