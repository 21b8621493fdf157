"""The schedule: looks for what is due, submits the window's redistillation, follows it, says what it skipped.

One for each work folder, by a lease; its state lies in a file there, so that it goes on after a restart of its own, of
the cluster, or on another machine. `draftloop schedule` runs it in the foreground or in a detached actor.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from cluster.job_submission import Attempt, JobServer, JobServerError, latest_attempt, submit_once
from cluster.schedule_state import (
    SAID,
    Outcome,
    Run,
    Said,
    ScheduleState,
    TauRuns,
    asked_to_stop,
    load_state,
    schedule_folder,
)
from cluster.triggers import NOT_RUNNING, Decision, Sources, TriggerConfig, decide, next_moment, pass_over
from drafters.atomic_files import AtomicFolder
from drafters.remote import first_line
from pipelines.run_lease import TTL_S, LeaseLostError, RunLease, lease_record
from pipelines.traffic_selection import TrafficWindow

STOP_LOOK_S = 5.0  # between two looks for a request to stop
HELD_UP = "the schedule was held up"  # why moments of the cron expression were missed


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """What is run, and when. Addresses mean the same on every machine of the cluster."""

    target: str
    traffic: str  # what serve's --traffic-log says
    registry: str
    work: str  # folder of redistill's windows
    triggers: TriggerConfig
    redistill_run: str | None = None  # run file with further options of redistill
    python: str = "python"  # the cluster's interpreter that has Draftloop
    attempts: int = 3  # a window's run is tried so often
    retry_s: float = 60.0  # after a failed try; twice that after the second, and so on
    max_run_s: float = 86400.0  # then a window's run is stopped, and the next window's turn comes
    look_s: float = 60.0  # between two looks for what is due
    follow_s: float = 10.0  # between two looks at a run
    lease_ttl_s: float = TTL_S

    def command(self, window: str) -> list[str]:
        """The run of the window of that id."""
        options = {"target": self.target, "traffic": self.traffic, "registry": self.registry, "work": self.work}
        times = TrafficWindow.from_id(window)
        options |= {"since": times.since.isoformat(), "until": times.until.isoformat()}
        options |= {"run": self.redistill_run} if self.redistill_run else {}
        given = [part for name, value in options.items() for part in (f"--{name}", value)]
        return [self.python, "-m", "cluster.cli", "redistill", *given]


def utc_now() -> datetime:
    return datetime.now(UTC)


def keep_schedule(
    config: ScheduleConfig,
    sources: Sources,
    jobs: JobServer,
    say: Callable[[str], None],
    ended: threading.Event,
    owner: str = "schedule",
) -> None:
    """The schedule until `ended`, or until `schedule --stop` asks for its end. A run that is going on is left alone.

    Raises LeaseHeldError if there is another for this work folder. A file server that goes away is waited for.
    """
    folder, absence = schedule_folder(config.work), NOT_RUNNING
    tokens: set[str] = set()  # of its leases: a request to stop may name one that it has lost meanwhile
    while not ended.is_set():
        try:
            with RunLease(folder, owner, config.lease_ttl_s) as lease:
                held = lease_record(folder)
                tokens |= {held.token} if held else set()
                _keep(Schedule(config, sources, jobs, say, absence=absence), lease, tokens, ended)
                return
        except (LeaseLostError, OSError) as error:
            if not tokens:
                raise
            absence = f"{HELD_UP}, its folder could not be reached"
            say(f"{first_line(error)}; taking it up again")
            ended.wait(config.lease_ttl_s / 3)


def _keep(schedule: Schedule, lease: RunLease, tokens: set[str], ended: threading.Event) -> None:
    wake = time.monotonic()
    while not schedule.is_asked_to_stop(tokens):
        lease.check()
        left = wake - time.monotonic()
        if left <= 0:
            left = schedule.tick()
            wake = time.monotonic() + left
        if ended.wait(min(left, STOP_LOOK_S)):
            return
    schedule.end()


class Schedule:
    """A schedule between two ticks: its state in memory is what the file holds.

    `absence` says why moments of the cron expression before its beginning were missed.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        sources: Sources,
        jobs: JobServer,
        say: Callable[[str], None],
        now: Callable[[], datetime] = utc_now,
        absence: str = NOT_RUNNING,
    ):
        self.config, self._sources, self._jobs, self._out, self._now = config, sources, jobs, say, now
        self._folder: AtomicFolder = schedule_folder(config.work)
        self._begun, self._absence = now(), absence
        self._trouble: str | None = None
        self._unsaved = False
        cron = f"{config.triggers.cron or 'never'} {config.triggers.time_zone}"
        state = load_state(self._folder)
        if state is None or state.cron != cron:  # moments of another expression are not missed
            old = state.model_dump() if state else {}
            state = ScheduleState.model_validate(old | {"cron": cron, "cron_seen": self._begun})
        self.state = state
        self._say("begun" if state.run is None else f"back at {state.run.submission_id}")
        self._save()

    def tick(self) -> float:
        """Do what is due; seconds until the next look. Trouble with a server is said once, and tried again."""
        try:
            pause = self._look() if self.state.run is None else self._follow(self.state.run)
        except (OSError, RuntimeError, ValueError) as error:
            told = first_line(error)
            if told != self._trouble:
                self._say(f"{told}; trying again")
                with contextlib.suppress(OSError):
                    self._save()
            self._trouble = told
            return self.config.look_s
        self._trouble = None
        return pause

    def end(self) -> None:
        self._say("stopped on request")
        self._save()

    def is_asked_to_stop(self, tokens: Collection[str]) -> bool:
        """Whether the holder of one of these leases is."""
        try:
            return asked_to_stop(self._folder) in tokens
        except OSError:
            return False  # the file server is away; the next look will tell

    def _look(self) -> float:
        """Start what is due."""
        now, state, triggers = self._now(), self.state, self.config.triggers
        last, since = state.last, self._sources.done_until()
        if last is not None and last.result == "succeeded" and (since is None or last.until > since):
            since = last.until
        decision = decide(
            triggers,
            self._sources,
            now=now,
            cron_seen=state.cron_seen,
            since=since,
            rested=last.ended_at if last else None,
            tau_runs={state.tau_runs.champion: state.tau_runs.runs} if state.tau_runs else None,
            bases={base.version: base for base in state.bases},
            absence=self._why_absent(),
        )
        run = self._due(decision, now)  # before the moment counts as dealt with: sources may be away
        state.run = run
        self._count_tau_runs(decision)
        if decision.base is not None:
            state.keep_base(decision.base)
        self._see(decision.cron_seen, decision.skipped, decision.news, f"due: {run.why}" if run else None)
        if run is not None:
            return self._follow(run)
        coming = next_moment(triggers, now)
        until_then = (coming - now).total_seconds() if coming else self.config.look_s
        return min(self.config.look_s, max(until_then, 0.0))

    def _count_tau_runs(self, decision: Decision) -> None:
        """Of the champion of now; say once for each that live tau rests longer after it."""
        counted = self.state.tau_runs
        if decision.champion is not None:
            runs = counted.runs if counted and counted.champion == decision.champion else 0
            self.state.tau_runs = TauRuns(champion=decision.champion, runs=runs + 1)
        elif decision.resting and counted and not counted.told:
            counted.told = True
            self._say(decision.resting)

    def _due(self, decision: Decision, now: datetime) -> Run | None:
        """The run that a decision starts."""
        if decision.until is None:
            return None
        window = TrafficWindow(since=self._sources.begins(), until=decision.until).id
        return Run(
            window=window, until=decision.until, why=decision.why, started_at=now, submit_at=now,
            submission_id=f"redistill-{window}",
        )  # fmt: skip

    def _why_absent(self) -> str:
        """Why moments were missed, if some were: nobody was there, or looks failed."""
        reasons = [self._absence] if self.state.cron_seen < self._begun else []
        reasons += [f"{HELD_UP}: {self._trouble}"] if self._trouble else []
        return ", then ".join(reasons) or HELD_UP

    def _follow(self, run: Run) -> float:
        """See to it that the run goes on, and to its end."""
        if self._unsaved:
            self._save()  # before anything is submitted: whoever comes back asks for this id
        now, config = self._now(), self.config
        attempt = latest_attempt(self._jobs, run.window, config.attempts)
        self._tell_failures(run, attempt, now)
        run.submission_id = attempt.submission_id
        if attempt.state in ("succeeded", "given up"):
            return self._end(run, now, "succeeded" if attempt.state == "succeeded" else "given up")
        if (now - run.started_at).total_seconds() > config.max_run_s:
            return self._give_up_late(run, now)
        if attempt.state == "to be submitted" and now >= run.submit_at:
            submit_once(self._jobs, attempt.submission_id, config.command(run.window))
            self._say(f"submitted {attempt.submission_id}")
        why = f"{run.submission_id} was going on"
        decision = pass_over(config.triggers, now=now, cron_seen=self.state.cron_seen, why=why)
        self._see(decision.cron_seen, decision.skipped)
        return config.follow_s

    def _tell_failures(self, run: Run, attempt: Attempt, now: datetime) -> None:
        for failure in attempt.failures[run.failures :]:
            self._say(failure)
            run.submit_at = now + timedelta(seconds=self.config.retry_s * len(attempt.failures))
        run.failures = len(attempt.failures)

    def _give_up_late(self, run: Run, now: datetime) -> float:
        hours = self.config.max_run_s / 3600
        self._say(f"{run.submission_id} took more than {hours:g} hours and is stopped")
        try:
            self._jobs.stop(run.submission_id)
        except JobServerError as error:
            self._say(f"it could not be stopped: {first_line(error)}")
        return self._end(run, now, "given up")

    def _end(self, run: Run, now: datetime, result: Literal["succeeded", "given up"]) -> float:
        why = f"{run.submission_id} was going on"
        decision = pass_over(self.config.triggers, now=now, cron_seen=self.state.cron_seen, why=why)
        self.state.last = Outcome(
            window=run.window, until=run.until, submission_id=run.submission_id, result=result,
            started_at=run.started_at, ended_at=now,
        )  # fmt: skip
        self.state.run = None
        if result == "succeeded":
            self._say(f"{run.submission_id} succeeded")
        else:
            self._say(f"window {run.window} is given up; its traffic goes into the next one")
        self._see(decision.cron_seen, decision.skipped)
        return 0.0

    def _see(self, cron_seen: datetime, *told: str | None) -> None:
        """Moments up to there are dealt with, and what there is to tell is said: all in one write, so that it is once.

        Where nothing was said no moment came, and the file may go on with the older time.
        """
        for text in told:
            if text:
                self._say(text)
        self.state.cron_seen = cron_seen
        if self._unsaved:
            self._save()

    def _say(self, text: str) -> None:
        self._out(text)
        self.state.said = [*self.state.said, Said(at=self._now(), text=text)][-SAID:]
        self._unsaved = True

    def _save(self) -> None:
        self.state.save(self._folder)
        self._unsaved = False
