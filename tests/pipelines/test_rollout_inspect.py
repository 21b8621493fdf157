"""What an inspection finds: figures by hand, and a verdict for every kind of damage."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from drafters.target import tokenizer_hash
from pipelines.prompts import RejectedRow
from pipelines.rollout_inspect import Inspection, InspectOptions, Lengths, StoredFeatures, inspect_rollouts
from pipelines.rollout_schema import Rollout, RolloutMetadata, schema_version_of
from pipelines.rollout_store import RolloutError, RolloutStore, shard_name
from serving.chat_options import ChatOptions
from tests.pipelines.test_rollout_store import METADATA, rollout
from tests.pipelines.test_rollout_versions import write_version_1

LENGTHS = [(4, 3), (4, 1), (6, 3), (9, 8), (5, 2)]  # prompt and response tokens of the rows
PLAN = {"rows": 6, "rows_per_shard": 2, "seed": 3, "prompts": "p.jsonl", "dtype": "float32", "schema_version": 1}
SHARDS = 3
FAILED = {"line": 6, "reason": "x"}


def rows(with_features: bool = True) -> list[Rollout]:
    made = [rollout(i, *lengths) for i, lengths in enumerate(LENGTHS)]
    made[1].finish_reason, made[3].category, made[4].temperature = "length", "code", 0.0
    made[3].loss_mask = [0] * 16 + [1]
    for row in made:
        row.features_TF = row.features_TF if with_features else None
    return made


def begin(folder: Path, features: str | None = "bfloat16", shards: int = SHARDS, **origin) -> tuple:
    """The first shards of a set of three, of two rows and one row that failed; returns what finishing it takes."""
    metadata = replace(METADATA, schema_version=schema_version_of(features or "bfloat16"), **origin)
    if not features:
        metadata = replace(metadata, target_layer_ids=())
    store, made = RolloutStore(str(folder), features_dtype=features), rows(bool(features))
    plan = PLAN | {key: value for key, value in metadata.as_json().items() if key != "code_version"}
    store.begin(plan)
    records = [
        store.write_shard(shard_name(i, SHARDS), made[2 * i : 2 * i + 2], metadata, [FAILED] * (i == 2))
        for i in range(shards)
    ]
    return store, plan, metadata, records


def write(folder: Path, features: str | None = "bfloat16", **origin) -> str:
    store, plan, metadata, records = begin(folder, features, **origin)
    store.finish(plan, metadata, records, [RejectedRow("p.jsonl", 6, "x"), RejectedRow("p.jsonl", 9, "no text")])
    return str(folder)


def look(uri: str, **options) -> Inspection:
    return inspect_rollouts(uri, InspectOptions(**{"sample": 0} | options))


def test_a_whole_set_by_hand(tmp_path: Path):
    found = look(write(tmp_path))
    assert (found.finished, found.checked, found.damaged) == (True, True, {})
    assert (found.shards, found.shards_planned, found.rows, found.rows_read, found.rejected) == (3, 3, 5, 5, 2)
    assert (found.prompt_tokens, found.response_tokens) == (28, 10), "seven are not the target's own"
    assert found.prompt_lengths == Lengths(4, 5, 9, 9)
    assert found.response_lengths == Lengths(1, 3, 8, 8)
    assert found.finish_reasons == {"stop": 4, "length": 1}
    assert found.categories == {"math": 4, "code": 1}
    assert found.sampling["temperature"] == (0.0, 0.5)
    assert found.sampling["top_k"] == (7, 7)
    assert found.loss_mask_share == (3 + 1 + 3 + 1 + 2) / 45
    assert found.features == [StoredFeatures("bfloat16", 3, 5, 12)]
    assert found.origin == METADATA.as_json()
    assert found.config["prompts"] == "p.jsonl"


def test_p95_leaves_one_of_twenty_above(tmp_path: Path):
    store = RolloutStore(str(tmp_path))
    store.begin(PLAN)
    made = [rollout(i, 1 + i, 2) for i in range(20)]
    store.finish(PLAN, METADATA, [store.write_shard(shard_name(0, 1), made, METADATA)], [])
    assert look(str(tmp_path)).prompt_lengths == Lengths(1, 10, 19, 20)


def test_columns_are_summed_over_row_groups_and_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipelines.rollout_store.ROW_GROUP_BYTES", 50)  # a row to a group
    found = look(write(tmp_path))
    files = [pq.ParquetFile(tmp_path / shard_name(i, SHARDS)) for i in range(SHARDS)]
    assert [f.num_row_groups for f in files] == [2, 2, 1]
    chunks = [f.metadata.row_group(g).column(c) for f in files for g in range(f.num_row_groups) for c in range(14)]
    features = sum(c.total_compressed_size for c in chunks if c.path_in_schema == "features")
    assert found.bytes_by_column["features"] == features > 40 * 12
    assert sum(found.bytes_by_column.values()) == sum(c.total_compressed_size for c in chunks) < found.bytes
    assert next(iter(found.bytes_by_column)) == "features"
    assert found.bytes == sum((tmp_path / shard_name(i, SHARDS)).stat().st_size for i in range(SHARDS))


def test_int8_features_and_none(tmp_path: Path):
    found = look(write(tmp_path / "int8", "int8"))
    assert found.features == [StoredFeatures("int8", 3, 5, 6 + 2 * 4)]
    assert "features_scale" in found.bytes_by_column
    assert (found.origin["schema_version"], found.damaged) == (2, {})
    bare = look(write(tmp_path / "bare", None))
    assert (bare.features, bare.rows_read, bare.origin["target_layer_ids"]) == ([], 5, [])


def test_version_1_is_inspected(tmp_path: Path):
    write_version_1(tmp_path / "old")
    found = look(str(tmp_path / "old"))
    assert (found.rows_read, found.damaged, found.shards_planned) == (2, {}, 1)
    assert found.features == [StoredFeatures("float32", 3, 2, 24)]


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "verdict"),
    [
        (flip_a_bit, "differs from its checksum"),
        (Path.unlink, "missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-7]), "bytes, not"),
        (lambda file: file.write_bytes(b"x" * file.stat().st_size), "differs from its checksum"),
    ],
)
def test_a_damaged_shard_is_named_and_counts_for_nothing(damage, verdict, tmp_path: Path):
    uri = write(tmp_path)
    damage(tmp_path / shard_name(1, SHARDS))
    found = look(uri)
    assert list(found.damaged) == [shard_name(1, SHARDS)]
    assert verdict in found.damaged[shard_name(1, SHARDS)]
    assert (found.rows, found.rows_read, found.finished) == (5, 3, True)
    assert found.categories == {"math": 3}, "the row about code was in the damaged shard"


def test_without_checksums_only_what_reading_shows_is_damage(tmp_path: Path):
    uri = write(tmp_path)
    first, second = (tmp_path / shard_name(i, SHARDS) for i in range(2))
    data = bytearray(first.read_bytes())
    data[pq.ParquetFile(first).metadata.row_group(0).column(11).data_page_offset + 60] ^= 1  # inside the features
    first.write_bytes(data)
    second.write_bytes(b"x" * second.stat().st_size)
    found = look(uri, check=False)
    assert not found.checked
    assert list(found.damaged) == [second.name]
    assert "cannot be read" in found.damaged[second.name]
    assert list(look(uri).damaged) == [first.name, second.name]


def test_a_shard_in_another_s_place(tmp_path: Path):
    """Right in itself, wrong here: its record says so."""
    store, plan, metadata, records = begin(tmp_path)
    store.finish(plan, metadata, [replace(records[0], rows=7), *records[1:]], [])
    assert look(str(tmp_path)).damaged == {shard_name(0, SHARDS): "2 rows, not 7"}


def test_an_unfinished_set_as_far_as_it_is_there(tmp_path: Path):
    begin(tmp_path, shards=2)
    (tmp_path / shard_name(2, SHARDS)).write_bytes(b"written, but not recorded")
    (tmp_path / "_work" / f"{shard_name(2, SHARDS)}.json").write_text("{")
    (tmp_path / "_work" / "part.tmp").write_bytes(b"half")
    found = look(str(tmp_path))
    assert (found.finished, found.damaged) == (False, {})
    assert (found.shards, found.shards_planned, found.rows, found.rows_planned, found.rejected) == (2, 3, 4, 6, 0)
    assert (found.prompt_tokens, found.response_tokens) == (23, 8)
    assert found.origin == METADATA.as_json(), "the plan says all but the code version, and the shards say that"


def test_an_unfinished_set_may_be_damaged_or_bare(tmp_path: Path):
    begin(tmp_path / "a", shards=2)
    (tmp_path / "a" / shard_name(0, SHARDS)).unlink()
    assert look(str(tmp_path / "a")).damaged == {shard_name(0, SHARDS): "missing"}
    begin(tmp_path / "b", shards=0)
    bare = look(str(tmp_path / "b"))
    assert (bare.finished, bare.shards, bare.shards_planned, bare.rows) == (False, 0, 3, 0)
    assert (bare.prompt_lengths, bare.loss_mask_share, bare.features) == (None, None, [])


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({}, "is not a rollout set"),
        ({"notes.txt": "x"}, "is not a rollout set"),
        ({"manifest.json": "{"}, "damaged manifest"),
        ({"plan.json": "{"}, "damaged plan"),
        ({"plan.json": "[]"}, "damaged plan"),
        ({"plan.json": '{"schema_version": 3}'}, "schema version 3, known are 1 and 2"),
        ({"manifest.json": '{"schema_version": 3}'}, "schema version 3, known are 1 and 2"),
    ],
)
def test_what_is_no_set_is_one_line(files, cause, tmp_path: Path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RolloutError, match=cause) as caught:
        look(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_no_such_folder_is_one_line(tmp_path: Path):
    for uri in (str(tmp_path / "nowhere"), "nosuch://bucket/x"):
        with pytest.raises(RolloutError, match=r"not a rollout set|cannot be opened"):
            look(uri)


def test_another_file_system():
    """fsspec's in-memory store, as s3:// would be: no local paths."""
    store = RolloutStore("memory://inspected/set")
    store.begin(PLAN)
    record = store.write_shard(shard_name(0, 3), rows()[:2], METADATA)
    assert look("memory://inspected/set").rows_read == 2
    store.finish(PLAN, METADATA, [record], [])
    assert (look("memory://inspected/set").finished, look("memory://inspected/set").damaged) == (True, {})


