"""Which drafter to choose, from the figures alone: what was measured of each in; one line with its reason out.

Speeds are compared prompt by prompt: of every group of prompts that was timed, the logarithm of tokens/s over plain
decoding's in the same run. Prompt sets count alike, and how they differ is no noise: a difference counts if Student's
interval of the mean over sets, made from the spread within each, leaves out zero.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from pipelines.compare_config import Shape
from pipelines.compare_figures import Advice, BatchTimes, DrafterTimes, PairFigures

CONFIDENCE = 0.95
LEAST_FREEDOM = 2  # groups beyond the first of each set: with fewer nothing is known of the noise
FREE = 0.03  # of T_base: a draft that costs less costs nothing
FLAT = 0.15  # growth of a time from one draft to the longest chain that is called flat
RISING = 0.05  # growth of tau in the second half of the chain's length that is called rising


@dataclass(frozen=True)
class Standing:
    """One drafter at one batch."""

    drafter: str
    logs: list[list[float]]  # by set and group, log of tokens/s over plain decoding's

    @property
    def speed(self) -> float:
        return math.exp(_mean(self.logs))

    @property
    def gain(self) -> Margin:
        """Over plain decoding."""
        return margin_of(self.logs)

    def over(self, other: Standing) -> Margin:
        pairs = zip(self.logs, other.logs, strict=True)
        return margin_of([[a - b for a, b in zip(*both, strict=True)] for both in pairs])


@dataclass(frozen=True)
class Margin:
    """By how much something is faster, minus 1, and the ends of the interval."""

    mean: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        return self.low > 0

    def words(self) -> str:
        if math.isinf(self.high):
            return f"{self.mean:+.0%}, too few timed prompts to know the noise: give a larger --speed-limit"
        return f"{self.mean:+.0%}, {self.low:+.0%} to {self.high:+.0%}"


def advise(
    pairs: Sequence[PairFigures], times: Sequence[DrafterTimes], batches: Sequence[int], served: Collection[str]
) -> Advice:
    """What to choose. Of every drafter there must be all sets; `batches` were timed, the smallest one decides. `served`
    are those that `draftloop serve` takes."""
    batch = min(batches)
    ranked = standings(pairs, batch)
    if not ranked:
        return Advice(
            drafter=None, serve=None, shape="", batch=batch, speed=None, runner_up=None, margin=[], told_apart=False,
            line="serve without a drafter: none could be measured", others=[],
        )  # fmt: skip
    sure = [standing for standing in ranked if standing.gain.sure]
    if not sure:
        best, gain = ranked[0], ranked[0].gain
        return Advice(
            drafter=None, serve=None, shape="", batch=batch, speed=best.speed, runner_up=best.drafter,
            margin=_ends(gain), told_apart=gain.high < 0,
            line=_without_line(best, gain, batch), others=_other_batches(pairs, batches, None),
        )  # fmt: skip
    best = sure[0]
    second = next((standing for standing in ranked if standing is not best), None)
    serve = next((standing for standing in sure if standing.drafter in served), None)
    mine = [pair for pair in pairs if pair.drafter == best.drafter]
    shape = _usual_shape(mine, batch)
    apart = None if second is None else best.over(second)
    reason = _reason(best.drafter, shape, batch, pairs, times)
    line = f"choose {best.drafter} with {_drafts(mine, batch)}: S {best.speed:.2f} at batch {batch}, since {reason}"
    return Advice(
        drafter=best.drafter,
        serve=serve.drafter if serve else None,
        shape=shape.name,
        batch=batch,
        speed=best.speed,
        runner_up=second.drafter if second else None,
        margin=[] if apart is None else _ends(apart),
        told_apart=apart is not None and apart.sure,
        line=line + _runner_up(second, apart),
        others=[
            *_not_served(best, serve),
            *_other_batches(pairs, batches, best.drafter),
            *_other_sets(pairs, batch, best.drafter),
        ],
    )


def standings(pairs: Sequence[PairFigures], batch: int) -> list[Standing]:
    """Drafters from the fastest to the slowest."""
    logs: dict[str, list[list[float]]] = {}
    for pair in pairs:
        logs.setdefault(pair.drafter, []).append([math.log(ratio) for ratio in pair.speed(batch).ratios])
    return sorted((Standing(name, values) for name, values in logs.items()), key=lambda s: -s.speed)


def margin_of(logs: Sequence[Sequence[float]]) -> Margin:
    """Of the mean over sets of means of logarithms, with Student's interval."""
    mean, freedom = _mean(logs), sum(len(one) - 1 for one in logs)
    if freedom < LEAST_FREEDOM or min(map(len, logs)) < 2:
        return Margin(math.expm1(mean), -1.0, math.inf)
    variance = sum(statistics.variance(one) / len(one) for one in logs) / len(logs) ** 2
    half = _student(freedom) * math.sqrt(variance)
    return Margin(math.expm1(mean), math.expm1(mean - half), math.expm1(mean + half))


