"""The files of a prompt set: patterns, several files, Parquet, remote folders, and files that cannot be read."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drafters.target import Target, load_target
from pipelines.prompts import PromptError, PromptSet, read_prompts


@pytest.fixture(scope="module")
def target(toy_target_dir: Path) -> Target:
    return load_target(str(toy_target_dir))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, so that names can be given as users give them."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jsonl(path: Path, *rows: dict | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return path


def parquet(path: Path, **columns) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def ids(read: PromptSet) -> list[str]:
    return [row.id for row in read.rows]


def rejects(read: PromptSet) -> list[tuple[str, int, str]]:
    return [(row.file, row.line, kind) for row, kind in zip(read.rejected, read.kinds, strict=True)]


def test_files_of_a_pattern_are_read_in_the_order_of_their_names(here: Path, target: Target):
    jsonl(here / "in/b.jsonl", {"prompt": "b1"}, b"{", {"prompt": "b3"})
    jsonl(here / "in/a.jsonl", b"\xef\xbb\xbf" + b'{"prompt": "a1"}', {"id": "own", "prompt": "a2"})
    (here / "in/c.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + b'\r\n{"prompt": "c2"}\r\n'))
    parquet(here / "in/d.parquet", prompt=["d1"])
    jsonl(here / "in/deeper/a.jsonl", {"prompt": "no"})
    (here / "in/z.jsonl").mkdir()
    read = read_prompts("in/*", target)
    assert ids(read) == ["a-line-000001", "own", "b-line-000001", "b-line-000003", "c-line-000002", "d-line-000001"]
    assert [target.tokenizer.decode(row.prompt_ids) for row in read.rows] == ["a1", "a2", "b1", "b3", "c2", "d1"]
    assert rejects(read) == [("in/b.jsonl", 2, "not JSON")]
    assert read.files == ["in/a.jsonl", "in/b.jsonl", "in/c.jsonl.gz", "in/d.parquet"]
    assert ids(read_prompts(str(here / "in/[ab].jsonl"), target)) == ids(read)[:4]


def test_a_pattern_of_one_file_is_that_file(here: Path, target: Target):
    jsonl(here / "a.jsonl", {"prompt": "a"}, b"{")
    alone, matched = read_prompts("a.jsonl", target), read_prompts("*.jsonl", target)
    assert ids(alone) == ids(matched) == ["line-000001"]
    assert alone.sha256 == matched.sha256 == hashlib.sha256((here / "a.jsonl").read_bytes()).hexdigest()
    assert rejects(alone) == rejects(matched) == [("a.jsonl", 2, "not JSON")]


def test_a_name_that_exists_is_no_pattern(here: Path, target: Target):
    jsonl(here / "what[1]?.jsonl", {"prompt": "a"})
    jsonl(here / "what1x.jsonl", {"prompt": "b"})
    assert target.tokenizer.decode(read_prompts("what[1]?.jsonl", target).rows[0].prompt_ids) == "a"


def test_files_of_one_stem_still_give_every_row_an_id_of_its_own(here: Path, target: Target):
    for name in ("x/p.jsonl", "y/p.jsonl", "y/q.jsonl"):
        jsonl(here / name, {"prompt": name})
    read = read_prompts("**/*.jsonl", target)
    assert ids(read) == ["x/p.jsonl-line-000001", "y/p.jsonl-line-000001", "q-line-000001"]


def test_an_id_may_occur_once_in_all_files(here: Path, target: Target):
    jsonl(here / "a.jsonl", {"id": "one", "prompt": "x"}, {"id": "two", "prompt": "x"}, {"id": "one", "prompt": "x"})
    jsonl(here / "b.jsonl", {"id": 2, "prompt": "x"}, {"id": "two", "prompt": "x"})
    read = read_prompts("?.jsonl", target)
    assert ids(read) == ["one", "two", "2"]
    assert [(r.file, r.line, r.reason) for r in read.rejected] == [
        ("a.jsonl", 3, "id 'one' is already that of line 1"),
        ("b.jsonl", 2, "id 'two' is already that of line 2 of a.jsonl"),
    ]


def test_the_checksum_covers_every_file_whatever_the_limit(here: Path, target: Target):
    jsonl(here / "a.jsonl", {"prompt": "1"}, {"prompt": "2"}, b"{")
    jsonl(here / "b.jsonl", {"prompt": "3"}, b"{")
    first = read_prompts("*.jsonl", target, limit=2)
    assert ids(first) == ["a-line-000001", "a-line-000002"]
    assert first.rejected == []
    assert first.sha256 == read_prompts("*.jsonl", target).sha256
    assert ids(read_prompts("*.jsonl", target, limit=3))[-1] == "b-line-000001"
    jsonl(here / "b.jsonl", {"prompt": "4"})
    changed = read_prompts("*.jsonl", target, limit=2).sha256
    (here / "b.jsonl").rename(here / "c.jsonl")
    assert len({first.sha256, changed, read_prompts("*.jsonl", target, limit=2).sha256}) == 3, "ids have the names"


@pytest.fixture
def bucket() -> Iterator[str]:
    """A folder of a file system that is not this machine's."""
    fs = fsspec.filesystem("memory")
    yield "memory://bucket"
    fs.rm("/bucket", recursive=True)


