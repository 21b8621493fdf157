"""A whole run of generate with int8 features: its size is said, it is reused, and other options are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.generate import GenerateConfig, generate
from pipelines.rollout_index import training_sequence
from pipelines.rollout_inspect import InspectOptions, inspect_rollouts
from pipelines.rollout_store import RolloutError
from pipelines.training_data import open_sets

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_a_run_with_int8_features(tmp_path: Path, toy_target_dir: Path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"{i} plus"}) + "\n" for i in range(4)))
    config = GenerateConfig(
        target=str(toy_target_dir), prompts=str(prompts), output=str(tmp_path / "rollouts"), max_new_tokens=6,
        rows_per_shard=2, backend="torch", num_taps=2, cpus_per_actor=1, features_dtype="int8",
    )  # fmt: skip
    said = []
    generate(config, lambda progress: said.append(progress.message))
    # 6 bytes of ids and mask; 2 layers of 32 codes, and 2 scales
    assert any(message and "per token with features 78 B in int8 (134 B in bfloat16" in message for message in said)

    found = inspect_rollouts(config.output, InspectOptions(sample=0))
    assert (found.rows_read, found.damaged, found.config["features_dtype"]) == (4, {}, "int8")
    assert [(kind.dtype, kind.bytes_per_token) for kind in found.features] == [("int8", 72)]
    assert len([training_sequence(row) for rollouts in open_sets([config.output]) for row in rollouts]) == 4

    assert generate(config).shards_reused == 2
    with pytest.raises(RolloutError, match=r"features_dtype was 'int8', now 'bfloat16'.*use those"):
        generate(replace(config, features_dtype="bfloat16"))
