"""`draftloop redistill` on the command line: its options, in the order of the flow, into a `RedistillConfig`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from cluster.command import (
    ChatTemplateOption,
    DtypeOption,
    JsonOption,
    SystemOption,
    TargetOption,
    ThinkingOption,
    console,
    end,
    least_most,
    one_line_errors,
)
from cluster.run_file import RunOption


def time_option(text: str | None) -> datetime | None:
    """An ISO time with its zone."""
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = datetime.min
    if time.tzinfo is None:
        raise typer.BadParameter(f"{text!r} is no time with a zone, such as 2026-11-30T18:00:00+00:00")
    return time


def redistill(
    run: RunOption = None,
    target: TargetOption = "smollm2",
    traffic: Annotated[str, typer.Option(help="--traffic-log of serve.")] = "draftloop-out/traffic",
    registry: Annotated[str, typer.Option(help="Of the target's drafters, local or s3://.")] = "draftloop-out/registry",
    work: Annotated[
        str, typer.Option(help="Folder or s3:// address of the windows' files.")
    ] = "draftloop-out/redistill",
    since: Annotated[
        str | None,
        typer.Option(help="Requests from then on: an ISO time with its zone.", show_default="the last window's end"),
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Requests before then.", show_default="--settle-minutes ago")
    ] = None,
    settle_minutes: Annotated[
        float, typer.Option(min=0, help="Without --until: so long must an answer's way into the log take at most.")
    ] = 5.0,
    min_rows: Annotated[int, typer.Option(help="Fewer usable requests wait for the next window.")] = 200,
    held_out: Annotated[float, typer.Option(help="Share of the requests, the newest, that only the gate sees.")] = 0.1,
    max_rows: Annotated[int, typer.Option(help="Requests to learn from, spread over the window.")] = 20_000,
    chat_template: ChatTemplateOption = None,
    system: SystemOption = None,
    thinking: ThinkingOption = "default",
    replay: Annotated[
        list[str] | None, typer.Option(help="Rollouts of earlier trainings; several: give the option several times.")
    ] = None,
    replay_windows: Annotated[int, typer.Option(help="Replay so many earlier windows too.")] = 3,
    replay_share: Annotated[float, typer.Option(help="Of the training rows.")] = 0.5,
    epochs: Annotated[float, typer.Option(help="Passes over the window's requests.")] = 3.0,
    learning_rate: Annotated[float, typer.Option(help="Peak; warm-up, then cosine to zero.")] = 1e-3,
    regression: Annotated[
        list[str], typer.Option(help="Prompts that a challenger must not be worse on; several times: several sets.")
    ] = ["gsm8k_test"],  # noqa: B006 - typer takes a list, and copies it
    regression_limit: Annotated[int, typer.Option(help="Prompts of each of their categories.")] = 40,
    held_out_limit: Annotated[int, typer.Option(help="Held-out prompts that are decoded, the newest.")] = 64,
    margin: Annotated[float, typer.Option(help="Share by which tau must be better on held-out traffic.")] = 0.02,
    regression_tolerance: Annotated[float, typer.Option(help="Share by which tau may fall on those prompts.")] = 0.05,
    speed_tolerance: Annotated[float, typer.Option(help="Share by which S may fall.")] = 0.03,
    max_new_tokens: Annotated[int, typer.Option(help="Of each of the gate's answers.")] = 128,
    num_draft_tokens: Annotated[int, typer.Option(help="Gate: drafts per round; depth of a tree.")] = 5,
    tree_nodes: Annotated[int, typer.Option(min=0, help="Gate: nodes of a draft tree; 0: chains.")] = 7,
    dtype: DtypeOption = "float32",
    batch: Annotated[int, typer.Option(help="Sequences that an actor reads at once.")] = 8,
    num_actors: Annotated[str, typer.Option(help="Actors that read: a number, or least:most.")] = "1",
    num_workers: Annotated[int, typer.Option(min=1, help="Ray Train workers.")] = 1,
    gpu: Annotated[bool, typer.Option("--gpu", help="One GPU for each actor and worker, and for the gate.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a challenger from a window of traffic; promote it only if it is measurably better.

    Run twice for the same window, the second run does nothing; killed, the same command goes on. Exit code 0 also for
    a challenger that is rejected: the report says why.
    """
    with one_line_errors():
        from cluster import show
        from pipelines.gate import GateConfig
        from pipelines.redistill import redistill as make
        from pipelines.redistill_config import RedistillConfig
        from pipelines.step_config import StepConfig
        from pipelines.traffic_window import WindowConfig
        from serving.chat_options import ChatOptions

        config = RedistillConfig(
            target=target, traffic=traffic, registry=registry, work=work, since=time_option(since),
            until=time_option(until), settle_s=60 * settle_minutes, min_rows=min_rows,
            replay=tuple(replay or ()), replay_windows=replay_windows,
            replay_share=replay_share, regression=tuple(regression), regression_limit=regression_limit,
            held_out_limit=held_out_limit, dtype=dtype, batch=batch, num_actors=least_most(num_actors),
            num_workers=num_workers, use_gpu=gpu, chat_options=ChatOptions.read(chat_template, system, thinking),
            window=WindowConfig(held_out=held_out, max_rows=max_rows),
            steps=StepConfig(epochs=epochs, learning_rate=learning_rate),
            gate=GateConfig(
                margin=margin, regression_tolerance=regression_tolerance, speed_tolerance=speed_tolerance,
                most_speed_tolerance=max(0.1, speed_tolerance), max_new_tokens=max_new_tokens,
                num_draft_tokens=num_draft_tokens, tree_nodes=tree_nodes, dtype=dtype,
                device="cuda" if gpu else "cpu",
            ),
        )  # fmt: skip
        with show.stage(console, f"redistill: {target} from {traffic}", as_json) as stage:
            report = make(config, stage.say)
        look = f"show {report.version}" if report.version else "list"
        end(report, show.redistill_table, as_json, f"draftloop registry {look} --registry {registry}")