def test_the_sample_is_text_where_the_tokenizer_is(tmp_path: Path, toy_target_dir: Path):
    origin = {"target": str(toy_target_dir), "tokenizer_hash": tokenizer_hash(toy_target_dir)}
    found = look(write(tmp_path, **origin), sample=3)
    assert [row.id for row in found.sample] == ["row-0", "row-1", "row-2"]
    assert found.sample[2].prompt == "\0\1\2\3\4\5"  # ids are bytes
    assert [row.response for row in found.sample] == ["ddd", "e", "fff"]
    assert found.sample[0].response_ids == [100, 100, 100]
    assert found.sample_note is None


def test_the_sample_is_ids_where_it_is_not(tmp_path: Path, toy_target_dir: Path):
    uri = write(tmp_path, target="./gone")
    found = look(uri, sample=1)
    assert (found.sample[0].prompt_ids, found.sample[0].prompt) == ([0, 1, 2, 3], None)
    assert "./gone is not here" in found.sample_note
    other = look(uri, sample=1, target=str(toy_target_dir))
    assert (other.sample[0].prompt, "another tokenizer" in other.sample_note) == (None, True)
    assert look(uri, sample=0).sample_note is None


def test_a_tokenizer_needs_no_weights(tmp_path: Path, toy_target_dir: Path):
    bare = tmp_path / "tokenizer"
    bare.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((toy_target_dir / name).read_bytes())
    uri = write(tmp_path / "set", tokenizer_hash=tokenizer_hash(toy_target_dir))
    assert look(uri, sample=1, target=str(bare)).sample[0].response == "ddd"


def test_features_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What bounds the memory: batches of few rows, of the small columns only."""
    seen = []
    plain = pq.ParquetFile.iter_batches

    def watched(self, batch_size, columns):
        seen.append((batch_size, set(columns)))
        return plain(self, batch_size=batch_size, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watched)
    look(write(tmp_path, "int8"), sample=2)
    assert len(seen) == SHARDS
    assert all(size <= 256 and not columns & {"features", "features_scale"} for size, columns in seen)


def test_progress_goes_shard_by_shard(tmp_path: Path):
    seen = []
    inspect_rollouts(write(tmp_path), InspectOptions(sample=0), lambda *at: seen.append(at))
    assert seen == [(i + 1, SHARDS, shard_name(i, SHARDS)) for i in range(SHARDS)]


def test_metadata_is_all_in_the_origin(tmp_path: Path):
    options = ChatOptions(system="Be brief.")
    origin = look(write(tmp_path / "options", chat_options=options)).origin
    assert set(origin) == set(RolloutMetadata.__dataclass_fields__)
    assert origin["chat_options"] == {"template": None, "system": "Be brief.", "thinking": "default"}
    assert "chat_options" not in look(write(tmp_path / "none")).origin
