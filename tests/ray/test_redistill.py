"""Traffic, registry and rollouts on a real S3 server: one window from the log to the verdict, with every real stage."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from drafters.registry import Registry
from pipelines.gate import GateConfig
from pipelines.redistill import next_window, redistill
from pipelines.redistill_config import RedistillConfig
from pipelines.rollout_store import open_rollouts
from pipelines.step_config import StepConfig
from pipelines.traffic_window import WindowConfig
from tests.in_process_training import in_process
from tests.s3_server import BUCKET, S3Server
from tests.toy_mtp import save_toy_drafter
from tests.toy_traffic import log_traffic

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
]

SINCE = datetime(2025, 11, 30, 12, tzinfo=UTC)
PROMPTS = [f"{i} plus {7 * i} is" for i in range(60)]


def test_a_window_on_s3_becomes_a_champion_that_beats_its_parent(
    s3_server: S3Server, toy_target_dir: Path, tmp_path: Path
):
    """The parent is untrained, so that a few steps on the traffic must be better; S is left to luck here."""
    root = f"s3://{BUCKET}/loop"
    log_traffic(f"{root}/traffic", toy_target_dir, PROMPTS, SINCE)
    registry = Registry(f"{root}/registry")
    first = registry.publish(save_toy_drafter(tmp_path / "first", toy_target_dir))
    registry.promote(first.name, by="test", why="to begin with", expected=None)
    (tmp_path / "regression.jsonl").write_text(
        "\n".join(json.dumps({"id": f"g{i}", "category": "toy", "prompt": f"{i} minus {i} is"}) for i in range(8))
    )
    config = RedistillConfig(
        target=str(toy_target_dir),
        traffic=f"{root}/traffic",
        registry=f"{root}/registry",
        work=f"{root}/work",
        until=SINCE + timedelta(minutes=2),
        min_rows=20,
        regression=(str(tmp_path / "regression.jsonl"),),
        window=WindowConfig(held_out=0.35, max_repeated_share=1.0),
        steps=StepConfig(epochs=30, tokens_per_step=600, learning_rate=1e-2, anchors_per_sequence=8, evaluations=1),
        held_out_limit=32,
        gate=GateConfig(max_new_tokens=16, backend="torch", most_speed_tolerance=0.99, speed_tolerance=0.99),
    )
    said: list[str] = []
    with in_process(tmp_path):
        report = redistill(config, said.append)
    assert (report.verdict, report.previous) == ("promoted", first.name), report.why
    assert (report.counts["read"], report.counts["training"] + report.counts["held_out"]) == (60, 60)
    champion = registry.champion()
    assert champion is not None
    assert champion.version == report.window == report.version
    version = registry.version(report.window)
    assert version.parent == first.name
    assert version.evaluation["gate"]["passed"]
    assert open_rollouts(f"{root}/work/windows/{report.window}/rollouts").manifest.rows == report.counts["training"]
    assert any("challenger" in line or "gate" in line for line in said)
    assert redistill(config) == replace(report, repeated=True)
    assert len(registry.history()) == 2
    assert next_window(replace(config, until=None)).since == config.until
