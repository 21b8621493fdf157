"""`draftloop registry ...`: tables, JSON objects, exit codes, and the next command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from drafters.registry import Registry
from tests.toy_mtp import save_toy_drafter


def run(*arguments: str):
    # wide enough for no line of a table to be folded
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, ["registry", *arguments])


def flat(result) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.output.replace("│", " ").split())


def facts(*arguments: str) -> dict:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def one_line(result) -> str:
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    return line


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.command import console

    monkeypatch.setattr(console, "width", 400, raising=False)


@pytest.fixture
def drafter(tmp_path: Path, toy_target_dir: Path) -> Path:
    folder = save_toy_drafter(tmp_path / "drafter", toy_target_dir)
    (folder / "evaluation.json").write_text('{"tau": 2.5, "s_measured": 1.4, "by": [1]}')
    return folder


def changed(drafter: Path, seed: int) -> str:
    values = json.loads((drafter / "provenance.json").read_text())
    (drafter / "provenance.json").write_text(json.dumps(values | {"seed": seed}))
    return str(drafter)


def test_from_the_first_version_to_a_removal(drafter: Path, tmp_path: Path):
    uri = str(tmp_path / "registry")
    at = ("--registry", uri)
    empty = flat(run("list", *at))
    assert f"registry {uri}: no versions yet" in empty
    assert f"next: draftloop registry add DRAFTER --registry {uri}" in empty

    added = flat(run("add", str(drafter), *at, "--name", "first"))
    assert "version first" in added
    assert added.endswith(f"next: draftloop registry promote first --registry {uri} --why ...")
    assert "first, which was there already with the same files" in flat(run("add", str(drafter), *at))
    second = facts("add", changed(drafter, 2), *at, "--parent", "first")
    name = second["version"]["name"]
    assert (second["version"]["parent"], second["was_there"]) == ("first", False)
    assert second["uri"] == f"{uri}/versions/{name}"

    promoted = flat(run("promote", "first", *at, "--why", "the first", "--by", "ann"))
    assert "champion first before none (plain decoding) by ann why the first" in promoted
    assert promoted.endswith(f"next: draftloop registry list --registry {uri}")
    assert "nothing is changed" in flat(run("promote", "first", *at, "--why", "again"))
    change = facts("promote", name, *at, "--why", "tau 2.5 against 2.1")["change"]
    assert (change["number"], change["version"], change["previous"]) == (2, name, "first")
    assert "@" in change["by"], "user@machine"

    Registry(uri).report_serving("replica-1", name)
    listed = flat(run("list", *at))
    for fact in (f"{name} champion 20", "first 2.50 replica-1", "first predecessor", "2 20", "tau 2.5 against 2.1"):
        assert fact in listed, fact
    found = facts("list", *at)
    assert [(v["name"], v["role"], v["served_by"]) for v in found["versions"]] == [
        ("first", "predecessor", []), (name, "champion", ["replica-1"]),
    ]  # fmt: skip
    assert (found["champion"]["version"], len(found["history"])) == (name, 2)

    showing = flat(run("show", name, *at))
    for fact in ("role champion", "parent first", "tau 2.5, s_measured 1.4", "served by replica-1", "2 20"):
        assert fact in showing, fact
    assert showing.endswith(f"next: draftloop registry rollback --registry {uri} --why ...")
    assert facts("show", "first", *at)["role"] == "predecessor"

    assert f"champion first before {name}" in flat(run("rollback", *at, "--why", "slow"))
    assert "champion none (plain decoding) before first" in flat(run("rollback", *at, "--why", "slow"))
    assert "champion: none (plain decoding)" in flat(run("list", *at))
    for seed in (3, 4):
        facts("add", changed(drafter, seed), *at, "--name", f"number-{seed}")
    pruned = flat(run("prune", *at, "--keep", "1"))
    assert f"removed number-3 left first, {name}, number-4" in pruned, "the last champion, and what a replica serves"
    history = facts("list", *at)["history"]
    assert (history[-1]["action"], history[-1]["removed"]) == ("prune", ["number-3"])


def test_mistakes_are_one_line(drafter: Path, tmp_path: Path):
    at = ("--registry", str(tmp_path / "registry"))
    why = ("--why", "because")
    assert "has no version a; it has none yet" in one_line(run("promote", "a", *at, *why))
    run("add", str(drafter), *at, "--name", "monday")
    assert "has no version mondy; did you mean monday?" in one_line(run("show", "mondy", *at))
    assert "no drafter at" in one_line(run("add", str(tmp_path / "nothing"), *at))
    assert "has no version sunday" in one_line(run("add", changed(drafter, 1), *at, "--parent", "sunday"))
    assert "nothing to roll back to" in one_line(run("rollback", *at, *why))
    assert "cannot be opened" in one_line(run("list", "--registry", "nowhere://x"))
    Registry(at[1]).reject("monday", by="gate", why="code is worse", report={})
    assert "version monday was rejected (code is worse); give --force" in one_line(run("promote", "monday", *at, *why))
    assert "rejected code is worse (by gate)" in flat(run("show", "monday", *at))
    assert facts("promote", "monday", *at, *why, "--force")["change"]["version"] == "monday"
    assert facts("list", *at)["versions"][0]["rejected"]


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["list"], ["add", "--registry", "x"], ["promote", "a", "--registry", "x"], ["rollback", "--registry", "x"],
        ["rollback", "--registry", "x", "--why", "y", "--plain", "--to", "a"], ["prune", "--registry", "x"],
        ["prune", "--registry", "x", "--keep", "-1"], ["burn"],
    ],
)  # fmt: skip
def test_wrong_use_is_exit_code_2(arguments: list[str]):
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("command", ["add", "list", "show", "promote", "rollback", "prune"])
def test_help_names_the_options(command: str):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--registry" in result.output
    assert "--json" in result.output
