"""The schedule with a clock and a job server in memory: one run at a time, and a restart anywhere changes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.schedule import Schedule, ScheduleConfig, keep_schedule
from cluster.schedule_state import STATE, ScheduleStateError, ask_to_stop, asked_to_stop, load_state, schedule_folder
from cluster.show_schedule import read_schedule
from cluster.tau_base import Champion
from cluster.trigger_sources import done_until
from cluster.triggers import Sources, TriggerConfig
from drafters.atomic_files import AtomicFolder
from pipelines import run_lease
from pipelines.run_lease import LeaseHeldError, RunLease, lease_record
from pipelines.window_folder import BEGINNING
from tests.cluster.test_job_submission import FakeJobs

BEGIN = datetime(2026, 11, 30, 12, 30, tzinfo=UTC)
ONE, TWO = "redistill-19700101T000000Z-20261130T125500Z", "redistill-20261130T125500Z-20261130T145500Z"


class World:
    """A clock, a job server, figures, and whatever schedule is alive."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.now, self.rows, self.done, self.heard = BEGIN, 0, None, list[str]()
        self.used = BEGINNING  # end of the newest window that was used
        self.begins: Callable[[], datetime] = lambda: self.used
        self.live: dict[str, tuple[float, int]] = {}
        self.champion = "a"
        self.jobs = FakeJobs()
        self.count: Callable[[], int] = lambda: self.rows
        triggers = options.pop("triggers", TriggerConfig(cron="0 * * * *", min_rows=100))
        self.config = ScheduleConfig(
            target="smollm2", traffic="s3://t", registry="s3://r", work=str(folder), triggers=triggers, **options
        )
        self.start()

    def start(self) -> None:
        """A fresh schedule, as after a kill: nothing of the old one but its file."""
        sources = Sources(
            new_rows=lambda since: self.count(),
            live_tau=lambda since, until: self.live,
            champion=lambda: Champion(version=self.champion, since=BEGIN - timedelta(hours=2), evaluated=2.5),
            done_until=lambda: self.done,
            begins=lambda: self.begins(),
        )
        self.schedule = Schedule(self.config, sources, self.jobs, self.heard.append, lambda: self.now)

    def at(self, hour: int, minute: int, second: int = 0) -> float:
        """Look at that time; seconds until the next look."""
        self.now = BEGIN.replace(hour=hour, minute=minute, second=second)
        return self.schedule.tick()

    def submitted(self) -> list[str]:
        return [name for name, _ in self.jobs.submitted]

    def said(self, part: str) -> int:
        """Lines with it, in the file."""
        state = load_state(schedule_folder(self.config.work))
        assert state is not None
        return sum(part in line.text for line in state.said)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_run_from_its_moment_to_its_end(world: World):
    assert world.at(12, 30) == 60
    assert world.at(12, 59, 30) == 30, "awake at the moment itself"
    assert world.submitted() == []
    world.at(13, 0)
    assert world.submitted() == [ONE]
    assert world.jobs.submitted[0][1] == (
        "python -m cluster.cli redistill --target smollm2 --traffic s3://t --registry s3://r "
        f"--work {world.config.work} --since 1970-01-01T00:00:00+00:00 --until 2026-11-30T12:55:00+00:00"
    ).split(" ")
    world.jobs.set(ONE, "RUNNING")
    world.rows = 1000
    world.at(13, 30)
    world.at(14, 1)
    assert world.submitted() == [ONE], "never two"
    assert world.said(f"skipped 2026-11-30 14:00 UTC: {ONE} was going on") == 1
    world.jobs.set(ONE, "SUCCEEDED")
    world.used = BEGIN.replace(minute=55)
    world.at(14, 2)
    world.at(14, 3)
    assert world.submitted() == [ONE], "rows wait until it has rested"
    world.rows = 0
    world.at(15, 0)
    assert world.submitted() == [ONE, TWO], "the next window begins where the one before ended"


def test_a_schedule_that_is_restarted_at_every_step_does_the_same(world: World):
    world.at(13, 0)
    for minute in (1, 2, 3):
        world.start()
        world.at(13, minute)
    world.jobs.set(ONE, "RUNNING")
    world.start()
    world.at(14, 30)
    world.start()
    world.jobs.set(ONE, "SUCCEEDED")
    world.start()
    world.at(14, 40)
    world.start()
    world.at(14, 41)
    assert world.submitted() == [ONE]
    assert world.said(f"{ONE} succeeded") == 1
    assert world.said("skipped 2026-11-30 14:00 UTC") == 1


def test_one_that_dies_before_it_submits_submits_the_same_window_later(world: World):
    world.jobs.away = True
    world.at(13, 0)
    assert world.said("no answer; trying again") == 1
    world.at(13, 1)
    assert world.said("no answer; trying again") == 1, "said once"
    world.jobs.away = False
    world.start()
    world.at(13, 20)
    assert world.submitted() == [ONE]


