"""Online training takes the steps of offline training, and writes nothing but the drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelines.curve_point import CurvePoint
from pipelines.generate import GenerateConfig, generate
from pipelines.step_config import StepConfig
from pipelines.train import train
from pipelines.train_config import OnlineOptions, TrainConfig, TrainError
from tests.in_process_training import in_process

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, toy_target_dir: Path, ray_cluster: None) -> Path:
    """Rollouts of the same prompts with features and without."""
    folder = tmp_path_factory.mktemp("online")
    lines = [json.dumps({"id": f"r{i}", "prompt": f"{i} times {i * 3} is"}) for i in range(20)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    for name, with_features in (("whole", True), ("bare", False)):
        generate(
            GenerateConfig(
                target=str(toy_target_dir),
                prompts=str(folder / "prompts.jsonl"),
                output=str(folder / name),
                max_new_tokens=20,
                rows_per_shard=8,
                backend="torch",
                with_features=with_features,
                target_layer_ids=(0, 1) if with_features else None,
                cpus_per_actor=1,
            )
        )
    return folder


def config_of(work: Path, target: Path, rollouts: str, **changes) -> TrainConfig:
    return replace(
        TrainConfig(
            target=str(target),
            rollouts=(str(work / rollouts),),
            output=str(work / f"by-{rollouts}"),
            num_draft_tokens=3,
            draft_vocab_size=150,
            held_out=0.2,
            steps=StepConfig(epochs=4, tokens_per_step=160, anchors_per_sequence=8, evaluations=2, precision="float32"),
            threads_per_worker=1,
        ),
        **changes,
    )


def test_the_loss_curves_agree(work: Path, toy_target_dir: Path, tmp_path: Path):
    online = OnlineOptions(target_layer_ids=(0, 1), backend="torch", batch=4, threads_per_actor=1)
    before = sorted(p for p in work.rglob("*.parquet"))
    curves: dict[str, list[CurvePoint]] = {"whole": [], "bare": []}
    reports = {"bare": train(config_of(work, toy_target_dir, "bare", online=online), curves["bare"].append)}
    with in_process(tmp_path):
        reports["whole"] = train(config_of(work, toy_target_dir, "whole"), curves["whole"].append)
    assert reports["whole"].steps == reports["bare"].steps > 8
    assert [p.step for p in curves["whole"]] == [p.step for p in curves["bare"]]
    losses = {name: [p.loss for p in points] for name, points in curves.items()}
    assert losses["bare"] == pytest.approx(losses["whole"], rel=2e-3)  # features rounded to bfloat16 in another pass
    assert reports["bare"].parity_passed is not False
    assert sorted(p for p in work.rglob("*.parquet")) == before, "features were stored"
    one, other = (load_file(work / f"by-{name}" / "model.safetensors") for name in ("whole", "bare"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0.05, atol=5e-3)


def test_what_does_not_fit_is_refused_before_anything_starts(work: Path, toy_target_dir: Path):
    with pytest.raises(TrainError, match="have no features; generate them again with features, or train online"):
        train(config_of(work, toy_target_dir, "bare"))
    with pytest.raises(TrainError, match=r"target_layer_ids \[0, 7\] do not fit; give layers from 0 to 1"):
        train(config_of(work, toy_target_dir, "bare", online=OnlineOptions(target_layer_ids=(0, 7))))
