"""What a diagnosis says: checks with their evidence, faults in order of likelihood, one line on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Grade = Literal["ok", "fault", "note"]
Verdict = Literal["sound", "fault", "weak", "other text"]

# How sure a fault is that it keeps acceptance down. Of two faults, the one of the higher rank comes first.
DAMAGED = 40.0  # the files are not what was saved
MEASURED = 30.0  # acceptance comes back without it; what comes back of tau is added
SERVED = 25.0  # the same weights accept more outside the engine
RECORDED = 20.0  # other than the provenance says
SUSPECTED = 10.0  # it goes with low acceptance, and may have other reasons


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    grade: Grade
    evidence: str
    cause: str = ""  # of a fault, one word: what a script asks for
    says: str = ""  # the fault in words
    mend: str = ""
    rank: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A likely cause, with all that speaks for it."""

    cause: str
    says: str
    evidence: list[str]
    mend: str
    measured: str = ""  # by what change acceptance comes back, with both taus


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The drafter with one thing changed, on the same places of the same answers as without the change."""

    cause: str
    name: str
    tau: float
    tau_as_it_is: float
    gain_low: float  # the gain in tau is at least this, with the confidence below
    gain_high: float
    confidence: float
    confirmed: bool  # measured on all rounds, not on a few places


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything `draftloop diagnose` found."""

    headline: str
    verdict: Verdict
    findings: list[Finding]  # the likeliest first
    checks: list[Check]
    drafter: str
    target: str
    kind: str
    prompt_set: str
    prompts: int = 0
    tau: float | None = None  # expected of the drafter as it is, on the target's own answers
    served_tau: float | None = None  # in the engine, on the same prompts
    trained_tau: float | None = None  # that its training expected
    acceptance_by_position: list[float] = field(default_factory=list)
    tau_by_category: dict[str, float] = field(default_factory=dict)
    trials: list[TrialResult] = field(default_factory=list)
    path_mismatch_share: float | None = None  # of the refused drafts


def findings_of(checks: Sequence[Check]) -> list[Finding]:
    """The faults by cause, the likeliest first; several checks may speak for one."""
    by_cause: dict[str, list[Check]] = {}
    for check in sorted((c for c in checks if c.grade == "fault"), key=lambda check: -check.rank):
        by_cause.setdefault(check.cause, []).append(check)
    return [
        Finding(
            cause=cause,
            says=found[0].says,
            evidence=[check.evidence for check in found],
            mend=found[0].mend,
            measured=found[0].evidence if found[0].rank >= MEASURED and found[0].rank < DAMAGED else "",
        )
        for cause, found in by_cause.items()
    ]
