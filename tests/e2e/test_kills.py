"""Drivers and workers killed at random moments: the same command goes on, and ends with an undisturbed run's bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
import ray

from drafters.registry import Registry
from pipelines.rollout_store import open_rollouts
from tests.toy_mtp import save_toy_drafter
from tests.toy_traffic import log_traffic

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.usefixtures("ray_cluster")]

ROWS, ROWS_PER_SHARD = 120, 4
SHARDS = ROWS // ROWS_PER_SHARD
DEADLINE_S = 150.0


class Command:
    """A command line in a process of its own, on the cluster that runs."""

    def __init__(self, *arguments: str, log: Path):
        self.log = log
        environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cluster.cli", *arguments], env=environment, stdout=stream, stderr=stream
            )

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that happens while the command runs."""
        deadline = time.monotonic() + DEADLINE_S
        while not reached():
            assert self._process.poll() is None, f"ended too early:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)

    def end(self) -> None:
        assert self._process.wait(timeout=DEADLINE_S) == 0, self.log.read_text()


@pytest.fixture
def moments() -> random.Random:
    """Where a run is disturbed; the seed is shown when a test fails."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed of the moments: {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, toy_target_dir: Path) -> Path:
    """Prompts, and the run files of both commands."""
    folder = tmp_path_factory.mktemp("kills")
    lines = [json.dumps({"id": f"r{i}", "prompt": f"{i} plus {i * 7} is"}) for i in range(ROWS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "generate.yaml").write_text(
        f"target: {toy_target_dir}\nprompts: {folder}/prompts.jsonl\nmax-new-tokens: 48\ntemperature: 0.8\nseed: 5\n"
        f"backend: torch\nrows-per-shard: {ROWS_PER_SHARD}\nnum-actors: '2'\ncpus-per-actor: 1\n"
    )
    (folder / "train.yaml").write_text(
        f"target: {toy_target_dir}\nrollouts: {folder}/undisturbed\nepochs: 8\nnum-draft-tokens: 3\n"
        "draft-vocab-size: 150\ntokens-per-step: 600\nsave-every-steps: 5\n"
    )
    return folder


@pytest.fixture(scope="module")
def undisturbed(work: Path) -> Path:
    """Rollouts."""
    output = work / "undisturbed"
    Command("generate", "--run", f"{work}/generate.yaml", "--output", str(output), log=work / "generate.log").end()
    return output


def checksums(folder: Path) -> dict[str, str]:
    return {shard.name: shard.sha256 for shard in open_rollouts(str(folder)).manifest.shards}


def test_generate_s_driver_killed_at_three_random_moments(work: Path, undisturbed: Path, moments: random.Random):
    """After a random number of shards in each third of the run, and a random time later."""
    output, log = work / "disturbed", work / "disturbed.log"
    arguments = ("generate", "--run", f"{work}/generate.yaml", "--output", str(output))
    for third in range(3):
        shards = moments.randrange(third * SHARDS // 3, (third + 1) * SHARDS // 3 - 2)
        command = Command(*arguments, log=log)
        command.until(lambda shards=shards: len(list(output.glob("*.parquet"))) >= max(1, shards))
        time.sleep(moments.random() * 0.1)
        command.kill()
    assert not (output / "manifest.json").exists()
    Command(*arguments, log=log).end()
    assert checksums(output) == checksums(undisturbed)
    open_rollouts(str(output)).check()
    assert sorted(p.name for p in output.iterdir()) == sorted(p.name for p in undisturbed.iterdir())


def steps_shown(output: Path) -> int:
    """Of a training run that is not over."""
    live = output.parent / f".{output.name}.training" / "live" / "metrics.jsonl"
    lines = live.read_text().splitlines() if live.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def test_train_s_driver_and_worker_killed_at_random_steps(work: Path, undisturbed: Path, moments: random.Random):
    arguments = ("train", "--run", f"{work}/train.yaml")
    whole = work / "whole" / "drafter"
    Command(*arguments, "--output", str(whole), log=work / "whole.log").end()
    last = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert last >= 40

    output, log = work / "killed" / "drafter", work / "killed.log"
    command = Command(*arguments, "--output", str(output), log=log)
    step = moments.randrange(6, last // 2)
    command.until(lambda: steps_shown(output) >= step)
    command.kill()
    command = Command(*arguments, "--output", str(output), log=log)
    before = set(train_workers())
    step = moments.randrange(step + 5, last - 5)
    command.until(lambda: steps_shown(output) >= step)
    workers = set(train_workers()) - before
    assert workers, "nothing to kill"
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    command.until(lambda: bool(set(train_workers()) - before - workers))  # it is replaced, by the same command
    command.end()
    assert (output / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not (output.parent / ".drafter.training").exists()


def train_workers() -> list[int]:
    """Processes of Ray Train's workers."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if "RayTrainWorker" in " ".join(p.info["cmdline"] or [])]


def redistilled(folder: Path) -> dict:
    """How the only window of a folder ended; that it and the registry agree is checked."""
    (report_file,) = (folder / "work" / "windows").glob("*/report.json")
    report, registry = json.loads(report_file.read_text()), Registry(str(folder / "registry"))
    promotions = [change for change in registry.history() if change.version == report["window"]]
    assert [version.name for version in registry.versions()].count(report["window"]) == 1
    assert len(promotions) == (report["verdict"] == "promoted")
    assert (registry.verdict(report["window"]) is None) == (report["verdict"] == "promoted")
    return report


def test_redistill_killed_in_each_of_its_stages(work: Path, toy_target_dir: Path, moments: random.Random):
    """Selecting, reading, training, gate: killed once in each, by the file that the stage before leaves."""
    folder, log = work / "redistill", work / "redistill.log"
    since = datetime(2025, 11, 30, 12, tzinfo=UTC)
    log_traffic(str(folder / "traffic"), toy_target_dir, [f"{i} plus {7 * i} is" for i in range(120)], since)
    registry = Registry(str(folder / "registry"))
    first = registry.publish(save_toy_drafter(folder / "first", toy_target_dir))
    registry.promote(first.name, by="test", why="to begin with", expected=None)
    (folder / "regression.jsonl").write_text(
        "\n".join(json.dumps({"id": f"g{i}", "category": "toy", "prompt": f"{i} minus {i} is"}) for i in range(8))
    )
    arguments = (
        "redistill", "--target", str(toy_target_dir), "--traffic", f"{folder}/traffic", "--registry",
        f"{folder}/registry", "--work", f"{folder}/work", "--until", "2025-11-30T12:10:00+00:00", "--min-rows", "20",
        "--held-out", "0.3", "--regression", f"{folder}/regression.jsonl", "--epochs", "20", "--max-new-tokens", "32",
        "--speed-tolerance", "0.99",
    )  # fmt: skip
    stages = ("selection.json", "rollouts/plan.json", "rollouts/manifest.json", "training.json", "gate-*.json")
    for reached in stages:
        command = Command(*arguments, log=log)
        command.until(lambda reached=reached: bool(list((folder / "work" / "windows").glob(f"*/{reached}"))))
        time.sleep(moments.random() * 0.2)
        command.kill()
    one = Command(*arguments, log=log)
    one.end()
    report = redistilled(folder)
    assert (report["verdict"], report["counts"]["read"]) == ("promoted", 120), report["why"]
    again = Command(*arguments, log=log)
    again.end()
    assert redistilled(folder) == report
