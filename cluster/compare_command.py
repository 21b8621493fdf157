"""`draftloop compare` on the command line: its options into a `CompareConfig`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.command import (
    BackendOption,
    ChatTemplateOption,
    CudaGraphsOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    SystemOption,
    TargetOption,
    ThinkingOption,
    console,
    end,
    fail,
    one_line_errors,
)
from cluster.run_file import RunOption


def numbers(text: str) -> tuple[int, ...]:
    """`1,4,8` as (1, 4, 8); empty text as none."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r} are not whole numbers with commas between them, such as 1,4,8") from None


def compare(
    run: RunOption = None,
    target: TargetOption = "smollm2",
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="A drafter's folder or address, or NAME=ADDRESS; several: give the option several times."),
    ] = None,
    prompts: Annotated[
        list[str], typer.Option(help="A shipped set or a file of held-out prompts; several times: several sets.")
    ] = ["gsm8k_test"],  # noqa: B006 - typer takes a list, and copies it
    output: Annotated[str, typer.Option(help="Folder of tables, figures and plot, local or s3://.")] = (
        "draftloop-out/compare"
    ),
    prompt_lookup: Annotated[bool, typer.Option(help="Prompt lookup, which needs no training, takes part.")] = True,
    limit: Annotated[int, typer.Option(help="Prompts of each set that tau is counted on.")] = 40,
    speed_limit: Annotated[
        int,
        typer.Option(help="Of these so many are timed; at least three groups of the smallest batch, two of others."),
    ] = 6,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap raw prompt rows into a user turn.")] = False,
    chat_template: ChatTemplateOption = None,
    system: SystemOption = None,
    thinking: ThinkingOption = "default",
    tokens: Annotated[int, typer.Option(help="Most new tokens per prompt.")] = 96,
    batches: Annotated[str, typer.Option(help="Batch sizes that are timed; the advice is for the smallest.")] = "1,4,8",
    num_draft_tokens: Annotated[int, typer.Option(help="Longest chain of drafts, and depth of trees.")] = 8,
    trees: Annotated[str, typer.Option(help="Nodes of draft trees, beside the chains.")] = "3,7,15",
    dtype: DtypeOption = "float32",
    backend: BackendOption = "auto",
    device: DeviceOption = "cpu",
    cuda_graphs: CudaGraphsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Put drafters, prompt lookup and plain decoding side by side on the same prompts, and say which to choose.

    Stopped, the same command goes on. Exit code 1 if a drafter had to be left out, or if outputs are not those of plain
    decoding: the report is written all the same. Speeds need a machine that does nothing else.
    """
    with one_line_errors():
        from cluster import show
        from cluster.show_compare import compare_view, progress
        from pipelines.compare import compare as measure
        from pipelines.compare_config import CompareConfig
        from serving.chat_options import ChatOptions

        config = CompareConfig(
            target=target, drafters=tuple(drafter or ()), prompts=tuple(prompts), output=output,
            prompt_lookup=prompt_lookup, limit=limit, speed_limit=speed_limit, chat=chat,
            chat_options=ChatOptions.read(chat_template, system, thinking), max_new_tokens=tokens,
            batches=numbers(batches), num_draft_tokens=num_draft_tokens, trees=numbers(trees), dtype=dtype,
            backend=backend, device=device, cuda_graphs=cuda_graphs,
        )  # fmt: skip
        with show.stage(console, f"compare: drafters for {target} on {', '.join(prompts)}", as_json) as stage:
            report = measure(config, progress(stage))
        addresses = {facts.name: facts.address for facts in report.drafters}
        chosen = addresses.get(report.advice.serve or "")
        drafted = f" --drafter {chosen}" if chosen else ""
        end(report, compare_view, as_json, f"draftloop serve --target {target}{drafted}")
        if errors := report.errors():
            fail(f"{'; '.join(errors)} (the report is kept in {report.output})", 1)
