"""What the gate demands, as functions: measured figures in, a line with its verdict out. Nothing is decoded here.

A demand on which the measurements cannot tell is not met: the line says what is missing.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from pipelines.gate_config import GateConfig
from pipelines.gate_decoding import BatchTimes, PartedAnswer, PromptResult, Way
from pipelines.gate_prompts import UsablePrompts
from pipelines.gate_report import PLAIN, GateLine
from pipelines.paired_bootstrap import PLAIN_ROUNDS, Pair, TauGain, tau_gain, with_rounds
from pipelines.parity import ParityResult

HELD_OUT, REGRESSION, SPEED = "held-out tau", "regression tau", "S_measured"
LOSSLESS, PARITY, FALLBACKS, LOADS = "lossless", "served as expected", "no fallbacks", "loads"

# A median of n normal samples scatters by 1.253 sd / sqrt(n), and sd is IQR / 1.349: 95% lie within 1.96 of that.
MEDIAN_NOISE = 1.96 * 1.253 / 1.349


def failed_line(name: str, says: str, *, decided: bool = False) -> GateLine:
    """Of a demand for which nothing could be measured."""
    return GateLine(name=name, champion=None, challenger=None, threshold=None, passed=False, says=says, decided=decided)


def enough_prompts(held_out: UsablePrompts, regression: UsablePrompts, config: GateConfig) -> list[GateLine]:
    """A failed line for each set that is too small to decide on, which is known before anything is decoded."""
    return [
        failed_line(name, f"too few to decide: {usable}, {least} are needed; give more")
        for name, usable, least in (
            (HELD_OUT, held_out, config.min_prompts),
            (REGRESSION, regression, config.min_category_prompts),
        )
        if len(usable.prompts) < least
    ]


# -- tau --------------------------------------------------------------------------------------------------------------


def held_out_line(results: Sequence[PromptResult], config: GateConfig) -> GateLine:
    """tau is better by more than the margin, and its interval lies above zero: the gain is more than its noise."""
    pairs = with_rounds(_pairs(results))
    if len(pairs) < config.min_prompts:
        what = f"{len(pairs)} prompts with answers long enough to draft for"
        return failed_line(HELD_OUT, f"too few to decide: {what}, {config.min_prompts} are needed; give more prompts")
    found = _tau_gain(pairs, config)
    margin = config.margin * found.champion
    says = f"{_taus(found, results)}; margin {margin:.2f}"
    if found.gain <= margin:
        says += "; the gain does not exceed the margin"
    elif found.low <= 0:
        says += "; the gain does not exceed its noise, more prompts would tell"
    passed = found.gain > margin and found.low > 0
    return _tau_line(HELD_OUT, found, found.champion + margin, passed, says)


def regression_lines(results: Sequence[PromptResult], config: GateConfig) -> list[GateLine]:
    """tau has not fallen by more than the tolerance: on the whole set, and on every category by itself.

    A category of fewer than `min_category_prompts` prompts is not judged by itself, since its figure would be chance:
    such categories are judged together, and where even together they are too few, as part of the whole set only, whose
    line names them. What is judged is the measured fall. An interval that reaches beyond the tolerance is told in the
    line and fails nothing; a fall beyond the tolerance fails although its interval may hold zero.
    """
    groups: dict[str, list[PromptResult]] = {}
    for result in results:
        if with_rounds(_pairs([result])):
            groups.setdefault(result.prompt.category or "without category", []).append(result)
    least = config.min_category_prompts
    small = {name: group for name, group in sorted(groups.items()) if len(group) < least}
    together = [result for group in small.values() for result in group]
    names = ", ".join(f"{name} {len(group)}" for name, group in small.items())
    parts = {name: group for name, group in sorted(groups.items()) if name not in small}
    note = ""
    if len(together) >= least:
        parts[f"small categories ({names})"] = together
    elif together:
        note = f"; too few prompts to judge by themselves: {names}"
    whole = [result for group in groups.values() for result in group]
    if len(whole) < least:
        return [failed_line(REGRESSION, f"too few to decide: {len(whole)} prompts with rounds, {least} are needed")]
    lines = [_regression_line(REGRESSION, whole, note, config)]
    if len(groups) > 1:
        lines += [_regression_line(f"{REGRESSION}, {name}", part, "", config) for name, part in parts.items()]
    return lines


def _regression_line(name: str, results: Sequence[PromptResult], note: str, config: GateConfig) -> GateLine:
    found = _tau_gain(with_rounds(_pairs(results)), config)
    allowed = config.regression_tolerance * found.champion
    passed = found.gain >= -allowed
    says = f"{_taus(found, results)}; tolerance {allowed:.2f}"
    if not passed:
        says += "; it fell by more"
        says += ", though within its noise: more prompts would tell" if found.high >= 0 else " than that"
    elif found.low < -allowed:
        says += "; its noise reaches beyond the tolerance"
    return _tau_line(name, found, found.champion - allowed, passed, says + note)


def _pairs(results: Sequence[PromptResult]) -> list[Pair]:
    return [(r.rounds.get("champion", PLAIN_ROUNDS), r.rounds["challenger"]) for r in results]


def _tau_gain(pairs: Sequence[Pair], config: GateConfig) -> TauGain:
    return tau_gain(pairs, samples=config.bootstrap_samples, confidence=config.confidence, seed=config.seed)


def _taus(found: TauGain, results: Sequence[PromptResult]) -> str:
    against = f"{found.champion:.2f}" if "champion" in results[0].rounds else f"{found.champion:.2f} of {PLAIN}"
    return (
        f"{found.challenger:.2f} against {against} on {found.prompts} prompts, {found.gain:+.2f} "
        f"({found.confidence:.0%} interval {found.low:+.2f} to {found.high:+.2f})"
    )


def _tau_line(name: str, found: TauGain, threshold: float, passed: bool, says: str) -> GateLine:
    return GateLine(
        name=name,
        champion=found.champion,
        challenger=found.challenger,
        threshold=threshold,
        passed=passed,
        says=says,
    )


# -- speed ------------------------------------------------------------------------------------------------------------


def speed_line(batches: Sequence[BatchTimes], config: GateConfig) -> GateLine:
    """S_measured is not worse than the champion's by more than the tolerance, batch by batch; without a champion it is
    above 1. Only the champion's in the same run is one to compare with: S is another on another machine or day.

    The figures are medians over batches, which an outlier of a shared machine does not move. The tolerance is the
    configured one or, where that is more, the noise of the median in this run, up to `most_speed_tolerance`.
    """
    if len(batches) < config.min_batches:
        what = f"{len(batches)} batches, {config.min_batches} are needed"
        return failed_line(SPEED, f"too few to decide: {what}; give more prompts or a smaller batch")
    has_champion = "champion" in batches[0].seconds
    speeds = [batch.speed("challenger") for batch in batches]
    before = [batch.speed("champion") for batch in batches] if has_champion else [1.0] * len(batches)
    ratios = [batch.speed("challenger", over="champion" if has_champion else "plain") for batch in batches]
    ratio, noise = statistics.median(ratios), _noise_of_median(ratios)
    tolerance = min(max(config.speed_tolerance, noise), config.most_speed_tolerance) if has_champion else 0.0
    telling = noise <= config.most_speed_tolerance
    passed = telling and (ratio >= 1 - tolerance if has_champion else ratio > 1)
    says = f"{_spread(speeds)} against {_spread(before) if has_champion else f'1.00 of {PLAIN}'}"
    says += f" on {len(batches)} batches"
    if has_champion:
        says += f"; batch by batch {ratio:.2f} of it, tolerance {tolerance:.0%}"
    if not telling:
        says += f"; the run's noise alone is {noise:.0%}, too much to tell: measure again on a quieter machine"
    return GateLine(
        name=SPEED,
        champion=statistics.median(before),
        challenger=statistics.median(speeds),
        threshold=statistics.median(before) * (1 - tolerance),
        passed=passed,
        says=says,
        decided=telling,
    )


def _noise_of_median(ratios: Sequence[float]) -> float:
    """How far the median may be off by chance, as a share of it."""
    low, median, high = _quartiles(ratios)
    return MEDIAN_NOISE * (high - low) / math.sqrt(len(ratios)) / median


def _spread(values: Sequence[float]) -> str:
    low, median, high = _quartiles(values)
    return f"{median:.2f} (quartiles {low:.2f} to {high:.2f})"


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3


# -- what must simply hold --------------------------------------------------------------------------------------------


def lossless_line(results: Sequence[PromptResult], parted: Sequence[PartedAnswer], exact: bool) -> GateLine:
    """Greedy answers are those of plain decoding, token for token; where rounding may differ (`exact` False), all but
    near-ties of the target."""
    ways: tuple[Way, ...] = ("champion", "challenger")
    equal, ties, wrong, parts = dict[Way, int](), Counter[Way](), Counter[Way](), []
    for way in ways:
        if way not in results[0].answers:
            continue
        found = [answer for answer in parted if answer.way == way]
        ties[way] = sum(answer.near_tie for answer in found)
        equal[way], wrong[way] = len(results) - len(found), len(found) - ties[way]
        text = f"{way} {equal[way]} of {len(results)} answers equal to plain decoding"
        parts.append(text if exact else f"{text}, {ties[way]} part at near-ties, {wrong[way]} otherwise")
    passed = not wrong["challenger"]  # one that is wrong already must not keep out what is right
    if any(wrong.values()):
        parts.append("drafting changed what the target says, a fault of the engine or the backend")
    return GateLine(
        name=LOSSLESS,
        champion=equal.get("champion"),
        challenger=equal["challenger"],
        threshold=len(results) - ties["challenger"],
        passed=passed,
        says="; ".join(parts),
    )


def parity_line(found: ParityResult) -> GateLine:
    """The challenger's tau in service is within 5% of what its module predicts on the same texts."""
    threshold = None if found.expected is None else found.expected * (1 - found.tolerance)
    if found.expected is None or found.served is None:
        says = f"not measured on {found.prompts} prompts: "
        if found.passed is False:
            says += "texts part from those of plain decoding before a round is over"
        else:
            says += "no answer is long enough; give a greater max_new_tokens"
    else:
        says = f"{found.served:.2f} served, {found.expected:.2f} expected in chains on {found.prompts} prompts"
        if found.passed is None:
            says += f"; too little text to tell (one round's drafts are {found.tolerance:.0%} of it), give more prompts"
        else:
            says += f": {'within' if found.passed else 'more than'} {found.tolerance:.0%}"
            says += "" if found.passed else " apart, so training and serving disagree"
    return GateLine(
        name=PARITY,
        champion=None,
        challenger=found.served,
        threshold=threshold,
        passed=bool(found.passed),
        says=says,
        decided=found.passed is not None,
    )


def fallback_line(fallbacks: Mapping[Way, Mapping[str, int]]) -> GateLine:
    """The challenger failed in no round while it was measured: its figures would be those of plain decoding.

    A champion that fails is told, and must not keep out one that does not.
    """
    counts = {way: sum(reasons.values()) for way, reasons in fallbacks.items() if way != "plain"}
    parts = [
        f"{way} fell back to plain decoding, rounds by reason: "
        + ", ".join(f"{reason} {times}" for reason, times in sorted(fallbacks[way].items()))
        for way, count in counts.items()
        if count
    ]
    return GateLine(
        name=FALLBACKS,
        champion=counts.get("champion"),
        challenger=counts["challenger"],
        threshold=0,
        passed=not counts["challenger"],
        says="; ".join(parts) or "every round had its drafts",
    )
