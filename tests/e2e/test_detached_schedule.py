"""The detached schedule on a cluster: its process is killed during a run, and the run is still the only one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.state import list_actors

from cluster.schedule import ScheduleConfig
from cluster.schedule_actor import NAMESPACE, DetachedError, actor_name, start_detached
from cluster.schedule_state import ScheduleState, ask_to_stop, load_state, schedule_folder
from cluster.triggers import TriggerConfig
from drafters.atomic_files import AtomicFolder
from pipelines.run_lease import lease_record
from tests.e2e.test_jobs import DEADLINE_S, Jobs

pytestmark = [pytest.mark.ray, pytest.mark.kill]

CRON = "* * * * *"


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    jobs = Jobs()
    try:
        ray.init(address=jobs.cluster.address, log_to_driver=False)
        yield jobs
    finally:
        ray.shutdown()
        jobs.cluster.shutdown()


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def is_gone(name: str) -> bool:
    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return True
    return False


def stop(folder: AtomicFolder) -> None:
    """Ask whoever keeps the schedule, once somebody does."""
    held = wait_for(lambda: (held := lease_record(folder)) and not held.released and held)
    ask_to_stop(folder, held.token)


def test_a_schedule_that_is_killed_goes_on_and_submits_nothing_twice(jobs: Jobs, tmp_path: Path):
    runs, program = tmp_path / "runs.txt", tmp_path / "redistill"
    program.write_text(f'#!/bin/sh\necho "$@" >> {runs}\nsleep 6\n')
    program.chmod(0o755)
    config = ScheduleConfig(
        target="toy", traffic=f"{tmp_path}/traffic", registry=f"{tmp_path}/registry", work=f"{tmp_path}/work",
        triggers=TriggerConfig(cron=CRON, settle_s=0), python=str(program), look_s=0.5, follow_s=0.5, lease_ttl_s=2.0,
    )  # fmt: skip
    folder = schedule_folder(config.work)
    # a minute of the expression has come, so that it need not be waited for
    ScheduleState(cron=f"{CRON} UTC", cron_seen=datetime.now(UTC) - timedelta(minutes=1)).save(folder)
    assert start_detached(config, {})
    assert not start_detached(config, {}), "it is there already"
    with pytest.raises(DetachedError, match="other options"):
        start_detached(config, {"env_vars": {"A": "b"}})

    wait_for(runs.exists)
    old = next(a.pid for a in list_actors(jobs.address) if a.class_name == "ScheduleActor")
    os.kill(old, signal.SIGKILL)
    state = wait_for(lambda: (state := load_state(folder)) and state.last and state)
    assert state.last.result == "succeeded"
    assert [line.text for line in state.said if line.text.startswith(("submitted", "back at"))] == [
        f"submitted {state.last.submission_id}",
        f"back at {state.last.submission_id}",
    ]
    first_until = state.last.until.isoformat()
    assert [f"--until {first_until}" in line for line in runs.read_text().splitlines()][:1] == [True]
    assert runs.read_text().count(first_until) == 1

    stop(folder)
    wait_for(lambda: is_gone(actor_name(config.work)))
    assert start_detached(config, {}), "its name is free"
    stop(folder)
    wait_for(lambda: is_gone(actor_name(config.work)))
