"""`draftloop rollouts inspect` on the command line: what a set of rollouts holds, and whether it is whole."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.command import JsonOption, console, end, fail, one_line_errors

rollouts = typer.Typer(help="Look at rollout sets.", no_args_is_help=True)


@rollouts.command()
def inspect(
    path: Annotated[str, typer.Argument(help="--output of generate: a folder or an s3:// address.")],
    target: Annotated[
        str | None,
        typer.Option(help="Target whose tokenizer decodes the sample.", show_default="as recorded, if it is here"),
    ] = None,
    sample: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 2,
    check: Annotated[bool, typer.Option(help="Compare every shard with its checksum, which reads all of it.")] = True,
    as_json: JsonOption = False,
) -> None:
    """What a rollout set holds, finished or not, and whether it is whole.

    Exit code 1 if a shard is damaged or missing.
    """
    with one_line_errors():
        from cluster import show
        from cluster.show_rollouts import inspection_view
        from pipelines.rollout_inspect import InspectOptions, inspect_rollouts

        options = InspectOptions(sample=sample, check=check, target=target)
        with show.stage(console, f"inspect: {path}", as_json) as stage:
            found = inspect_rollouts(path, options, stage.at)
        if found.finished and not found.damaged:
            made_by = target or found.origin["target"]
            next_command = f"draftloop train --target {made_by} --rollouts {found.uri}"
        else:
            next_command = f"draftloop generate --output {found.uri} ... (the options that it was begun with)"
        end(found, inspection_view, as_json, next_command)
        if found.damaged:
            names = ", ".join(list(found.damaged)[:3])
            what = f"{len(found.damaged)} of {found.shards} shards are damaged or missing ({names})"
            fail(f"{what}; delete what is left of them and run generate again", 1)
