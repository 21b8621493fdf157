"""Seconds of the engine's parts, by what they depend on: T_base, T_draft and T_verify are read off here."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field

WINDOW = 512  # latest samples kept per key


def _window() -> deque[float]:
    return deque(maxlen=WINDOW)


@dataclass
class Timings:
    """Seconds of pure decode rounds (no prompt rows in the pass), by batch and number of drafts."""

    # forward + decide, by (batch, drafts of all sequences together)
    step: dict[tuple[int, int], deque[float]] = field(default_factory=lambda: defaultdict(_window))
    # by (batch, num_draft_tokens of the longest)
    draft: dict[tuple[int, int], deque[float]] = field(default_factory=lambda: defaultdict(_window))

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
