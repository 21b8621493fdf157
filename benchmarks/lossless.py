"""Is drafted output the target's own? Every drafter, backend and dtype against greedy decoding, in random company.

    python benchmarks/lossless.py --drafter draftloop-out/quickstart/drafter --reference-cache references.json

Every prompt is decoded in full, and an eighth of them again with a random limit and an eighth again to be cancelled;
they join in random order between rounds while the draft length changes at random (traffic.py). float32 must equal
transformers' float32 `generate` token for token (batches of 8, and the prompt alone where an answer differs); native
bfloat16 its own plain decoding of one prompt at a time; torch bfloat16 may part from that at near-ties of the target
only (pipelines/near_ties.py). A finished combination is saved at once and not run again; exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

# siblings: the folder of a script that is run is where Python looks first
from references import AnswerCache, Decode, code_digest, plain_decode, transformers_decode, write_json, write_text
from traffic import Answer, Request, drive, plan_requests

from drafters.checkpoint import read_config
from drafters.drafter import Drafter
from drafters.mtp import MtpConfig
from drafters.prompt_lookup import PromptLookupDrafter
from drafters.target import Target, load_model, load_target, target_fingerprint
from pipelines.evaluate import versions
from pipelines.near_ties import Parting, find_parting, logits_of
from pipelines.prompts import PromptRow, read_prompts
from serving.engine.build import DTYPES, TORCH_THREADS, build_engine, load_drafter_for
from serving.engine.engine import Engine
from serving.engine.rows import RowsBackend

ROOT = Path(__file__).parent.parent
HF = "transformers float32"
HF_BATCH = 8  # prompts of one `generate`
SHOWN = 5  # differences printed for each combination


@dataclass(frozen=True)
class Difference:
    """An answer that parts from its reference."""

    prompt: str  # id
    max_new_tokens: int
    cancelled: bool
    parting: Parting

    def __str__(self) -> str:
        p, kind = self.parting, "near-tie" if self.parting.near_tie else "NOT a near-tie"
        text = f"prompt {self.prompt}, position {p.position}: {p.got} instead of {p.expected}"
        if p.tie is None:
            return f"{text}: one of them ended without an end-of-sequence token"
        text += f", top-2 gap {p.tie.top_two_gap:.2g}, gap {p.tie.gap:.2g}, bfloat16 bound {p.tie.bound:.2g}: {kind}"
        return text + (f" (token {p.stray_position} strays)" if p.stray_position is not None else "")


@dataclass(frozen=True)
class Row:
    """One combination: a line of the table."""

    backend: str
    dtype: str
    drafter: str
    batch: int
    reference: str
    exact: bool  # every answer must be equal; otherwise near-ties may part
    answers: int
    cut: int  # of them with a random limit or cancelled
    tokens: int  # compared
    equal: int
    near_ties: int
    otherwise: int  # must be 0
    tau: float | None
    seconds: float | None  # decoding; None: it may have come from the cache
    largest_gap: float | None = None  # of a near-tie
    differences: list[Difference] = field(default_factory=list)


@dataclass
class Bench:
    """What all combinations share."""

    args: argparse.Namespace
    target: Target
    rows: list[PromptRow]
    cache: AnswerCache
    fingerprint: str
    drafters: dict[str, Path | None]  # by label; checkpoints have a path
    models: dict[str, torch.nn.Module] = field(default_factory=dict)  # of transformers, by dtype

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        return [row.prompt_ids for row in self.rows]

    def model(self, dtype: str) -> torch.nn.Module:
        if dtype not in self.models:
            self.models[dtype] = load_model(self.target.path, DTYPES[dtype])
        return self.models[dtype]

    def engine(self, backend: str, dtype: str, batch: int) -> Engine:
        """A plain engine that taps what any of the drafters needs."""
        taps = {layer for path in self.drafters.values() if path for layer in read_config(path).target_layer_ids}
        longest = max(map(len, self.prompts))
        return build_engine(
            self.target.path, dtype=dtype, backend=backend, num_slots=batch, max_len=longest + self.args.tokens + 32,
            target_layer_ids=sorted(taps),
        )  # fmt: skip

    def drafter(self, label: str, backend: RowsBackend) -> Drafter | None:
        if path := self.drafters[label]:
            return load_drafter_for(backend, path, self.target.path)
        return PromptLookupDrafter() if label == "prompt lookup" else None

    def transformers_reference(self, doubtful: Iterable[int] = ()) -> list[list[int]]:
        """Answers of `generate` in float32; of `doubtful` prompts, and those ever doubted, decoded alone."""
        torch.set_num_threads(TORCH_THREADS)
        tokens, known = self.args.tokens, versions()
        name = f"{HF}, {tokens} tokens, target {self.fingerprint}, {known['transformers']}, torch {known['torch']}"

        def make() -> Decode:
            return transformers_decode(self.model("float32"), self.target, tokens)

        self.cache.fill(name, [self.prompts[i] for i in doubtful], make)
        alone = self.cache.known(name, self.prompts)
        left = [p for p, answer in zip(self.prompts, alone, strict=True) if answer is None]
        batched = iter(self.cache.fill(f"{name}, batches of {HF_BATCH}", left, make, HF_BATCH))
        return [next(batched) if answer is None else answer for answer in alone]

    def own_reference(self, backend: str, dtype: str) -> list[list[int]]:
        """Answers of our own plain loop, one prompt at a time."""
        torch.set_num_threads(TORCH_THREADS)
        tokens = self.args.tokens
        name = f"{backend} {dtype}, {tokens} tokens, target {self.fingerprint}, code {code_digest()}"
        return self.cache.fill(name, self.prompts, lambda: plain_decode(self.engine(backend, dtype, 1), tokens))

    def parting(self, prompt: int, got: list[int], expected: list[int]) -> Parting | None:
        if got == expected:
            return None
        threads = torch.get_num_threads()
        torch.set_num_threads(TORCH_THREADS)
        exact, rounded = (logits_of(self.model(dtype)) for dtype in ("float32", "bfloat16"))
        found = find_parting(self.prompts[prompt], got, expected, exact, rounded)
        torch.set_num_threads(threads)
        return found


def compare(bench: Bench, reference: list[list[int]], answers: list[Answer]) -> dict:
    """Fields of a Row; every answer that parts from its prompt's reference is judged."""
    differences = []
    for a in answers:
        prompt = a.request.prompt
        if parting := bench.parting(prompt, a.token_ids, a.expected(reference[prompt])):
            differences.append(Difference(bench.rows[prompt].id, a.request.max_new_tokens, a.cancelled, parting))
    ties = [d.parting.tie.gap for d in differences if d.parting.near_tie and d.parting.tie]
    return {
        "answers": len(answers), "tokens": sum(len(a.token_ids) for a in answers),
        "equal": len(answers) - len(differences), "near_ties": len(ties), "otherwise": len(differences) - len(ties),
        "largest_gap": max(ties, default=None), "differences": differences,
    }  # fmt: skip


