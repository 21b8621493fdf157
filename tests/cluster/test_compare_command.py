"""`draftloop compare` on the command line: a report for people and machines, exit code 1 if one is left out."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from tests.toy_mtp import save_toy_drafter


@pytest.fixture
def arguments(tmp_path, toy_target_dir, monkeypatch) -> list[str]:
    for name, value in (("PAUSE_S", 0.0), ("PASSES", 1), ("SAMPLES", 1)):
        monkeypatch.setattr(f"pipelines.compare_timing.{name}", value)
    file = tmp_path / "counting.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"count from {i}"}) + "\n" for i in range(3)))
    return [
        "compare", "--target", str(toy_target_dir), "--prompts", str(file), "--output", str(tmp_path / "out"),
        "--tokens", "8", "--batches", "1", "--num-draft-tokens", "2", "--trees", "3", "--backend", "torch",
    ]  # fmt: skip


def test_one_bad_drafter_costs_a_line_and_the_exit_code(arguments, tmp_path, toy_target_dir):
    save_toy_drafter(tmp_path / "mtp", toy_target_dir)
    bad = [*arguments, "--drafter", f"mine={tmp_path / 'mtp'}", "--drafter", str(tmp_path / "gone"), "--json"]
    result = CliRunner().invoke(app, bad)
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert [d["name"] for d in facts["drafters"]] == ["prompt lookup", "mine"]
    assert [out["name"] for out in facts["left_out"]] == ["gone"]
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert "gone was left out: no drafter at" in line

    good = CliRunner().invoke(app, [*arguments, "--drafter", f"mine={tmp_path / 'mtp'}"])
    assert good.exit_code == 0, good.output
    assert "2 results of an earlier run" in good.stdout
    assert "counting: 3 prompts" in good.stdout
    assert facts["advice"]["line"][:20] in good.stdout
    assert "next: draftloop serve" in good.stdout


@pytest.mark.parametrize("wrong", [["--batches", "one"], ["--trees", "3;7"]])
def test_numbers_that_are_none_are_wrong_use(arguments, wrong):
    assert CliRunner().invoke(app, [*arguments, *wrong]).exit_code == 2
