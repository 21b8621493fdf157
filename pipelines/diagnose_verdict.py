"""From what was measured to what is said of it: trials as checks, acceptance against the training's, the headline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.diagnose_measure import clearly_more
from pipelines.diagnose_report import MEASURED, SERVED, SUSPECTED, Check, Finding, TrialResult, Verdict
from pipelines.diagnose_tokens import trained_kinds
from pipelines.diagnose_trials import Trial
from pipelines.parity import ParityResult

LITTLE_TAU = 1.5  # a drafter that expected no more of itself is weak
AS_IN_TRAINING = 0.6  # of the drafts accepted in training: with fewer, something is otherwise here
STILL_LEARNING = 0.05  # of the loss that falls, or of tau - 1 that is gained, over the last third of a training
MOST_RANK = 9.0  # what a gain adds to a rank at most

NAMES = {
    "layers": "tapped layers",
    "alignment": "labels and pairs",
    "mask": "other mask tokens",
    "attention": "attention in the block",
    "positions": "positions",
    "vocabulary": "draft vocabulary's ids",
    "template": "other prompts",
}


def trial_checks(results: Sequence[TrialResult], trials: Sequence[Trial]) -> list[Check]:
    """One check for every kind of change that was tried."""
    told = {(trial.cause, trial.name): trial for trial in trials}
    by_cause: dict[str, list[TrialResult]] = {}
    for result in sorted(results, key=lambda result: result.tau_as_it_is - result.tau):
        by_cause.setdefault(result.cause, []).append(result)
    return [_trial_check(found, told) for found in by_cause.values()]


def _trial_check(found: Sequence[TrialResult], told: Mapping[tuple[str, str], Trial]) -> Check:
    """`found` begins with the change that gains most."""
    best = found[0]
    name, words = f"trial: {NAMES.get(best.cause, best.cause)}", in_words(best)
    if not clearly_more(best):
        return Check(name=name, grade="ok", evidence=f"none of {len(found)} accepts clearly more; best: {words}")
    trial, gain = told[best.cause, best.name], best.tau - best.tau_as_it_is
    return Check(
        name=name, grade="fault", evidence=words, cause=best.cause, says=trial.says, mend=trial.mend,
        rank=MEASURED + min(gain, MOST_RANK),
    )  # fmt: skip


def in_words(result: TrialResult) -> str:
    where = "" if result.confirmed else " on a few places"
    return f"{result.name}: tau {result.tau:.2f}, against {result.tau_as_it_is:.2f} as it is{where}"


def served_check(result: ParityResult) -> Check:
    """The engine's acceptance beside what the same weights accept outside of it."""
    served, expected = ("-" if tau is None else f"{tau:.2f}" for tau in (result.served, result.expected))
    evidence = f"tau {served} in the engine, {expected} expected of the same weights on the same answers"
    if result.passed is None:
        return Check(name="served", grade="note", evidence=f"{evidence}: too little text to compare")
    lower = result.served is not None and result.expected is not None and result.served < result.expected
    if result.passed or not lower:
        return Check(name="served", grade="ok" if result.passed else "note", evidence=evidence)
    return Check(
        name="served",
        grade="fault",
        evidence=evidence,
        cause="serving",
        says="the drafter is sound and is served wrongly",
        mend="report it with this output: training and engine disagree about features, positions or state",
        rank=SERVED,
    )


def standing_check(tau: float | None, provenance: Mapping[str, Any], categories: Sequence[str], alone: bool) -> Check:
    """Acceptance here against that of the training. `alone`: no other fault was found that could explain it."""
    name, trained = "acceptance", _number(provenance.get("expected_tau"))
    if tau is None:
        return Check(name=name, grade="note", evidence="no answer is long enough for a round")
    beside = "its training is not known" if trained is None else f"{trained:.2f} expected in its training"
    evidence = f"tau {tau:.2f} here, {beside}"
    if trained is not None and tau - 1 < AS_IN_TRAINING * (trained - 1):
        kinds = _other_kinds(provenance, categories)
        return Check(
            name=name, grade="fault" if alone else "note", evidence=evidence + kinds, cause="text",
            says="it meets other text than it was trained on",
            mend="train it on the target's answers to prompts like these, or let redistill do that from its traffic",
            rank=SUSPECTED - 5,
        )  # fmt: skip
    if tau >= LITTLE_TAU:
        return Check(name=name, grade="ok", evidence=evidence)
    return Check(
        name=name, grade="fault" if alone else "note", evidence=evidence + _still_learning(provenance), cause="weak",
        says="it is weak, not broken", mend="train it longer, on more text, or make it larger", rank=SUSPECTED - 5,
    )  # fmt: skip


def _other_kinds(provenance: Mapping[str, Any], categories: Sequence[str]) -> str:
    """The kinds of text here and in training, where they differ."""
    trained, here = trained_kinds(provenance), sorted(filter(None, set(categories)))
    if not trained or not here or set(here) <= set(trained):
        return ""
    return f"; these prompts are of {', '.join(here)}, its training's of {', '.join(trained)}"


def _still_learning(provenance: Mapping[str, Any]) -> str:
    """Whether the curve was still on its way when the training ended."""
    points = [point for point in provenance.get("training_curve") or [] if point.get("loss") is not None]
    if not points:
        return ""
    last = points[-1]
    said = f"; {last['tokens']:,} response tokens seen" if last.get("tokens") else ""
    before = next((point for point in reversed(points) if point["step"] <= last["step"] * 2 / 3), None)
    if before is None:
        return said
    if before["loss"] > 0 and 1 - last["loss"] / before["loss"] >= STILL_LEARNING:
        said += f", and its loss still fell ({before['loss']:.2f} to {last['loss']:.2f} over the last third)"
    return said


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def headline(findings: Sequence[Finding], standing: Check | None) -> tuple[str, Verdict]:
    """The one line, and what it comes to."""
    if not findings:
        return f"nothing wrong found: {standing.evidence if standing else 'but nothing was decoded'}", "sound"
    first = findings[0]
    if first.cause == "weak":
        return f"no fault found: {first.says} ({first.evidence[0]})", "weak"
    if first.cause == "text":
        return f"no fault found in the drafter: {first.says} ({first.evidence[0]})", "other text"
    return f"likely: {first.says} ({first.measured or first.evidence[0]})", "fault"
