"""`draftloop schedule`: its options become a configuration, mistakes one line; --status and --stop need no cluster."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster import schedule as schedule_module
from cluster.cli import app
from cluster.job_submission import RayJobs
from cluster.schedule import ScheduleConfig
from cluster.tau_base import TauBase
from cluster.triggers import TriggerConfig
from pipelines.run_lease import LeaseRecord
from tests.cluster.test_schedule import World

GIVEN = ("schedule", "--traffic", "traffic", "--registry", "s3://bucket/drafters", "--work", "work")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ScheduleConfig]:
    """Configurations of the schedules that would have run."""
    found: list[ScheduleConfig] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(schedule_module, "keep_schedule", lambda config, *others: found.append(config))
    monkeypatch.setattr(RayJobs, "address", property(lambda self: self._address or "http://127.0.0.1:8265"))
    return found


def test_options_become_a_configuration_that_means_the_same_elsewhere(kept: list[ScheduleConfig], tmp_path: Path):
    (tmp_path / "environment.yaml").write_text("env_vars: {A: b}\n")
    more = ("--cron", "0 3 * * *", "--time-zone", "Europe/Berlin", "--min-rows", "5000", "--tau-drop", "0.1")
    result = invoke(*GIVEN, *more, "--max-run-hours", "2", "--runtime-env", "environment.yaml")
    assert result.exit_code == 0, result.output
    assert kept == [
        ScheduleConfig(
            target="smollm2",
            traffic=f"{tmp_path}/traffic",
            registry="s3://bucket/drafters",
            work=f"{tmp_path}/work",
            triggers=TriggerConfig(cron="0 3 * * *", time_zone="Europe/Berlin", min_rows=5000, tau_drop=0.1),
            max_run_s=7200,
            python=sys.executable,
        )
    ]
    assert "0 3 * * * (Europe/Berlin; next " in result.output
    assert "5,000 new rows, or live tau 10% below the champion's own at first" in result.output
    invoke(*GIVEN, *more, "--address", "http://head.example:8265")
    assert kept[1].python == "python", "another machine has its own"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("schedule", "--cron", "0 3 * * *"), 2, "needs --traffic and --registry"),
        (GIVEN, 1, "nothing would ever start a run"),
        ((*GIVEN, "--cron", "0 25 * * *"), 1, "no cron expression (Bad hour)"),
        ((*GIVEN, "--min-rows", "5", "--runtime-env", "absent.yaml"), 2, "absent.yaml cannot be read"),
        ((*GIVEN, "--min-rows", "5", "--status", "--stop"), 2, "give one of them"),
        ((*GIVEN, "--min-rows", "5", "--detached", "--address", "http://x"), 2, "leave --address out"),
        (("schedule", "--status", "--work", "nowhere"), 1, "there never was a schedule in nowhere"),
    ],
)
def test_mistakes_are_told_in_one_line(kept: list[ScheduleConfig], arguments: tuple[str, ...], code: int, says: str):
    result = invoke(*arguments)
    assert (result.exit_code, len(result.output.strip().splitlines())) == (code, 1)
    assert says in result.output
    assert kept == []


def test_status_and_stop_of_a_schedule_that_does_not_run(tmp_path: Path):
    world = World(tmp_path)
    world.schedule.state.keep_base(TauBase(version="a", since=world.now, until=world.now, gained=4.0, rounds=2))
    world.at(13, 0)
    shown = invoke("schedule", "--status", "--work", str(tmp_path))
    assert shown.exit_code == 0
    assert re.search(r"│ runs +│ no +│", shown.output)
    for part in (
        "submitted redistill-19700101T000000Z-20261130T125500Z", "0 * * * * (UTC), next 2",
        "a: 2.00 over its first 2 rounds",
    ):  # fmt: skip
        assert part in shown.output
    told = json.loads(invoke("schedule", "--status", "--json", "--work", str(tmp_path)).output)
    assert (told["runs"], told["state"]["run"]["window"]) == ("no", "19700101T000000Z-20261130T125500Z")
    assert invoke("schedule", "--stop", "--work", str(tmp_path)).output.startswith("no schedule runs on")


def test_stop_asks_again_if_another_has_taken_the_schedule_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = datetime.now(UTC)
    first = LeaseRecord(number=1, owner="the first", token="1", since=now, at=now, ttl_s=60.0)
    second = replace(first, number=2, owner="the second", token="2")
    records = iter([first, first, second, second, replace(second, number=3, released=True)])
    asked: list[str] = []
    monkeypatch.setattr("pipelines.run_lease.lease_record", lambda folder: next(records))
    monkeypatch.setattr("cluster.schedule_state.ask_to_stop", lambda folder, token: asked.append(token))
    monkeypatch.setattr("cluster.schedule_command.STOP_LOOK_S", 0.0)
    result = invoke("schedule", "--stop", "--work", str(tmp_path))
    assert (result.exit_code, asked) == (0, ["1", "2"])
    assert result.output.strip().endswith("stopped")
