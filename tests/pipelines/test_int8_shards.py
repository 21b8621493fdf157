"""What the actor of generate stores with --features-dtype: the engine's features, sound ones only, then quantised."""

from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from drafters.target import load_target, target_fingerprint
from pipelines.feature_codec import encode_features
from pipelines.generate_config import GenerateConfig
from pipelines.prompts import PromptRow
from pipelines.rollout_schema import RolloutMetadata, schema_version_of
from pipelines.rollout_store import RolloutStore, ShardRecord, shard_name
from pipelines.shard_generator import ShardContext, ShardGenerator, shard_item

NAME = shard_name(0, 1)
PROMPTS = [PromptRow(f"r{i}", [65 + i, 66, 67], "toy", i + 1) for i in range(3)]


def make(folder: Path, target: Path, dtype: str, kind: type[ShardGenerator] = ShardGenerator) -> ShardRecord:
    """One shard of three rows, by an actor without Ray."""
    config = GenerateConfig(
        target=str(target), features_dtype=dtype, target_layer_ids=(0, 1), max_new_tokens=5, backend="torch",
        threads_per_actor=1,
    )  # fmt: skip
    metadata = RolloutMetadata(
        target=str(target), target_fingerprint=target_fingerprint(load_target(str(target)).path, (0, 1)),
        tokenizer_hash="t", chat_template_hash="c", target_layer_ids=(0, 1), schema_version=schema_version_of(dtype),
    )  # fmt: skip
    context = ShardContext(
        config=config, metadata=metadata, target=str(target), drafter=None, output=str(folder), max_len=64
    )
    RolloutStore(str(folder)).begin({})
    silent = SimpleNamespace(note=SimpleNamespace(remote=lambda *_: None))
    batch = {key: [value] for key, value in shard_item(NAME, PROMPTS).items()}
    (result,) = kind(context, silent)(batch)["result"]
    assert '"error"' not in result, result
    record = RolloutStore(str(folder)).record(NAME)
    assert record is not None
    return record


def stored(folder: Path) -> list[dict]:
    return pq.read_table(folder / NAME).to_pylist()


def test_the_engine_s_features_are_stored_in_each_dtype(tmp_path: Path, toy_target_dir: Path):
    for dtype in ("bfloat16", "float32", "int8"):
        make(tmp_path / dtype, toy_target_dir, dtype)
    for narrow, wide, int8 in zip(*(stored(tmp_path / d) for d in ("bfloat16", "float32", "int8")), strict=True):
        assert narrow["response_ids"] == wide["response_ids"] == int8["response_ids"]
        assert [row["features_dtype"] for row in (narrow, wide, int8)] == ["bfloat16", "float32", "int8"]
        shape = narrow["features_shape"]
        assert shape == wide["features_shape"] == int8["features_shape"] == [3 + 5 - 1, 2 * 32]
        features = torch.frombuffer(bytearray(wide["features"]), dtype=torch.float32).reshape(shape)
        assert features.bfloat16().view(torch.int16).numpy().tobytes() == narrow["features"]
        assert torch.equal(features.bfloat16().float(), features), "the engine keeps bfloat16: no digits to add"
        expected = encode_features(features, "int8", taps=2)
        assert (int8["features"], int8["features_scale"]) == (expected.data, expected.scale)


def test_equal_runs_give_equal_int8_shards(tmp_path: Path, toy_target_dir: Path):
    first, second = (make(tmp_path / name, toy_target_dir, "int8") for name in ("a", "b"))
    assert first.sha256 == second.sha256


class Overflows(ShardGenerator):
    """The second row's hidden states are not finite."""

    def _dialogues(self, engine, name, rows):
        for place, dialogue in super()._dialogues(engine, name, rows):
            if dialogue.row.id == "r1":
                dialogue.features_TF = dialogue.features_TF * torch.inf
            yield place, dialogue


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rows_that_are_not_finite_are_rejected_before_quantising(dtype, tmp_path: Path, toy_target_dir: Path):
    record = make(tmp_path, toy_target_dir, dtype, Overflows)
    reason = "the target's hidden states are not finite"
    assert record.rejected == [{"file": "", "line": 2, "kind": "hidden states not finite", "reason": reason}]
    assert [row["id"] for row in stored(tmp_path)] == ["r0", "r2"]
