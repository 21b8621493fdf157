"""The guard and its registry: roll-backs that are told late, told twice, or not needed any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from drafters.registry import PLAIN, ChampionChangedError, Change, RegistryError
from serving import rollout_guard
from serving.live_tau import Tally
from serving.rollout_guard import RolloutGuard
from serving.rollout_reports import Order, Report, Taken
from serving.serve_config import RegistryFollowing, ServeConfig

CONFIG = RegistryFollowing(uri="none", poll_s=0.01, observe_s=0.1, min_rounds=10, max_observe_s=60)
GOOD, BAD = Tally(rounds=100, accepted=90, squares=90, emitted=190), Tally(rounds=100, emitted=100)


def change(number: int, version: str | None, previous: str | None = None, action="promote") -> Change:
    at = datetime.now(UTC)
    return Change(number=number, action=action, version=version, previous=previous, by="x", at=at, why="y")


class FakeRegistry:
    """Answers `rollback` with what it was given, one after another."""

    def __init__(self, *answers: Change | Exception):
        self.answers, self.asked = list(answers), []
        self.done = threading.Event()

    def rollback(self, **asked) -> Change:
        self.asked.append(asked)
        answer = self.answers.pop(0)
        if not self.answers:
            self.done.set()
        if isinstance(answer, Exception):
            raise answer
        return answer


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def with_bad_champion(registry: FakeRegistry, champion: Change, old: Taken) -> tuple[RolloutGuard, Callable[[], Order]]:
    """A guard and its only replica, which has found that the champion does badly."""
    guard = RolloutGuard(CONFIG, "app", registry)
    tried = Taken(number=champion.number, version=champion.version)

    def ask() -> Order:
        return guard.ask(
            Report(
                replica="r", champion=champion, serves=tried, served_s=1, now=BAD, before=old, before_tally=GOOD,
                settled=old,
            )
        )  # fmt: skip

    wait(lambda: ask().take == old)
    return guard, ask


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(rollout_guard, "_FIRST_PAUSE_S", 0.01)


def test_a_registry_that_is_away_is_told_later_and_the_replica_does_not_wait():
    back = change(3, "old", "bad", "rollback")
    registry = FakeRegistry(ConnectionError("away"), OSError("away"), back)
    champion = change(2, "bad", "old")
    guard, _ = with_bad_champion(registry, champion, Taken(number=1, version="old"))
    assert registry.done.wait(30)
    wait(lambda: not guard._teller.is_alive())
    assert len(registry.asked) == 3
    asked = registry.asked[-1]
    assert (asked["expected"], asked["to"], asked["by"]) == (champion, None, "draftloop serve, app app")
    assert asked["why"].startswith("live tau 1.00 against 1.90 before, ")
    old = Taken(number=1, version="old")
    order = guard.ask(Report(replica="r", champion=champion, serves=old, settled=old))
    assert order.take == Taken(number=3, version="old"), "the same version by another change: nothing to load"


def test_somebody_who_was_faster_is_left_alone():
    registry = FakeRegistry(ChampionChangedError("there is a newer one"))
    guard, ask = with_bad_champion(registry, change(2, "bad", "old"), Taken(number=1, version="old"))
    assert registry.done.wait(30)
    wait(lambda: not guard._teller.is_alive())
    assert ask().take == Taken(number=1, version="old")
    assert len(registry.asked) == 1
    old = Taken(number=1, version="old")
    order = guard.ask(Report(replica="r", champion=change(3, "third", "bad"), serves=old, settled=old))
    assert order.take == Taken(number=3, version="third")


@pytest.mark.parametrize(("old", "to"), [("old", "old"), ("bad's parent", None)])
def test_it_goes_back_to_what_had_proved_itself(old, to):
    registry = FakeRegistry(change(9, old, "bad", "rollback"))
    with_bad_champion(registry, change(8, "bad", "bad's parent"), Taken(number=2, version=old))
    assert registry.done.wait(30)
    assert registry.asked[0]["to"] == to


def test_where_the_way_back_is_gone_it_goes_back_to_plain_decoding(caplog):
    old = Taken(number=1, version="old")
    back = change(3, None, "bad", "rollback")
    gone = RegistryError("version old was removed")
    registry = FakeRegistry(gone, ConnectionError("away"), gone, back)
    champion = change(2, "bad", "old")
    guard, _ = with_bad_champion(registry, champion, old)
    assert registry.done.wait(30)
    wait(lambda: not guard._teller.is_alive())
    assert [asked["to"] for asked in registry.asked] == [None, PLAIN, None, PLAIN]
    assert "rolling back to plain decoding" in caplog.text
    order = guard.ask(Report(replica="r", champion=champion, serves=old, settled=old))
    assert order.take == Taken(number=3, version=None)


def test_a_guard_outlives_the_start_of_a_lone_replica():
    assert 2 * ServeConfig.model_fields["start_timeout_s"].default <= rollout_guard._LONELY_S
