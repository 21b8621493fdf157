"""What live tau may fall from: the champion's own live tau in its first time of service.

Not the gate's tau: the gate's drafts have one size. Service asks for chains or trees, long ones, short ones or
none, by what they cost at its load, so that its tau lies below the gate's though the traffic be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

Found = Mapping[str, tuple[float, int]]  # version in service -> (tau, rounds)
LiveTau = Callable[[datetime | None, datetime | None], Found]  # of requests from the one time on and before the other


@dataclass(frozen=True, kw_only=True)
class Champion:
    """The registry's, as the triggers see it."""

    version: str
    since: datetime  # UTC: it became champion
    evaluated: float | None  # tau of its evaluation, where it has one


@dataclass(frozen=True, kw_only=True)
class TauBase:
    """Live tau of one version from the first requests that it served on. Times are UTC."""

    version: str
    since: datetime  # the first of these requests came after this
    until: datetime  # later ones are not looked at yet, or do not belong to a base that is settled
    gained: float = 0.0  # accepted drafts + rounds
    rounds: int = 0
    settled: bool = False  # of enough time and rounds: it stays as it is

    @property
    def tau(self) -> float | None:
        """None without rounds."""
        return self.gained / self.rounds if self.rounds else None

    def compared(self, evaluated: float | None) -> str:
        """Its tau in words, with the evaluation's beside it."""
        tau = "-" if self.tau is None else f"{self.tau:.2f}"
        beside = "" if evaluated is None else f"; its evaluation says {evaluated:.2f}"
        return f"{tau} over its first {self.rounds:,} rounds in service{beside}"


def extend(
    base: TauBase | None, champion: Champion, live_tau: LiveTau, now: datetime, *, least_s: float, min_rounds: int
) -> TauBase:
    """The champion's base with the requests up to `now`; it is settled after `least_s` of service and `min_rounds`.

    A long time that nobody looked is read in parts, each twice as long as the one before: a champion of long ago gets
    nearly the base that it would have got then.
    """
    base = base or TauBase(version=champion.version, since=champion.since, until=champion.since)
    part = timedelta(seconds=least_s)
    while not base.settled and base.until < now:
        until = min(now, base.until + part)
        gained, rounds = of_version(base.version, live_tau(base.until, until))
        served = base.rounds + rounds
        since = base.since if served else until
        base = replace(
            base,
            since=since,
            until=until,
            gained=base.gained + gained,
            rounds=served,
            settled=served >= min_rounds and (until - since).total_seconds() >= least_s,
        )
        part *= 2
    return base


def latest(
    version: str, live_tau: LiveTau, begin: datetime, now: datetime, *, least_s: float, min_rounds: int
) -> tuple[float, int]:
    """(tokens gained, rounds) of a version in its latest time with so many rounds, `least_s` at least and from `begin`
    on: a time of the base's kind, in which good hours do not hide a bad one."""
    length = timedelta(seconds=least_s)
    while True:
        since = max(begin, now - length)
        gained, rounds = of_version(version, live_tau(since, None))
        if rounds >= min_rounds or since == begin:
            return gained, rounds
        length *= 2


def of_version(version: str, found: Found) -> tuple[float, int]:
    """(tokens gained, rounds) of a version; in service its name has the checkpoint's hash behind it."""
    served = [counts for name, counts in found.items() if name.split("@")[0] == version]
    return sum(tau * rounds for tau, rounds in served), sum(rounds for _, rounds in served)
