"""What commands share: options of one meaning, one line for every mistake, an end that names the next command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

console = Console()
errors = Console(stderr=True)

TargetOption = Annotated[
    str,
    typer.Option("--target", help="smollm2, a Hugging Face id (Qwen/Qwen3-0.6B), a local folder, or a .gguf file."),
]
DtypeOption = Annotated[str, typer.Option(help="Of the target: float32 or bfloat16.")]
BackendOption = Annotated[str, typer.Option(help="auto, native (C++ on CPUs) or torch (any target, CPU and GPU).")]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
CudaGraphsOption = Annotated[bool, typer.Option("--cuda-graphs", help="With cuda: replay captured passes.")]
ChatTemplateOption = Annotated[str | None, typer.Option(help="Jinja file in place of the target's own chat template.")]
SystemOption = Annotated[
    str | None, typer.Option(help="System turn for chats that have none; raw prompts stay as they are.")
]
ThinkingOption = Annotated[
    Literal["default", "on", "off"], typer.Option(help="Told to the chat template as enable_thinking.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="No progress; the report as one JSON object.")]


def least_most(text: str) -> tuple[int, int]:
    """`3` or `1:4` as (least, most)."""
    parts = text.split(":")
    try:
        low, high = int(parts[0]), int(parts[-1])
    except ValueError:
        low, high = 1, 0
    if len(parts) > 2 or not 1 <= low <= high:
        raise typer.BadParameter(f"{text!r} is not a number or least:most, such as 2 or 1:4")
    return low, high


def layer_ids(text: str | None) -> tuple[int, ...] | None:
    """`3,9,11` as (3, 9, 11), and a drafter's folder or address as the layers that it reads. Raises CheckpointError."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if all(part.isdecimal() for part in parts):
        return tuple(int(part) for part in parts)
    from drafters.checkpoint import read_config
    from drafters.remote_checkpoint import local_checkpoint

    return read_config(local_checkpoint(text)).target_layer_ids


def given(**options: Any) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def amounts(pairs: list[str] | None) -> tuple[tuple[str, float], ...]:
    """`["target_node=1"]` as (("target_node", 1.0),)."""
    found = []
    for pair in pairs or []:
        name, _, amount = pair.partition("=")
        try:
            found.append((name.strip(), float(amount or 1)))
        except ValueError:
            name = ""
        if not name.strip() or found[-1][1] <= 0:
            raise typer.BadParameter(f"{pair!r} is not NAME=AMOUNT, such as target_node=1")
    return tuple(found)


def end(report: Any, table: Any, as_json: bool, next_command: str) -> None:
    """What was made, its headline figures, and the next command to type."""
    from cluster import show

    if as_json:
        print(show.as_json(report))
        return
    console.print(table(report))
    console.print(f"next: {next_command}", highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """A user's mistake ends in one line and exit code 1, a bad option value in exit code 2; never in a traceback."""
    import pydantic

    try:
        yield
    except KeyboardInterrupt:
        errors.print("stopped; run the same command again to go on")
        raise typer.Exit(1) from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        fail(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}", 2)
    except (ValueError, OSError, RuntimeError) as error:
        if not _is_told(error):
            raise
        fail(str(error), 1)


def _is_told(error: Exception) -> bool:
    """Whether the error is one of ours, with a message for users; anything else is a bug and keeps its traceback."""
    return type(error).__module__.split(".")[0] in {"drafters", "serving", "pipelines", "cluster"} or isinstance(
        error, OSError
    )


def fail(message: str, code: int) -> NoReturn:
    errors.print(f"[red]error:[/red] {escape(' '.join(message.split()))}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)
