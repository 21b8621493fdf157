"""`draftloop evaluate`: a drafter and held-out prompts in, one table and evaluation.json out.

Every batch of prompts is decoded plainly and with the drafter, one after the other in the same engine, so that both
meet the same machine; the outputs are compared token for token.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from drafters.acceptance import Acceptance
from drafters.atomic_files import AtomicFolder
from drafters.checkpoint import read_provenance
from drafters.remote_checkpoint import local_checkpoint
from drafters.target import load_target
from pipelines.prompts import PromptRow, read_prompts
from serving.chat_options import ChatOptions, ChatTemplate, training_mismatch
from serving.engine.build import build_engine
from serving.engine.drafting import TREE_DEPTH, TREE_NODES
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.sequence import Completion


class EvaluationError(ValueError):
    """An evaluation that cannot be made; the message is one line with cause and mend."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What is measured, and how."""

    target: str = "smollm2"  # a shipped name, a Hugging Face id, a folder, a .gguf file
    drafter: str  # checkpoint folder, or its URI
    prompts: str = "gsm8k_test"  # a shipped set's name, a file or a URI; never what the drafter was trained on
    limit: int = 40  # prompts
    chat: bool = False  # wrap raw `prompt` rows into a user turn
    chat_options: ChatOptions = field(default_factory=ChatOptions)  # another template, a system turn, thinking
    max_new_tokens: int = 128  # per prompt
    batch: int = 1  # prompts decoded at a time
    num_draft_tokens: int = TREE_DEPTH  # drafts per round, or a tree's greatest depth
    tree_nodes: int = TREE_NODES  # most nodes of each sequence's draft tree, where the drafter makes trees; 0: chains
    dtype: str = "float32"  # or bfloat16
    backend: str = "auto"  # auto, native, torch
    device: str = "cpu"  # or cuda
    cuda_graphs: bool = False  # with cuda: capture decoding passes and replay them
    num_threads: int | None = None  # of torch; None leaves its own choice
    output: str | None = None  # JSON file; None: evaluation.json in the drafter's folder


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The facts of one evaluation; seconds are medians over decode rounds of a full batch."""

    tau: float | None
    acceptance_by_position: list[float]
    t_base_s: float | None
    t_draft_s: float | None
    t_verify_s: float | None
    s_predicted: float | None  # t_base * tau / (t_draft + t_verify)
    s_measured: float  # tokens/s with the drafter over tokens/s without, wall clock, prefill included
    s_measured_quartiles: list[float]  # of the ratio batch by batch
    tokens_per_s_plain: float
    tokens_per_s_drafted: float
    equal: int  # outputs that are token for token those of plain decoding
    prompts: int
    tokens: int  # emitted by one of the two
    batch: int
    num_draft_tokens: int
    tree_nodes: int  # 0: chains
    max_new_tokens: int
    dtype: str
    backend: str  # native or torch
    device: str
    drafter: str
    prompt_set: str
    mean_context: float  # tokens of prompt and output, mean over prompts
    prompts_differ: str | None = None  # in what these prompts are made otherwise than those of the training
    fallbacks: dict[str, int] = field(default_factory=dict)  # rounds decoded plainly because the drafter failed
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluateProgress:
    """After each batch."""

    prompts_done: int
    prompts_total: int
    tau: float | None
    equal: int


def evaluate(config: EvaluateConfig, on_progress: Callable[[EvaluateProgress], None] | None = None) -> Evaluation:
    """Measure a drafter by real decoding. Raises TargetError, CheckpointError, PromptError or EvaluationError."""
    for name in ("batch", "limit", "num_draft_tokens", "max_new_tokens"):
        if getattr(config, name) < 1:
            raise EvaluationError(f"{name} is {getattr(config, name)}; give at least 1")
    if config.tree_nodes < 0:
        raise EvaluationError(f"tree_nodes is {config.tree_nodes}; give 0 for chains, or more")
    drafter = local_checkpoint(config.drafter)
    folder, _, name = (config.output or f"{config.drafter.rstrip('/')}/evaluation.json").rpartition("/")
    output = AtomicFolder(folder or ".", scratch=".")
    target = load_target(config.target)
    room = target.max_len - config.max_new_tokens
    if room < 1:
        raise EvaluationError(
            f"max_new_tokens {config.max_new_tokens} leaves no room in {target.max_len} tokens of context"
        )
    rows = read_prompts(
        config.prompts,
        target,
        max_prompt_tokens=room,
        chat=config.chat,
        limit=config.limit,
        options=config.chat_options,
    ).rows
    longest = max(len(row.prompt_ids) for row in rows)
    engine = build_engine(
        target.path,
        dtype=config.dtype,
        backend=config.backend,
        device=config.device,
        num_slots=config.batch,
        max_len=min(target.max_len, longest + config.max_new_tokens + 32),
        drafter_path=drafter,
        num_threads=config.num_threads,
        cuda_graphs=config.cuda_graphs,
        # each prompt is decoded twice: the second time must not find in its slot what the first one fed
        config=EngineConfig(
            num_draft_tokens=config.num_draft_tokens, tree_nodes=config.tree_nodes, reuse_prefixes=False
        ),
    )
    if output.local is not None:
        output.local.mkdir(parents=True, exist_ok=True)  # now rather than after minutes of work
    assert engine.drafter is not None
    number, nodes = min(config.num_draft_tokens, engine.drafter.max_draft_tokens), engine.tree_nodes
    runs = _decode_both_ways(engine, rows, config, on_progress)
    differs = training_mismatch(read_provenance(drafter), ChatTemplate(target, config.chat_options))
    evaluation = replace(
        _summary(engine, runs, replace(config, num_draft_tokens=number, tree_nodes=nodes)), prompts_differ=differs
    )
    output.write(name, (json.dumps(asdict(evaluation), indent=2) + "\n").encode())
    return evaluation


@dataclass(frozen=True)
class _Run:
    """One batch of prompts, decoded both ways."""

    plain: list[Completion]
    drafted: list[Completion]
    plain_s: float
    drafted_s: float


def _decode_both_ways(
    engine: Engine,
    rows: list[PromptRow],
    config: EvaluateConfig,
    on_progress: Callable[[EvaluateProgress], None] | None,
) -> list[_Run]:
    drafter = engine.drafter
    sampling = Sampling(max_new_tokens=config.max_new_tokens)

    def decode(prompts: list[list[int]], drafted: bool) -> tuple[list[Completion], float]:
        engine.set_drafter(drafter if drafted else None)
        started = time.perf_counter()
        completions = engine.generate(prompts, sampling)
        return completions, time.perf_counter() - started

    for drafted in (False, True):  # warm up: first calls allocate
        decode([rows[0].prompt_ids[:64]], drafted)
    engine.reset_stats()
    runs: list[_Run] = []
    acceptance, equal = Acceptance(), 0
    for number, first in enumerate(range(0, len(rows), config.batch)):
        prompts = [row.prompt_ids for row in rows[first : first + config.batch]]
        order = (False, True) if number % 2 == 0 else (True, False)
        results = {with_drafter: decode(prompts, with_drafter) for with_drafter in order}
        run = _Run(results[False][0], results[True][0], results[False][1], results[True][1])
        runs.append(run)
        for without, completion in zip(run.plain, run.drafted, strict=True):
            acceptance.add(completion.acceptance)
            equal += without.token_ids == completion.token_ids
        if on_progress:
            on_progress(EvaluateProgress(min(first + config.batch, len(rows)), len(rows), acceptance.tau, equal))
    return runs


def _summary(engine: Engine, runs: list[_Run], config: EvaluateConfig) -> Evaluation:
    """`config` tells the drafts that were asked for, cut to what the drafter can do."""
    acceptance, timings = Acceptance(), engine.stats.timings
    pairs = [pair for run in runs for pair in zip(run.plain, run.drafted, strict=True)]
    for _, drafted in pairs:
        acceptance.add(drafted.acceptance)
    num, nodes = config.num_draft_tokens, config.tree_nodes
    t_base = timings.t_base(config.batch)
    t_draft, t_verify = timings.t_draft(config.batch, num), timings.t_verify(config.batch, nodes or num)
    predicted = None
    if t_base and t_draft and t_verify and acceptance.tau:
        predicted = t_base * acceptance.tau / (t_draft + t_verify)
    plain_tokens = sum(len(c.token_ids) for c, _ in pairs)
    drafted_tokens = sum(len(c.token_ids) for _, c in pairs)
    plain_rate = plain_tokens / sum(run.plain_s for run in runs)
    drafted_rate = drafted_tokens / sum(run.drafted_s for run in runs)
    ratios = [run.plain_s / run.drafted_s for run in runs]
    return Evaluation(
        tau=acceptance.tau,
        acceptance_by_position=acceptance.by_position,
        t_base_s=t_base,
        t_draft_s=t_draft,
        t_verify_s=t_verify,
        s_predicted=predicted,
        s_measured=drafted_rate / plain_rate,
        s_measured_quartiles=statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3,
        tokens_per_s_plain=plain_rate,
        tokens_per_s_drafted=drafted_rate,
        equal=sum(plain.token_ids == drafted.token_ids for plain, drafted in pairs),
        prompts=len(pairs),
        tokens=plain_tokens,
        batch=config.batch,
        num_draft_tokens=num,
        tree_nodes=nodes,
        max_new_tokens=config.max_new_tokens,
        dtype=config.dtype,
        backend=engine.backend.name,
        device=config.device,
        drafter=engine.drafter_name or config.drafter,
        prompt_set=config.prompts,
        mean_context=statistics.mean(len(c.prompt_ids) + len(c.token_ids) for c, _ in pairs),
        fallbacks=dict(engine.stats.fallbacks),
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """What a figure depends on: library versions and the machine's processor."""
    names = ("draftloop", "torch", "transformers")
    found = {name: importlib.metadata.version(name) for name in names if _installed(name)}
    return found | {"python": platform.python_version(), "processor": _processor(), "cpus": str(os.cpu_count())}


def _processor() -> str:
    """The model of the first CPU, or the architecture where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
