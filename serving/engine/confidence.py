"""How far a drafter's own confidence can be believed: its probabilities in, acceptance as observed in service out.

A drafter says of every draft how likely it is that it and all above it are kept. It is too sure of itself, or not sure
enough, and that changes with the traffic: so its log-odds are scaled and shifted (Platt 1999) by what came of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_LEAST = 1e-6  # probabilities are kept this far from 0 and 1 before they become log-odds
_PRIOR_SLOPE, _PRIOR_SHIFT = 0.2, 1.0  # variances: how far a new drafter may be from telling the truth
_MOST_STEP = 0.5  # of log-odds: one surprise where the curve is flat must not turn the whole estimate
_FORGET = 0.9995  # weight of what was known, per draft
_SURE = 20.0  # observations, at least, that the estimate may rest on: forgetting stops there


class Calibration:
    """P(kept) = sigmoid(slope * log-odds of the confidence + shift), fitted online by recursive Newton steps."""

    def __init__(self) -> None:
        self.slope, self.shift = 1.0, 0.0
        # covariance of (slope, shift)
        self._aa, self._ab, self._bb = _PRIOR_SLOPE, 0.0, _PRIOR_SHIFT

    def observe(self, confidence: Sequence[float], path: Sequence[int]) -> None:
        """The drafts of one round that were verified, by their confidence, and the places of those that were kept."""
        kept = set(path)
        for j, stated in enumerate(confidence):
            self._learn(_log_odds(stated), 1.0 if j in kept else 0.0)

    def _learn(self, x: float, kept: float) -> None:
        chance = 1 / (1 + math.exp(-(self.slope * x + self.shift)))
        curvature = max(chance * (1 - chance), 1e-4)
        if self._bb < _PRIOR_SHIFT / _SURE:
            self._aa, self._ab, self._bb = self._aa / _FORGET, self._ab / _FORGET, self._bb / _FORGET
        a, b = self._aa * x + self._ab, self._ab * x + self._bb  # covariance times (x, 1)
        gain = 1 / (1 + curvature * (a * x + b))
        step = gain * (kept - chance)
        step *= min(1.0, _MOST_STEP / max(abs(step * (a * x + b)), 1e-12))
        self.slope = max(self.slope + a * step, 0.0)  # more confidence is never worse
        self.shift += b * step
        self._aa -= curvature * gain * a * a
        self._ab -= curvature * gain * a * b
        self._bb -= curvature * gain * b * b

    def chances(self, confidence: Sequence[float] | np.ndarray) -> np.ndarray:
        """The chance that each draft is kept."""
        stated = np.clip(np.asarray(confidence, dtype=np.float64), _LEAST, 1 - _LEAST)
        return np.asarray(1 / (1 + np.exp(-(self.slope * np.log(stated / (1 - stated)) + self.shift))))


def _log_odds(probability: float) -> float:
    kept_off = min(max(probability, _LEAST), 1 - _LEAST)
    return math.log(kept_off / (1 - kept_off))
