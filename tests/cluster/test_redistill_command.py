"""`draftloop redistill` on the command line."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from pipelines.redistill_config import RedistillReport


@pytest.mark.parametrize(("version", "look"), [("20261130T120000Z-20261130T180000Z", "show"), (None, "list")])
def test_it_ends_with_a_command_that_can_be_typed(
    version: str | None, look: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    report = RedistillReport(
        window="20261130T120000Z-20261130T180000Z", verdict="rejected", why="tau is no better", version=version,
        previous=None, counts={}, gate=None, training=None, finished_at="2026-11-30T18:10:00+00:00",
    )  # fmt: skip
    monkeypatch.setattr("pipelines.redistill.redistill", lambda config, say: report)
    result = CliRunner().invoke(app, ["redistill", "--registry", str(tmp_path)])
    assert result.exit_code == 0, result.output
    said, _, command = result.output.strip().splitlines()[-1].partition("next: draftloop ")
    words = shlex.split(command)
    assert (said, words) == ("", ["registry", look, *([version] if version else []), "--registry", str(tmp_path)])
    assert CliRunner().invoke(app, words).exit_code == (1 if version else 0), "2 is wrong use"
