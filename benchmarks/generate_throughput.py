"""What Ray costs `draftloop generate`: one engine in this process against pools of one actor and of two.

    python benchmarks/generate_throughput.py --prompts gsm8k_train --limit 96

Every contender continues the same prompts with as many threads in all, features kept, in turns; a pool's time
is that in which its engines ran, their start told apart. Writes benchmarks/results/generate-DATE.{json,md}. Needs a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from references import write_json, write_text

from drafters.target import load_target, mtp_target_layer_ids
from pipelines.cores import usable_cores
from pipelines.evaluate import versions
from pipelines.generate import GenerateConfig, generate
from pipelines.prompts import read_prompts
from serving.engine.build import build_engine
from serving.engine.sampling import Sampling

RESULTS = Path(__file__).parent / "results"
BATCH, MAX_LEN = 8, 1024


@dataclass
class Speeds:
    """Of one contender, run by run."""

    tokens_per_s: list[float] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)  # all of a run's time but that in which engines ran
    tokens: int = 0


def bare(args: argparse.Namespace) -> tuple[float, float, int]:
    """(tokens/s, seconds of the start, tokens) of an engine in this process."""
    started = time.perf_counter()
    target = load_target(args.target)
    prompts = [row.prompt_ids for row in read_prompts(args.prompts, target, limit=args.limit).rows]
    layers = mtp_target_layer_ids(target.num_layers, 3)
    engine = build_engine(
        target.path, num_slots=BATCH, max_len=MAX_LEN, target_layer_ids=layers, num_threads=usable_cores()
    )
    begun = time.perf_counter()
    found = engine.generate(prompts, Sampling(max_new_tokens=args.tokens), keep_features=True)
    tokens = sum(len(completion.token_ids) for completion in found)
    return tokens / (time.perf_counter() - begun), begun - started, tokens


def pool(args: argparse.Namespace, actors: int) -> tuple[float, float, int]:
    """The same of a pool, which also writes its rollouts."""
    with tempfile.TemporaryDirectory() as folder:
        config = GenerateConfig(
            target=args.target,
            prompts=args.prompts,
            limit=args.limit,
            output=f"{folder}/rollouts",
            max_new_tokens=args.tokens,
            batch=BATCH,
            rows_per_shard=args.rows_per_shard,
            num_actors=(actors, actors),
            threads_per_actor=max(1, usable_cores() // actors),
            cpus_per_actor=1,
        )
        report = generate(config)
    return report.tokens_per_s, report.seconds - report.response_tokens / report.tokens_per_s, report.response_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", default="gsm8k_train")
    parser.add_argument("--limit", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows-per-shard", type=int, default=24)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    contenders = {
        "one engine in this process": lambda: bare(args),
        "generate, 1 actor": lambda: pool(args, 1),
        "generate, 2 actors": lambda: pool(args, 2),
    }
    speeds = {name: Speeds() for name in contenders}
    for run in range(args.runs):
        for name, measure in contenders.items():
            speed, start, tokens = measure()
            speeds[name].tokens_per_s.append(speed)
            speeds[name].start_s.append(start)
            speeds[name].tokens = tokens
            print(f"run {run + 1}, {name}: {speed:.1f} tok/s, start {start:.1f} s, {tokens} tokens", flush=True)
    alone = statistics.median(speeds["one engine in this process"].tokens_per_s)
    lines = ["| | tokens/s, median (range) | of one engine | start, s | tokens |", "|---|---|---|---|---|"]
    for name, found in speeds.items():
        middle = statistics.median(found.tokens_per_s)
        spread = f"{middle:.1f} ({min(found.tokens_per_s):.1f} to {max(found.tokens_per_s):.1f})"
        start = statistics.median(found.start_s)
        lines.append(f"| {name} | {spread} | {middle / alone:.2f} | {start:.1f} | {found.tokens:,} |")
    facts = {"args": vars(args), "versions": versions(), "speeds": {n: vars(s) for n, s in speeds.items()}}
    date = datetime.date.today().isoformat()
    note = (
        f"{args.target}, float32, greedy, {args.limit} prompts of {args.prompts}, {args.tokens} new tokens at most, "
        f"batch {BATCH} per engine, features of three layers kept, {usable_cores()} cores in all, "
        f"{args.runs} runs in turns."
    )
    text = f"# generate against one engine, {date}\n\n{note}\n\n" + "\n".join(lines) + "\n"
    write_json(RESULTS / f"generate-{date}.json", facts)
    write_text(RESULTS / f"generate-{date}.md", text)
    print(text)


if __name__ == "__main__":
    main()
