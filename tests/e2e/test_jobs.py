"""`ray job submit` of generate and train on a cluster of three nodes, and a node that dies under generate."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_actors

from benchmarks.serve_cluster import free_port, quick_to_notice_deaths
from cluster.job_submission import Job, RayJobs, submit_once
from pipelines.rollout_store import open_rollouts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

DEADLINE_S = 240.0


class Jobs:
    """A cluster of a head and two nodes for targets, and its job server."""

    def __init__(self) -> None:
        port = free_port()
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 4,
                "include_dashboard": True,
                "dashboard_port": port,
                "dashboard_agent_listen_port": free_port(),  # it starts jobs; another cluster here may have the usual
            },
        )
        self.address = f"http://127.0.0.1:{port}"
        try:
            self.target_nodes = [self._target_node(), self._target_node()]
            self.cluster.wait_for_nodes(timeout=60)
            self.client = JobSubmissionClient(self.address)
        except BaseException:
            self.cluster.shutdown()
            raise

    def _target_node(self) -> Any:
        return self.cluster.add_node(num_cpus=2, resources={"target_node": 2})

    def submit(self, *arguments: str, folder: Path) -> str:
        command = " ".join([sys.executable, "-m", "cluster.cli", *arguments])
        environment = {"working_dir": str(folder), "env_vars": {"PYTHONPATH": os.getcwd()}}
        return str(self.client.submit_job(entrypoint=command, runtime_env=environment))

    def wait(self, job: str) -> str:
        """The job's output. Fails if the job does, or takes too long."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            status = self.client.get_job_status(job)
            if status.is_terminal():
                logs = str(self.client.get_job_logs(job))
                assert status == JobStatus.SUCCEEDED, logs
                return logs
            time.sleep(0.5)
        self.client.stop_job(job)
        raise AssertionError(f"the job took more than {DEADLINE_S:.0f} s:\n{self.client.get_job_logs(job)}")

    def node_with_an_actor(self, job: str) -> Any:
        """The target node on which an actor of the job lives, with an engine in it."""
        driver = self.client.get_job_info(job).driver_info
        assert driver is not None
        alive = list_actors(self.address, filters=[("job_id", "=", driver.id), ("state", "=", "ALIVE")])
        hosts = [actor.node_id for actor in alive if "ShardGenerator" in actor.class_name]
        return next(node for node in self.target_nodes if node.node_id in hosts)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with quick_to_notice_deaths():
        jobs = Jobs()
        yield jobs
        jobs.cluster.shutdown()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, toy_target_dir: Path) -> Path:
    """Prompts, and run files of both jobs."""
    folder = tmp_path_factory.mktemp("jobs")
    lines = [json.dumps({"id": f"r{i}", "prompt": f"{i} plus {i * 7} is"}) for i in range(48)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "generate.yaml").write_text(
        f"target: {toy_target_dir}\nprompts: prompts.jsonl\noutput: {folder}/rollouts\nmax-new-tokens: 300\nbatch: 2\n"
        "backend: torch\nrows-per-shard: 4\nnum-actors: '2'\ncpus-per-actor: 1\nresource: [target_node=1]\n"
    )
    (folder / "train.yaml").write_text(
        f"target: {toy_target_dir}\nrollouts: {folder}/rollouts\noutput: {folder}/drafter\nepochs: 0.3\n"
        "num-draft-tokens: 3\ndraft-vocab-size: 150\ntokens-per-step: 400\nnum-workers: '2'\n"
    )
    return folder


def test_both_jobs_end_with_their_tables(jobs: Jobs, work: Path):
    made = jobs.wait(jobs.submit("generate", "--run", "generate.yaml", folder=work))
    assert "48 (0 rejected)" in made
    trained = jobs.wait(jobs.submit("train", "--run", "train.yaml", folder=work))
    assert "expected tau" in trained
    assert (work / "drafter" / "model.safetensors").exists()


def test_a_node_that_dies_costs_nothing(jobs: Jobs, work: Path):
    """Against the rollouts of the test before; the job is long enough to be at work when its actor's node dies."""
    disturbed = f"{work}/disturbed"
    arguments = ("generate", "--run", "generate.yaml", "--output")
    job = jobs.submit(*arguments, disturbed, folder=work)
    deadline = time.monotonic() + DEADLINE_S
    while not list(Path(disturbed).glob("*.parquet")):
        assert time.monotonic() < deadline
        assert not jobs.client.get_job_status(job).is_terminal(), jobs.client.get_job_logs(job)
        time.sleep(0.05)
    jobs.cluster.remove_node(jobs.node_with_an_actor(job), allow_graceful=False)
    assert not jobs.client.get_job_status(job).is_terminal(), "the job was over before its node went"
    jobs.wait(job)
    before, after = (open_rollouts(uri).manifest.shards for uri in (f"{work}/rollouts", disturbed))
    assert [s.sha256 for s in after] == [s.sha256 for s in before]


def test_a_job_server_s_own_words_for_a_job(jobs: Jobs):
    """What the schedule goes by: an id that nobody submitted, one that exists, why a job failed."""
    server = RayJobs(jobs.address)
    assert server.job("redistill-x") is None
    command = [sys.executable, "-c", "raise SystemExit('error: no rows; log more')"]
    for _ in range(2):
        submit_once(server, "redistill-x", command)
    deadline = time.monotonic() + DEADLINE_S
    while (job := server.job("redistill-x")) is None or job.status in ("PENDING", "RUNNING"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert job == Job(status="FAILED", message="error: no rows; log more")