def strict(fields: dict, exact: bool) -> dict:
    """Where answers must be equal, no near-tie is an excuse."""
    return fields | {"near_ties": 0, "otherwise": fields["near_ties"] + fields["otherwise"]} if exact else fields


def run_plain(bench: Bench, backend: str, dtype: str) -> Row:
    """Our own plain decoding, the reference of bfloat16, against transformers in float32."""
    plain = bench.own_reference(backend, dtype)
    answers = [Answer(Request(i, bench.args.tokens), token_ids, cancelled=False) for i, token_ids in enumerate(plain)]
    found = compare(bench, bench.transformers_reference(), answers)
    return Row(backend, dtype, "none, alone", 1, HF, False, cut=0, tau=None, seconds=None, **found)


def run_traffic(bench: Bench, engine: Engine, dtype: str, label: str, batch: int) -> Row:
    backend = engine.backend.name
    reference = bench.own_reference(backend, dtype) if dtype == "bfloat16" else bench.transformers_reference()
    rng = random.Random(f"{bench.args.seed} {backend} {dtype} {label} {batch}")
    requests = plan_requests(len(bench.rows), bench.args.tokens, rng)
    torch.set_num_threads(1 if engine.backend.native_threads else TORCH_THREADS)
    one = Engine(engine.backend, bench.drafter(label, engine.backend), eos_token_ids=bench.target.eos_token_ids)
    started, shown = time.perf_counter(), [time.perf_counter()]

    def progress(done: int) -> None:
        if time.perf_counter() - shown[0] > 20:
            shown[0] = time.perf_counter()
            print(f"  {done} of {len(requests)} answers, {shown[0] - started:.0f} s", flush=True)

    answers = drive(one, bench.prompts, requests, rng, progress)
    seconds = time.perf_counter() - started
    if one.stats.fallbacks:
        raise SystemExit(f"{backend}, {dtype}, {label}: the drafter failed ({one.stats.fallbacks})")
    if dtype == "float32":
        parted = {a.request.prompt for a in answers if a.token_ids != a.expected(reference[a.request.prompt])}
        reference = bench.transformers_reference(parted)
    exact = dtype == "float32" or backend == "native"
    name = f"own plain {dtype}" if dtype == "bfloat16" else HF
    found = strict(compare(bench, reference, answers), exact)
    cut = len(answers) - len(bench.rows)
    return Row(
        backend, dtype, label, batch, name, exact, cut=cut, tau=one.stats.acceptance.tau, seconds=seconds, **found
    )


