"""Versions of the rollout schema: 1 as it has always been, 2 where features are int8; both are read by all stages."""

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines.feature_codec import encode_features
from pipelines.rollout_index import training_sequence
from pipelines.rollout_schema import RolloutMetadata, schema_version_of
from pipelines.rollout_store import RolloutError, RolloutStore, iter_rollouts, open_rollouts, shard_name
from pipelines.training_data import open_sets
from tests.pipelines.test_rollout_store import METADATA, PLAN, files, rollout

METADATA_2 = replace(METADATA, schema_version=2)
README = Path(__file__).parents[2] / "README.md"


def write_set(folder: Path, dtype: str, rows: int = 6) -> Path:
    """Rows of 2 taps of width 3, in two shards."""
    metadata = replace(METADATA, schema_version=schema_version_of(dtype))
    store = RolloutStore(str(folder), features_dtype=dtype)
    store.begin(PLAN | {"features_dtype": dtype})
    half = rows // 2
    records = [
        store.write_shard(shard_name(i, 2), [rollout(i * half + j) for j in range(half)], metadata) for i in range(2)
    ]
    store.finish(PLAN | {"features_dtype": dtype}, metadata, records, [])
    return folder


def write_version_1(folder: Path) -> list[np.ndarray]:
    """A set as the first release wrote it, column by column, without a line of today's code; returns its features."""
    schema = pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("category", pa.string(), nullable=False),
            pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
            pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
            pa.field("loss_mask", pa.list_(pa.int8()), nullable=False),
            pa.field("finish_reason", pa.string(), nullable=False),
            pa.field("temperature", pa.float64(), nullable=False),
            pa.field("top_p", pa.float64(), nullable=False),
            pa.field("top_k", pa.int32(), nullable=False),
            pa.field("seed", pa.int64(), nullable=False),
            pa.field("max_new_tokens", pa.int32(), nullable=False),
            pa.field("features", pa.large_binary()),
            pa.field("features_dtype", pa.string()),
            pa.field("features_shape", pa.list_(pa.int32())),
        ]
    )
    features = [np.arange(24, dtype="<f4").reshape(4, 6) - i for i in range(2)]
    rows = [
        {
            "id": f"old-{i}", "category": "math", "prompt_ids": [1, 2], "response_ids": [3, 4, 5],
            "loss_mask": [0, 0, 1, 1, 1], "finish_reason": "stop", "temperature": 0.0, "top_p": 1.0, "top_k": 0,
            "seed": i, "max_new_tokens": 8, "features": features[i].tobytes(), "features_dtype": "float32",
            "features_shape": [4, 6],
        }
        for i in range(2)
    ]  # fmt: skip
    origin = {
        "target": "toy", "target_fingerprint": "f" * 32, "tokenizer_hash": "t" * 32, "chat_template_hash": "c" * 32,
        "target_layer_ids": [0, 1], "schema_version": 1, "code_version": "0.1.0",
    }  # fmt: skip
    texts = {f"draftloop.{name}": v if isinstance(v, str) else json.dumps(v) for name, v in origin.items()}
    folder.mkdir()
    name = "part-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=schema.with_metadata(texts)), folder / name)
    data = (folder / name).read_bytes()
    totals = {"rows": 2, "prompt_tokens": 4, "response_tokens": 6, "bytes": len(data)}
    shard = {"name": name, "sha256": hashlib.sha256(data).hexdigest(), "rejected": []} | totals
    plan = {"temperature": 0.0}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "manifest.json").write_text(
        json.dumps(origin | totals | {"rejected": 0, "config": plan, "shards": [shard]})
    )
    return features


