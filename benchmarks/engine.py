"""Decode speed of the engine against its peers, interleaved prompt by prompt in one run.

    python benchmarks/engine.py --drafter draftloop-out/quickstart/drafter --dtype float32 --batch 1

Contenders: transformers' `generate` (plain, and prompt lookup at batch 1), our plain loop, and ours with prompt lookup,
with the drafter, and with the drafter at a draft length that the engine chooses. Every contender decodes the same
prompts greedily; a run is one pass over all of them, in an order that rotates. Prints a table and writes it with its
circumstances to benchmarks/results/. Needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from drafters.acceptance import Acceptance
from drafters.drafter import Drafter
from drafters.prompt_lookup import PromptLookupDrafter
from drafters.target import Target, load_model, load_target
from pipelines.evaluate import versions
from pipelines.prompts import read_prompts
from serving.engine.build import TORCH_THREADS, build_engine, load_drafter_for
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling

Decode = Callable[[list[list[int]]], list[list[int]]]


@dataclass
class Contender:
    """One way to decode a batch, and what it took."""

    name: str
    decode: Decode
    engine: Engine | None = None
    run_s: list[float] = field(default_factory=list)  # seconds of each run
    tokens: int = 0  # of one run
    outputs: list[list[int]] = field(default_factory=list)  # of the last run


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    tokens_per_s: float  # median over runs, prefill included
    low: float  # slowest run
    high: float  # fastest run
    against_plain: float  # over our plain loop of the same backend
    tau: float | None
    t_base_ms: float | None
    t_draft_ms: float | None
    t_verify_ms: float | None
    s_predicted: float | None
    equal: str  # outputs equal to our plain loop's


def transformers_contenders(target: Target, dtype: torch.dtype, tokens: int, batch: int) -> list[Contender]:
    model = load_model(target.path, dtype)
    pad = target.tokenizer.pad_token_id if target.tokenizer.pad_token_id is not None else target.eos_token_ids[0]

    def decode(prompts: list[list[int]], **options: object) -> list[list[int]]:
        torch.set_num_threads(TORCH_THREADS)
        longest = max(len(p) for p in prompts)
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=list(target.eos_token_ids),
            pad_token_id=pad, temperature=None, top_p=None, **options,
        )  # fmt: skip
        answers = []
        for row in out[:, longest:].tolist():
            ends = [i for i, token in enumerate(row) if token in target.eos_token_ids]
            answers.append(row[: ends[0] + 1] if ends else row)
        return answers

    found = [Contender("transformers generate", decode)]
    if batch == 1:
        found.append(Contender("transformers prompt lookup", lambda p: decode(p, prompt_lookup_num_tokens=8)))
    return found


def our_contenders(target: Target, args: argparse.Namespace, backend: str) -> list[Contender]:
    engine = build_engine(
        target.path, dtype=args.dtype, backend=backend, num_slots=args.batch, max_len=1024,
        drafter_path=Path(args.drafter), config=EngineConfig(num_draft_tokens=args.num_draft_tokens),
    )  # fmt: skip

    def mtp() -> Drafter:  # one for each engine: a drafter keeps the state of one engine's slots
        return load_drafter_for(engine.backend, Path(args.drafter), target.path)

    plans = [
        ("plain", None, args.num_draft_tokens, False),
        ("prompt lookup", PromptLookupDrafter(), 8, False),
        (f"MTP, {args.num_draft_tokens} drafts", mtp(), args.num_draft_tokens, False),
        ("MTP, length chosen", mtp(), args.num_draft_tokens, True),
    ]
    found = []
    for name, drafter, number, adapt in plans:
        config = EngineConfig(num_draft_tokens=number, adapt_draft_length=adapt)
        one = Engine(engine.backend, drafter, config=config, eos_token_ids=target.eos_token_ids)

        def decode(prompts: list[list[int]], one: Engine = one, native: bool = backend == "native") -> list[list[int]]:
            torch.set_num_threads(1 if native else TORCH_THREADS)
            sampling = Sampling(max_new_tokens=args.tokens)
            return [c.token_ids for c in one.generate(prompts, sampling)]

        found.append(Contender(f"ours, {backend}, {name}", decode, one))
    return found


def measure(contenders: list[Contender], prompts: list[list[int]], batch: int, runs: int) -> None:
    for contender in contenders:
        contender.decode(prompts[:batch])  # warm up
        if contender.engine:
            contender.engine.reset_stats()
    batches = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    for run in range(runs):
        for contender in contenders:
            contender.run_s.append(0.0)
            contender.outputs = []
        for number, group in enumerate(batches):
            shift = (run + number) % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                started = time.perf_counter()
                outputs = contender.decode(group)
                contender.run_s[-1] += time.perf_counter() - started
                contender.outputs += outputs
        for contender in contenders:
            contender.tokens = sum(len(o) for o in contender.outputs)
        print(f"run {run + 1} of {runs}: " + ", ".join(f"{c.name} {c.tokens / c.run_s[-1]:.1f}" for c in contenders))


def row_of(contender: Contender, plain: Contender, batch: int) -> Row:
    rates = [contender.tokens / s for s in contender.run_s]
    plain_rate = statistics.median(plain.tokens / s for s in plain.run_s)
    acceptance, timings = Acceptance(), None
    if contender.engine:
        acceptance, timings = contender.engine.stats.acceptance, contender.engine.stats.timings
    number = len(acceptance.proposed_by_position)
    base = plain.engine.stats.timings.t_base(batch) if plain.engine else None
    draft = timings.t_draft(batch, number) if timings else None
    verify = timings.t_verify(batch, number) if timings and number else None
    known = acceptance.tau and base and draft and verify
    same = sum(a == b for a, b in zip(contender.outputs, plain.outputs, strict=True))
    return Row(
        contender.name, statistics.median(rates), min(rates), max(rates), statistics.median(rates) / plain_rate,
        acceptance.tau, _ms(base if contender.engine else None), _ms(draft), _ms(verify),
        base * acceptance.tau / (draft + verify) if known else None, f"{same}/{len(plain.outputs)}",
    )  # fmt: skip


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


def table(rows: list[Row]) -> str:
    def cell(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    lines = [
        "| contender | tok/s (slowest to fastest run) | S_measured | S_predicted | tau "
        "| T_base ms | T_draft ms | T_verify ms | equal to plain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        speed = f"{r.tokens_per_s:.1f} ({r.low:.1f} to {r.high:.1f})"
        cells = (
            r.name, speed, cell(r.against_plain, 2), cell(r.s_predicted, 2), cell(r.tau, 2), cell(r.t_base_ms),
            cell(r.t_draft_ms), cell(r.t_verify_ms), r.equal,
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", default="gsm8k_test")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--backends", default="native,torch")
    args = parser.parse_args()

    target = load_target(args.target)
    prompts = [row.prompt_ids for row in read_prompts(args.prompts, target, limit=args.limit).rows]
    bandwidth = copy_bandwidth()
    ours = [our_contenders(target, args, backend) for backend in args.backends.split(",")]
    dtype = torch.float32 if args.dtype == "float32" else torch.bfloat16
    contenders = transformers_contenders(target, dtype, args.tokens, args.batch) + [c for group in ours for c in group]
    measure(contenders, prompts, args.batch, args.runs)

    for contender in contenders:
        if contender.engine and contender.engine.stats.fallbacks:
            raise SystemExit(f"{contender.name}: the drafter failed ({contender.engine.stats.fallbacks}); no figures")
    plain_of = {c.name: group[0] for group in ours for c in group}
    rows = [row_of(c, plain_of.get(c.name, ours[0][0]), args.batch) for c in contenders]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {
        "date": datetime.date.today().isoformat(), "commit": commit.stdout.strip(), "arguments": vars(args),
        "copy_gb_per_s": bandwidth, "versions": versions(), "rows": [asdict(r) for r in rows],
    }  # fmt: skip
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    file = folder / f"engine-{args.dtype}-batch{args.batch}-{facts['date']}"
    file.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n")
    title = (
        f"Engine, {args.dtype}, batch {args.batch}: {len(prompts)} {args.prompts} prompts, {args.tokens} new tokens, "
        f"{args.runs} runs, greedy; copy bandwidth {bandwidth:.0f} GB/s; commit {facts['commit']}; {versions()}"
    )
    file.with_suffix(".md").write_text(f"{title}\n\n{table(rows)}\n")
    print(f"{title}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
