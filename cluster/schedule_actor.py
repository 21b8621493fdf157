"""The schedule as a detached actor of the cluster: `draftloop schedule --detached` starts it, `--stop` ends it.

Ray starts it again when its process or its node dies, and it goes on from its state file. A cluster that was started
anew has forgotten its actors: the same command brings the schedule back.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import ray

from cluster.job_submission import RayJobs
from cluster.schedule import ScheduleConfig, keep_schedule
from cluster.schedule_state import schedule_folder
from cluster.trigger_sources import sources_of
from drafters.remote import first_line
from pipelines.run_lease import LeaseHeldError

NAMESPACE = "draftloop"
ANSWER_S = 120.0  # that Ray may take to start the actor, a new node's environment included
CRASH_PAUSE_S = 30.0  # before Ray starts it again after a bug


class DetachedError(RuntimeError):
    """A detached schedule that cannot be started; one line with cause and mend."""


class ScheduleActor:
    """A schedule that runs in a thread, from the actor's start: after a restart nobody calls a method."""

    def __init__(self, config: ScheduleConfig, runtime_env: Mapping[str, Any]):
        self._options = (config, dict(runtime_env))
        context = ray.get_runtime_context()
        self._itself = context.current_actor
        jobs = RayJobs(context.gcs_address, runtime_env)
        threading.Thread(target=self._keep, args=(config, jobs), name="schedule", daemon=True).start()

    def options(self) -> tuple[ScheduleConfig, dict[str, Any]]:
        return self._options

    def _keep(self, config: ScheduleConfig, jobs: RayJobs) -> None:
        sources = sources_of(config.traffic, config.registry, config.work)
        while True:
            try:
                keep_schedule(config, sources, jobs, log, threading.Event(), "detached schedule")
                break
            except (LeaseHeldError, OSError) as error:  # its own, before it was killed, or a file server that is away
                log(f"{first_line(error)}; trying again")
                time.sleep(config.lease_ttl_s / 3)
            except BaseException:  # a bug: told in the actor's log; Ray starts a fresh process
                traceback.print_exc()
                time.sleep(CRASH_PAUSE_S)
                os._exit(1)
        ray.kill(self._itself, no_restart=True)  # it was asked to stop: its name is free for the next


def log(text: str) -> None:
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC {text}", flush=True)


def actor_name(work: str) -> str:
    """One schedule for each work folder."""
    return f"schedule-{hashlib.sha256(schedule_folder(work).uri.encode()).hexdigest()[:12]}"


def start_detached(config: ScheduleConfig, runtime_env: Mapping[str, Any]) -> bool:
    """Start the actor on the cluster that Ray is connected to; False if it is there already, with the same options.

    Raises DetachedError if it runs with other ones, or does not start.
    """
    name = actor_name(config.work)
    existed = _exists(name)
    actor: Any = (
        ray.remote(ScheduleActor)
        .options(name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, max_restarts=-1, num_cpus=0)
        .remote(config, dict(runtime_env))
    )
    try:
        running = ray.get(actor.options.remote(), timeout=ANSWER_S)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
        raise DetachedError(
            f"the actor {name} did not start ({first_line(error)}); `ray list actors` and its log tell more"
        ) from error
    if running != (config, dict(runtime_env)):
        raise DetachedError(
            f"a detached schedule with other options runs on {config.work}; end it with draftloop schedule --stop "
            f"--work {config.work}, then start this one"
        )
    return not existed


def _exists(name: str) -> bool:
    with contextlib.suppress(ValueError):
        ray.get_actor(name, namespace=NAMESPACE)
        return True
    return False
