"""Options from a YAML file: taken, overridden on the command line, and refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
import typer
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from cluster.run_file import RunOption

ROOT = Path(__file__).parents[2]
toy = typer.Typer()


@toy.command()
def cook(
    run: RunOption = None,
    dish: Annotated[str, typer.Option()] = "soup",
    hot_water: Annotated[float, typer.Option()] = 1.5,
    guest: Annotated[list[str], typer.Option()] = ["nobody"],  # noqa: B006 - typer copies it
    salt: Annotated[bool, typer.Option()] = True,
    pepper: Annotated[bool, typer.Option("--pepper")] = False,
    limit: Annotated[int | None, typer.Option()] = None,
) -> None:
    print(dish, hot_water, guest, salt, pepper, limit)


def cooked(text: str, folder: Path, *arguments: str) -> tuple[int, str]:
    file = folder / "run.yaml"
    file.write_text(text)
    result = CliRunner().invoke(toy, ["--run", str(file), *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_values_are_the_commands_defaults_and_its_own_options_go_first(tmp_path: Path):
    text = "dish: stew\nhot-water: 2\nguest: [Ann, Bob]\nsalt: false\npepper: true\nlimit: 3\n"
    assert cooked(text, tmp_path) == (0, "stew 2.0 ['Ann', 'Bob'] False True 3")
    given = ["--dish", "pie", "--guest", "Eve", "--salt", "--limit", "4"]
    assert cooked(text, tmp_path, *given) == (0, "pie 2.0 ['Eve'] True True 4")
    assert cooked("", tmp_path) == (0, "soup 1.5 ['nobody'] True False None")
    assert cooked("guest: Ann", tmp_path) == (0, "soup 1.5 ['Ann'] True False None"), "one value is a list of one"
    assert cooked("hot_water: 3", tmp_path) == (0, "soup 3.0 ['nobody'] True False None")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hot_watr: 2", "hot_watr is no option of this command; did you mean hot_water?"),
        ("zzz: 2", "zzz is no option of this command; see --help"),
        ("run: other.yaml", "run is no option of this command"),
        ("dish: {a: 1}", "dish is a mapping; give a value or a list"),
        ("hot_water: [1, 2]", "hot-water is a list; give one value"),
        ("- dish", "holds no options; give one `option: value` a line"),
        ("dish: [", "is no YAML"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_code_2(text, message, tmp_path: Path):
    code, output = cooked(text, tmp_path)
    assert code == 2
    assert message in output


def test_a_wrong_value_is_told_by_its_option(tmp_path: Path):
    code, output = cooked("hot_water: cold", tmp_path)
    assert code == 2
    assert "hot-water" in output
    assert CliRunner().invoke(toy, ["--run", str(tmp_path / "nowhere.yaml")]).exit_code == 2


@pytest.mark.parametrize("file", sorted((ROOT / "cluster/runs").glob("*.yaml")), ids=lambda file: file.name)
def test_shipped_run_files_name_options_of_their_command(file: Path):
    """Named COMMAND-WHAT.yaml; the command is not run, but all of its values are taken."""
    name = file.name.split("-")[0]
    command = typer.main.get_command(app).commands[name]
    context = command.make_context(name, ["--run", str(file)])
    for option, value in yaml.safe_load(file.read_text()).items():
        taken = context.params[option.replace("-", "_")]
        assert taken == ([value] if isinstance(taken, list) and not isinstance(value, list) else value)


def test_values_are_what_is_written(tmp_path: Path):
    assert cooked("dish: 2:8\nlimit: null", tmp_path)[1].startswith("2:8 "), "no 128"
    assert cooked("dish: yes", tmp_path)[1].startswith("yes ")
    assert cooked("dish: 007", tmp_path)[1].startswith("007 ")
    assert cooked("salt: no\npepper: yes\nlimit: ~", tmp_path)[1].endswith("False True None")
