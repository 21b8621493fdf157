"""Whether a round takes the whole batch, or one half while the drafter, elsewhere, drafts for the other.

Halves keep target and drafter busy at once, but two passes over half a batch may cost more than one over all of it.
So it is measured: what a sequence's round costs, in seconds, either way.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from typing import Literal

Overlap = Literal["auto", "on", "off"]

_WINDOW = 64  # latest rounds of either kind
_TRIAL = 16  # rounds of a kind before it is judged, and in each later trial of the one that lost
_TRIAL_EVERY = 1024  # rounds between such trials


class OverlapChoice:
    """Keeps the cost of both ways by batch size and chooses the cheaper one."""

    def __init__(self, overlap: Overlap):
        self._overlap = overlap
        self._costs: dict[tuple[int, bool], deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))
        self._rounds: dict[int, int] = defaultdict(int)

    def halves(self, batch: int) -> bool:
        """Whether the next rounds of `batch` sequences go by halves."""
        if batch < 2 or self._overlap == "off":
            return False
        if self._overlap == "on":
            return True
        whole, half = self._costs[batch, False], self._costs[batch, True]
        if len(whole) < _TRIAL or len(half) < _TRIAL:
            return len(whole) >= _TRIAL
        best = statistics.median(half) < statistics.median(whole)
        on_trial = self._rounds[batch] % _TRIAL_EVERY < _TRIAL
        return best != on_trial

    def observe(self, batch: int, halves: bool, sequences: int, seconds: float) -> None:
        """A step of `sequences` of the batch's sequences took so long, waiting for drafts included."""
        self._rounds[batch] += 1
        if sequences:
            self._costs[batch, halves].append(seconds / sequences)
