"""The command line: `draftloop generate | train | evaluate | serve | redistill`, in the order of the flow, and more.

Exit codes: 0 done, 1 failed (one line names the cause and the mend), 2 wrong use.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

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
    amounts,
    console,
    end,
    layer_ids,
    least_most,
    one_line_errors,
)
from cluster.compare_command import compare
from cluster.diagnose_command import diagnose
from cluster.formats_command import export, import_drafter
from cluster.redistill_command import redistill
from cluster.registry_command import registry
from cluster.rollouts_command import rollouts
from cluster.run_file import RunOption
from cluster.schedule_command import schedule
from cluster.serve_command import serve
from cluster.train_command import train

app = typer.Typer(
    name="draftloop",
    help="Lossless speculative decoding that keeps itself fast. Newcomers: draftloop quickstart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def generate(
    run: RunOption = None,
    target: TargetOption = "smollm2",
    prompts: Annotated[
        str,
        typer.Option(
            help="gsm8k_train, gsm8k_test, mbpp, russian (shipped), or .jsonl, .jsonl.gz and .parquet with messages, "
            "prompt or turns: a path, an s3:// address, or a pattern in quotes ('prompts/*.jsonl')."
        ),
    ] = "gsm8k_train",
    output: Annotated[str, typer.Option(help="Folder of the rollouts, local or s3://.")] = "draftloop-out/rollouts",
    limit: Annotated[int | None, typer.Option(help="Use only so many prompts.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap raw prompt rows into a user turn.")] = False,
    chat_template: ChatTemplateOption = None,
    system: SystemOption = None,
    thinking: ThinkingOption = "default",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of a reply.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="1: all.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    features: Annotated[bool, typer.Option(help="Store the target's hidden states, which train needs.")] = True,
    features_dtype: Annotated[
        Literal["bfloat16", "float32", "int8"],
        typer.Option(help="Of stored features. int8 (a scale per token and layer) takes half; float32 keeps no more."),
    ] = "bfloat16",
    taps: Annotated[int, typer.Option(help="Layers whose hidden states are stored, the last included.")] = 3,
    layers: Annotated[
        str | None,
        typer.Option(
            help="These layers instead, from 0: 1,14,27, or a drafter: those that it reads. A DFlash for other "
            "servers leaves out the last."
        ),
    ] = None,
    dtype: DtypeOption = "float32",
    backend: BackendOption = "auto",
    batch: Annotated[int, typer.Option(help="Sequences that an actor decodes at once.")] = 8,
    drafter: Annotated[str | None, typer.Option(help="Drafter that makes generation faster.")] = None,
    num_actors: Annotated[str, typer.Option(help="Engines in the pool: a number, or least:most.")] = "1",
    cpus_per_actor: Annotated[
        float | None, typer.Option(help="CPUs that Ray sets aside for each.", show_default="this machine's, divided")
    ] = None,
    threads_per_actor: Annotated[
        int | None, typer.Option(help="Compute threads of each.", show_default="its CPUs")
    ] = None,
    gpus_per_actor: Annotated[float, typer.Option(help="GPUs of each; less than 1: actors share one.")] = 0.0,
    gpu: Annotated[bool, typer.Option("--gpu", help="Short for --gpus-per-actor 1.")] = False,
    resource: Annotated[
        list[str] | None, typer.Option(help="NAME=AMOUNT of a custom Ray resource that an actor's node must have.")
    ] = None,
    rows_per_shard: Annotated[int, typer.Option(help="Prompts per Parquet file, the unit of resuming.")] = 64,
    max_bytes: Annotated[int | None, typer.Option(help="Refuse to write more.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Let the target continue prompts; write its tokens and features as Parquet rollouts."""
    with one_line_errors():
        from cluster import show
        from pipelines.generate import GenerateConfig
        from pipelines.generate import generate as make
        from serving.chat_options import ChatOptions

        config = GenerateConfig(
            target=target, prompts=prompts, output=output, limit=limit, chat=chat, max_new_tokens=max_new_tokens,
            chat_options=ChatOptions.read(chat_template, system, thinking), temperature=temperature, top_k=top_k,
            top_p=top_p, seed=seed, with_features=features, features_dtype=features_dtype, num_taps=taps,
            target_layer_ids=layer_ids(layers),
            dtype=dtype, backend=backend, batch=batch, drafter=drafter, num_actors=least_most(num_actors),
            max_bytes=max_bytes, gpus_per_actor=gpus_per_actor or float(gpu), cpus_per_actor=cpus_per_actor,
            threads_per_actor=threads_per_actor, resources=amounts(resource), rows_per_shard=rows_per_shard,
        )  # fmt: skip
        with show.stage(console, f"generate: {target} continues {prompts}", as_json) as stage:
            report = make(config, stage.generate)
        end(report, show.generate_table, as_json, f"draftloop train --target {target} --rollouts {report.output}")


