"""`draftloop serve` on the command line: its options into a `ServeConfig`, then the app until Ctrl-C."""

from __future__ import annotations

import threading
from typing import Annotated, Any

import typer
from rich.markup import escape

from cluster.command import (
    BackendOption,
    ChatTemplateOption,
    CudaGraphsOption,
    DeviceOption,
    DtypeOption,
    SystemOption,
    TargetOption,
    ThinkingOption,
    console,
    fail,
    given,
    one_line_errors,
)
from cluster.run_file import RunOption

_DAY_S = 86400


def serve(
    run: RunOption = None,
    target: TargetOption = "smollm2",
    drafter: Annotated[str | None, typer.Option(help="--output of train; without: plain decoding.")] = None,
    registry: Annotated[
        str | None, typer.Option(help="Serve this registry's champion, whichever that is, in place of --drafter.")
    ] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 to be reached from other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    model_name: Annotated[str | None, typer.Option(help="What clients ask for; default: the target's name.")] = None,
    api_keys: Annotated[str | None, typer.Option(help="File of keys, one a line; without: no keys.")] = None,
    page: Annotated[bool, typer.Option(help="A page for people at /.")] = True,
    chat_template: ChatTemplateOption = None,
    system: SystemOption = None,
    thinking: ThinkingOption = "default",
    num_draft_tokens: Annotated[
        int, typer.Option(min=0, help="Most drafts per round, or depth of a tree; 0: decode plainly.")
    ] = 5,
    tree_nodes: Annotated[
        int, typer.Option(min=0, max=63, help="Most nodes of a draft tree, where a drafter makes trees; 0: chains.")
    ] = 15,
    adapt: Annotated[bool, typer.Option(help="Choose each sequence's number of drafts by cost.")] = True,
    num_slots: Annotated[
        int | None, typer.Option(min=1, help="Sequences decoded at once.", show_default="8, or what --memory-gb holds")
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(min=0.001, help="What a replica may take: weights, slots, drafter.")
    ] = None,
    max_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence, prompt included.")] = 2048,
    num_replicas: Annotated[int, typer.Option(min=1, help="Least replicas, with --max-replicas.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="As many as the load wants, up to so many.", show_default="--num-replicas")
    ] = None,
    disaggregated: Annotated[
        bool,
        typer.Option("--disaggregated", help="The drafter in a process of its own, on cuda with a GPU too."),
    ] = False,
    spread: Annotated[bool, typer.Option("--spread", help="disaggregated: on another node, if there is one.")] = False,
    draft_deadline_s: Annotated[
        float | None,
        typer.Option(min=0.001, help="disaggregated: a round waits so long for its drafts.", show_default="0.25"),
    ] = None,
    traffic_log: Annotated[
        str | None,
        typer.Option(help="Folder, local or s3://, for the token ids of answered requests; without: none are kept."),
    ] = None,
    traffic_sample: Annotated[float, typer.Option(min=0, max=1, help="Share of the requests that it keeps.")] = 1.0,
    traffic_max_bytes: Annotated[int, typer.Option(min=1, help="Of the whole log; the oldest go.")] = 10 * 2**30,
    traffic_max_age_days: Annotated[float, typer.Option(min=0.01, help="Older requests go.")] = 30.0,
    dtype: DtypeOption = "float32",
    backend: BackendOption = "auto",
    device: DeviceOption = "cpu",
    cuda_graphs: CudaGraphsOption = False,
) -> None:
    """Answer OpenAI-style requests with the target and a drafter, until Ctrl-C."""
    with one_line_errors():
        from pipelines.ray_session import start_ray
        from serving.serve_app import memory_line, run_app, shutdown
        from serving.serve_config import Disaggregation, ServeConfig
        from serving.traffic_log import TrafficLogConfig

        if drafter is not None and registry is not None:
            fail("--drafter and --registry exclude each other; leave one of them out", 2)
        if not disaggregated and (spread or draft_deadline_s is not None):
            fail("--spread and --draft-deadline-s need --disaggregated; add it or leave them out", 2)
        slots = num_slots or (None if memory_gb else 8)
        scaling: dict[str, Any] = {"num_replicas": num_replicas}
        if max_replicas is not None:
            scaling = {"autoscale": {"min_replicas": num_replicas, "max_replicas": max_replicas}}
        apart: dict[str, Any] = given(strategy="SPREAD" if spread else "PACK", draft_deadline_s=draft_deadline_s)
        traffic = TrafficLogConfig(
            uri=traffic_log, sample_rate=traffic_sample, max_bytes=traffic_max_bytes,
            max_age_s=traffic_max_age_days * _DAY_S,
        )  # fmt: skip
        settings: dict[str, Any] = {"dtype": dtype, "backend": backend, "device": device, **scaling}
        config = ServeConfig(
            target=target, drafter=drafter, host=host, port=port, model_name=model_name, api_key_file=api_keys,
            page=page, chat_template=chat_template, system=system, thinking=thinking,
            num_draft_tokens=num_draft_tokens, tree_nodes=tree_nodes, adapt_draft_length=adapt, num_slots=slots,
            memory_bytes=None if memory_gb is None else int(memory_gb * 1e9), max_len=max_len,
            disaggregated=Disaggregation(**apart) if disaggregated else None, cuda_graphs=cuda_graphs,
            traffic_log=traffic, **given(registry=registry), **settings,
        )  # fmt: skip
        start_ray()
        base_url = run_app(config)
        source = drafter or (f"the champion of {registry}" if registry else "none")
        _say_hello(config.served_name, base_url, source, memory_line(), page)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            console.print("stopping")
        finally:
            shutdown()


def _say_hello(name: str, base_url: str, drafter: str, memory: str, page: bool) -> None:
    what = escape(f"{name} at {base_url}, drafter {drafter}")
    console.print(f"[bold]serving[/bold] {what}", soft_wrap=True)
    console.print(memory, highlight=False, markup=False, soft_wrap=True)
    if page:
        console.print(f"a page to try it: {base_url.removesuffix('/v1')}/", highlight=False, markup=False)
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is 7 * 12?"}}]}}'
    curl = f"  curl {base_url}/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    console.print("or in a shell:" if page else "try it:")
    console.print(curl, highlight=False, markup=False, soft_wrap=True)
