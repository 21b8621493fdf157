"""Every drafter on every prompt set: tau by real decoding, and speed at batch 1, chains and trees side by side.

    python benchmarks/compare_drafters.py --drafter recursive=draftloop-out/drafter --prompts gsm8k_test

tau and acceptance are counted on all prompts, decoded greedily in batches of 8. Speed is measured on the first few of
them at batch 1: plain decoding and all drafters take turns prompt by prompt, in an order drawn for each. Needs a
machine that does nothing else. A run that was stopped goes on where it was, if nothing else has changed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from references import write_json, write_text
from safetensors import safe_open

from drafters.acceptance import Acceptance
from drafters.checkpoint import read_config, read_provenance
from drafters.drafter import Drafter
from drafters.prompt_lookup import PromptLookupDrafter
from drafters.target import Target, load_target
from pipelines.evaluate import versions
from pipelines.prompts import read_prompts
from serving.engine.build import DTYPES, build_rows, load_drafter_for
from serving.engine.engine import Engine, EngineConfig
from serving.engine.rows import RowsBackend
from serving.engine.sampling import Sampling
from serving.engine.timing import Timings

BATCH = 8  # of the decoding that tau is counted on
MAX_LEN = 1024
LOOKUP = "prompt lookup"
PAUSE_S = 0.1  # before each timed decode, so that the threads of the one before have gone to sleep
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Plan:
    """A drafter and how it is asked."""

    drafter: str
    depth: int  # num_draft_tokens
    nodes: int  # of a tree; 0: chains

    @property
    def name(self) -> str:
        shape = f"tree of {self.nodes}, {self.depth} deep" if self.nodes else f"chain of {self.depth}"
        return f"{self.drafter}, {shape}"


@dataclass(frozen=True)
class Row:
    """What one plan did on one prompt set."""

    prompt_set: str
    plan: str
    prompts: int
    tau: float | None
    acceptance_by_position: list[float]
    equal: str  # timed outputs equal to plain decoding's
    s_measured: float | None  # tokens/s over plain decoding's, the same prompts in the same run
    s_quartiles: list[float]  # prompt by prompt
    tokens_per_s: float
    t_base_ms: float | None
    t_draft_ms: float | None
    t_verify_ms: float | None
    parameters: int
    training_minutes: float | None


class Bench:
    """One backend, an engine per plan over it."""

    def __init__(self, args: argparse.Namespace, target: Target):
        self.args, self.target = args, target
        self.folders = dict(pair.split("=", 1) for pair in args.drafter)
        taps = {layer for path in self.folders.values() for layer in read_config(Path(path)).target_layer_ids}
        self.rows: RowsBackend = build_rows(
            target.path,
            dtype=DTYPES[args.dtype],
            backend=args.backend,
            device=args.device,
            num_slots=BATCH,
            max_len=MAX_LEN,
            target_layer_ids=tuple(sorted(taps)),
        )
        if self.rows.native_threads:
            torch.set_num_threads(1)
        self.plain = self._engine(None, EngineConfig())
        self.engines = {plan: self._engine(self._drafter(plan), self._config(plan)) for plan in self._plans()}

    def _plans(self) -> Iterator[Plan]:
        depths = [int(d) for d in self.args.chains.split(",") if d]
        trees = [(int(d), int(n)) for d, n in (pair.split(":") for pair in self.args.trees.split(",") if pair)]
        yield Plan(LOOKUP, 3, 0)
        for label in self.folders:
            most = self._drafter(Plan(label, 1, 0)).max_draft_tokens
            yield from dict.fromkeys(Plan(label, min(depth, most), 0) for depth in depths)
            for depth, nodes in trees:
                yield Plan(label, min(depth, most), nodes)

    def _drafter(self, plan: Plan) -> Drafter:
        if plan.drafter == LOOKUP:
            return PromptLookupDrafter()
        return load_drafter_for(self.rows, Path(self.folders[plan.drafter]), self.target.path)

    def _engine(self, drafter: Drafter | None, config: EngineConfig) -> Engine:
        config = replace(config, reuse_prefixes=False)  # every run decodes the same prompts
        return Engine(self.rows, drafter, config=config, eos_token_ids=self.target.eos_token_ids)

    def _config(self, plan: Plan) -> EngineConfig:
        return EngineConfig(num_draft_tokens=plan.depth, tree_nodes=plan.nodes)

    def rows_of(self, prompt_set: str, prompts: list[list[int]], done: set[str]) -> Iterator[Row]:
        """A row for every plan that is not `done`: first tau of each, then the speed of all in one run."""
        sampling = Sampling(max_new_tokens=self.args.tokens)
        acceptance: dict[Plan, Acceptance] = {}
        for plan, engine in self.engines.items():
            if plan.name in done:
                continue
            engine.reset_stats()
            engine.generate(prompts, sampling)
            if engine.stats.fallbacks:
                raise SystemExit(f"{plan.name}: the drafter failed ({engine.stats.fallbacks}); no figures")
            acceptance[plan] = engine.stats.acceptance
            print(f"  {prompt_set}, {plan.name}: tau {acceptance[plan].tau or 0:.2f}", flush=True)
        speeds = self._speeds(prompts[: self.args.speed_limit], list(acceptance)) if acceptance else {}
        for plan, counted in acceptance.items():
            yield self._row(prompt_set, plan, len(prompts), counted, speeds[plan])

    def _speeds(self, prompts: list[list[int]], plans: list[Plan]) -> dict[Plan, Speed]:
        rng, plain = random.Random(0), Speed()
        speeds = {plan: Speed() for plan in plans}
        everybody = [(self.plain, plain), *((self.engines[plan], speeds[plan]) for plan in plans)]
        for engine, _ in everybody:  # first calls allocate
            engine.generate([prompts[0][:16]], Sampling(max_new_tokens=8))
            engine.reset_stats()
        for prompt in prompts:
            rng.shuffle(everybody)
            for engine, speed in everybody:
                time.sleep(PAUSE_S)
                started = time.perf_counter()
                (completion,) = engine.generate([prompt], Sampling(max_new_tokens=self.args.tokens))
                speed.seconds.append(time.perf_counter() - started)
                speed.tokens.append(completion.token_ids)
        for engine, speed in everybody:
            speed.timings = engine.stats.timings
        for speed in speeds.values():
            speed.plain = plain
        return speeds

    def _row(self, prompt_set: str, plan: Plan, prompts: int, counted: Acceptance, speed: Speed) -> Row:
        plain, timings = speed.plain or speed, speed.timings
        ratios = [p / s for p, s in zip(plain.seconds, speed.seconds, strict=True)]
        equal = sum(a == b for a, b in zip(plain.tokens, speed.tokens, strict=True))
        base = plain.timings.t_base(1)
        draft, verify = timings.t_draft(1, plan.depth), timings.t_verify(1, plan.nodes or plan.depth)
        return Row(
            prompt_set=prompt_set,
            plan=plan.name,
            prompts=prompts,
            tau=counted.tau,
            acceptance_by_position=[round(share, 3) for share in counted.by_position],
            equal=f"{equal} of {len(ratios)}",
            s_measured=speed.tokens_per_s / plain.tokens_per_s,
            s_quartiles=statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3,
            tokens_per_s=speed.tokens_per_s,
            t_base_ms=base and base * 1e3,
            t_draft_ms=draft and draft * 1e3,
            t_verify_ms=verify and verify * 1e3,
            parameters=self._parameters(plan),
            training_minutes=self._minutes(plan),
        )

    def _parameters(self, plan: Plan) -> int:
        if plan.drafter == LOOKUP:
            return 0
        with safe_open(Path(self.folders[plan.drafter]) / "model.safetensors", framework="pt") as file:
            names = [name for name in file.keys() if name != "draft_vocab_ids"]  # noqa: SIM118 - no dict
            return sum(file.get_tensor(name).numel() for name in names)

    def _minutes(self, plan: Plan) -> float | None:
        if plan.drafter == LOOKUP:
            return None
        curve = read_provenance(Path(self.folders[plan.drafter])).get("training_curve") or [{}]
        return curve[-1].get("seconds", 0.0) / 60


class Speed:
    """Decodes of the timed prompts by one contender."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[list[int]] = []
        self.timings = Timings()
        self.plain: Speed | None = None

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / sum(self.seconds)


