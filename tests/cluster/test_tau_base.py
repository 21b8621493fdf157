"""The base that live tau is measured against: a version's first time of service, whenever somebody looks."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from cluster.tau_base import Champion, Found, TauBase, extend, latest

PROMOTED = datetime(2026, 11, 30, 12, 0, 0, 500, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
CHAMPION = Champion(version="a", since=PROMOTED, evaluated=2.6)
extended = partial(extend, champion=CHAMPION, least_s=1800, min_rounds=300)


@dataclass
class Traffic:
    """A stand-in for the traffic log: who served how many rounds, minute by minute."""

    rows: list[tuple[datetime, str, float, int]] = field(default_factory=list)
    asked: int = 0

    def serve(self, minutes: range, tau: float, version: str = "a@1", rounds: int = 20) -> None:
        """From and to so many minutes after the promotion."""
        self.rows += [(PROMOTED + minute * MINUTE, version, tau, rounds) for minute in minutes]

    def live_tau(self, since: datetime | None, until: datetime | None) -> Found:
        self.asked += 1
        found: dict[str, tuple[float, int]] = {}
        for at, version, tau, rounds in self.rows:
            if (since is None or at >= since) and (until is None or at < until):
                known, count = found.get(version, (0.0, 0))
                found[version] = (known * count + tau * rounds) / (count + rounds), count + rounds
        return found


@pytest.fixture
def traffic() -> Traffic:
    return Traffic()


def look_by_look(traffic: Traffic, minutes: int) -> TauBase:
    base = None
    for minute in range(1, minutes):
        base = extended(base, live_tau=traffic.live_tau, now=PROMOTED + minute * MINUTE)
    assert base is not None
    return base


def test_it_is_the_first_half_hour_whoever_looks_late(traffic: Traffic):
    traffic.serve(range(30), 2.0)
    traffic.serve(range(30, 7 * 24 * 60), 1.5)
    base = look_by_look(traffic, 40)
    assert (base.settled, base.tau, base.rounds, base.until) == (True, 2.0, 600, PROMOTED + 30 * MINUTE)
    before = traffic.asked
    late = extended(None, live_tau=traffic.live_tau, now=PROMOTED + timedelta(days=7))
    assert (late, traffic.asked - before) == (base, 1)
    assert extended(base, live_tau=traffic.live_tau, now=PROMOTED + timedelta(days=8)) == base
    assert base.compared(2.6) == "2.00 over its first 600 rounds in service; its evaluation says 2.60"


def test_it_takes_time_and_rounds(traffic: Traffic):
    traffic.serve(range(20), 2.0, rounds=100)
    assert not look_by_look(traffic, 20).settled, "rounds enough, of a few minutes"
    few = Traffic()
    few.serve(range(60), 2.0, rounds=5)
    base = look_by_look(few, 90)
    assert (base.settled, base.rounds, base.until) == (True, 300, PROMOTED + 60 * MINUTE)


def test_service_that_begins_late_has_its_time_all_the_same(traffic: Traffic):
    traffic.serve(range(600), 1.0, version="before@7")
    traffic.serve(range(600, 660), 2.0)
    base = look_by_look(traffic, 700)
    assert (base.settled, base.tau, base.until) == (True, 2.0, PROMOTED + 630 * MINUTE)
    traffic.asked = 0
    late = extended(None, live_tau=traffic.live_tau, now=PROMOTED + 700 * MINUTE)
    assert (late.settled, late.tau, late.rounds) == (True, 2.0, 60 * 20)
    assert traffic.asked < 10, "a long time is read in few parts"


def test_good_hours_do_not_hide_a_bad_one(traffic: Traffic):
    traffic.serve(range(600), 2.0)
    traffic.serve(range(600, 640), 1.5)

    def found(minutes: int, begin: int = 0, min_rounds: int = 300) -> tuple[float, int]:
        times = PROMOTED + begin * MINUTE, PROMOTED + minutes * MINUTE
        gained, rounds = latest("a", traffic.live_tau, *times, least_s=1800, min_rounds=min_rounds)
        return gained / rounds, rounds

    assert found(640) == (1.5, 600), "the last half hour"
    assert found(640, min_rounds=1000) == (pytest.approx((1.5 * 40 + 2.0 * 20) / 60), 1200), "an hour, for the rounds"
    assert found(640, begin=635) == (1.5, 100), "not what came before"


def test_without_rounds_there_is_none(traffic: Traffic):
    base = extended(None, live_tau=traffic.live_tau, now=PROMOTED - MINUTE)
    assert (base.settled, base.tau, base.until) == (False, None, PROMOTED)
    assert base.compared(None) == "- over its first 0 rounds in service"
