"""When to redistill: a cron expression, enough new traffic, or a fall of live tau; which of them is due, and why.

No clock and no files: the time and the sources of figures come in, a decision goes out. `cluster/schedule.py` asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from cluster.tau_base import Champion, LiveTau, TauBase, extend, latest

COUNTED = 10_000  # missed moments that are counted; a week of minutes
NOT_RUNNING = "no schedule was running"
LEAST_REST_S, LONGEST_REST_S, MOST_DOUBLINGS = 60.0, 86400.0, 20  # of live tau whose runs change no champion


class TriggerError(ValueError):
    """Triggers that cannot be; one line with cause and mend."""


@dataclass(frozen=True, kw_only=True)
class TriggerConfig:
    """What starts a run. At least one of `cron`, `min_rows` and `tau_drop`."""

    cron: str | None = None  # five fields as in crontab(5), through changes of the clocks as Debian's cron does it
    time_zone: str = "UTC"  # of the cron expression, an IANA name
    min_rows: int | None = None  # new rows in the traffic log
    tau_drop: float | None = None  # share of its base (`tau_base.py`) by which the champion's live tau must lie below
    min_rounds: int = 2000  # that live tau and its base must rest on
    base_s: float = 1800.0  # of service that both cover, or more where that has fewer rounds
    settle_s: float = 300.0  # a window ends so long before its run starts: rows come into the log when answers are over
    start_within_s: float = 600.0  # a moment of the cron expression that is older was missed
    rest_s: float = 1800.0  # after a run, before rows or tau start another; tau: doubled by each in vain, up to a day

    def __post_init__(self) -> None:
        for name, bad, mend in (
            ("min_rows", self.min_rows is not None and self.min_rows < 1, "1 or more"),
            ("tau_drop", self.tau_drop is not None and not 0 < self.tau_drop < 1, "a share such as 0.1 for a tenth"),
            ("min_rounds", self.min_rounds < 1, "1 or more"),
            ("base_s", self.base_s <= 0, "more than 0"),
            ("settle_s", self.settle_s < 0, "0 or more"),
            ("start_within_s", self.start_within_s <= 0, "more than 0"),
            ("rest_s", self.rest_s < 0, "0 or more"),
        ):
            if bad:
                raise TriggerError(f"{name} is {getattr(self, name)}; give {mend}")
        if self.cron is None and self.min_rows is None and self.tau_drop is None:
            raise TriggerError("nothing would ever start a run; give a cron expression, min_rows or tau_drop")
        try:
            ZoneInfo(self.time_zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):  # the latter two for names that are odd paths
            raise TriggerError(f"there is no time zone {self.time_zone!r}; give a name such as Europe/Berlin") from None
        if self.cron is not None:
            self._check_cron(self.cron)

    def _check_cron(self, cron: str) -> None:
        try:
            if len(cron.split()) != 5:
                raise CronSimError("not five fields")  # cronsim takes seconds too, which is no cron
            comes = next_moment(self, datetime.now(UTC))
        except CronSimError as error:
            raise TriggerError(
                f"{cron!r} is no cron expression ({error}); give minute, hour, day, month and weekday, such as "
                "'0 3 * * *'"
            ) from None
        if comes is None:
            raise TriggerError(f"the cron expression {cron!r} never comes; mend its day and month")


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where figures come from. `since` is the end of the latest window; None: there was none, so all there is.

    They may raise OSError, ValueError or RuntimeError, which costs the one look.
    """

    new_rows: Callable[[datetime | None], int]
    live_tau: LiveTau
    champion: Callable[[], Champion | None]
    done_until: Callable[[], datetime | None]  # end of the newest window that is done, whoever ran it
    begins: Callable[[], datetime]  # where the next window begins: one that had too little traffic is in it


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to be done at a moment."""

    trigger: str | None = None  # "cron", "rows" or "tau": start a run; None: do not
    why: str = ""  # it starts
    until: datetime | None = None  # UTC, whole seconds: where the window of a run that starts ends
    champion: str | None = None  # of trigger "tau": the version whose live tau has fallen
    skipped: str | None = None  # windows that nobody will run, in words; to be said once
    resting: str | None = None  # why live tau is not looked at, in words, where its runs have changed no champion
    base: TauBase | None = None  # the champion's, as it is now: to be kept; None: nobody looked
    news: str | None = None  # of that base, in words; to be said once
    cron_seen: datetime  # moments of the cron expression up to here are dealt with


def next_moment(config: TriggerConfig, after: datetime) -> datetime | None:
    """The cron expression's first moment (UTC) after that time; None if there is no expression, or none ever comes."""
    return next(_moments(config, after), None)


def decide(
    config: TriggerConfig,
    sources: Sources,
    *,
    now: datetime,
    cron_seen: datetime,
    since: datetime | None,
    rested: datetime | None = None,
    tau_runs: Mapping[str, int] | None = None,
    bases: Mapping[str, TauBase] | None = None,
    absence: str = NOT_RUNNING,
) -> Decision:
    """What is due at `now`, when no run is going on.

    `cron_seen` is the latest decision's (at the very first, `now`), `since` the end of the latest window, `rested` the
    end of the latest run, `tau_runs` how many runs the live tau of a version has started that is champion still,
    `bases` those that decisions told to keep, by version, `absence` why nobody looked between `cron_seen` and now.
    Sources are asked only if the cron expression is not due; their errors pass through.
    """
    skipped, due = _cron(config, cron_seen, now, absence)
    until = ((due or now) - timedelta(seconds=config.settle_s)).replace(microsecond=0)
    if since is not None and until <= since:
        if due is None:
            return Decision(cron_seen=now, skipped=skipped)
        why = f"the window before ends at {_said(config, since)} and {config.settle_s:.0f} s must lie behind a window"
        return Decision(cron_seen=now, skipped=_and(skipped, f"skipped {_said(config, due)}: {why}"))
    if due is not None:
        why = f"{config.cron} ({config.time_zone}) at {_said(config, due)}"
        return Decision(trigger="cron", why=why, until=until, cron_seen=now, skipped=skipped)
    quiet = Decision(cron_seen=now, skipped=skipped)
    if rested is not None and now < rested + timedelta(seconds=config.rest_s):
        return quiet
    if config.tau_drop is not None and (champion := sources.champion()) is not None:
        base, news = _based(config, sources.live_tau, champion, (bases or {}).get(champion.version), until)
        runs = (tau_runs or {}).get(champion.version, 0)
        resting = _rests(config, runs, rested, now) if runs and rested else None
        quiet = replace(quiet, resting=resting, base=base, news=news)
        if not resting and (found := _fallen(config, sources.live_tau, since, now, champion, base)):
            return replace(quiet, trigger="tau", why=found, until=until, champion=champion.version)
    if found := _enough(config, sources, since):
        return replace(quiet, trigger="rows", why=found, until=until)
    return quiet


