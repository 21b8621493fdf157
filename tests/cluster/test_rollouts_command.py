"""`draftloop rollouts inspect`: the table, the JSON object, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from drafters.target import tokenizer_hash
from pipelines.rollout_store import shard_name
from tests.pipelines.test_rollout_inspect import begin, write


def run(*arguments: str):
    # wide enough for no line of a table to be folded
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, ["rollouts", *arguments])


def flat(result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def one_line(result) -> str:
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    return line


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.command import console

    monkeypatch.setattr(console, "width", 400, raising=False)


def test_a_whole_set(tmp_path: Path, toy_target_dir: Path):
    origin = {"target": str(toy_target_dir), "tokenizer_hash": tokenizer_hash(toy_target_dir)}
    result = run("inspect", write(tmp_path, **origin), "--sample", "1")
    assert result.exit_code == 0, result.output
    text = flat(result)
    for fact in (
        "sequences 5 (2 rejected)",
        "prompt tokens 28; prompts of 4 to 9, median 5, p95 9",
        "response tokens 10; responses of 1 to 8, median 3, p95 8",
        "finish reasons stop 4, length 1",
        "categories math 4, code 1",
        "loss mask 1 for 22.2% of the tokens",
        "sampling temperature 0 to 0.5, top_p 0.9, top_k 7, max_new_tokens 8, seed 3",
        "features bfloat16, 12 bytes per token; layers 0, 1 of width 3",
        f"target {toy_target_dir}, fingerprint {'f' * 32}",
        "written by draftloop 0, schema version 1",
        "checksums right for 3 of 3 shards",
        "row-0 prompt: \N{REPLACEMENT CHARACTER}",  # the bytes 0 to 3 are no text for a terminal
        "response: ddd",
        f"next: draftloop train --target {toy_target_dir} --rollouts {tmp_path}",
    ):
        assert fact in text, fact
    assert "unfinished" not in text
    assert "row-1" not in text
    assert "\x00" not in result.output


def test_json_is_one_object_with_the_same_facts(tmp_path: Path):
    result = run("inspect", write(tmp_path, "int8"), "--json", "--no-check", "--sample", "1")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["rows"], facts["rejected"], facts["checked"], facts["damaged"]) == (5, 2, False, {})
    assert facts["response_lengths"] == {"min": 1, "median": 3, "p95": 8, "max": 8}
    assert facts["features"] == [{"dtype": "int8", "width": 3, "rows": 5, "bytes_per_token": 14}]
    assert facts["sample"][0]["prompt_ids"] == [0, 1, 2, 3]
    assert facts["sample"][0]["prompt"] is None
    assert facts["origin"]["target"] == "toy"


def test_ids_and_the_reason_where_there_is_no_tokenizer(tmp_path: Path):
    result = run("inspect", write(tmp_path, target="./gone"), "--sample", "1")
    assert result.exit_code == 0
    text = flat(result)
    assert "prompt: 0 1 2 3 response: 100 100 100" in text
    assert "no text: ./gone is not here" in text


@pytest.mark.parametrize("missing", [True, False])
def test_damaged_and_missing_shards_are_exit_code_1(missing, tmp_path: Path):
    uri = write(tmp_path)
    file = tmp_path / shard_name(1, 3)
    if missing:
        file.unlink()
    else:
        file.write_bytes(b"x" * file.stat().st_size)
    result = run("inspect", uri, "--sample", "0")
    assert f"1 of 3 shards are damaged or missing ({file.name})" in one_line(result)
    verdict = "missing" if missing else "differs from its checksum"
    assert f"damaged {file.name}: {verdict}" in flat(result)
    assert "read 3 sequences of whole shards" in flat(result)
    assert "next: draftloop generate" in flat(result)
    machine = run("inspect", uri, "--json")
    assert machine.exit_code == 1
    assert json.loads(machine.stdout)["damaged"] == {file.name: verdict}


def test_an_unfinished_set_says_so(tmp_path: Path):
    begin(tmp_path, shards=2)
    result = run("inspect", str(tmp_path), "--sample", "0")
    assert result.exit_code == 0, result.output
    assert "unfinished 2 of 3 shards, 4 of 6 rows" in flat(result)
    assert "sequences 4 (0 rejected so far)" in flat(result)
    assert "next: draftloop generate" in flat(result)


def test_a_set_without_features(tmp_path: Path):
    result = run("inspect", write(tmp_path, None), "--sample", "0", "--no-check")
    assert result.exit_code == 0
    assert "features none" in flat(result)
    assert "checksums not compared" in flat(result)


def test_what_is_no_set_is_one_line(tmp_path: Path):
    assert "is not a rollout set" in one_line(run("inspect", str(tmp_path)))
    assert "cannot be opened" in one_line(run("inspect", "nosuch://bucket/x"))


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["inspect", "x", "--sample", "-1"], ["burn", "x"]])
def test_wrong_use_is_exit_code_2(arguments):
    assert run(*arguments).exit_code == 2


def test_help_names_the_options():
    result = run("inspect", "--help")
    assert result.exit_code == 0
    for option in ("--target", "--sample", "--no-check", "--json"):
        assert option in result.output


def test_generate_knows_three_dtypes_of_features():
    assert CliRunner().invoke(app, ["generate", "--features-dtype", "int4"]).exit_code == 2
