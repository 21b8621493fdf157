"""`draftloop schedule` on the command line: in the foreground, detached on the cluster, its state, its end."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import threading
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import typer
import yaml

from cluster.command import JsonOption, TargetOption, console, fail, given, one_line_errors
from cluster.run_file import RunOption

STOP_WAIT_S = 90.0  # a look of the schedule may be under way, and a file server take its time
STOP_LOOK_S = 1.0  # between two looks whether it has stopped


def schedule(
    run: RunOption = None,
    target: TargetOption = "smollm2",
    traffic: Annotated[str | None, typer.Option(help="--traffic-log of serve.", show_default=False)] = None,
    registry: Annotated[str | None, typer.Option(help="Folder of drafter versions.", show_default=False)] = None,
    work: Annotated[
        str, typer.Option(help="Folder of the windows and of the schedule's state, local (shared) or s3://.")
    ] = "draftloop-out/redistill",
    cron: Annotated[
        str | None, typer.Option(help="'0 3 * * *': minute, hour, day, month, weekday, as in crontab.")
    ] = None,
    time_zone: Annotated[str, typer.Option(help="Of --cron, such as Europe/Berlin.")] = "UTC",
    min_rows: Annotated[int | None, typer.Option(help="So many new rows of traffic start a run.")] = None,
    tau_drop: Annotated[
        float | None, typer.Option(help="So does a champion's live tau by this share below its own at first: 0.1.")
    ] = None,
    min_rounds: Annotated[int, typer.Option(help="Verify rounds that live tau must rest on.")] = 2000,
    base_minutes: Annotated[
        float, typer.Option(min=0.1, help="Of service, first and latest, whose live tau is compared.")
    ] = 30.0,
    settle_minutes: Annotated[
        float, typer.Option(min=0, help="A window ends so long before its run: answers must have reached the log.")
    ] = 5.0,
    rest_minutes: Annotated[
        float,
        typer.Option(min=0, help="After a run, before rows or tau start another; tau: doubled by each run in vain."),
    ] = 30.0,
    redistill_run: Annotated[
        str | None, typer.Option(help="Run file with further options of redistill, at a path that the cluster has.")
    ] = None,
    attempts: Annotated[int, typer.Option(min=1, help="Tries of a window's run that fails.")] = 3,
    max_run_hours: Annotated[float, typer.Option(min=0.01, help="A window's run is stopped then.")] = 24.0,
    address: Annotated[
        str | None, typer.Option(help="Ray's job server, http://head:8265.", show_default="RAY_ADDRESS, or found here")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            help="Interpreter of the cluster that has Draftloop.", show_default="this one, or python elsewhere"
        ),
    ] = None,
    runtime_env: Annotated[Path | None, typer.Option(help="YAML of the runs' Ray runtime environment.")] = None,
    detached: Annotated[
        bool, typer.Option("--detached", help="As an actor of the cluster, which restarts it.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="What the schedule of --work does and did.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the schedule of --work, wherever it runs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Redistill again and again: by the clock, when there is enough traffic, when live tau falls; never two at once."""
    if status + stop + detached > 1:
        fail("--status, --stop and --detached are three commands; give one of them", 2)
    with one_line_errors():
        if status:
            return _status(work, as_json)
        if stop:
            return _stop(work)
        if traffic is None or registry is None:
            fail("a schedule needs --traffic and --registry: the folders of serve's traffic log and of the drafters", 2)
        from cluster.job_submission import RayJobs
        from cluster.schedule import ScheduleConfig
        from cluster.triggers import TriggerConfig
        from drafters.atomic_files import AtomicFolder

        triggers = TriggerConfig(
            cron=cron, time_zone=time_zone, min_rows=min_rows, tau_drop=tau_drop, min_rounds=min_rounds,
            base_s=60 * base_minutes, settle_s=60 * settle_minutes, rest_s=60 * rest_minutes,
        )  # fmt: skip
        if detached:
            if address is not None:
                fail("--detached uses the cluster's own job server; leave --address out and set RAY_ADDRESS", 2)
            address = _join_cluster()
        environment = _read_runtime_env(runtime_env)
        jobs = RayJobs(address, environment)
        config = ScheduleConfig(
            target=_everywhere(target), traffic=AtomicFolder(traffic).uri, registry=AtomicFolder(registry).uri,
            work=AtomicFolder(work).uri, triggers=triggers, attempts=attempts, max_run_s=3600 * max_run_hours,
            redistill_run=None if redistill_run is None else _everywhere(redistill_run),
            python=python or _python_at(jobs.address),
        )  # fmt: skip
        _hello(config)
        if detached:
            _detach(config, environment)
        else:
            _keep(config, jobs)


