"""The engine that a comparison runs on, with all its drafters: what each of the three measurements gives by drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from drafters.checkpoint import CheckpointError
from drafters.drafter import Drafter
from drafters.prompt_lookup import PromptLookupDrafter
from drafters.target import Target
from pipelines.compare_advice import LEAST_FREEDOM
from pipelines.compare_config import CompareConfig, Shape
from pipelines.compare_contenders import Contender
from pipelines.compare_counting import Answer, Onlooker, first_answers, length_figures, path_mismatches, watched_answers
from pipelines.compare_figures import DrafterFacts, DrafterTimes, LengthFigures, PairFigures, SpeedFigures
from pipelines.compare_timing import (
    PLAIN,
    TimedAnswers,
    groups_of,
    round_times,
    speed_figures,
    timed_answers,
    turns,
)
from pipelines.near_ties import near_ties
from serving.engine.build import DTYPES, build_engine, load_drafter_for
from serving.engine.engine import EngineConfig
from serving.engine.memory_plan import Form, plan_drafter

FALLBACK_DEPTH = 4  # of the chain that is timed where nothing can be predicted

Tick = Callable[[str], None]  # told what was done after each unit of work


@dataclass(frozen=True)
class NamedPrompts:
    """A prompt set as token ids."""

    name: str
    prompts: list[list[int]]
    sha256: str

    @property
    def mean_tokens(self) -> float:
        return sum(map(len, self.prompts)) / len(self.prompts)


class Bench:
    """One engine, several drafters. What fails is noted in `failures`, and does not take part any more."""

    def __init__(self, config: CompareConfig, target: Target, contenders: Sequence[Contender], longest_prompt: int):
        self.config, self.target = config, target
        taps = sorted({layer for contender in contenders for layer in contender.target_layer_ids})
        depth, nodes = config.num_draft_tokens, max(config.trees, default=0)
        self.engine = build_engine(
            target.path,
            dtype=config.dtype,
            backend=config.backend,
            device=config.device,
            num_slots=max(config.batches),
            max_len=min(target.max_len, longest_prompt + config.max_new_tokens + depth + nodes + 32),
            target_layer_ids=taps,
            num_threads=config.num_threads,
            cuda_graphs=config.cuda_graphs,
            # every prompt is decoded again and again: it must not be found in its slot
            config=EngineConfig(num_draft_tokens=depth, tree_nodes=nodes, reuse_prefixes=False),
        )
        self.contenders = {contender.name: contender for contender in contenders}
        self.drafters: dict[str, Drafter] = {}
        self.failures: dict[str, str] = {}
        for contender in contenders:
            try:
                self.drafters[contender.name] = self._load(contender.path)
            except CheckpointError as error:
                self.failures[contender.name] = " ".join(str(error).split())
        self.shapes = {
            name: config.shapes(drafter.max_draft_tokens, drafter.max_tree_nodes)
            for name, drafter in self.drafters.items()
        }

    def _load(self, path: Path | None) -> Drafter:
        return PromptLookupDrafter() if path is None else load_drafter_for(self.engine.backend, path, self.target.path)

    def _working(self, names: Sequence[str]) -> dict[str, Drafter]:
        return {name: self.drafters[name] for name in names if name not in self.failures}

    def facts(self, name: str) -> DrafterFacts:
        """What the drafter is and takes."""
        contender, backend = self.contenders[name], self.engine.backend
        form: Form = "native" if backend.name == "native" else "packed" if backend.native_threads else "plain"
        weights = slot = 0
        if contender.path is not None:
            plan = plan_drafter(
                contender.path, self.target.path, dtype=DTYPES[self.config.dtype], form=form, num_slots=1,
                max_len=self.target.max_len,
            )  # fmt: skip
            weights, slot = plan.drafter_bytes, plan.state_bytes
        return DrafterFacts(
            name=name,
            kind=self.drafters[name].name,
            address=contender.address,
            sha256=contender.sha256,
            parameters=contender.parameters,
            training_minutes=contender.training_minutes,
            weights_bytes=weights,
            slot_bytes=slot,
            slot_tokens=self.target.max_len,
            shares=contender.shares,
        )

    def times(self, names: Sequence[str], sets: Sequence[NamedPrompts], tick: Tick) -> dict[str, DrafterTimes]:
        """What rounds of every shape cost, by drafter, in contexts of all sets."""
        most = max(len(one.prompts) for one in sets)
        mixed = [one.prompts[i % len(one.prompts)] for i in range(most) for one in sets]
        drafters = self._working(names)
        by_batch = []
        for batch in self.config.batches:
            on_turn = partial(tick, f"cost of rounds at batch {batch}")
            found, failures = round_times(self.engine, drafters, self.shapes, mixed, batch, on_turn)
            by_batch.append(found)
            self.failures |= failures
            drafters = self._working(list(drafters))
        return {name: DrafterTimes(drafter=name, batches=[one[name] for one in by_batch]) for name in drafters}

    def times_units(self, drafters: int) -> int:
        """Ticks of `times`."""
        return turns(drafters) * len(self.config.batches)

    def pairs(
        self, names: Sequence[str], prompts: NamedPrompts, times: dict[str, DrafterTimes], tick: Tick
    ) -> list[PairFigures]:
        """Drafters on one prompt set: tau by length first, then the speed of the shapes that promise most."""
        drafters = self._working(names)
        onlookers = {name: Onlooker(drafter, self.shapes[name]) for name, drafter in drafters.items()}
        answers = watched_answers(
            self.engine, onlookers, prompts.prompts, self.config.max_new_tokens, partial(tick, f"{prompts.name}: tau")
        )
        for name, onlooker in onlookers.items():
            if onlooker.failure is not None:
                self.failures[name] = f"it failed while it drafted ({onlooker.failure})"
        drafters = self._working(names)
        lengths = {
            name: with_speeds([length_figures(answers, name, shape) for shape in self.shapes[name]], times[name])
            for name in drafters
        }
        speeds: dict[str, list[SpeedFigures]] = {name: [] for name in drafters}
        for i, batch in enumerate(self.config.batches):
            shapes = {name: best_shape(lengths[name], i) for name in self._working(names)}
            for name, found in self._speeds(shapes, prompts, answers, batch, tick).items():
                speeds[name].append(found)
        return [self._pair(name, prompts, answers, lengths[name], speeds[name]) for name in self._working(names)]

    def _pair(
        self,
        name: str,
        prompts: NamedPrompts,
        answers: list[Answer],
        lengths: list[LengthFigures],
        speeds: list[SpeedFigures],
    ) -> PairFigures:
        chain = max((shape for shape in self.shapes[name] if not shape.nodes), key=lambda shape: shape.depth)
        rejections, share = path_mismatches(answers, name, chain, self.target.tokenizer)
        return PairFigures(
            drafter=name,
            prompt_set=prompts.name,
            prompts=len(prompts.prompts),
            lengths=lengths,
            rejections=rejections,
            path_mismatch_share=share,
            speeds=speeds,
        )

    def pairs_units(self, drafters: int, prompts: NamedPrompts) -> int:
        """Ticks of `pairs`."""
        groups = sum(len(self._groups(prompts, batch)) for batch in self.config.batches)
        return len(prompts.prompts) + (drafters + 1) * groups

    def _least_groups(self, batch: int) -> int:
        """Of the smallest batch, which the advice is for, as many as that needs."""
        return LEAST_FREEDOM + 1 if batch == min(self.config.batches) else 2

    def _timed(self, prompts: NamedPrompts, batch: int) -> list[list[int]]:
        """The set's first prompts, enough for all groups where the set has them."""
        return prompts.prompts[: max(self.config.speed_limit, self._least_groups(batch) * batch)]

    def _groups(self, prompts: NamedPrompts, batch: int) -> list[list[list[int]]]:
        return groups_of(self._timed(prompts, batch), batch, self._least_groups(batch))

    def _speeds(
        self, shapes: dict[str, Shape], prompts: NamedPrompts, answers: list[Answer], batch: int, tick: Tick
    ) -> dict[str, SpeedFigures]:
        groups = self._groups(prompts, batch)
        same = first_answers(answers[: len(self._timed(prompts, batch))], batch * len(groups))
        found = timed_answers(
            self.engine, self._working(list(shapes)), shapes, groups, self.config.max_new_tokens,
            partial(tick, f"{prompts.name}: speed at batch {batch}"),
        )  # fmt: skip
        for name in shapes:
            if (failure := found[name].failure) is not None:
                self.failures[name] = failure
        speeds = {}
        for name in self._working(list(shapes)):
            tau, ties = length_figures(same, name, shapes[name]).tau, self._near_ties(found[name], found[PLAIN], groups)
            speeds[name] = replace(speed_figures(found[name], found[PLAIN], batch, shapes[name], tau), near_ties=ties)
        return speeds

    def _near_ties(self, drafted: TimedAnswers, plain: TimedAnswers, groups: list[list[list[int]]]) -> int:
        """Answers that part from plain decoding's only where rounding may: never on the native backend, which sums in
        one order whatever the rows. In bfloat16 most do, and the target in a wider dtype is not loaded for that."""
        if self.engine.backend.name == "native" or self.config.dtype != "float32":
            return 0
        prompts = [prompt for group in groups for prompt in group]
        answers = zip(prompts, drafted.answers, plain.answers, strict=True)
        parted = [(prompt, got, expected) for prompt, got, expected in answers if got != expected]
        return sum(near_ties(parted, self.target.path, DTYPES[self.config.dtype], self.config.device))


def with_speeds(lengths: Sequence[LengthFigures], times: DrafterTimes) -> list[LengthFigures]:
    """The same rounds with S_predicted by batch."""
    return [replace(one, s_predicted=[batch.s_predicted(one) for batch in times.batches]) for one in lengths]


def best_shape(lengths: Sequence[LengthFigures], batch_number: int) -> Shape:
    """The shape that promises the highest S; a chain of a few drafts where nothing is known."""
    promising = [one for one in lengths if one.s_predicted[batch_number] is not None]
    if not promising:
        chains = [one.shape for one in lengths if not one.nodes]
        return chains[min(FALLBACK_DEPTH, len(chains)) - 1]
    return max(promising, key=lambda one: one.s_predicted[batch_number] or 0.0).shape
