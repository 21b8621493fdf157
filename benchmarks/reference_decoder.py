"""Our DFlash and DFlash 2 checkpoints in z-lab's reference decoder, the PyPI package `dflash`, beside our own engine.

    python -m venv zlab && zlab/bin/pip install 'dflash[local]==0.1.0'
    python benchmarks/reference_decoder.py --drafter plain=drafter --drafter second=drafter2 --reference zlab/bin/python

The drafter is exported (`draftloop export --format z-lab`), and both decode the same prompts greedily in float32 at
batch 1, the whole block drafted in every round. Compared: output tokens, and tau as tokens behind the first over
rounds (a last round that a limit or a stop cuts short counts with what it emitted, in both). `dflash` pins its own
torch and transformers: it runs in an environment of its own, as a process that reads the prompts and writes its answers
as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TOLERANCE = 0.02  # of tau
DEADLINE_S = 3600.0  # of the other process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", action="append", help="LABEL=FOLDER; may be repeated")
    parser.add_argument("--reference", default="python", help="interpreter of an environment with dflash")
    parser.add_argument("--prompts", default="gsm8k_test")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--backend", default="auto", help="of our engine")
    parser.add_argument("--name", default="reference-decoder", help="of the files in benchmarks/results")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # how the other process is called
    args = parser.parse_args()
    if args.job:
        _decode_with_reference(args.job)
    elif not args.drafter:
        parser.error("give at least one --drafter LABEL=FOLDER")
    else:
        _compare(args)


def _compare(args: argparse.Namespace) -> None:
    from references import write_json, write_text

    from drafters.checkpoint import read_config
    from drafters.formats.exchange import export_checkpoint
    from drafters.target import load_target
    from pipelines.evaluate import versions
    from pipelines.prompts import read_prompts

    target = load_target(args.target)
    prompts = [row.prompt_ids for row in read_prompts(args.prompts, target, limit=args.limit).rows]
    rows = []
    for label, folder in (pair.split("=", 1) for pair in args.drafter):
        config: Any = read_config(Path(folder))
        ours = _decode_with_engine(target, Path(folder), config.num_draft_tokens, prompts, args.tokens, args.backend)
        with tempfile.TemporaryDirectory() as scratch:
            exported = Path(scratch) / "exported"
            export_checkpoint(folder, args.target, "z-lab", exported)
            job = {
                "target": str(target.path), "drafter": str(exported), "prompts": prompts,
                "stops": list(target.eos_token_ids), "tokens": args.tokens,
            }  # fmt: skip
            theirs = _run_reference(args.reference, job)
        rows.append(_row(label, ours, theirs))
        print(f"{label}: {json.dumps(rows[-1])}", flush=True)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()
    facts = {
        "target": args.target, "prompts": args.prompts, "count": len(prompts), "tokens": args.tokens,
        "backend": args.backend,
        "commit": commit, "versions": versions(), "rows": rows,
    }  # fmt: skip
    file = ROOT / "benchmarks" / "results" / f"{args.name}-{datetime.date.today().isoformat()}"
    write_json(file.with_suffix(".json"), facts)
    write_text(file.with_suffix(".md"), _markdown(facts))
    print(_markdown(facts))
    if any(abs(row["tau_reference"] / row["tau_engine"] - 1) > TOLERANCE for row in rows):
        sys.exit(f"tau differs by more than {TOLERANCE:.0%}")


def _decode_with_engine(
    target: Any, drafter: Path, depth: int, prompts: list[list[int]], tokens: int, backend: str
) -> Any:
    """[answers, rounds] of our engine."""
    from serving.engine.build import build_engine
    from serving.engine.engine import EngineConfig
    from serving.engine.sampling import Sampling

    config = EngineConfig(num_draft_tokens=depth)
    engine = build_engine(target.path, drafter_path=drafter, backend=backend, max_len=1024, num_slots=1, config=config)
    answers, rounds = [], []
    for ids in prompts:
        done = engine.generate([ids], Sampling(max_new_tokens=tokens))[0]
        answers.append(list(done.token_ids))
        rounds.append(done.acceptance.rounds)
    return [answers, rounds]


def _run_reference(python: str, job: dict[str, Any]) -> Any:
    """[answers, rounds] of the reference, and its versions."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job))
        subprocess.run([python, __file__, "--job", str(file)], check=True, timeout=DEADLINE_S)
        return json.loads(file.with_name("answers.json").read_text())


def _decode_with_reference(file: Path) -> None:
    """Runs in the other environment: only torch, transformers and dflash are there."""
    import importlib.metadata

    import dflash.model as reference
    import torch
    from transformers import AutoModelForCausalLM

    reference._cuda_time = time.perf_counter  # its figures of rounds come with times, which it takes on a GPU
    job = json.loads(file.read_text())
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    named = json.loads((Path(job["drafter"]) / "config.json").read_text())["architectures"][0]
    drafter = getattr(reference, named).from_pretrained(job["drafter"], dtype=torch.float32).eval()
    answers, rounds = [], []
    for number, ids in enumerate(job["prompts"]):
        done = reference.dflash_generate(
            drafter, target, torch.tensor([ids]), job["tokens"], job["stops"], temperature=0.0, return_stats=True
        )
        answers.append(done.output_ids[0, len(ids) :].tolist())
        rounds.append(len(done.acceptance_lengths))
        print(f"reference: {number + 1} of {len(job['prompts'])}", end="\r", file=sys.stderr, flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("dflash", "torch", "transformers")}
    file.with_name("answers.json").write_text(json.dumps([answers, rounds, versions]))


def _row(label: str, ours: Any, theirs: Any) -> dict[str, Any]:
    def tau(answers: list[list[int]], rounds: list[int]) -> float:
        if not sum(rounds):
            sys.exit("no answer has more than one token: nothing was drafted; give other prompts or more --tokens")
        return sum(len(answer) - 1 for answer in answers) / sum(rounds)

    equal = sum(mine == other for mine, other in zip(ours[0], theirs[0], strict=True))
    same_rounds = sum(mine == other for mine, other in zip(ours[1], theirs[1], strict=True))
    return {
        "drafter": label, "tau_engine": tau(ours[0], ours[1]), "tau_reference": tau(theirs[0], theirs[1]),
        "equal_answers": equal, "equal_rounds": same_rounds, "prompts": len(ours[0]),
        "rounds_engine": sum(ours[1]), "rounds_reference": sum(theirs[1]), "reference": theirs[2],
    }  # fmt: skip


def _markdown(facts: dict[str, Any]) -> str:
    lines = [
        f"# Our DFlash checkpoints in the reference decoder, {datetime.date.today().isoformat()}",
        "",
        f"{facts['target']}, {facts['count']} prompts of {facts['prompts']}, {facts['tokens']} new tokens, greedy, "
        f"float32, batch 1, whole blocks; our backend {facts['backend']}; commit {facts['commit']}; "
        f"{facts['versions']}; reference: {facts['rows'][0]['reference'] if facts['rows'] else ''}",
        "",
        "| drafter | tau, our engine | tau, dflash | difference | rounds | equal answers | prompts of equal rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in facts["rows"]:
        gap = row["tau_reference"] / row["tau_engine"] - 1
        lines.append(
            f"| {row['drafter']} | {row['tau_engine']:.4f} | {row['tau_reference']:.4f} | {gap:+.2%} | "
            f"{row['rounds_engine']}, {row['rounds_reference']} | {row['equal_answers']} of {row['prompts']} | "
            f"{row['equal_rounds']} of {row['prompts']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
