"""What rounds cost and how fast answers come, plain decoding and all drafters in turns on one engine.

Two measurements. `round_times`: T_base, T_draft and T_verify of every shape, the shape changing from round to round of
the same decodes, so that noise and context are the same for all. `timed_answers`: whole answers with one chosen shape,
prompt by prompt, every drafter and plain decoding one after another in an order drawn for each.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from drafters.acceptance import Acceptance
from drafters.drafter import Drafter, DraftReply, DraftRequest
from pipelines.compare_config import Shape
from pipelines.compare_figures import BatchTimes, ShapeTimes, SpeedFigures
from serving.engine.drafting import EngineStats
from serving.engine.engine import Engine
from serving.engine.sampling import Sampling

PLAIN = ""  # the contender without a drafter
PLAIN_SHAPE = Shape(0)
PASSES, SAMPLES = 2, 4  # turns of each contender, and rounds of each shape in a turn
MOST_TRIES = 8  # rounds for each that is wanted: only those in which all sequences decode are counted
WARM_UP = 8  # tokens: first calls allocate
PAUSE_S = 0.1  # before each timed decode, so that the threads of the one before have gone to sleep

Prompts = Sequence[Sequence[int]]


class FullChains:
    """`Drafter` that offers as many drafts as were asked for, whatever the inner one finds: a pass that is timed for k
    drafts has their rows."""

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.name, self.target_layer_ids = inner.name, inner.target_layer_ids
        self.max_draft_tokens, self.max_tree_nodes = inner.max_draft_tokens, inner.max_tree_nodes

    def allocate(self, num_slots: int, max_len: int) -> None:
        self.inner.allocate(num_slots, max_len)

    def draft(self, request: DraftRequest) -> DraftReply:
        reply = self.inner.draft(request)
        return reply if reply.parents_BK is not None else replace(reply, counts=None)


# -- what rounds cost -------------------------------------------------------------------------------------------------


def round_times(
    engine: Engine,
    drafters: dict[str, Drafter],
    shapes: dict[str, list[Shape]],
    prompts: Prompts,
    batch: int,
    on_turn: Callable[[], None],
) -> tuple[dict[str, BatchTimes], dict[str, str]]:
    """(medians of every drafter's shapes in batches of `batch`, why some have none), both by drafter."""
    contenders: dict[str, Drafter | None] = {PLAIN: None} | {n: FullChains(d) for n, d in drafters.items()}
    wanted = {PLAIN: [PLAIN_SHAPE]} | shapes
    stats = {(name, shape): EngineStats() for name in contenders for shape in wanted[name]}
    rng, order = random.Random(0), list(contenders)
    for number in range(PASSES):
        rng.shuffle(order)
        for name in order:
            engine.set_drafter(contenders[name])
            mine = {shape: stats[name, shape] for shape in wanted[name]}
            _cycle(engine, mine, prompts, batch, SAMPLES * (number + 1))
            on_turn()
    engine.set_drafter(None)
    t_base = stats[PLAIN, PLAIN_SHAPE].timings.t_base(batch)
    fallbacks = {name: [r for shape in shapes[name] for r in stats[name, shape].fallbacks] for name in drafters}
    failures = {name: _failed(reasons) for name, reasons in fallbacks.items() if reasons}
    times = {
        name: BatchTimes(
            batch=batch,
            t_base_s=t_base,
            shapes=[
                ShapeTimes(
                    depth=shape.depth,
                    nodes=shape.nodes,
                    t_draft_s=stats[name, shape].timings.t_draft(batch, shape.depth),
                    t_verify_s=stats[name, shape].timings.t_verify(batch, shape.drafts),
                )
                for shape in wanted[name]
            ],
        )
        for name in drafters
        if name not in failures
    }
    return times, failures


def _failed(reasons: Iterable[str]) -> str:
    return f"it failed while it drafted ({', '.join(dict.fromkeys(reasons))})"


def turns(drafters: int) -> int:
    """Of `round_times`: so often it tells that one is over."""
    return PASSES * (drafters + 1)


def _cycle(engine: Engine, stats: dict[Shape, EngineStats], prompts: Prompts, batch: int, samples: int) -> None:
    """Rounds of all shapes in turns, until each has so many of a full batch."""
    start, left = 0, MOST_TRIES * samples * len(stats)

    def done() -> bool:
        failed = any(one.fallbacks for one in stats.values())
        return failed or left < 0 or all(_rounds(one, shape, batch) >= samples for shape, one in stats.items())

    while not done():
        members = [list(prompts[(start * batch + i) % len(prompts)]) for i in range(batch)]
        room = engine.max_len - max(map(len, members))
        sampling = Sampling(max_new_tokens=room, ignore_eos=True)
        names = [engine.add(prompt, sampling, request_id=f"cycle-{i}") for i, prompt in enumerate(members)]
        finished = False
        while not finished and not done():
            shape = min(stats, key=lambda s: _rounds(stats[s], s, batch))
            engine.num_draft_tokens, engine.tree_nodes = shape.depth, shape.nodes
            engine.stats = stats[shape]
            finished, left = any(progress.completion for progress in engine.step()), left - 1
        for name in names:
            engine.cancel(name)
        while engine.has_work:
            engine.step()
        start += 1


def _rounds(stats: EngineStats, shape: Shape, batch: int) -> int:
    """Full rounds of the shape that were timed."""
    steps = len(stats.timings.step.get((batch, batch * shape.drafts), ()))
    return min(steps, len(stats.timings.draft.get((batch, shape.depth), ()))) if shape.depth else steps


# -- how fast answers come --------------------------------------------------------------------------------------------


@dataclass
class TimedAnswers:
    """What one contender did with all groups of prompts."""

    seconds: list[float] = field(default_factory=list)  # by group
    tokens: list[int] = field(default_factory=list)  # by group
    answers: list[list[int]] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    stats: EngineStats = field(default_factory=EngineStats)
    failure: str | None = None  # of the drafter: it is not asked any more

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


def groups_of(prompts: Prompts, batch: int, least: int = 2) -> list[list[list[int]]]:
    """Groups of `batch` prompts, `least` of them, so that there is a spread; from the beginning again where there are
    too few."""
    count = max(least, -(-len(prompts) // batch))
    return [[list(prompts[(g * batch + i) % len(prompts)]) for i in range(batch)] for g in range(count)]


def timed_answers(
    engine: Engine,
    drafters: dict[str, Drafter],
    shapes: dict[str, Shape],
    groups: Sequence[Prompts],
    max_new_tokens: int,
    on_decode: Callable[[], None],
) -> dict[str, TimedAnswers]:
    """Decode the groups with every drafter in its shape, and plainly (under the name PLAIN)."""
    contenders: dict[str, Drafter | None] = {PLAIN: None} | drafters
    found = {name: TimedAnswers() for name in contenders}

    def decode(name: str, group: Prompts, tokens: int) -> None:
        shape = shapes.get(name, PLAIN_SHAPE)
        engine.set_drafter(contenders[name])
        engine.num_draft_tokens, engine.tree_nodes = shape.depth, shape.nodes
        engine.stats = found[name].stats
        time.sleep(PAUSE_S)
        started = time.perf_counter()
        completions = engine.generate(group, Sampling(max_new_tokens=tokens))
        seconds = time.perf_counter() - started
        timed = found[name]
        if engine.stats.fallbacks:
            timed.failure = _failed(engine.stats.fallbacks)
            return
        timed.seconds.append(seconds)
        timed.tokens.append(sum(len(completion.token_ids) for completion in completions))
        for completion in completions:
            timed.answers.append(completion.token_ids)
            timed.acceptance.add(completion.acceptance)

    for name in contenders:
        decode(name, [prompt[:16] for prompt in groups[0]], WARM_UP)
        found[name] = TimedAnswers(failure=found[name].failure)
    rng, order = random.Random(0), list(contenders)
    for group in groups:
        rng.shuffle(order)
        for name in order:
            if found[name].failure is None:
                decode(name, group, max_new_tokens)
            on_decode()
    engine.set_drafter(None)
    return found


def speed_figures(
    drafted: TimedAnswers, plain: TimedAnswers, batch: int, shape: Shape, tau_counted: float | None
) -> SpeedFigures:
    """One drafter beside plain decoding."""
    timings = drafted.stats.timings
    rates = [
        [tokens / seconds for tokens, seconds in zip(one.tokens, one.seconds, strict=True)] for one in (drafted, plain)
    ]
    return SpeedFigures(
        batch=batch,
        depth=shape.depth,
        nodes=shape.nodes,
        prompts=len(plain.answers),
        tau=drafted.acceptance.tau,
        tau_counted=tau_counted,
        s_measured=drafted.tokens_per_s / plain.tokens_per_s,
        ratios=[a / b for a, b in zip(*rates, strict=True)],
        tokens_per_s=drafted.tokens_per_s,
        tokens_per_s_plain=plain.tokens_per_s,
        t_base_s=plain.stats.timings.t_base(batch),
        t_draft_s=timings.t_draft(batch, shape.depth),
        t_verify_s=timings.t_verify(batch, shape.drafts),
        equal=sum(a == b for a, b in zip(drafted.answers, plain.answers, strict=True)),
    )


def quartiles(ratios: Sequence[float]) -> tuple[float, float]:
    """Lower and upper."""
    if len(ratios) < 2:
        return ratios[0], ratios[0]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, high
