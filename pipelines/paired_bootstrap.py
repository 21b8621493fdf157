"""Is one drafter's tau better than another's on the same prompts, or is it chance?

In: of every prompt, what each drafter gained in how many rounds. Out: the difference of the two taus with an interval
for it. tau over many prompts is a ratio of sums, so whole prompts are drawn anew, with both drafters' counts of a
prompt together, and both ratios made from each draw (Efron and Tibshirani, An Introduction to the Bootstrap, 1993).

The interval is the percentile one, expanded for small samples (Hesterberg, What Teachers Should Know About the
Bootstrap, 2015): without that, equal drafters would seem unequal too often on 10 or 20 prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from drafters.acceptance import Acceptance

LEAST_PROMPTS = 2  # below that nothing is known of the noise
_DRAWN_AT_ONCE = 1 << 18  # prompts in memory at a time


@dataclass(frozen=True)
class PromptRounds:
    """What one drafter did on one prompt."""

    gained: int  # tokens, before clipping at a stop or a limit: accepted drafts + rounds
    rounds: int

    @classmethod
    def of(cls, acceptance: Acceptance) -> PromptRounds:
        return cls(acceptance.accepted + acceptance.rounds, acceptance.rounds)


PLAIN_ROUNDS = PromptRounds(1, 1)  # plain decoding gains one token a round, on any prompt

Pair = tuple[PromptRounds, PromptRounds]  # champion's and challenger's on one prompt


@dataclass(frozen=True, kw_only=True)
class TauGain:
    """Both taus, their difference, and where it lies with the given confidence."""

    champion: float
    challenger: float
    low: float
    high: float
    confidence: float  # that the interval holds the difference, 0 to 1; half of what is missing lies on either side
    prompts: int

    @property
    def gain(self) -> float:
        return self.challenger - self.champion


def with_rounds(pairs: Sequence[Pair]) -> list[Pair]:
    """The prompts on which both drafters had a round: an answer of one token has none."""
    return [pair for pair in pairs if all(side.rounds for side in pair)]


def tau_gain(pairs: Sequence[Pair], *, samples: int = 10_000, confidence: float = 0.95, seed: int = 0) -> TauGain:
    """The difference in tau over the prompts `with_rounds`; the same for the same pairs and seed.

    Raises ValueError for fewer than LEAST_PROMPTS of them.
    """
    counts_N4 = np.array([[*_both(a), *_both(b)] for a, b in with_rounds(pairs)], dtype=np.float64)
    number = len(counts_N4)
    if number < LEAST_PROMPTS:
        raise ValueError(f"{number} prompts with rounds; at least {LEAST_PROMPTS} are needed to know the noise")
    champion, challenger = _taus(counts_N4.sum(axis=0))
    rng, gains = np.random.default_rng(seed), []
    at_once = max(1, _DRAWN_AT_ONCE // number)
    for first in range(0, samples, at_once):
        drawn = rng.integers(number, size=(min(at_once, samples - first), number))
        before, after = _taus(counts_N4[drawn].sum(axis=1))
        gains.append(after - before)
    tail = _tail(confidence, number)
    low, high = np.quantile(np.concatenate(gains), [tail, 1 - tail])
    return TauGain(
        champion=float(champion),
        challenger=float(challenger),
        low=float(low),
        high=float(high),
        confidence=confidence,
        prompts=number,
    )


def _both(side: PromptRounds) -> tuple[int, int]:
    return side.gained, side.rounds


def _taus(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return sums[..., 0] / sums[..., 1], sums[..., 2] / sums[..., 3]


def _tail(confidence: float, number: int) -> float:
    """The share of draws to leave out on either side, so that an interval from `number` prompts is wide enough.

    Draws scatter like a normal distribution with variance (n - 1) / n of what it should be; what is wanted is Student's
    t with n - 1 degrees of freedom, here by the first terms of its Cornish-Fisher expansion.
    """
    normal, freedom = NormalDist(), number - 1
    z = normal.inv_cdf((1 + confidence) / 2)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return normal.cdf(-t * math.sqrt(number / freedom))
