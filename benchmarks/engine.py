"""Decode speed of the engine against its peers, interleaved batch by batch in one run.

    pip install -e '.[bench]'
    python benchmarks/engine.py --drafter draftloop-out/quickstart/drafter

Per dtype and batch size, every contender (contenders.py) decodes the same prompts greedily; a run is one pass over all
of them, in an order that is drawn for each batch. The slow ones, transformers and our torch backend, decode the first
batches of a run only, and ratios count the batches that both sides decoded. Prints a table for each and writes them
with their circumstances to benchmarks/results/. Needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import random
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from contenders import Contender, Setting, llama_cpp_contender, our_contenders, transformers_contenders
from references import write_json, write_text
from safetensors import safe_open

from drafters.acceptance import Acceptance
from drafters.target import load_target
from pipelines.evaluate import versions
from pipelines.prompts import read_prompts
from serving.engine.build import DTYPES, TORCH_THREADS

PAUSE_S = 0.2  # before each decode, so that the threads of the one before have gone to sleep
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    tokens_per_s: float  # median over runs, all sequences together, prefill included
    low: float  # slowest run
    high: float  # fastest run
    against_plain: float | None  # over our plain loop of the same backend
    against_transformers: float  # over transformers' generate
    against_llama_cpp: float | None  # over llama.cpp in the nearest dtype
    tau: float | None
    t_base_ms: float | None
    t_draft_ms: float | None
    t_verify_ms: float | None
    s_predicted: float | None
    gb_per_s: float | None  # weights streamed by a plain step
    equal: str  # outputs equal to our plain loop's
    lengths: dict[int, int] | None  # drafts chosen, by sequence and round


def measure(contenders: list[Contender], groups: list[list[list[int]]], runs: int, slow_groups: int) -> None:
    """Decode all groups with everybody, `runs` times; the order is drawn anew for each group."""
    for contender in contenders:
        contender.decode(groups[0])  # warm up
        if contender.engine:
            contender.engine.reset_stats()
    order = random.Random(0)
    for run in range(runs):
        for contender in contenders:
            contender.runs.append([])
            contender.outputs = []
        for number, group in enumerate(groups):
            for contender in order.sample(contenders, len(contenders)):
                if contender.slow and number >= slow_groups:
                    continue
                time.sleep(PAUSE_S)
                started = time.perf_counter()
                outputs = contender.decode(group)
                contender.runs[-1].append((sum(map(len, outputs)), time.perf_counter() - started))
                contender.outputs += outputs
        print(f"run {run + 1} of {runs}: " + ", ".join(f"{c.name} {c.rates()[-1]:.1f}" for c in contenders), flush=True)


def row_of(contender: Contender, plain: Contender, peers: list[Contender], batch: int, weight_bytes: int) -> Row:
    """`plain` is our plain loop on the contender's backend, or on the first backend for a peer."""
    acceptance, timings = Acceptance(), None
    if contender.engine:
        acceptance, timings = contender.engine.stats.acceptance, contender.engine.stats.timings
    # Predicted only where every round had as many drafts: T_verify depends on them.
    fixed = contender.engine is not None and contender.engine.drafter and not contender.engine.config.adapt_draft_length
    number = contender.engine.num_draft_tokens if fixed and contender.engine else 0
    drafts = contender.engine.tree_nodes or number if contender.engine else 0
    base = plain.engine.stats.timings.t_base(batch) if plain.engine and contender.engine else None
    draft = timings.t_draft(batch, number) if timings and number else None
    verify = timings.t_verify(batch, drafts) if timings and number else None
    known = acceptance.tau and base and draft and verify
    same = sum(a == b for a, b in zip(contender.outputs, plain.outputs, strict=False))
    rates = contender.rates()
    return Row(
        name=contender.name, tokens_per_s=statistics.median(rates), low=min(rates), high=max(rates),
        against_plain=ratio(contender, plain) if contender.engine else None,
        against_transformers=ratio(contender, peers[0]),
        against_llama_cpp=ratio(contender, peers[-1]) if peers[-1].name.startswith("llama.cpp") else None,
        tau=acceptance.tau, t_base_ms=_ms(base), t_draft_ms=_ms(draft), t_verify_ms=_ms(verify),
        s_predicted=base * acceptance.tau / (draft + verify) if known else None,
        gb_per_s=weight_bytes / base / 1e9 if base and contender is plain else None,
        equal=f"{same}/{min(len(contender.outputs), len(plain.outputs))}",
        lengths=dict(sorted(contender.engine.stats.draft_lengths.items())) if contender.adapts else None,
    )  # fmt: skip