def test_remote_files_and_patterns(target: Target, bucket: str):
    fs = fsspec.filesystem("memory")
    for name in ("b", "a"):
        fs.pipe(f"/bucket/{name}.jsonl", json.dumps({"prompt": name}).encode() + b"\n{")
    read = read_prompts(f"{bucket}/*.jsonl", target)
    assert ids(read) == ["a-line-000001", "b-line-000001"]
    assert [file.rsplit("/", 1)[1] for file in read.files] == ["a.jsonl", "b.jsonl"]
    assert {file.split("://")[0] for file in read.files} == {"memory"}
    assert ids(read_prompts(read.files[1], target)) == ["line-000001"]
    with pytest.raises(PromptError, match="match no file"):
        read_prompts(f"{bucket}/*.parquet", target)


# -- Parquet ----------------------------------------------------------------------------------------------------------


def test_parquet_rows_are_those_of_json_lines(here: Path, target: Target):
    rows = [
        {"id": "a", "category": "chat", "messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "raw"},
        {"turns": ["one", "two"]},
        {"id": "b", "category": "c", "prompt": "x"},
        {},
        {"id": "a", "prompt": "again"},
        {"prompt": "a", "turns": ["b"]},
        {"messages": [{"role": "user"}]},
        {"turns": []},
    ]
    names = ("id", "category", "messages", "prompt", "turns")
    jsonl(here / "p.jsonl", *rows)
    extra = {"source": [1] * len(rows)}
    parquet(here / "p.parquet", **{name: [row.get(name) for row in rows] for name in names}, **extra)
    lines, table = read_prompts("p.jsonl", target), read_prompts("p.parquet", target)
    assert table.rows == lines.rows
    assert len(table.rows) == 4
    assert [(r.line, r.reason) for r in table.rejected] == [(r.line, r.reason) for r in lines.rejected]
    assert table.kinds == lines.kinds
    assert [r.line for r in table.rejected] == [5, 6, 7, 8, 9]
    assert table.sha256 == hashlib.sha256((here / "p.parquet").read_bytes()).hexdigest()


def test_values_that_only_parquet_has(here: Path, target: Target):
    broken = pa.array([b"fine", b"\xff\xfe", b"good"], pa.binary()).view(pa.string())
    parquet(here / "utf8.parquet", id=[1, 2, 3], prompt=broken)
    read = read_prompts("utf8.parquet", target)
    assert ids(read) == ["1", "3"]
    assert rejects(read) == [("utf8.parquet", 2, "not UTF-8")]

    parquet(here / "types.parquet", id=["a", "b"], category=pa.array([None, 3]), prompt=["x", "y"])
    assert rejects(read_prompts("types.parquet", target)) == [("types.parquet", 2, "wrong type")]
    parquet(here / "bytes.parquet", prompt=pa.array([b"x"], pa.binary()))
    with pytest.raises(PromptError, match=r"line 1: prompt is bytes; give a string"):
        read_prompts("bytes.parquet", target)
    parquet(here / "words.parquet", turns=pa.array([["a", None]]))
    with pytest.raises(PromptError, match=r"turns\[1\] is null"):
        read_prompts("words.parquet", target)
    parquet(here / "large.parquet", prompt=pa.array(["x"], pa.large_string()).dictionary_encode())
    assert len(read_prompts("large.parquet", target).rows) == 1


# -- sets that cannot be used -----------------------------------------------------------------------------------------


def one_line(spec: str, target: Target) -> str:
    with pytest.raises(PromptError) as caught:
        read_prompts(spec, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_pattern_that_matches_nothing(here: Path, target: Target):
    assert one_line("in/*.jsonl", target) == "prompts in/*.jsonl match no file; check the pattern, or give a file"
    (here / "folder.jsonl").mkdir()
    assert "is a folder" in one_line("*.jsonl", target)


def test_a_pattern_that_matches_something_else_too(here: Path, target: Target):
    jsonl(here / "a.jsonl", {"prompt": "a"})
    (here / "README.md").write_text("no prompts")
    assert "match README.md, which is none of .jsonl, .jsonl.gz, .parquet" in one_line("*", target)


def test_parquet_without_rows_or_without_prompts(here: Path, target: Target):
    parquet(here / "empty.parquet", prompt=pa.array([], pa.string()))
    assert "the file is empty" in one_line("empty.parquet", target)
    parquet(here / "foreign.parquet", prompt_ids=[[1]], text=["a"])
    foreign = one_line("foreign.parquet", target)
    assert foreign == (
        "prompts foreign.parquet have none of the columns messages, prompt, turns (but prompt_ids, text); add one"
    )
    jsonl(here / "good.jsonl", {"prompt": "a"})
    assert "foreign.parquet have none" in one_line("*", target)
    (here / "foreign.parquet").unlink()
    assert ids(read_prompts("*", target)) == ["good-line-000001"], "an empty file among others takes nothing away"


def test_several_files_without_a_usable_row(here: Path, target: Target):
    for name in ("a", "b"):
        jsonl(here / f"{name}.jsonl", b"")
    assert "all 2 files are empty" in one_line("*.jsonl", target)
    jsonl(here / "b.jsonl", b"\n{")
    assert "none of its 1 rows can be used (b.jsonl, line 2: not JSON" in one_line("*.jsonl", target)


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.parquet", "b.jsonl"])
def test_a_damaged_file_among_others_is_named(here: Path, target: Target, name: str):
    for other in ("a", "c"):
        jsonl(here / f"{other}.jsonl", {"prompt": "a"})
    if name.endswith(".gz"):
        (here / name).write_bytes(gzip.compress(b'{"prompt": "b"}\n' * 100)[:-20])
    elif name.endswith(".parquet"):
        parquet(here / name, prompt=["b"] * 100)
        (here / name).write_bytes((here / name).read_bytes()[:-20])
    else:
        (here / name).write_bytes('{"prompt": "b"}'.encode("utf-16"))
    said = one_line("*", target)
    assert said.startswith(f"prompts {name}")
    assert ("damaged" in said) or ("UTF-16" in said)


def test_parquet_that_is_damaged_inside(here: Path, target: Target):
    """The footer is whole, so that only reading the rows finds out."""
    file = parquet(here / "p.parquet", prompt=[f"row {i}" for i in range(100)])
    data = bytearray(file.read_bytes())
    data[4:60] = b"\xff" * 56
    file.write_bytes(data)
    assert "p.parquet: the Parquet data is damaged" in one_line("p.parquet", target)