def test_one_that_is_killed_between_its_decision_and_its_submission(world: World, monkeypatch: pytest.MonkeyPatch):
    def die(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(world.jobs, "submit", die)
    with pytest.raises(KeyboardInterrupt):
        world.at(13, 0)
    monkeypatch.undo()
    world.start()
    world.at(13, 20)
    assert world.submitted() == [ONE]


def test_a_cluster_that_was_started_anew_gets_the_same_window(world: World):
    world.at(13, 0)
    world.jobs.jobs.clear()  # it has forgotten its jobs
    world.start()
    world.at(13, 20)
    assert world.submitted() == [ONE, ONE]


def test_moments_missed_while_no_schedule_ran_are_said_once(world: World):
    world.at(12, 31)
    world.now = BEGIN.replace(hour=16, minute=30)
    world.start()
    world.at(16, 30)
    world.start()
    world.at(16, 31)
    text = "skipped 4 windows, 2026-11-30 13:00 UTC to 2026-11-30 16:00 UTC: no schedule was running"
    assert (world.said(text), world.said("skipped")) == (1, 1)
    assert world.submitted() == []


def test_another_cron_expression_has_missed_nothing(world: World):
    world.config = replace(world.config, triggers=TriggerConfig(cron="*/10 * * * *"))
    world.now = BEGIN.replace(hour=16, minute=35)
    world.start()
    world.at(16, 35)
    assert world.said("skipped") == 0


def test_a_run_that_fails_is_tried_again_later_and_given_up_at_last(world: World):
    world.at(13, 0)
    world.jobs.set(ONE, "FAILED", "error: the disk is full")
    world.at(13, 1)
    assert world.submitted() == [ONE], "not at once"
    world.at(13, 2)
    assert world.submitted() == [ONE, f"{ONE}-2"]
    assert world.said(f"{ONE} failed: error: the disk is full") == 1
    world.jobs.set(f"{ONE}-2", "STOPPED")
    world.start()
    world.at(13, 3)
    world.at(13, 4)
    assert world.submitted()[2:] == [], "longer after the second failure"
    world.at(13, 5)
    world.jobs.set(f"{ONE}-3", "FAILED")
    world.at(13, 6)
    assert world.said("is given up; its traffic goes into the next one") == 1
    world.at(14, 0)
    assert world.submitted()[3:] == ["redistill-19700101T000000Z-20261130T135500Z"]


def test_a_run_that_takes_too_long_is_stopped(tmp_path: Path):
    world = World(tmp_path, max_run_s=3600)
    world.at(13, 0)
    world.jobs.set(ONE, "RUNNING")
    world.at(14, 0)
    assert world.jobs.stopped == []
    world.at(14, 1)
    assert world.jobs.stopped == [ONE]
    assert world.said("took more than 1 hours") == 1
    world.start()
    world.jobs.set(ONE, "SUCCEEDED")
    world.at(15, 0)
    assert world.submitted() == [ONE, "redistill-19700101T000000Z-20261130T145500Z"]


def test_a_window_that_was_run_by_hand_is_where_the_next_begins(world: World):
    world.done = world.used = BEGIN
    world.at(13, 0)
    assert world.submitted() == ["redistill-20261130T123000Z-20261130T125500Z"]


def test_figures_that_cannot_be_had_do_not_keep_the_clock_from_working(world: World):
    def away() -> int:
        raise OSError("the log is away")

    world.count = away
    world.at(12, 40)
    world.at(12, 41)
    assert world.said("the log is away; trying again") == 1
    world.at(13, 0)
    assert world.submitted() == [ONE]


def test_a_moment_is_not_lost_to_a_source_that_is_away(world: World):
    def away() -> datetime:
        raise OSError("the windows are away")

    world.begins = away
    world.at(13, 0)
    assert world.submitted() == []
    world.begins = lambda: world.used
    world.at(13, 1)
    assert world.submitted() == [ONE]


def test_moments_missed_while_a_server_was_away_are_laid_to_it(world: World):
    def away() -> datetime:
        raise OSError("the windows are away")

    world.begins = away
    for minute in (0, 1):
        world.at(13, minute)
    world.begins = lambda: world.used
    world.at(13, 13)
    assert world.submitted() == []
    assert world.said("skipped 2026-11-30 13:00 UTC: the schedule was held up: the windows are away") == 1


def test_nothing_is_submitted_before_its_run_is_in_the_file(world: World, monkeypatch: pytest.MonkeyPatch):
    def full(name: str, data: bytes) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(world.schedule._folder, "write", full)
    world.at(13, 0)
    world.at(13, 1)
    assert world.submitted() == []
    monkeypatch.undo()
    world.at(13, 2)
    assert world.submitted() == [ONE]
    state = load_state(schedule_folder(world.config.work))
    assert state is not None
    assert state.run is not None
    assert state.run.submission_id == ONE


def test_live_tau_that_a_run_did_not_mend_rests_longer(tmp_path: Path):
    world = World(tmp_path, triggers=TriggerConfig(tau_drop=0.1, min_rounds=1, rest_s=1800))
    world.live = {"a@1": (2.0, 10)}
    world.at(12, 45)
    world.live = {"a@1": (1.0, 10)}
    world.at(13, 0)
    world.jobs.set(ONE, "SUCCEEDED")
    world.at(13, 10)
    world.at(13, 41)
    world.start()
    world.at(13, 42)
    told = "live tau started {} that changed no champion; it starts the next one at 2026-11-30 {} UTC or later"
    assert world.said(told.format("a run", "14:10")) == 1
    assert world.submitted() == [ONE]
    world.at(14, 10)
    assert len(world.submitted()) == 2
    world.jobs.set(world.submitted()[1], "SUCCEEDED")
    world.at(14, 20)
    world.at(15, 21)
    assert world.said(told.format("2 runs", "16:20")) == 1


def test_a_base_of_live_tau_outlives_the_schedule_and_other_champions(tmp_path: Path):
    world = World(tmp_path, triggers=TriggerConfig(tau_drop=0.1, min_rounds=1, base_s=60))
    world.at(12, 40)
    world.live = {"a@1": (2.0, 10), "b@1": (1.5, 10)}
    for minute in (41, 42):
        world.at(12, minute)
        world.start()
    world.champion = "b"
    world.live = {"a@1": (1.0, 10), "b@1": (1.5, 10)}
    world.at(12, 50)
    assert world.said("live tau of a starts no run before it has a base") == 1
    assert world.said("live tau of a is measured against 2.00 over its first 10 rounds in service") == 1
    assert world.said("live tau of b is measured against 1.50") == 1
    assert world.submitted() == []
    world.start()
    world.champion = "a"  # b was rolled back, and the traffic has changed
    world.at(13, 0)
    assert world.submitted() == [ONE]


def test_the_newest_window_with_a_report_is_the_last_one_done(tmp_path: Path):
    folder = AtomicFolder(str(tmp_path))
    assert done_until(str(tmp_path)) is None
    for name, done in (("20261130T060000Z-20261130T120000Z", True), ("20261130T120000Z-20261130T180000Z", False)):
        folder.write(f"windows/{name}/{'report' if done else 'window'}.json", b"{}")
    assert done_until(str(tmp_path)) == datetime(2026, 11, 30, 12, tzinfo=UTC)


def keep(world: World, ended: threading.Event) -> None:
    keep_schedule(world.config, world.schedule._sources, world.jobs, world.heard.append, ended)


def test_one_schedule_a_folder_and_it_ends_when_it_is_asked_to(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cluster.schedule.STOP_LOOK_S", 0.02)
    folder = schedule_folder(world.config.work)
    looks: list[str | None] = []

    def look(folder: AtomicFolder) -> str | None:
        looks.append(asked_to_stop(folder))
        return looks[-1]

    monkeypatch.setattr("cluster.schedule.asked_to_stop", look)
    ask_to_stop(folder, "an earlier one's")  # which died before it could heed it
    thread = threading.Thread(target=keep, args=(world, threading.Event()), daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while len(looks) < 3 or not (seen := read_schedule(world.config.work)) or not seen.runs.startswith("schedule on "):
        assert time.monotonic() < deadline
        assert thread.is_alive(), "it heeds what another was asked"
        time.sleep(0.02)
    held = lease_record(folder)
    assert held is not None
    ask_to_stop(folder, held.token)
    thread.join(30)
    assert not thread.is_alive()
    assert world.said("stopped on request") == 1
    after = read_schedule(world.config.work)
    assert after is not None
    assert after.runs == "no"


def test_a_second_schedule_is_told_of_the_first(world: World, monkeypatch: pytest.MonkeyPatch):
    ended = threading.Event()
    with RunLease(schedule_folder(world.config.work), "the first", ttl_s=600.0) as first:
        # the first renews its lease whenever the second waits for a sign of life
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: first.renew())
        monkeypatch.setattr(run_lease, "time", clock)
        with pytest.raises(LeaseHeldError, match="the first"):
            # a second one that did begin would end with its first line
            keep_schedule(world.config, world.schedule._sources, world.jobs, say=lambda line: ended.set(), ended=ended)


def test_a_damaged_state_is_named(world: World):
    AtomicFolder(world.config.work).write(f"schedule/{STATE}", b'{"cron": 1}')
    with pytest.raises(ScheduleStateError, match=r"schedule/state\.json is no schedule's state"):
        world.start()
