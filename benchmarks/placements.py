"""Plain, colocated and disaggregated service side by side, over HTTP, at several concurrencies.

    python benchmarks/placements.py --drafter DRAFTER --nodes 2

All apps stand in one Ray Serve and take turns, so that they meet the same machine; whoever does not serve sleeps. The
disaggregated ones are measured in strict alternation, by halves of the batch, and as the engine chooses; with --nodes 2
target and drafter lie on two local nodes (SPREAD). Then T_base, T_draft and T_verify of the engine alone and the round
trip of the link give what two GPUs with the same ratios would do. Needs a machine that does nothing else. Writes
benchmarks/results/placements-DATE.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from http_load import Streamed, quantile, run_streams
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions
from references import write_json, write_text

from drafters.drafter import DraftReply, DraftRequest
from drafters.remote_checkpoint import local_checkpoint
from drafters.target import load_target
from pipelines.evaluate import versions
from pipelines.prompts import read_prompts
from serving.draft_link import DrafterInfo, DraftLink, RemoteDrafter
from serving.draft_server import DraftServer
from serving.engine.build import build_engine
from serving.engine.engine import EngineConfig
from serving.engine.sampling import Sampling
from serving.serve_app import build
from serving.serve_config import Disaggregation, Overlap, ServeConfig

RESULTS = Path(__file__).parent / "results"
PLAIN, COLOCATED = "no drafter", "colocated"
APART: dict[str, Overlap] = {"apart, alternating": "off", "apart, by halves": "on", "apart, as chosen": "auto"}


@contextmanager
def cluster(nodes: int) -> Iterator[None]:
    """A local Ray of one node, or of two with room for one bundle of every app each."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    for _ in range(nodes - 1):
        made.add_node(num_cpus=4)
    made.wait_for_nodes(timeout=60)
    os.environ["RAY_ADDRESS"] = made.address
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        made.shutdown()


def start_apps(args: argparse.Namespace) -> dict[str, str]:
    """The base URL of every contender."""
    common: dict[str, Any] = {"target": args.target, "dtype": args.dtype, "num_slots": 8, "max_len": 1024}
    configs = {PLAIN: ServeConfig(**common), COLOCATED: ServeConfig(drafter=args.drafter, **common)}
    strategy = "STRICT_SPREAD" if args.nodes > 1 else "PACK"
    for name, overlap in APART.items():
        apart = Disaggregation(strategy=strategy, overlap=overlap, draft_deadline_s=1.0)
        configs[name] = ServeConfig(drafter=args.drafter, disaggregated=apart, **common)
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=args.port), proxy_location="HeadOnly")
    targets, urls = [], {}
    for number, (name, config) in enumerate(configs.items()):
        targets.append(serve.RunTarget(target=build(config), name=f"app-{number}", route_prefix=f"/app-{number}"))
        urls[name] = f"http://127.0.0.1:{args.port}/app-{number}/v1"
    serve.run_many(targets, wait_for_applications_running=True)
    return urls