def pass_over(config: TriggerConfig, *, now: datetime, cron_seen: datetime, why: str) -> Decision:
    """The decision while a run is going on: there are never two, so what comes up meanwhile is skipped."""
    return Decision(cron_seen=now, skipped=_missed(config, cron_seen, now, why))


def _cron(
    config: TriggerConfig, cron_seen: datetime, now: datetime, absence: str
) -> tuple[str | None, datetime | None]:
    """(what was missed, in words, the moment that is due)."""
    in_time = max(cron_seen, now - timedelta(seconds=config.start_within_s))
    due = max(takewhile(lambda moment: moment <= now, _moments(config, in_time)), default=None)
    last_missed = now if due is None else due - timedelta(seconds=1)
    return _missed(config, cron_seen, last_missed, absence), due


def _rests(config: TriggerConfig, runs: int, rested: datetime, now: datetime) -> str | None:
    """Why live tau starts no run yet, after so many that it started and the champion outlived; None if it may.

    What training on the traffic did not mend it will hardly mend at once: each run in vain doubles the rest.
    """
    rest_s = min(max(config.rest_s, LEAST_REST_S) * 2 ** min(runs, MOST_DOUBLINGS), LONGEST_REST_S)
    wakes = rested + timedelta(seconds=max(rest_s, config.rest_s))
    if now >= wakes:
        return None
    what = "a run that changed" if runs == 1 else f"{runs} runs that changed"
    return f"live tau started {what} no champion; it starts the next one at {_said(config, wakes)} or later"


def _based(
    config: TriggerConfig, live_tau: LiveTau, champion: Champion, known: TauBase | None, until: datetime
) -> tuple[TauBase, str | None]:
    """(the champion's base up to that time, what there is to say of it)."""
    base = extend(known, champion, live_tau, until, least_s=config.base_s, min_rounds=config.min_rounds)
    if base.settled and not (known and known.settled):
        return base, f"live tau of {base.version} is measured against {base.compared(champion.evaluated)}"
    if base.settled or known:
        return base, None
    needs = f"{config.min_rounds:,} rounds and {config.base_s / 60:.0f} minutes in service"
    return base, f"live tau of {base.version} starts no run before it has a base, which takes {needs}"


def _fallen(
    config: TriggerConfig, live_tau: LiveTau, since: datetime | None, now: datetime, champion: Champion, base: TauBase
) -> str | None:
    """Why the champion's live tau calls for a run; None if it does not."""
    if config.tau_drop is None or base.tau is None or not base.settled:
        return None
    begin = base.until if since is None else max(since, base.until)  # not against itself
    gained, rounds = latest(base.version, live_tau, begin, now, least_s=config.base_s, min_rounds=config.min_rounds)
    if rounds < config.min_rounds:
        return None
    tau = gained / rounds
    if tau >= (1 - config.tau_drop) * base.tau:
        return None
    return (
        f"live tau of {base.version} is {tau:.2f} over its latest {rounds:,} rounds, {1 - tau / base.tau:.0%} below "
        f"{base.compared(champion.evaluated)} (tolerance {config.tau_drop:.0%})"
    )


def _enough(config: TriggerConfig, sources: Sources, since: datetime | None) -> str | None:
    if config.min_rows is None:
        return None
    rows = sources.new_rows(since)
    return f"{rows:,} new rows of traffic (at least {config.min_rows:,})" if rows >= config.min_rows else None


def _moments(config: TriggerConfig, after: datetime) -> Iterator[datetime]:
    if config.cron is None:
        return
    for moment in CronSim(config.cron, after.astimezone(ZoneInfo(config.time_zone))):
        at = moment.astimezone(UTC)
        if at > after:  # in an hour that comes twice, a moment of its first time is found in its second one too
            yield at


def _missed(config: TriggerConfig, after: datetime, until: datetime, why: str) -> str | None:
    """The cron expression's moments after the one and up to the other, in words; None if there are none."""
    moments = takewhile(lambda moment: moment <= until, _moments(config, after))
    found = list(islice(moments, COUNTED + 1))
    if not found:
        return None
    first, last = _said(config, found[0]), _said(config, found[-1])
    if len(found) > COUNTED:
        return f"skipped more than {COUNTED:,} windows since {first}: {why}"
    if len(found) > 1:
        return f"skipped {len(found):,} windows, {first} to {last}: {why}"
    return f"skipped {first}: {why}"


def _said(config: TriggerConfig, at: datetime) -> str:
    return f"{at.astimezone(ZoneInfo(config.time_zone)):%Y-%m-%d %H:%M %Z}"


def _and(one: str | None, other: str) -> str:
    return f"{one}; {other}" if one else other
