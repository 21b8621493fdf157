"""The prefill stage on a local Ray cluster: the bytes of an undisturbed run, whatever was killed on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from drafters.acceptance import Acceptance
from drafters.target import load_target
from pipelines import traffic_rollouts
from pipelines.rollout_store import open_rollouts, shard_name
from pipelines.shard_pool import GenerateProgress
from pipelines.traffic_prefill import TrafficPrefill
from pipelines.traffic_rollouts import TrafficRolloutsConfig, write_rollouts
from serving.engine.sampling import Sampling
from serving.traffic_schema import TrafficRow
from tests.pipelines.test_traffic_rollouts import files, make_here

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.usefixtures("ray_cluster")]


class DiesOnce(TrafficPrefill):
    """Kills its own process in the middle of the second shard, once."""

    def _readings(self, name, answers):
        marker = Path(self.context.output).parent / "killed"
        for number, reading in enumerate(super()._readings(name, answers)):
            if name == shard_name(1, 3) and number == 1 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield reading


def test_a_killed_actor_changes_no_byte(toy_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    rows = [
        TrafficRow(
            request_id=f"r{n}", arrived_at=n, prompt_ids=rng.integers(0, 256, 9), response_ids=rng.integers(0, 256, 20),
            finish_reason="length", sampling=Sampling(temperature=1.0), drafter_version=None, drafter_changed=False,
            placement="none", acceptance=Acceptance(),
        )
        for n in range(10)
    ]  # fmt: skip
    target = load_target(str(toy_target_dir))
    config = TrafficRolloutsConfig(
        target=str(toy_target_dir), target_layer_ids=(0, 1), backend="torch", rows_per_shard=4, batch=3,
        cpus_per_actor=1, stall_timeout_s=120,
    )  # fmt: skip
    seen: list[GenerateProgress] = []
    with monkeypatch.context() as patch:
        patch.setattr(traffic_rollouts, "TrafficPrefill", DiesOnce)
        write_rollouts(rows, target, str(tmp_path / "killed" / "set"), config, seen.append)
    assert (tmp_path / "killed" / "killed").exists()
    assert (seen[-1].rows_done, seen[-1].rows_total, seen[-1].response_tokens) == (10, 10, 200)
    assert [r.id for r in open_rollouts(str(tmp_path / "killed" / "set"))] == [f"r{n}" for n in range(10)]

    monkeypatch.setattr(traffic_rollouts, "make_shards", make_here)
    write_rollouts(rows, target, str(tmp_path / "undisturbed"), config)
    assert files(tmp_path / "killed" / "set") == files(tmp_path / "undisturbed")
