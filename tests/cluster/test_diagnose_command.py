"""`draftloop diagnose` on the command line: the same facts for people and machines, exit code 0 whatever is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from tests.toy_echo import save_echo_target, save_one_token_drafter


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("diagnose")
    target = save_echo_target(folder / "target")
    drafter = save_one_token_drafter(folder / "drafter", target, "a", expected_tau=4.0)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}a"}) + "\n" for i in range(4)))
    return ["diagnose", str(drafter), "--target", str(target), "--prompts", str(folder / "prompts.jsonl")]


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, list(arguments))


def test_a_sound_drafter(arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "nothing wrong found: tau 4.00 here, 4.00 expected in its training" in result.output
    assert "next: draftloop serve --target" in result.output


def test_a_fault_is_no_failure(arguments, tmp_path):
    broken = Path(shutil.copytree(arguments[1], tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"")
    shown = run("diagnose", str(broken), *arguments[2:])
    assert shown.exit_code == 0
    assert "likely: its weights are cut short or missing" in shown.output
    facts = json.loads(run("diagnose", str(broken), *arguments[2:], "--json").stdout)
    assert (facts["verdict"], facts["findings"][0]["cause"]) == ("fault", "files")


def test_without_a_drafter_it_fails(arguments, tmp_path):
    result = run("diagnose", str(tmp_path / "nowhere"), *arguments[2:])
    assert result.exit_code == 1
    assert "no drafter at" in result.stderr