def test_version_1_is_still_read_and_trained_on(tmp_path: Path):
    features = write_version_1(tmp_path / "old")
    rollouts = open_rollouts(str(tmp_path / "old"))
    rollouts.check()
    for row, expected in zip(rollouts, features, strict=True):
        assert row.features_TF is not None
        assert row.features_TF.numpy().tolist() == expected.tolist()
    sequences = [training_sequence(row) for rollouts in open_sets([str(tmp_path / "old")]) for row in rollouts]
    assert [s.ids.tolist() for s in sequences] == [[1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_only_int8_raises_the_version(dtype, tmp_path: Path):
    """Older code refuses any other version than 1 by the manifest: it must not be kept from what it can read."""
    write_set(tmp_path / "plain", dtype)
    assert json.loads((tmp_path / "plain" / "manifest.json").read_text())["schema_version"] == 1
    schema = pq.read_schema(tmp_path / "plain" / shard_name(0, 2))
    assert "features_scale" not in schema.names
    assert schema.metadata[b"draftloop.schema_version"] == b"1"
    write_set(tmp_path / "int8", "int8")
    assert json.loads((tmp_path / "int8" / "manifest.json").read_text())["schema_version"] == 2
    assert pq.read_schema(tmp_path / "int8" / shard_name(0, 2)).metadata[b"draftloop.schema_version"] == b"2"


def test_code_that_knows_version_1_only_refuses_version_2_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_set(tmp_path, "int8")
    monkeypatch.setattr("pipelines.rollout_manifest.READABLE_VERSIONS", (1,))
    with pytest.raises(RolloutError, match="schema version 2, known are 1; update") as caught:
        open_rollouts(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_int8_rows_come_back_within_half_a_scale_and_bfloat16_s_rounding(tmp_path: Path):
    write_set(tmp_path, "int8")
    for i, row in enumerate(iter_rollouts(str(tmp_path))):
        original = rollout(i).features_TF.float()
        scale = original.unflatten(1, (2, 3)).abs().amax(-1, keepdim=True) / 127
        error = (row.features_TF.float() - original).unflatten(1, (2, 3)).abs()
        rounding = row.features_TF.float().unflatten(1, (2, 3)).abs() * 2**-8  # of 8 significant bits
        assert bool((error <= 0.50001 * scale + rounding).all())
        assert bool((error > 0).any()), "these are the original features, not quantised ones"
        assert row.features_TF.dtype == torch.bfloat16


def test_each_tap_has_its_own_scale(tmp_path: Path):
    """The store takes the number of taps from the metadata."""
    store, row = RolloutStore(str(tmp_path), features_dtype="int8"), rollout(0)
    row.features_TF = torch.tensor([[1e4, 2e4, 0, 1e-4, 2e-4, 0]] * 6)
    store.write_shard(shard_name(0, 1), [row], METADATA_2)
    stored = pq.read_table(tmp_path / shard_name(0, 1)).to_pylist()[0]
    assert np.frombuffer(stored["features"], "i1").reshape(6, 6)[0].tolist() == [64, 127, 0, 64, 127, 0]
    scales = np.frombuffer(stored["features_scale"], "<f4").reshape(6, 2)
    np.testing.assert_allclose(scales, [[2e4 / 127, 2e-4 / 127]] * 6, rtol=1e-6)
    assert (stored["features_dtype"], stored["features_shape"]) == ("int8", [6, 6])


def test_equal_rows_give_equal_int8_shards(tmp_path: Path):
    write_set(tmp_path / "a", "int8")
    write_set(tmp_path / "b", "int8")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_row_without_features_fits_among_int8_rows(tmp_path: Path):
    store, bare = RolloutStore(str(tmp_path), features_dtype="int8"), rollout(1)
    bare.features_TF = None
    store.begin(PLAN)
    record = store.write_shard(shard_name(0, 1), [rollout(0), bare], METADATA_2)
    store.finish(PLAN, METADATA_2, [record], [])
    assert [r.features_TF is None for r in iter_rollouts(str(tmp_path))] == [False, True]


def test_training_reads_int8_beside_bfloat16(tmp_path: Path):
    sets = [str(write_set(tmp_path / dtype, dtype)) for dtype in ("bfloat16", "int8")]
    sequences = [training_sequence(row) for rollouts in open_sets(sets) for row in rollouts]
    assert len(sequences) == 12
    for exact, rounded in zip(sequences[:6], sequences[6:], strict=True):
        assert torch.equal(exact.ids, rounded.ids)
        torch.testing.assert_close(exact.features, rounded.features, rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_the_readme_s_lines_read_features_with_numpy_alone(dtype, tmp_path: Path):
    write_set(tmp_path / "rollouts", dtype)
    (snippet,) = [b for b in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "features_scale" in b]
    script = tmp_path / "read.py"
    script.write_text(
        snippet + "import sys\nassert not {'torch', 'ray', 'pipelines'} & set(sys.modules)\n"
        "assert features.dtype == np.float32\nnp.save('features.npy', features)\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "row-0 [100, 100, 100]" in done.stdout
    read, original = np.load(tmp_path / "features.npy"), rollout(0).features_TF.float()
    assert read.shape == (6, 6)
    if dtype != "int8":
        assert read.tolist() == original.tolist()
        return
    scales = np.frombuffer(encode_features(original, "int8", taps=2).scale, "<f4").reshape(6, 2).repeat(3, axis=1)
    assert (np.abs(read - original.numpy()) <= scales * 0.50001).all()


def test_metadata_survive_both_versions(tmp_path: Path):
    write_set(tmp_path, "int8")
    assert open_rollouts(str(tmp_path)).metadata == METADATA_2 == RolloutMetadata.from_json(METADATA_2.as_json())