def ratio(one: Contender, other: Contender) -> float:
    """Tokens per second of one over the other's, run by run over the batches that both decoded: the median."""
    common = min(len(one.runs[0]), len(other.runs[0]))
    return statistics.median(a / b for a, b in zip(one.rates(common), other.rates(common), strict=True))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def copy_bandwidth() -> float:
    """GB/s, read and written, of a large copy."""
    torch.set_num_threads(TORCH_THREADS)
    source, sink = torch.ones(64 * 2**20), torch.empty(64 * 2**20)
    best = 1e9
    for _ in range(8):
        started = time.perf_counter()
        sink.copy_(source)
        best = min(best, time.perf_counter() - started)
    return 2 * source.nbytes / best / 1e9


def weight_bytes(target_path: Path, dtype: str) -> int:
    """Bytes of the target's weights: with tied embeddings, what a plain step reads once each."""
    numbers = 0
    for file in target_path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            numbers += sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118 - no dict
    return numbers * DTYPES[dtype].itemsize


def table(rows: list[Row]) -> str:
    def cell(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    heads = (
        "contender", "tok/s (slowest to fastest run)", "x transformers", "x llama.cpp", "S_measured", "S_predicted",
        "tau", "T_base ms", "T_draft ms", "T_verify ms", "GB/s", "equal to plain",
    )  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for r in rows:
        cells = (
            r.name, f"{r.tokens_per_s:.1f} ({r.low:.1f} to {r.high:.1f})", cell(r.against_transformers, 2),
            cell(r.against_llama_cpp, 2), cell(r.against_plain, 2), cell(r.s_predicted, 2), cell(r.tau, 2),
            cell(r.t_base_ms), cell(r.t_draft_ms), cell(r.t_verify_ms), cell(r.gb_per_s), r.equal,
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    chosen = [f"Drafts chosen by {r.name}: {r.lengths}" for r in rows if r.lengths]
    return "\n".join([*lines, "", *chosen])


def measure_setting(setting: Setting, prompts: list[list[int]], args: argparse.Namespace) -> list[Row]:
    ours = [our_contenders(setting, backend) for backend in args.backends.split(",")]
    peers = transformers_contenders(setting)
    if args.llama_cpp:
        peers.append(llama_cpp_contender(setting))
    contenders = peers + [c for group in ours for c in group]
    groups = [prompts[i : i + setting.batch] for i in range(0, len(prompts), setting.batch)]
    try:
        measure(contenders, groups, args.runs, max(1, args.slow_limit // setting.batch))
    finally:
        for contender in contenders:
            contender.close()
    for contender in contenders:
        if contender.engine and contender.engine.stats.fallbacks:
            raise SystemExit(f"{contender.name}: the drafter failed ({contender.engine.stats.fallbacks}); no figures")
    plain_of = {c.name: group[0] for group in ours for c in group}
    size = weight_bytes(setting.target.path, setting.dtype)
    return [row_of(c, plain_of.get(c.name, ours[0][0]), peers, setting.batch, size) for c in contenders]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", required=True, help="folder of a recursive MTP drafter")
    parser.add_argument("--prompts", default="gsm8k_test")
    parser.add_argument("--limit", type=int, default=8, help="prompts; rounded up to the batch")
    parser.add_argument("--slow-limit", type=int, default=3, help="prompts of a run that the slow contenders decode")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--backends", default="native,torch")
    parser.add_argument("--name", default="engine", help="of the files in benchmarks/results")
    parser.add_argument("--llama-cpp", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    target = load_target(args.target)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    facts = {
        "date": datetime.date.today().isoformat(), "commit": commit.stdout.strip(), "arguments": vars(args),
        "versions": versions(), "copy_gb_per_s": copy_bandwidth(), "tables": [],
    }  # fmt: skip
    file = Path(__file__).parent / "results" / f"{args.name}-{facts['date']}"
    parts = [
        f"# Decode speed, {facts['date']}\n\n{args.tokens} new tokens, greedy, medians of {args.runs} runs, "
        f"{args.target} on {args.prompts}; copy bandwidth {facts['copy_gb_per_s']:.0f} GB/s read and written; commit "
        f"{facts['commit']}; {versions()}\n"
    ]
    for dtype in args.dtypes.split(","):
        for batch in map(int, args.batches.split(",")):
            limit = -(-args.limit // batch) * batch
            prompts = [row.prompt_ids for row in read_prompts(args.prompts, target, limit=limit).rows]
            setting = Setting(
                target=target, drafter=Path(args.drafter), dtype=dtype, batch=batch, tokens=args.tokens,
                num_draft_tokens=args.num_draft_tokens,
            )  # fmt: skip
            rows = measure_setting(setting, prompts, args)
            facts["tables"].append({"dtype": dtype, "batch": batch, "rows": [asdict(r) for r in rows]})
            parts.append(f"## {dtype}, batch {batch}, {len(prompts)} prompts\n\n{table(rows)}\n")
            print(parts[-1])
            write_json(file.with_suffix(".json"), facts)
            write_text(file.with_suffix(".md"), "\n".join(parts))


if __name__ == "__main__":
    main()
