"""Options of a command in a YAML file: `draftloop train --run FILE`. What the command line says too goes first.

    target: smollm2
    rollouts: [s3://bucket/rollouts, s3://bucket/older]
    epochs: 4

Keys are the command's options, with dashes or underscores.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cluster.command import fail

NOTHING = ("", "~", "null")  # what YAML has for no value


def _take_run_file(context: typer.Context, file: Path | None) -> Path | None:
    """Make the file's values the defaults of the command's other options."""
    if file is not None:
        values = read_run_file(file, option_names(context))
        repeated = {
            str(parameter.name) for parameter in context.command.params if getattr(parameter, "multiple", False)
        }
        for name, value in values.items():
            if name in repeated and not isinstance(value, list):
                values[name] = [value]
            elif isinstance(value, list) and name not in repeated:
                fail(f"run file {file}: {name.replace('_', '-')} is a list; give one value", 2)
        context.default_map = {**(context.default_map or {}), **values}
    return file


RunOption = Annotated[
    Path | None,
    typer.Option(
        "--run", callback=_take_run_file, is_eager=True, help="YAML file of options; the command line goes first."
    ),
]


def option_names(context: typer.Context) -> dict[str, str]:
    """What a file may call the command's parameters: option names without dashes -> the parameter's own name."""
    names: dict[str, str] = {}
    for parameter in context.command.params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if not option.startswith("--no-"):
                names[_plain(option)] = str(parameter.name)
    return {name: own for name, own in names.items() if own not in ("run", "help")}


def read_run_file(file: Path, names: dict[str, str]) -> dict[str, Any]:
    """The file's values by parameter. Ends the command with exit code 2 and one line if it cannot be used."""
    try:
        # every value as it is written: the option knows its kind, and 2:8 is no number of base 60
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        fail(f"run file {file} cannot be read ({error.strerror}); give a YAML file of options", 2)
    except UnicodeDecodeError:
        fail(f"run file {file} is not UTF-8; save it as UTF-8", 2)
    except yaml.YAMLError as error:
        fail(f"run file {file} is no YAML ({' '.join(str(error).split())}); give one `option: value` a line", 2)
    if values in (None, ""):
        values = {}
    if not isinstance(values, dict):
        fail(f"run file {file} holds no options; give one `option: value` a line", 2)
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = _plain(str(key))
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            mend = f"did you mean {near[0]}?" if near else "see --help for the command's options"
            fail(f"run file {file}: {key} is no option of this command; {mend}", 2)
        if isinstance(value, dict):
            fail(f"run file {file}: {key} is a mapping; give a value or a list", 2)
        found[names[name]] = None if value in NOTHING else value
    return found


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_").lower()
