"""`draftloop generate` on the command line: its options, and the table of reasons at its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from pipelines.generate import GenerateReport
from serving.chat_options import ChatOptions
from tests.toy_mtp import TAPS, save_toy_drafter


def run(*arguments: str):
    return CliRunner().invoke(app, ["generate", *arguments], env={"COLUMNS": "100"})


def report(**changes) -> GenerateReport:
    facts = {
        "output": "here", "rows": 940, "rejected": 60, "rejected_by_kind": {"not JSON": 57, "too long": 3},
        "shards_made": 2, "shards_reused": 1, "prompt_tokens": 9, "response_tokens": 99, "bytes": 5, "seconds": 1.0,
        "tokens_per_s": 0.0,
    }  # fmt: skip
    return GenerateReport(**facts | changes)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list:
    """The configurations that `generate` was run with; its report has 60 rejected rows."""
    configs: list = []
    monkeypatch.setattr("pipelines.generate.generate", lambda config, on_progress: configs.append(config) or report())
    return configs


def test_it_ends_with_the_reasons_and_exit_code_0(seen: list):
    result = run()
    assert result.exit_code == 0, result.output
    words = [line.replace("│", " ").split() for line in result.stdout.splitlines()]
    assert ["not", "JSON", "57"] in words
    assert ["too", "long", "3"] in words
    assert words.index(["not", "JSON", "57"]) < words.index(["too", "long", "3"])
    assert "rejects.jsonl" in result.stdout
    assert "next: draftloop train" in result.stdout
    machine = run("--json")
    assert json.loads(machine.stdout)["rejected_by_kind"] == {"not JSON": 57, "too long": 3}


def test_without_rejects_there_is_no_such_table(monkeypatch: pytest.MonkeyPatch):
    clean = report(rejected=0, rejected_by_kind={})
    monkeypatch.setattr("pipelines.generate.generate", lambda config, on_progress: clean)
    assert "rejects.jsonl" not in run().stdout


def test_layers_to_tap_are_numbers_or_a_drafter_s(seen: list, toy_target_dir: Path, tmp_path: Path):
    drafter = save_toy_drafter(tmp_path / "drafter", toy_target_dir)
    for named in ("3, 9,11", str(drafter)):
        assert run("--layers", named).exit_code == 0
    assert run().exit_code == 0
    assert [config.target_layer_ids for config in seen] == [(3, 9, 11), TAPS, None]
    wrong = run("--layers", "3;9")
    assert wrong.exit_code == 1
    assert "no drafter at" in wrong.output


def test_chat_options_reach_the_run(seen: list, tmp_path: Path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert run().exit_code == 0
    assert run("--chat-template", str(tmp_path / "t.jinja"), "--system", "be brief", "--thinking", "off").exit_code == 0
    assert [config.chat_options for config in seen] == [
        ChatOptions(),
        ChatOptions(template="{{ messages }}", system="be brief", thinking="off"),
    ]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--chat-template", "none.jinja"], "chat template none.jinja cannot be read"),
        (["--system", " "], "the system turn is empty"),
        (["--thinking", "on"], "has no variable enable_thinking"),
        (["--prompts", "nothing/*.jsonl"], "match no file"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], cause: str, toy_target_dir: Path, tmp_path: Path):
    result = run("--target", str(toy_target_dir), "--output", str(tmp_path / "out"), *arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert cause in line
    assert not (tmp_path / "out").exists()


def test_thinking_is_on_off_or_default():
    assert run("--thinking", "maybe").exit_code == 2


def test_what_an_actor_gets(seen: list):
    for arguments in ([], ["--gpu"], ["--gpus-per-actor", "0.5", "--threads-per-actor", "3"]):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
    assert [(config.gpus_per_actor, config.threads_per_actor) for config in seen] == [(0, None), (1, None), (0.5, 3)]
    assert "gpus_per_actor is 1.5; give whole GPUs, or a part of one" in run("--gpus-per-actor", "1.5").stderr