def _mean(logs: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(statistics.fmean(one) for one in logs)


def _student(freedom: int) -> float:
    """Quantile of Student's t for CONFIDENCE, by the first terms of its Cornish-Fisher expansion."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**i for i, term in enumerate(terms, start=1))


def _ends(margin: Margin) -> list[float]:
    """Without infinity, which JSON does not have."""
    return [margin.mean] if math.isinf(margin.high) else [margin.mean, margin.low, margin.high]


def _usual_shape(pairs: Sequence[PairFigures], batch: int) -> Shape:
    """The one that was timed on most sets."""
    return Counter(pair.speed(batch).shape for pair in pairs).most_common(1)[0][0]


def _drafts(pairs: Sequence[PairFigures], batch: int) -> str:
    """What it was timed with: one shape, or one by prompt set."""
    names = {pair.prompt_set: pair.speed(batch).shape.name for pair in pairs}
    if len(set(names.values())) == 1:
        return f"a {next(iter(names.values()))}"
    return " and ".join(f"a {name} on {prompt_set}" for prompt_set, name in names.items())


def _without_line(best: Standing, gain: Margin, batch: int) -> str:
    if best.speed <= 1:
        return (
            f"serve without a drafter: none makes decoding faster here (the best is {best.drafter}, "
            f"S {best.speed:.2f} at batch {batch}; {gain.words()})"
        )
    return (
        f"serve without a drafter until more is measured: {best.drafter} (S {best.speed:.2f} at batch {batch}) cannot "
        f"be told apart from plain decoding ({gain.words()})"
    )


def _runner_up(second: Standing | None, apart: Margin | None) -> str:
    if second is None or apart is None:
        return "; nothing else was compared"
    if apart.sure:
        return f"; faster than {second.drafter} (S {second.speed:.2f}; {apart.words()})"
    return f"; it cannot be told apart from {second.drafter} (S {second.speed:.2f}; {apart.words()})"


def _not_served(best: Standing, serve: Standing | None) -> list[str]:
    """What stands in for a winner that `draftloop serve` does not take."""
    if serve is best:
        return []
    instead = "no other drafter" if serve is None else f"{serve.drafter} (S {serve.speed:.2f})"
    return [
        f"`draftloop serve` does not take {best.drafter}, which is for generation in one's own code; it takes {instead}"
    ]


def _reason(name: str, shape: Shape, batch: int, pairs: Sequence[PairFigures], times: Sequence[DrafterTimes]) -> str:
    """Tokens and cost of a round, and what in their growth with the length makes this length the best."""
    mine = [pair for pair in pairs if pair.drafter == name]
    lengths = [pair.length(shape) for pair in mine]
    spent = next(t for t in times if t.drafter == name).at(batch)
    of, tau = spent.of(shape), _shown(mean_tau(mine, shape))
    verify = [spent.verify_s(shape, one.offered) for one in lengths if one.rounds]
    known = [seconds for seconds in verify if seconds is not None]
    if not of or of.t_draft_s is None or not known or not spent.t_base_s:
        return f"a round brings {tau} tokens"
    cost = (of.t_draft_s + statistics.fmean(known)) / spent.t_base_s
    said = f"a round brings {tau} tokens in the time of {cost:.2f} plain steps"
    if of.t_draft_s < FREE * spent.t_base_s:
        return f"{said}: drafting costs next to nothing ({of.t_draft_s * 1e3:.1f} ms)"
    return said + _growth(mine, spent, shape)


def _growth(mine: Sequence[PairFigures], spent: BatchTimes, shape: Shape) -> str:
    """How the times and tau grow with a chain's length."""
    chain = mine[0].longest_chain().shape
    first, last = spent.of(Shape(1)), spent.of(chain)
    if not first or not last or chain.depth < 2:
        return ""
    rows, drafting = _rise(first.t_verify_s, last.t_verify_s), _rise(first.t_draft_s, last.t_draft_s)
    if rows is None or drafting is None:
        return ""
    half = Shape(-(-chain.depth // 2))
    taus = [mean_tau(mine, s) for s in (half, chain)]
    times = f"from 1 to {chain.depth} drafts T_verify grows by {rows:.0%} and T_draft by {drafting:.0%}"
    middle, longest = map(_shown, taus)
    rising = taus[0] is not None and taus[1] is not None and taus[1] >= (1 + RISING) * taus[0]
    if rows <= FLAT and drafting <= FLAT and rising and shape.drafts > half.depth:
        return (
            f"; there is compute to spare ({times}) and tau still rises ({middle} at {half.depth} drafts, "
            f"{longest} at {chain.depth}): long blocks pay"
        )
    if shape.drafts <= half.depth and (rows > FLAT or drafting > FLAT):
        return f"; length costs ({times}; tau {middle} at {half.depth}, {longest} at {chain.depth}): short pays"
    return f"; {times}, tau from {_shown(mean_tau(mine, Shape(1)))} to {longest}"


def mean_tau(pairs: Sequence[PairFigures], shape: Shape) -> float | None:
    """Over the sets that have rounds; None: none has."""
    known = [tau for pair in pairs if (tau := pair.length(shape).tau) is not None]
    return statistics.fmean(known) if known else None


def _shown(tau: float | None) -> str:
    return "-" if tau is None else f"{tau:.2f}"


def _rise(first: float | None, last: float | None) -> float | None:
    return None if not first or last is None else last / first - 1


def _other_batches(pairs: Sequence[PairFigures], batches: Sequence[int], chosen: str | None) -> list[str]:
    """A line for every larger batch where something else is best."""
    lines = []
    for batch in sorted(batches)[1:]:
        best = standings(pairs, batch)[0]
        if best.speed <= 1 and chosen is not None:
            lines.append(f"at batch {batch} decode plainly: the best drafter, {best.drafter}, has S {best.speed:.2f}")
        elif best.speed > 1 and best.drafter != chosen:
            lines.append(f"at batch {batch} {best.drafter} is the fastest (S {best.speed:.2f})")
    return lines


def _other_sets(pairs: Sequence[PairFigures], batch: int, chosen: str) -> list[str]:
    """A line for every prompt set on which something else is surely better."""
    lines = []
    names = list(dict.fromkeys(pair.prompt_set for pair in pairs))
    for name in names if len(names) > 1 else []:
        ranked = standings([pair for pair in pairs if pair.prompt_set == name], batch)
        best, own = ranked[0], next(s for s in ranked if s.drafter == chosen)
        if best.speed <= 1:
            lines.append(f"on {name} decode plainly: the best drafter, {best.drafter}, has S {best.speed:.2f}")
        elif best is not own and best.over(own).sure:
            lines.append(f"on {name} {best.drafter} is faster (S {best.speed:.2f} against {own.speed:.2f})")
    return lines