app.add_typer(rollouts, name="rollouts")
app.command()(train)


@app.command()
def evaluate(
    run: RunOption = None,
    target: TargetOption = "smollm2",
    drafter: Annotated[str, typer.Option(help="--output of train.")] = "draftloop-out/drafter",
    prompts: Annotated[
        str, typer.Option(help="A shipped set or a JSONL file; never what it was trained on.")
    ] = "gsm8k_test",
    limit: Annotated[int, typer.Option(help="Prompts to decode.")] = 40,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap raw prompt rows into a user turn.")] = False,
    chat_template: ChatTemplateOption = None,
    system: SystemOption = None,
    thinking: ThinkingOption = "default",
    max_new_tokens: Annotated[int, typer.Option(help="Per prompt.")] = 128,
    batch: Annotated[int, typer.Option(help="Prompts decoded at a time.")] = 1,
    num_draft_tokens: Annotated[int, typer.Option(help="Drafts per round; depth of a tree.")] = 5,
    tree_nodes: Annotated[int, typer.Option(min=0, help="Nodes of each sequence's draft tree; 0: chains.")] = 7,
    dtype: DtypeOption = "float32",
    backend: BackendOption = "auto",
    device: DeviceOption = "cpu",
    cuda_graphs: CudaGraphsOption = False,
    output: Annotated[str | None, typer.Option(help="JSON file; default: evaluation.json beside the drafter.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Decode held-out prompts with the drafter and without; compare speed and, token for token, the outputs."""
    with one_line_errors():
        from cluster import show
        from pipelines.evaluate import EvaluateConfig
        from pipelines.evaluate import evaluate as measure
        from serving.chat_options import ChatOptions

        config = EvaluateConfig(
            target=target, drafter=drafter, prompts=prompts, limit=limit, chat=chat, max_new_tokens=max_new_tokens,
            batch=batch, num_draft_tokens=num_draft_tokens, tree_nodes=tree_nodes, dtype=dtype, backend=backend,
            device=device, cuda_graphs=cuda_graphs, output=output,
            chat_options=ChatOptions.read(chat_template, system, thinking),
        )  # fmt: skip
        with show.stage(console, f"evaluate: {drafter} for {target} on {prompts}", as_json) as stage:
            report = measure(config, stage.evaluate)
        end(report, show.evaluation_table, as_json, f"draftloop serve --target {target} --drafter {drafter}")


app.command()(compare)
app.command()(diagnose)
app.add_typer(registry, name="registry")
app.command()(export)
app.command("import")(import_drafter)
app.command()(serve)
app.command()(redistill)
app.command()(schedule)


@app.command()
def quickstart(
    target: TargetOption = "smollm2",
    output: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("draftloop-out/quickstart"),
    prompts: Annotated[int, typer.Option(min=8, max=800, help="GSM8K questions to train on.")] = 400,
    epochs: Annotated[float, typer.Option(help="Passes over the target's answers.")] = 8.0,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
) -> None:
    """The whole loop once, small: generate, train, evaluate, serve."""
    with one_line_errors():
        from cluster.quickstart import quickstart as run

        run(console, target, output, prompts, epochs, port)


@app.command()
def drill(
    target: TargetOption = "smollm2",
    output: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("draftloop-out/drill"),
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter of GSM8K to begin with.", show_default="one is trained")
    ] = None,
    replay: Annotated[str | None, typer.Option(help="Rollouts that it was trained on.")] = None,
    questions: Annotated[int, typer.Option(min=8, max=800, help="GSM8K questions to train the first one on.")] = 400,
    shifts: Annotated[
        int, typer.Option(min=0, max=2, help="Kinds of traffic that follow GSM8K; 0: only a bad drafter's roll-back.")
    ] = 2,
    answers: Annotated[int, typer.Option(min=20, help="To each kind of traffic before the loop runs.")] = 100,
    answers_after: Annotated[int, typer.Option(min=1, help="And after it.")] = 40,
    concurrency: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 2,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
) -> None:
    """The closed loop, watched: traffic shifts, tau falls, a challenger is trained, gated, promoted and served."""
    with one_line_errors():
        from cluster.drill import DrillConfig
        from cluster.drill import drill as run

        config = DrillConfig(
            target=target, output=output, drafter=drafter, replay=replay, questions=questions, shifts=shifts,
            answers=answers, answers_after=answers_after, concurrency=concurrency, port=port,
        )  # fmt: skip
        run(console, config)
        console.print(f"next: look at {output}/drill.svg", highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    """The console script."""
    sys.exit(app())


if __name__ == "__main__":
    main()