def table(rows: list[Row]) -> str:
    def cell(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    heads = (
        "drafter", "tau", "acceptance by position", "T_draft ms", "T_verify ms", "S_measured (quartiles)", "tok/s",
        "equal to plain", "parameters, M", "training, minutes",
    )  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for r in rows:
        low, _, high = r.s_quartiles
        cells = (
            r.plan, cell(r.tau, 2), " ".join(f"{share:.2f}" for share in r.acceptance_by_position),
            cell(r.t_draft_ms), cell(r.t_verify_ms), f"{cell(r.s_measured, 2)} ({low:.2f} to {high:.2f})",
            cell(r.tokens_per_s), r.equal, cell(r.parameters / 1e6), cell(r.training_minutes),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", action="append", default=[], help="LABEL=FOLDER; may be repeated")
    parser.add_argument("--prompts", action="append", default=[], help="a shipped set or a file; may be repeated")
    parser.add_argument("--limit", type=int, default=100, help="prompts of each set that tau is counted on")
    parser.add_argument("--speed-limit", type=int, default=12, help="prompts of each set that are timed")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chains", default="4,8", help="num_draft_tokens of chains")
    parser.add_argument("--trees", default="7:7", help="DEPTH:NODES of trees")
    parser.add_argument("--name", default="drafters", help="of the files in benchmarks/results")
    args = parser.parse_args()
    target = load_target(args.target)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    arguments = vars(args) | {"drafter": [pair.split("=")[0] for pair in args.drafter]}
    arguments["prompts"] = [Path(name).name for name in args.prompts or ["gsm8k_test"]]
    weights = {
        label: hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()[:12]
        for label, folder in (pair.split("=", 1) for pair in args.drafter)
    }
    facts = {"arguments": arguments, "versions": versions(), "weights": weights, "commit": commit.stdout.strip()}
    file = ROOT / "benchmarks" / "results" / f"{args.name}-{datetime.date.today().isoformat()}"
    known = json.loads(file.with_suffix(".json").read_text()) if file.with_suffix(".json").exists() else {}
    rows = [Row(**row) for row in known.get("rows", [])] if {k: known.get(k) for k in facts} == facts else []
    bench = Bench(args, target)
    parts = []
    for name in args.prompts or ["gsm8k_test"]:
        prompt_set = Path(name).stem
        prompts = [row.prompt_ids for row in read_prompts(name, target, limit=args.limit).rows]
        done = {row.plan for row in rows if row.prompt_set == prompt_set}
        rows += bench.rows_of(prompt_set, prompts, done)
        write_json(
            file.with_suffix(".json"),
            facts | {"rows": [asdict(row) for row in rows]},
        )
        mine = [row for row in rows if row.prompt_set == prompt_set]
        base = next((row.t_base_ms for row in mine if row.t_base_ms), None)
        parts.append(
            f"## {prompt_set}: {mine[0].prompts} prompts, {args.speed_limit} of them timed"
            + (f", T_base {base:.1f} ms" if base else "")
            + f"\n\n{table(mine)}\n"
        )
        print(parts[-1])
    head = (
        f"# Drafters, {datetime.date.today().isoformat()}\n\n{args.tokens} new tokens, greedy, {args.target} in "
        f"{args.dtype}, batch 1 for speed; commit {commit.stdout.strip()}; {versions()}\n"
    )
    write_text(file.with_suffix(".md"), "\n".join([head, *parts]))


if __name__ == "__main__":
    main()