def measure(args: argparse.Namespace, urls: dict[str, str]) -> dict[tuple[str, int], list[dict[str, float]]]:
    """Figures of every run, by contender and concurrency; `changed` counts answers unlike the first contender's."""
    target = load_target(args.target)
    pool = itertools.cycle(read_prompts(args.prompts, target).rows)
    name = Path(args.target).name

    def some(count: int) -> list[dict[str, Any]]:
        """The next prompts: a slot that holds one of them would spare its contender the prefill."""
        rows = itertools.islice(pool, count)
        return [{"model": name, "prompt": row.prompt_ids, "max_tokens": args.tokens, "temperature": 0} for row in rows]

    found: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    for url, concurrency in itertools.product(urls.values(), args.concurrency):
        asyncio.run(run_streams(url, some(8), concurrency))  # kernels, and what draft lengths are chosen by
    for run, concurrency in itertools.product(range(args.runs), args.concurrency):
        bodies = some(args.limit if concurrency > 1 else max(1, args.limit // 3))
        texts: list[str] = []
        for contender, url in urls.items():
            answers, seconds = asyncio.run(run_streams(url, bodies, concurrency))
            texts = texts or [a.text for a in answers]
            figures = figures_of([a for a in answers if a.error is None], seconds)
            figures["failed"] = sum(a.error is not None for a in answers)
            figures["changed"] = sum(a.text != text for a, text in zip(answers, texts, strict=True))
            found[contender, concurrency].append(figures)
            print(f"run {run + 1}, {concurrency} at once, {contender}: {figures}", flush=True)
    return found


def figures_of(answers: list[Streamed], seconds: float) -> dict[str, float]:
    rounds, accepted = sum(a.rounds for a in answers), sum(a.accepted for a in answers)
    per_token = [a.per_token_s for a in answers if a.per_token_s is not None]
    return {
        "tokens_per_s": sum(a.tokens for a in answers) / seconds,
        "tau": accepted / rounds + 1 if rounds else 0.0,
        "first_p50_ms": 1000 * quantile([a.first_s for a in answers], 0.5),
        "first_p95_ms": 1000 * quantile([a.first_s for a in answers], 0.95),
        "token_p50_ms": 1000 * quantile(per_token, 0.5),
        "token_p95_ms": 1000 * quantile(per_token, 0.95),
    }


def table(found: dict[tuple[str, int], list[dict[str, float]]]) -> list[str]:
    lines = [
        "| at once | | tokens/s, median (range) | of no drafter | tau | first token, ms: p50, p95 | "
        "per token, ms: p50, p95 |",
        "|---|---|---|---|---|---|---|",
    ]
    for (contender, concurrency), runs in sorted(found.items(), key=lambda item: item[0][1]):

        def middle(name: str, runs: list[dict[str, float]] = runs) -> float:
            return statistics.median(run[name] for run in runs)

        speeds = [run["tokens_per_s"] for run in runs]
        plain = statistics.median(run["tokens_per_s"] for run in found[PLAIN, concurrency])
        tau = f"{middle('tau'):.2f}" if middle("tau") else ""
        lines.append(
            f"| {concurrency} | {contender} | {middle('tokens_per_s'):.1f} ({min(speeds):.1f} to {max(speeds):.1f}) | "
            f"{middle('tokens_per_s') / plain:.2f} | {tau} | {middle('first_p50_ms'):.0f}, "
            f"{middle('first_p95_ms'):.0f} | {middle('token_p50_ms'):.1f}, {middle('token_p95_ms'):.1f} |"
        )
    return lines


# -- what two devices would do -----------------------------------------------------------------------------------------


class _Silent:
    """Answers a request at once with drafts of nothing: what is left is the link."""

    def __init__(self, info: DrafterInfo):
        self.name, self.target_layer_ids = info.name, info.target_layer_ids
        self.max_draft_tokens, self.max_tree_nodes = info.max_draft_tokens, info.max_tree_nodes

    def allocate(self, num_slots: int, max_len: int) -> None:
        """Nothing is kept."""

    def draft(self, request: DraftRequest) -> DraftReply:
        return DraftReply(tokens_BK=torch.zeros((len(request.slots), request.tree_nodes), dtype=torch.int64))


def round_trip_s(batch: int, pairs: int, width: int, count: int = 300) -> float:
    """Median seconds of a round trip with so many pairs' features, both ends on this machine."""
    link = DraftLink()
    server = DraftServer(link.keys, b"bench")
    info = DrafterInfo(name="silent", target_layer_ids=(0,), max_draft_tokens=7, max_tree_nodes=7)
    server.add("bench", _Silent(info))
    drafter = RemoteDrafter(link, b"bench", "bench", info)
    features = torch.randn(batch * pairs, width)
    seconds = []
    time.sleep(0.5)
    for number in range(count):
        request = DraftRequest(
            slots=list(range(batch)), epochs=[number] * batch, counts=[pairs] * batch, starts=[0] * batch,
            first_tokens=[1] * batch, tokens_N=torch.ones(batch * pairs, dtype=torch.int64), features_NF=features,
            num_draft_tokens=5, tree_nodes=7, temperatures=[0.0] * batch, seeds=[0] * batch,
        )  # fmt: skip
        begun = time.perf_counter()
        drafter.draft(request)
        seconds.append(time.perf_counter() - begun)
    server.close()
    link.close()
    return statistics.median(seconds)


def parts(args: argparse.Namespace, batch: int) -> dict[str, float]:
    """T_base, T_draft, T_verify (trees of 7) and tau of the engine alone at a batch, in seconds."""
    target = load_target(args.target)
    config = EngineConfig(num_draft_tokens=5, tree_nodes=7)
    path = local_checkpoint(args.drafter)
    engine = build_engine(
        target.path, dtype=args.dtype, num_slots=batch, max_len=1024, drafter_path=path, config=config
    )
    prompts = [row.prompt_ids for row in read_prompts(args.prompts, target, limit=2 * batch).rows]
    engine.generate(prompts, Sampling(max_new_tokens=args.tokens))
    timings, tau = engine.stats.timings, engine.stats.acceptance.tau
    draft = timings.t_draft(batch, 5)
    verify = [s for (b, drafts), s in timings.step.items() if b == batch and drafts >= 6 * batch]
    drafter = engine.drafter
    assert drafter is not None
    width = len(drafter.target_layer_ids) * engine.backend.hidden_size
    engine.set_drafter(None)
    engine.reset_stats()
    engine.generate(prompts, Sampling(max_new_tokens=32))
    base = engine.stats.timings.t_base(batch)
    assert draft is not None
    assert base is not None
    assert tau is not None
    return {
        "tau": tau,
        "base": base,
        "draft": draft,
        "verify": statistics.median(x for s in verify for x in s),
        "link": round_trip_s(batch, 3, width),
    }


def model(args: argparse.Namespace) -> tuple[list[str], dict[int, dict[str, float]]]:
    """What a target and a drafter on devices of their own would reach with these times, by batch."""
    found = {batch: parts(args, batch) for batch in (1, 2, 4, 8)}
    lines = [
        "| batch | T_base, T_draft, T_verify, round trip, ms | tau | one device | two, alternating | two, by halves |",
        "|---|---|---|---|---|---|",
    ]
    for batch in (2, 4, 8):
        whole, half = found[batch], found[batch // 2]
        tokens, link = batch * whole["tau"], whole["link"]
        one = tokens / (whole["draft"] + whole["verify"])
        alternating = tokens / (whole["draft"] + whole["verify"] + link)
        halves = tokens / (2 * max(half["verify"], half["draft"] + half["link"]))
        times = ", ".join(f"{1000 * whole[name]:.2f}" for name in ("base", "draft", "verify", "link"))
        lines.append(f"| {batch} | {times} | {whole['tau']:.2f} | {one:.0f} tok/s | {alternating:.0f} | {halves:.0f} |")
    one, many = found[1], found[8]
    tokens, base, draft, link = 8 * many["tau"], one["base"], one["draft"], many["link"]
    free = (tokens / (base + draft), tokens / (base + draft + link), tokens / (2 * max(base, draft + link)))
    lines += [
        "",
        "That is a device for which every row costs, as on these cores. Where rows are free (a GPU at small batches, "
        "bound by its memory), a pass takes as long for half a batch as for the whole, and halves cannot win: with "
        f"T_base {1000 * base:.1f} ms and T_draft {1000 * draft:.1f} ms of one sequence for 8, one device makes "
        f"{free[0]:.0f} tok/s, two in alternation {free[1]:.0f}, by halves {free[2]:.0f}. Halves win where the verify "
        "pass is bound by arithmetic and the draft takes a good part of a round, at most a factor of 2.",
    ]
    return lines, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", default="gsm8k_test")
    parser.add_argument("--limit", type=int, default=24, help="prompts of a run; a third of them one at a time")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--port", type=int, default=18400)
    parser.add_argument("--model-only", action="store_true", help="print what two devices would do, and end")
    args = parser.parse_args()
    predicted, times = model(args)
    if args.model_only:
        print("\n".join(predicted))
        return
    with cluster(args.nodes):
        found = measure(args, start_apps(args))
    date = datetime.date.today().isoformat()
    where = "two local nodes (STRICT_SPREAD)" if args.nodes > 1 else "one node"
    few = max(1, args.limit // 3)

    def total(name: str) -> float:
        return sum(run[name] for runs in found.values() for run in runs)

    note = (
        f"{Path(args.target).name}, {args.dtype}, greedy, {args.limit} prompts of {args.prompts} ({few} one at a "
        f"time), {args.tokens} new tokens at most, {args.runs} runs in turns, streams over HTTP through Ray Serve, "
        f"target and drafter apart on {where}, {os.cpu_count()} cores in all for targets, drafters, proxy and client. "
        f"Every run has prompts of its own, the same for all. Requests that failed: {total('failed'):.0f}; answers "
        f"that differ from {PLAIN}'s: {total('changed'):.0f}."
    )
    lines = [f"# Placements, {date}", "", note, "", *table(found), "", "## What two devices would do", ""]
    lines += [
        "From the engine alone (trees of 7, one process, both cores) and the link (both ends on this machine, "
        "encrypted): tokens/s = batch * tau / time of a round. One device: T_draft + T_verify; two in alternation: the "
        "round trip more; two by halves: 2 * max(T_verify, T_draft + round trip) of half the batch.",
        "",
        *predicted,
    ]
    facts = {
        "args": vars(args) | {"drafter": Path(args.drafter).name, "target": Path(args.target).name},
        "versions": versions(),
        "runs": {f"{name}, {concurrency}": runs for (name, concurrency), runs in found.items()},
        "engine": times,
    }
    write_json(RESULTS / f"placements-{date}.json", facts)
    write_text(RESULTS / f"placements-{date}.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
