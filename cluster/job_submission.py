"""A window's redistillation as a job of Ray: submitted once, followed, submitted again when it failed.

The submission id comes from the window, and Ray rejects an id that it has seen: that makes it the idempotency key. Who
comes back after a restart of its own, or of the cluster, asks for the same id and goes on.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from drafters.remote import first_line

T = TypeVar("T")

ANSWER_S = 60.0  # that the job server may take for an answer
RENOUNCED_S = 600.0  # a question that is older than this will not be answered any more


class JobServerError(RuntimeError):
    """The job server gives no answer, or refuses; one line."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the job server says of a job."""

    status: str  # PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED
    message: str = ""


class JobServer(Protocol):
    """The part of Ray's job API that is needed. Every call answers within a time, or raises JobServerError."""

    def job(self, submission_id: str) -> Job | None:
        """None: it knows no such job."""

    def submit(self, submission_id: str, command: Sequence[str]) -> None:
        """Raises JobServerError also if the id exists."""

    def stop(self, submission_id: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The latest try of a window's run."""

    state: Literal["to be submitted", "running", "succeeded", "given up"]
    submission_id: str
    number: int  # from 1
    failures: tuple[str, ...] = ()  # of the tries before, and of this one if it is given up; one line each


def latest_attempt(jobs: JobServer, window: str, attempts: int) -> Attempt:
    """How far the window's run is: one that failed or was stopped is tried again, `attempts` times in all."""
    failures: list[str] = []
    for number in range(1, attempts + 1):
        name = f"redistill-{window}" + (f"-{number}" if number > 1 else "")
        job = jobs.job(name)
        if job is not None and job.status in ("FAILED", "STOPPED"):
            failures.append(f"{name} {job.status.lower()}" + (f": {job.message}" if job.message else ""))
            continue
        going = "succeeded" if job is not None and job.status == "SUCCEEDED" else "running"
        state: Any = "to be submitted" if job is None else going
        return Attempt(state=state, submission_id=name, number=number, failures=tuple(failures))
    return Attempt(state="given up", submission_id=name, number=attempts, failures=tuple(failures))


def submit_once(jobs: JobServer, submission_id: str, command: Sequence[str]) -> None:
    """Submit it; that it is there already is as good. Raises JobServerError."""
    try:
        jobs.submit(submission_id, command)
    except JobServerError:
        if jobs.job(submission_id) is None:  # else another was faster, or only the answer got lost
            raise


_ENTRYPOINT = "Running entrypoint for job"  # the first line of a job's log


class RayJobs:
    """Ray's job server, asked with a deadline. `address`: its own, or the cluster's; None: as Ray finds it.

    `runtime_env` is that of the jobs. Raises JobServerError if no server answers.
    """

    def __init__(self, address: str | None, runtime_env: Mapping[str, Any] | None = None, answer_s: float = ANSWER_S):
        self._address, self._runtime_env, self._answer_s = address, dict(runtime_env or {}), answer_s
        self._client: Any = None
        self._latest: tuple[threading.Thread | None, float] = (None, 0.0)  # question, and when it was asked

    @property
    def address(self) -> str:
        """http://head:8265"""
        return str(self._ask(lambda client: client.get_address()))

    def job(self, submission_id: str) -> Job | None:
        try:
            info = self._ask(lambda client: client.get_job_info(submission_id))
        except JobServerError as error:
            if "status code 404" in str(error):  # the only way in which the client tells
                return None
            raise
        message = _last_line(info.message or "")
        if message.startswith(_ENTRYPOINT):  # Ray read the log before the job's own words were in it
            message = _last_line(self._ask(lambda client: client.get_job_logs(submission_id)))
        return Job(status=str(info.status), message=message)

    def submit(self, submission_id: str, command: Sequence[str]) -> None:
        entrypoint, environment = shlex.join(command), self._runtime_env
        self._ask(
            lambda client: client.submit_job(
                entrypoint=entrypoint, submission_id=submission_id, runtime_env=environment
            )
        )

    def stop(self, submission_id: str) -> None:
        self._ask(lambda client: client.stop_job(submission_id))

    def _ask(self, question: Callable[[Any], T]) -> T:
        def ask() -> T:
            if self._client is None:
                from ray.job_submission import JobSubmissionClient

                self._client = JobSubmissionClient(self._address)
            return question(self._client)

        try:
            return self._within(ask)
        except (OSError, RuntimeError, ValueError) as error:  # what the client raises; requests' errors are OSErrors
            if not isinstance(error, RuntimeError):
                self._client = None  # the head may come back under another address
            where = self._address or os.environ.get("RAY_ADDRESS") or "this machine"
            raise JobServerError(f"Ray's job server at {where}: {first_line(error)}") from error

    def _within(self, operation: Callable[[], T]) -> T:
        """The operation's result. Raises TimeoutError: the client would wait for ever for a server that hangs.

        While a question is out nothing else is asked, so that a server that hangs costs one thread, not one a look. But
        a connection whose other end is gone never ends: after RENOUNCED_S the server is asked anew.
        """
        silent = f"no answer for {self._answer_s:.0f} s"
        out, begun = self._latest
        if out is not None and out.is_alive() and time.monotonic() - begun < RENOUNCED_S:
            raise TimeoutError(silent)
        found: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                found.append(operation())
            except BaseException as error:  # raised again below, in the caller's thread
                failed.append(error)

        thread = threading.Thread(target=run, name="job server", daemon=True)
        self._latest = thread, time.monotonic()
        thread.start()
        thread.join(self._answer_s)
        if thread.is_alive():
            raise TimeoutError(silent)
        if failed:
            raise failed[0]
        return found[0]


def _last_line(text: str) -> str:
    """What a job's message comes down to; Ray puts the log's last lines into it."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
