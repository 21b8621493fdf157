"""A window's run is submitted once, followed, tried again; Ray's client is asked with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray.job_submission

from cluster import job_submission
from cluster.job_submission import Job, JobServerError, RayJobs, latest_attempt, submit_once

WINDOW = "20261130T120000Z-20261130T180000Z"
FIRST, SECOND, THIRD = (f"redistill-{WINDOW}{suffix}" for suffix in ("", "-2", "-3"))


class FakeJobs:
    """A job server in memory: status by id, and what was submitted, in order."""

    def __init__(self, **jobs: str) -> None:
        self.jobs = {name: Job(status=status) for name, status in jobs.items()}
        self.submitted: list[tuple[str, list[str]]] = []
        self.stopped: list[str] = []
        self.away = False

    def set(self, name: str, status: str, message: str = "") -> None:
        self.jobs[name] = Job(status=status, message=message)

    def job(self, submission_id: str) -> Job | None:
        if self.away:
            raise JobServerError("no answer")
        return self.jobs.get(submission_id)

    def submit(self, submission_id: str, command: Sequence[str]) -> None:
        if self.away:
            raise JobServerError("no answer")
        if submission_id in self.jobs:
            raise JobServerError(f"Job with submission_id {submission_id} already exists")
        self.submitted.append((submission_id, list(command)))
        self.set(submission_id, "PENDING")

    def stop(self, submission_id: str) -> None:
        self.stopped.append(submission_id)


@pytest.mark.parametrize(
    ("jobs", "state", "name", "failures"),
    [
        ({}, "to be submitted", FIRST, 0),
        ({FIRST: "PENDING"}, "running", FIRST, 0),
        ({FIRST: "RUNNING"}, "running", FIRST, 0),
        ({FIRST: "SUCCEEDED"}, "succeeded", FIRST, 0),
        ({FIRST: "FAILED"}, "to be submitted", SECOND, 1),
        ({FIRST: "STOPPED", SECOND: "RUNNING"}, "running", SECOND, 1),
        ({FIRST: "FAILED", SECOND: "SUCCEEDED"}, "succeeded", SECOND, 1),
        ({FIRST: "FAILED", SECOND: "STOPPED"}, "to be submitted", THIRD, 2),
        ({FIRST: "FAILED", SECOND: "FAILED", THIRD: "FAILED"}, "given up", THIRD, 3),
    ],
)
def test_what_a_window_s_run_has_come_to(jobs: dict[str, str], state: str, name: str, failures: int):
    attempt = latest_attempt(FakeJobs(**jobs), WINDOW, attempts=3)
    assert (attempt.state, attempt.submission_id, len(attempt.failures)) == (state, name, failures)


def test_an_id_that_another_submitted_first_is_as_good(monkeypatch: pytest.MonkeyPatch):
    jobs = FakeJobs(**{FIRST: "RUNNING"})
    submit_once(jobs, FIRST, ["x"])
    assert jobs.submitted == []

    def refuse(submission_id: str, command: Sequence[str]) -> None:
        raise JobServerError("no agent")

    monkeypatch.setattr(jobs, "submit", refuse)
    with pytest.raises(JobServerError, match="no agent"):
        submit_once(jobs, SECOND, ["x"])


class FakeClient:
    """What `JobSubmissionClient` does, by the words of Ray 2.60."""

    calls: list[dict[str, Any]]
    hangs = threading.Event()

    def __init__(self, address: str | None) -> None:
        if address == "nowhere":
            raise ConnectionError("Failed to connect to Ray at address: nowhere.\nMore of it")

    def get_job_info(self, submission_id: str) -> Any:
        if submission_id == "hangs":
            self.hangs.wait(30)
        if submission_id == "unknown":
            raise RuntimeError("Request failed with status code 404: Job unknown does not exist.")
        if submission_id == "broken":
            raise RuntimeError("Request failed with status code 500: Traceback")
        message = "Job entrypoint command failed with exit code 1, last available logs:\n\nerror: no rows\n"
        return SimpleNamespace(status=ray.job_submission.JobStatus.FAILED, message=message)

    def submit_job(self, **options: Any) -> None:
        self.calls.append(options)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    FakeClient.calls = []
    FakeClient.hangs = threading.Event()
    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", FakeClient)
    return FakeClient


def test_ray_s_answers_become_jobs(client: type[FakeClient]):
    jobs = RayJobs("http://head:8265", {"env_vars": {"A": "b"}})
    assert jobs.job("failed") == Job(status="FAILED", message="error: no rows")
    assert jobs.job("unknown") is None
    with pytest.raises(JobServerError, match="status code 500"):
        jobs.job("broken")
    jobs.submit(FIRST, ["python", "-m", "x", "--work", "a folder"])
    assert client.calls == [
        {
            "entrypoint": "python -m x --work 'a folder'",
            "submission_id": FIRST,
            "runtime_env": {"env_vars": {"A": "b"}},
        }
    ]


def test_a_server_that_hangs_or_is_away_is_told_in_one_line(client: type[FakeClient]):
    with pytest.raises(JobServerError, match="no answer for 0 s"):
        RayJobs("http://head:8265", answer_s=0.05).job("hangs")
    client.hangs.set()
    with pytest.raises(JobServerError) as told:
        RayJobs("nowhere").job("x")
    assert str(told.value) == "Ray's job server at nowhere: Failed to connect to Ray at address: nowhere."


def asking() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "job server"}


def test_a_server_that_hangs_is_not_asked_again_and_again(client: type[FakeClient], monkeypatch: pytest.MonkeyPatch):
    jobs, others = RayJobs("http://head:8265", answer_s=0.05), asking()
    with pytest.raises(JobServerError, match="no answer"):
        jobs.job("hangs")
    (waiting,) = asking() - others
    for _ in range(3):
        with pytest.raises(JobServerError, match="no answer"):
            jobs.submit(FIRST, ["x"])
    assert (client.calls, asking() - others) == ([], {waiting})
    monkeypatch.setattr(job_submission, "RENOUNCED_S", 0.0)
    jobs._answer_s = 30.0  # of a busy machine
    jobs.submit(FIRST, ["x"])
    assert len(client.calls) == 1, "a connection whose other end is gone never answers"
    client.hangs.set()
    waiting.join(30)
