"""Rollout sets: readable with pyarrow alone, bit-exact features, whole files or none, one kind per folder."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.prompts import RejectedRow
from pipelines.rollout_schema import Rollout, RolloutMetadata
from pipelines.rollout_store import RolloutError, RolloutStore, iter_rollouts, open_rollouts, shard_name

METADATA = RolloutMetadata(
    target="toy",
    target_fingerprint="f" * 32,
    tokenizer_hash="t" * 32,
    chat_template_hash="c" * 32,
    target_layer_ids=(0, 1),
    code_version="0",
)
PLAN = {"target_fingerprint": "f" * 32, "temperature": 0.0, "seed": 3}


def rollout(number: int, prompt: int = 4, response: int = 3, dtype=torch.bfloat16) -> Rollout:
    generator = torch.Generator().manual_seed(number)
    features = torch.randn(prompt + response - 1, 6, generator=generator).to(dtype)
    return Rollout(
        id=f"row-{number}",
        category="math",
        prompt_ids=list(range(prompt)),
        response_ids=[100 + number] * response,
        finish_reason="stop",
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=-number,
        max_new_tokens=8,
        features_TF=features,
    )


def test_a_plan_that_nothing_was_made_with_ties_to_nothing(tmp_path: Path):
    """The mend that a refusal names (fewer tokens, say) must not be refused in turn."""
    other = PLAN | {"seed": 4}
    RolloutStore(str(tmp_path)).begin(PLAN)
    (tmp_path / "_work" / "killed.tmp").write_bytes(b"half")
    store = RolloutStore(str(tmp_path))
    store.begin(other)
    assert json.loads((tmp_path / "plan.json").read_text())["seed"] == 4
    store.write_shard(shard_name(0, 2), [rollout(0)], METADATA)
    with pytest.raises(RolloutError, match="begun with other options"):
        store.begin(PLAN)
    (tmp_path / shard_name(0, 2)).unlink()  # its record is left
    with pytest.raises(RolloutError, match="begun with other options"):
        store.begin(PLAN)


def write_set(folder: Path, shards: int = 3, rows: int = 4) -> RolloutStore:
    store = RolloutStore(str(folder))
    store.begin(PLAN)
    records = [
        store.write_shard(shard_name(i, shards), [rollout(i * rows + j) for j in range(rows)], METADATA)
        for i in range(shards)
    ]
    store.finish(PLAN, METADATA, records, [RejectedRow("p.jsonl", 9, "no text")])
    return store


def files(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def same(a: Rollout, b: Rollout) -> bool:
    left, right = vars(a) | {"features_TF": None}, vars(b) | {"features_TF": None}
    if left != right or (a.features_TF is None) != (b.features_TF is None):
        return False
    if a.features_TF is None or b.features_TF is None:
        return True
    bits = torch.int16 if a.features_TF.dtype == torch.bfloat16 else torch.int32
    return a.features_TF.dtype == b.features_TF.dtype and torch.equal(
        a.features_TF.view(bits), b.features_TF.view(bits)
    )


def test_rows_come_back_bit_for_bit(tmp_path: Path):
    write_set(tmp_path)
    rollouts = open_rollouts(str(tmp_path), target_fingerprint="f" * 32)
    assert len(rollouts) == 12
    read = list(rollouts)
    assert all(same(rollout(i), r) for i, r in enumerate(read))
    assert read[0].loss_mask == [0, 0, 0, 0, 1, 1, 1]
    assert rollouts.metadata == METADATA
    assert [r.id for r in rollouts.rollouts(shards=[1])] == ["row-4", "row-5", "row-6", "row-7"]
    assert all(r.features_TF is None for r in iter_rollouts(str(tmp_path), with_features=False))
    rollouts.check()
    assert json.loads((tmp_path / "rejects.jsonl").read_text()) == {"file": "p.jsonl", "line": 9, "reason": "no text"}
    assert (rollouts.manifest.response_tokens, rollouts.manifest.prompt_tokens, rollouts.manifest.rejected) == (
        36,
        48,
        1,
    )


@settings(max_examples=30)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    bits=st.integers(0, 2**16 - 1),
)
def test_any_shape_and_any_bits_survive(tmp_path_factory: pytest.TempPathFactory, lengths, dtype, bits):
    rows = [rollout(i, p, r, dtype) for i, (p, r) in enumerate(lengths)]
    rows[0].features_TF.view(torch.int16)[:] = bits - 2**15  # NaN payloads and infinities among them
    rows[-1].features_TF = None if len(rows) > 1 else rows[-1].features_TF
    folder = tmp_path_factory.mktemp("set")
    store = RolloutStore(str(folder))
    store.begin(PLAN)
    record = store.write_shard(shard_name(0, 1), rows, METADATA)
    store.finish(PLAN, METADATA, [record], [])
    assert all(same(a, b) for a, b in zip(rows, iter_rollouts(str(folder)), strict=True))


def test_pyarrow_alone_reads_a_shard(tmp_path: Path):
    write_set(tmp_path)
    script = (
        "import sys, pyarrow.parquet as pq\n"
        "table = pq.read_table(sys.argv[1])\n"
        "row = table.slice(0, 1).to_pylist()[0]\n"
        "assert len(row['features']) == 2 * row['features_shape'][0] * row['features_shape'][1]\n"
        "assert table.schema.metadata[b'draftloop.target_layer_ids'] == b'[0, 1]'\n"
        "assert table.schema.metadata[b'draftloop.schema_version'] == b'1'\n"
        "assert not {'torch', 'ray', 'pipelines'} & set(sys.modules)\n"
        "print(row['id'], row['response_ids'])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / shard_name(0, 3))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "row-0 [100, 100, 100]\n"


def test_equal_rows_give_equal_bytes_in_any_order_of_shards(tmp_path: Path):
    write_set(tmp_path / "a")
    store = RolloutStore(str(tmp_path / "b"))
    store.begin(PLAN)
    records = [store.write_shard(shard_name(i, 3), [rollout(i * 4 + j) for j in range(4)], METADATA) for i in (2, 0, 1)]
    store.finish(PLAN, METADATA, records, [RejectedRow("p.jsonl", 9, "no text")])
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert not (tmp_path / "a" / "_work").exists()


def test_row_groups_bound_what_a_reader_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipelines.rollout_store.ROW_GROUP_BYTES", 200)
    write_set(tmp_path, shards=1, rows=10)
    assert pq.ParquetFile(tmp_path / shard_name(0, 1)).num_row_groups > 3
    assert all(same(rollout(i), r) for i, r in enumerate(iter_rollouts(str(tmp_path))))


def test_only_complete_shards_have_records(tmp_path: Path):
    store = RolloutStore(str(tmp_path))
    store.begin(PLAN)
    for i in range(3):
        store.write_shard(shard_name(i, 3), [rollout(i)], METADATA)
    assert set(store.records(3)) == {shard_name(i, 3) for i in range(3)}
    (tmp_path / shard_name(0, 3)).unlink()
    (tmp_path / shard_name(1, 3)).write_bytes(b"half")
    (tmp_path / "_work" / "left.tmp").write_bytes(b"half")
    store.begin(PLAN)
    assert set(store.records(3)) == {shard_name(2, 3)}
    assert not list(tmp_path.glob("_work/*.tmp"))
    with pytest.raises(RolloutError, match="not finished"):
        open_rollouts(str(tmp_path))


def test_finished_set_knows_its_shards_too(tmp_path: Path):
    store = write_set(tmp_path)
    (tmp_path / shard_name(1, 3)).unlink()
    assert set(store.records(3)) == {shard_name(0, 3), shard_name(2, 3)}
    with pytest.raises(RolloutError, match=shard_name(1, 3)):
        open_rollouts(str(tmp_path))


def test_other_options_are_refused_by_name(tmp_path: Path):
    write_set(tmp_path)
    before = files(tmp_path)
    with pytest.raises(RolloutError, match=r"temperature was 0\.0, now 0\.7.*another --output"):
        RolloutStore(str(tmp_path)).begin(PLAN | {"temperature": 0.7})
    with pytest.raises(RolloutError, match="chat was None, now True"):
        RolloutStore(str(tmp_path)).begin(PLAN | {"chat": True})
    RolloutStore(str(tmp_path)).begin(dict(reversed(PLAN.items())))
    assert files(tmp_path) == before


def test_a_plan_of_before_features_had_a_choice_of_dtype_goes_on(tmp_path: Path):
    write_set(tmp_path)
    RolloutStore(str(tmp_path)).begin(PLAN | {"features_dtype": "bfloat16"})
    with pytest.raises(RolloutError, match="features_dtype was 'bfloat16', now 'int8'"):
        RolloutStore(str(tmp_path)).begin(PLAN | {"features_dtype": "int8"})


def test_folder_with_other_files_is_refused(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RolloutError, match=r"thesis\.txt"):
        RolloutStore(str(tmp_path)).begin(PLAN)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_unwritable_output_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for uri in (str(tmp_path / "file" / "sub"), "nosuch://bucket/x"):
        with pytest.raises(RolloutError, match=r"cannot be (written|opened)") as caught:
            RolloutStore(uri).begin(PLAN)
        assert "\n" not in str(caught.value)


def break_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def age_manifest(folder: Path) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(values | {"schema_version": 99}))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda p: shutil.rmtree(p), "not a rollout set"),
        (lambda p: [f.unlink() for f in p.iterdir()], "not a rollout set"),
        (break_manifest, "damaged manifest"),
        (age_manifest, "schema version 99"),
        (lambda p: (p / shard_name(0, 3)).write_bytes(b""), "missing or cut short"),
    ],
)
def test_what_is_no_rollout_set_is_one_line(tmp_path: Path, damage, cause: str):
    write_set(tmp_path / "set")
    damage(tmp_path / "set")
    with pytest.raises(RolloutError, match=cause) as caught:
        open_rollouts(str(tmp_path / "set"))
    assert "\n" not in str(caught.value)


def test_flipped_bit_fails_the_check(tmp_path: Path):
    write_set(tmp_path)
    file = tmp_path / shard_name(2, 3)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(RolloutError, match=shard_name(2, 3)):
        open_rollouts(str(tmp_path)).check()


def test_other_target_s_rollouts_are_refused(tmp_path: Path):
    write_set(tmp_path)
    with pytest.raises(RolloutError, match="another target"):
        open_rollouts(str(tmp_path), target_fingerprint="0" * 32)


def test_wrong_features_are_refused(tmp_path: Path):
    store = RolloutStore(str(tmp_path))
    bad = rollout(0)
    bad.features_TF = bad.features_TF[1:]
    with pytest.raises(ValueError, match="row-0"):
        store.write_shard(shard_name(0, 1), [bad], METADATA)
    whole = rollout(0)
    with pytest.raises(ValueError, match="int8 features do not go into a set of schema version 1"):
        RolloutStore(str(tmp_path), features_dtype="int8").write_shard(shard_name(0, 1), [whole], METADATA)


def test_uri_of_another_file_system():
    """The same code on fsspec's in-memory store: no renames, no local paths."""
    store = RolloutStore("memory://rollouts/set")
    store.begin(PLAN)
    record = store.write_shard(shard_name(0, 1), [rollout(0)], METADATA)
    assert store.records(1) == {record.name: record}
    store.finish(PLAN, METADATA, [record], [])
    rollouts = open_rollouts("memory://rollouts/set")
    rollouts.check()
    assert same(rollout(0), next(iter(rollouts)))
    assert rollouts.folder.names() == ["manifest.json", shard_name(0, 1), "plan.json", "rejects.jsonl"]