def run_all(bench: Bench, done: set[tuple], save: Callable[[Row], None]) -> None:
    """Every combination that is not among `done`, the engine of each built once."""
    for dtype in bench.args.dtype.split(","):
        for backend in bench.args.backends.split(","):
            if dtype == "bfloat16" and (backend, dtype, "none, alone", 1) not in done:
                save(run_plain(bench, backend, dtype))
            for batch in map(int, bench.args.batches.split(",")):
                labels = [label for label in bench.drafters if (backend, dtype, label, batch) not in done]
                engine = bench.engine(backend, dtype, batch) if labels else None
                for label in labels:
                    assert engine is not None
                    print(f"{backend}, {dtype}, {label}, batch {batch}", flush=True)
                    save(run_traffic(bench, engine, dtype, label, batch))


def report(row: Row) -> str:
    """A combination in a line, and its first differences."""
    lines = [
        f"{'failed' if row.otherwise else 'ok'}: {row.backend}, {row.dtype}, {row.drafter}, batch {row.batch}: "
        f"{row.equal} of {row.answers} answers equal to {row.reference}, {row.near_ties} parted by near-ties, "
        f"{row.otherwise} otherwise"
    ]
    worst = sorted(row.differences, key=lambda d: d.parting.near_tie)
    return "\n".join(lines + [f"  {difference}" for difference in worst[:SHOWN]])


def table(rows: list[dict]) -> str:
    lines = [
        "| backend | dtype | drafter | batch | compared with | answers (cut) | tokens | equal | parted by near-tie "
        "(largest gap) | parted otherwise | tau | decoding s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        tau = "" if r["tau"] is None else f"{r['tau']:.2f}"
        ties = f"{r['near_ties']} ({r['largest_gap']:.2g})" if r["near_ties"] else "0"
        cells = (
            r["backend"], r["dtype"], r["drafter"], r["batch"], r["reference"], f"{r['answers']} ({r['cut']})",
            r["tokens"], r["equal"], ties, r["otherwise"], tau, "" if r["seconds"] is None else f"{r['seconds']:.0f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def drafter_labels(paths: list[Path]) -> dict[str, Path | None]:
    labels: dict[str, Path | None] = {"none": None, "prompt lookup": None}
    for path in paths:
        config = read_config(path)
        label = f"MTP {config.kind}" if isinstance(config, MtpConfig) else "DFlash"
        labels[f"{label}, {path.name}" if label in labels else label] = path
    if len(labels) != len(paths) + 2:
        raise SystemExit("two drafters of one kind have folders of one name; rename one of them")
    return labels


def circumstances(bench: Bench, prompts_sha: str) -> tuple[dict, dict]:
    """(what a resumed run must share with the saved one, what else is noted)."""
    args = bench.args
    weights = {
        label: hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()[:12]
        for label, path in bench.drafters.items()
        if path
    }
    same = {
        "target": bench.fingerprint, "prompts": prompts_sha, "limit": len(bench.rows), "tokens": args.tokens,
        "seed": args.seed, "code": code_digest(), "drafters": weights,
    }  # fmt: skip
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    commands = {
        k: [str(v) for v in value] if isinstance(value, list) else str(value) for k, value in vars(args).items()
    }
    noted = {"date": datetime.date.today().isoformat(), "commit": commit.stdout.strip(), "arguments": commands}
    return same, noted | {"versions": versions()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", type=Path, action="append", default=[], help="a checkpoint; may be repeated")
    parser.add_argument("--prompts", default="gsm8k_test")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--backends", default="native,torch")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reference-cache", type=Path, required=True, help="JSON file, made if it is missing")
    today = datetime.date.today().isoformat()
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / f"lossless-{today}")
    args = parser.parse_args()

    target = load_target(args.target)
    prompts = read_prompts(args.prompts, target, limit=args.limit)
    labels = drafter_labels(args.drafter)
    cache = AnswerCache(args.reference_cache)
    bench = Bench(args, target, prompts.rows, cache, target_fingerprint(target.path), labels)
    same, noted = circumstances(bench, prompts.sha256)
    file = args.output.with_name(args.output.name + ".json")
    facts = json.loads(file.read_text()) if file.exists() else {"same": same, **noted, "rows": []}
    if facts["same"] != same:
        changed = ", ".join(key for key in same if facts["same"].get(key) != same[key])
        raise SystemExit(f"{file} holds another run ({changed} differ); give another --output, or remove it")

    def save(row: Row) -> None:
        print(report(row), flush=True)
        facts["rows"].append(asdict(row))
        write_json(file, facts)

    run_all(bench, {(r["backend"], r["dtype"], r["drafter"], r["batch"]) for r in facts["rows"]}, save)
    title = (
        f"Lossless: {len(prompts.rows)} {args.prompts} prompts, {args.tokens} new tokens, greedy, seed {args.seed}; "
        f"commit {facts['commit']}, code {same['code']}; {facts['versions']}"
    )
    text = f"{title}\n\n{table(facts['rows'])}\n"
    write_text(file.with_suffix(".md"), text)
    print(f"\n{text}")
    sys.exit(1 if any(row["otherwise"] for row in facts["rows"]) else 0)


if __name__ == "__main__":
    main()