def _everywhere(path: str) -> str:
    """What is a path here, so that it means the same from another folder."""
    return str(Path(path).expanduser().absolute()) if Path(path).expanduser().exists() else path


def _python_at(address: str) -> str:
    """The interpreter of the cluster: this one if the cluster is on this machine."""
    from urllib.parse import urlsplit

    from ray.util import get_node_ip_address

    host = urlsplit(address).hostname
    return sys.executable if host in ("127.0.0.1", "localhost", get_node_ip_address()) else "python"


def _keep(config: Any, jobs: Any) -> None:
    """The schedule in this process, until Ctrl-C, SIGTERM or --stop."""
    from cluster.schedule import keep_schedule
    from cluster.trigger_sources import sources_of

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    with contextlib.suppress(KeyboardInterrupt):
        keep_schedule(config, sources_of(config.traffic, config.registry, config.work), jobs, _say, ended)
    _say("stopped; a run that is going on goes on, and the same command takes it up again")


def _detach(config: Any, environment: dict[str, Any]) -> None:
    from cluster.schedule_actor import actor_name, start_detached

    new = start_detached(config, environment)
    what = "runs" if new else "ran already"
    _print(f"{what} on the cluster as the actor {actor_name(config.work)}")
    _print(f"next: draftloop schedule --status --work {config.work}")


def _join_cluster() -> str:
    """Connect to a cluster that goes on without this command; its address."""
    import ray

    from cluster.schedule_actor import DetachedError
    from pipelines.ray_session import left_behind

    try:
        if left_behind():
            raise ConnectionError
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        raise DetachedError("there is no Ray cluster here; start one (ray start --head), or set RAY_ADDRESS") from None
    return str(ray.get_runtime_context().gcs_address)


def _status(work: str, as_json: bool) -> None:
    from cluster.show_schedule import read_schedule, schedule_view

    seen = read_schedule(work)
    if seen is None:
        fail(f"there never was a schedule in {work}; give the --work of draftloop schedule", 1)
    if as_json:
        print(json.dumps(asdict(seen)))
        return
    console.print(schedule_view(seen))
    _print(f"next: draftloop schedule --stop --work {work}")


def _stop(work: str) -> None:
    from cluster.schedule_state import ask_to_stop, load_state, schedule_folder
    from pipelines.run_lease import lease_record

    folder = schedule_folder(work)
    held = lease_record(folder)
    if held is None or held.released or held.is_long_dead(datetime.now(UTC)):
        _print(f"no schedule runs on {work}")
        return
    asked, deadline = "", time.monotonic() + STOP_WAIT_S
    while held is not None and not held.released:
        if held.token != asked:  # also one that was started again before it heeded the request
            ask_to_stop(folder, held.token)
            _print(f"asked {held} to stop")
            asked = held.token
        if time.monotonic() > deadline:
            fail(f"no answer in {STOP_WAIT_S:.0f} s; if it is not dead, it stops when its file server is back", 1)
        time.sleep(STOP_LOOK_S)
        held = lease_record(folder)
    state = load_state(folder)
    going = f"; {state.run.submission_id} goes on, `ray job stop` ends it" if state and state.run else ""
    _print(f"stopped{going}")


def _read_runtime_env(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"runtime environment {file} cannot be read ({' '.join(str(error).split())}); give a YAML file", 2)
    if not isinstance(values, dict):
        fail(f"runtime environment {file} is no mapping; give keys such as env_vars", 2)
    return dict(values)


def _hello(config: Any) -> None:
    from cluster.triggers import next_moment

    triggers = config.triggers
    parts = given(rows=triggers.min_rows, tau=triggers.tau_drop)
    when = [f"{parts['rows']:,} new rows"] if "rows" in parts else []
    when += [f"live tau {parts['tau']:.0%} below the champion's own at first"] if "tau" in parts else []
    if coming := next_moment(triggers, datetime.now(UTC)):
        local = coming.astimezone(ZoneInfo(triggers.time_zone))
        when.insert(0, f"{triggers.cron} ({triggers.time_zone}; next {local:%Y-%m-%d %H:%M %Z})")
    _print(f"redistill {config.target} into {config.registry} at: {', or '.join(when)}")


def _say(text: str) -> None:
    _print(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z} {text}")


def _print(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
