"""When a run is due: the cron expression through changes of the clocks, rows, live tau; what was missed is said."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cluster.tau_base import Champion, TauBase
from cluster.triggers import Decision, Sources, TriggerConfig, TriggerError, decide, next_moment, pass_over
from pipelines.window_folder import BEGINNING

START = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
CHAMPION = Champion(version="a", since=START - timedelta(hours=6), evaluated=2.6)
BASE = TauBase(
    version="a", since=CHAMPION.since, until=START - timedelta(hours=5), gained=4000.0, rounds=2000, settled=True
)


def sources(rows: int = 0, live: Any = None, champion: Champion | None = None) -> Sources:
    return Sources(
        new_rows=lambda since: rows,
        live_tau=live if callable(live) else lambda since, until: live or {},
        champion=lambda: champion,
        done_until=lambda: None,
        begins=lambda: BEGINNING,
    )


def asked(config: TriggerConfig, now: datetime, *, seen: datetime = START, **others: Any) -> Decision:
    known = {"since": START - timedelta(days=1), "bases": {"a": BASE}}
    settings: dict[str, Any] = {"sources": sources()} | known | others
    return decide(config, now=now, cron_seen=seen, **settings)


def at(day: int, hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 10, day, hour, minute, tzinfo=UTC)


def looks(config: TriggerConfig, begin: datetime, end: datetime) -> tuple[list[datetime], list[str]]:
    """Window ends and what was skipped, of a schedule that looks four times an hour."""
    ends, skipped, seen, now = [], [], begin, begin
    while now <= end:
        decision = asked(config, now, seen=seen, since=None)
        seen, now = decision.cron_seen, now + timedelta(minutes=15)
        ends += [decision.until] if decision.until else []
        skipped += [decision.skipped] if decision.skipped else []
    return ends, skipped


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("30 2 * * *", [at(24, 0, 30), at(25, 0, 30), at(26, 1, 30)]),  # comes twice on the 25th: the first counts
        ("0 3 * * *", [at(24, 1), at(25, 2), at(26, 2)]),
        ("0 */12 * * *", [at(24, 10), at(24, 22), at(25, 11), at(25, 23), at(26, 11)]),
    ],
)
def test_clocks_that_go_back(cron: str, expected: list[datetime]):
    config = TriggerConfig(cron=cron, time_zone="Europe/Berlin", settle_s=0)
    ends, skipped = looks(config, at(23, 22), at(26, 12))
    assert ends == expected
    assert skipped == []


def test_an_hour_that_is_left_out_runs_when_it_would_have_ended():
    config = TriggerConfig(cron="30 2 * * *", time_zone="Europe/Berlin", settle_s=0)
    begin = datetime(2027, 3, 27, 12, tzinfo=UTC)
    ends, skipped = looks(config, begin, begin + timedelta(days=2))
    assert ends == [datetime(2027, 3, 28, 1, 0, tzinfo=UTC), datetime(2027, 3, 29, 0, 30, tzinfo=UTC)]
    assert skipped == []


def test_a_window_ends_before_its_run_so_that_the_log_is_written():
    decision = asked(
        TriggerConfig(cron="0 3 * * *", time_zone="Asia/Tokyo", settle_s=300), START + timedelta(hours=6.1)
    )
    assert (decision.trigger, decision.until) == ("cron", datetime(2026, 11, 30, 17, 55, tzinfo=UTC))
    assert decision.why == "0 3 * * * (Asia/Tokyo) at 2026-12-01 03:00 JST"


def test_moments_that_nobody_was_there_for_are_said_once_and_not_caught_up():
    config = TriggerConfig(cron="0 * * * *", time_zone="UTC")
    back = START + timedelta(hours=5, minutes=30)
    decision = asked(config, back)
    assert decision.until is None
    assert decision.skipped == (
        "skipped 5 windows, 2026-11-30 13:00 UTC to 2026-11-30 17:00 UTC: no schedule was running"
    )
    assert asked(config, back + timedelta(seconds=1), seen=decision.cron_seen).skipped is None
    in_time = asked(config, START + timedelta(hours=2, minutes=5))
    assert (in_time.trigger, in_time.skipped) == ("cron", "skipped 2026-11-30 13:00 UTC: no schedule was running")


def test_a_year_of_missed_minutes_is_not_counted_out():
    decision = asked(TriggerConfig(cron="* * * * *"), START + timedelta(days=365))
    assert decision.trigger == "cron"
    assert str(decision.skipped).startswith("skipped more than 10,000 windows since 2026-11-30 12:01 UTC")


def test_what_comes_up_during_a_run_is_passed_over():
    config = TriggerConfig(cron="0 * * * *")
    now = START + timedelta(hours=1, minutes=1)
    decision = pass_over(config, now=now, cron_seen=START, why="redistill-x was going on")
    assert decision.skipped == "skipped 2026-11-30 13:00 UTC: redistill-x was going on"
    assert asked(config, now, seen=decision.cron_seen).trigger is None


def test_enough_rows_are_due_once_the_run_before_has_rested():
    config = TriggerConfig(min_rows=100, rest_s=1800)
    few, enough = {"sources": sources(rows=99)}, {"sources": sources(rows=100)}
    assert asked(config, START, **few).trigger is None
    decision = asked(config, START, **enough)
    assert (decision.trigger, decision.why) == ("rows", "100 new rows of traffic (at least 100)")
    early, late = START - timedelta(seconds=1799), START - timedelta(seconds=1800)
    assert asked(config, START, rested=early, **enough).trigger is None
    assert asked(config, START, rested=late, **enough).trigger == "rows"


@pytest.mark.parametrize(
    ("live", "champion", "due"),
    [
        ({"a@1": (1.79, 100)}, CHAMPION, True),
        ({"a@1": (1.81, 100)}, CHAMPION, False),  # within the tolerance, though 30% below the evaluation
        ({"a@1": (1.0, 99)}, CHAMPION, False),  # too few rounds
        ({"a@1": (1.0, 50), "a@2": (2.4, 50)}, CHAMPION, True),  # over both, 1.7
        ({"b@1": (1.0, 500)}, CHAMPION, False),  # another version's
        ({"a@1": (1.0, 100)}, replace(CHAMPION, evaluated=None), True),  # it needs none
        ({"a@1": (1.0, 100)}, None, False),  # no champion
    ],
)
def test_live_tau_that_falls_below_the_champion_s_own_base(live, champion, due: bool):
    config = TriggerConfig(tau_drop=0.1, min_rounds=100)
    decision = asked(config, START, sources=sources(live=live, champion=champion))
    assert decision.trigger == ("tau" if due else None)


@pytest.mark.parametrize(("runs", "hours"), [(0, 0.5), (1, 1), (2, 2), (3, 4), (40, 24)])
def test_live_tau_rests_twice_as_long_after_each_run_in_vain_and_a_day_at_most(runs: int, hours: float):
    config = TriggerConfig(tau_drop=0.1, min_rows=100, min_rounds=1, rest_s=1800)
    fallen: dict[str, Any] = {"sources": sources(live={"a@1": (1.0, 9)}, champion=CHAMPION), "tau_runs": {"a": runs}}
    rested = START - timedelta(hours=hours)
    assert asked(config, START, rested=rested, **fallen).champion == "a"
    early = asked(config, START, rested=rested + timedelta(seconds=1), **fallen)
    assert (early.trigger, early.resting is None) == (None, runs == 0)
    other = fallen | {"tau_runs": {"b": 40}}
    assert asked(config, START, rested=START - timedelta(hours=0.5), **other).trigger == "tau", "a new champion's own"
    rows = fallen | {"sources": sources(rows=100, live={"a@1": (1.0, 9)}, champion=CHAMPION)}
    late_enough = min(rested + timedelta(seconds=1), START - timedelta(seconds=1800))
    assert asked(config, START, rested=late_enough, **rows).trigger == ("tau" if runs == 0 else "rows")


def test_the_reason_of_a_fall_has_its_figures():
    found = sources(live={"a@1": (1.5, 5120)}, champion=CHAMPION)
    decision = asked(TriggerConfig(tau_drop=0.1), START, sources=found)
    assert decision.why == (
        "live tau of a is 1.50 over its latest 5,120 rounds, 25% below 2.00 over its first 2,000 rounds in service; "
        "its evaluation says 2.60 (tolerance 10%)"
    )


def test_a_champion_without_a_base_starts_no_run_and_that_is_said_once():
    config = TriggerConfig(tau_drop=0.1, min_rounds=100, settle_s=300)
    new = Champion(version="new", since=START, evaluated=2.6)
    served = {START + timedelta(minutes=m): (2.0 if m < 40 else 1.5) for m in range(0, 120, 5)}
    now = START

    def live(since: datetime | None, until: datetime | None) -> dict[str, tuple[float, int]]:
        assert since is not None
        some = [tau for at, tau in served.items() if since <= at < (until or now)]
        return {"new@1": (sum(some) / len(some), 20 * len(some))} if some else {}

    bases: dict[str, TauBase] = {"a": BASE}
    told, due = [], []
    for minute in range(10, 120):
        now = START + timedelta(minutes=minute)
        decision = asked(config, now, sources=sources(live=live, champion=new), since=START, bases=bases)
        assert decision.base is not None
        bases["new"] = decision.base
        told += [(minute, decision.news)] if decision.news else []
        due += [minute] if decision.trigger else []
    assert told == [
        (10, "live tau of new starts no run before it has a base, which takes 100 rounds and 30 minutes in service"),
        (35, "live tau of new is measured against 2.00 over its first 120 rounds in service; its evaluation says 2.60"),
    ]
    assert due[0] == 51, "after the base 40 rounds of 2.00 and 60 of 1.50: 1.70 of 100 rounds, which are enough"


def test_whichever_comes_first_and_the_cron_expression_asks_no_source():
    def broken(since: datetime | None) -> int:
        raise OSError("the log is away")

    config = TriggerConfig(cron="0 * * * *", min_rows=1)
    found = Sources(
        new_rows=broken, live_tau=lambda s, u: {}, champion=lambda: None, done_until=lambda: None,
        begins=lambda: BEGINNING,
    )  # fmt: skip
    assert asked(config, START + timedelta(hours=1), sources=found).trigger == "cron"
    with pytest.raises(OSError, match="the log is away"):
        asked(config, START + timedelta(minutes=30), sources=found)


def test_a_window_is_never_empty():
    config = TriggerConfig(cron="0 * * * *", min_rows=1, settle_s=300)
    now, since = START + timedelta(hours=1), START + timedelta(minutes=55)
    decision = asked(config, now, since=since, sources=sources(rows=9))
    assert decision.until is None
    assert "the window before ends at 2026-11-30 12:55 UTC" in str(decision.skipped)
    assert asked(config, now + timedelta(minutes=1), seen=now, since=since, sources=sources(rows=9)).trigger == "rows"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "nothing would ever start a run"),
        ({"cron": "61 * * * *"}, "no cron expression"),
        ({"cron": "0 0 3 * * *"}, "not five fields"),  # no seconds: others would read it otherwise
        ({"cron": "0 0 30 2 *"}, "no cron expression"),
        ({"cron": "0 0 */28 2 MON#2"}, "never comes"),
        ({"cron": "0 3 * * *", "time_zone": "Europe/Berlim"}, "no time zone 'Europe/Berlim'"),
        ({"cron": "0 3 * * *", "time_zone": "../x"}, "no time zone"),
        ({"min_rows": 0}, "min_rows is 0"),
        ({"tau_drop": 10}, "tau_drop is 10; give a share"),
        ({"tau_drop": 0.1, "base_s": 0}, "base_s is 0; give more than 0"),
    ],
)
def test_triggers_that_cannot_be(options: dict[str, Any], says: str):
    with pytest.raises(TriggerError, match=says):
        TriggerConfig(**options)


def test_no_expression_has_no_moment():
    assert next_moment(TriggerConfig(min_rows=1), START) is None
