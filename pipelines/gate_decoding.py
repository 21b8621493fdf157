"""The gate's measurements: prompts and drafters in, what each of them did side by side out.

Every batch is decoded plainly, with the champion and with the challenger, one after another in the same engine and in
every order in turn, so that all of them meet the same machine.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from drafters.drafter import Drafter
from drafters.drafter_module import DrafterModule
from pipelines.features import read_features
from pipelines.gate_prompts import GatePrompt
from pipelines.near_ties import near_ties
from pipelines.paired_bootstrap import PLAIN_ROUNDS, PromptRounds
from pipelines.parity import ParityResult, measure_parity, parity_cases
from pipelines.training_sequence import TrainingSequence
from serving.engine.engine import Engine
from serving.engine.sampling import Sampling
from serving.engine.sequence import Completion

Way = Literal["plain", "champion", "challenger"]

WARM_UP_PROMPT, WARM_UP_ANSWER = 64, 8  # tokens of the first batch: first calls allocate


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """One prompt, decoded in all ways."""

    prompt: GatePrompt
    answers: dict[Way, list[int]]  # emitted tokens
    rounds: dict[Way, PromptRounds]  # of the drafters; of plain decoding what follows from its meaning


@dataclass(frozen=True, kw_only=True)
class BatchTimes:
    """One batch of prompts, by way."""

    seconds: dict[Way, float]
    tokens: dict[Way, int]

    def speed(self, way: Way, over: Way = "plain") -> float:
        """Tokens per second over those of another way."""
        return (self.tokens[way] / self.seconds[way]) / (self.tokens[over] / self.seconds[over])


@dataclass(frozen=True)
class PartedAnswer:
    """An answer of a drafter that is not that of plain decoding."""

    way: Way
    near_tie: bool  # rounding explains it


class SideBySide:
    """An engine that decodes the same prompts in all ways."""

    def __init__(self, engine: Engine, drafters: dict[Way, Drafter], max_new_tokens: int):
        self.engine, self.max_new_tokens = engine, max_new_tokens
        self.drafters: dict[Way, Drafter | None] = {"plain": None, **drafters}
        self.orders = list(itertools.permutations(self.drafters))
        self.fallbacks: dict[Way, Counter[str]] = {way: Counter() for way in self.drafters}  # rounds by reason

    def decode(
        self, prompts: Sequence[GatePrompt], batch: int, on_batch: Callable[[int], None]
    ) -> tuple[list[PromptResult], list[BatchTimes]]:
        """Decode greedily, `batch` prompts at a time; `on_batch` is told how many it were."""
        results, times = [], []
        for way in self.drafters:
            self._run(way, [prompt.prompt_ids[:WARM_UP_PROMPT] for prompt in prompts[:batch]], WARM_UP_ANSWER)
        for number, first in enumerate(range(0, len(prompts), batch)):
            some = prompts[first : first + batch]
            order = self.orders[number % len(self.orders)]
            ran = {way: self._run(way, [p.prompt_ids for p in some], self.max_new_tokens) for way in order}
            times.append(
                BatchTimes(
                    seconds={way: seconds for way, (_, seconds) in ran.items()},
                    tokens={way: sum(len(c.token_ids) for c in done) for way, (done, _) in ran.items()},
                )
            )
            for i, prompt in enumerate(some):
                by_way = {way: ran[way][0][i] for way in self.drafters}
                results.append(_result(prompt, by_way))
            on_batch(len(some))
        return results, times

    def _run(self, way: Way, prompts: list[list[int]], max_new_tokens: int) -> tuple[list[Completion], float]:
        self.engine.set_drafter(self.drafters[way])
        before = Counter(self.engine.stats.fallbacks)
        started = time.perf_counter()
        done = self.engine.generate(prompts, Sampling(max_new_tokens=max_new_tokens))
        seconds = time.perf_counter() - started
        self.fallbacks[way] += Counter(self.engine.stats.fallbacks) - before
        return done, seconds

    def parity(self, module: DrafterModule, results: Sequence[PromptResult], limit: int) -> ParityResult:
        """The challenger's tau in service beside what its module predicts on the texts that plain decoding gave.

        Chains of as many drafts as the module is trained for, on up to `limit` prompts, spread over all. The engine
        drafts chains from here on.
        """
        engine, number = self.engine, module.config.num_draft_tokens
        results = [r for r in results if r.answers["plain"]]
        count = min(limit, len(results))
        chosen = [results[i * len(results) // count] for i in range(count)]
        engine.set_drafter(None)  # only reads
        cases = parity_cases(module, _sequences(engine, module, chosen), number, limit)
        engine.set_drafter(self.drafters["challenger"])
        assert engine.drafter is not None
        number = min(number, engine.drafter.max_draft_tokens)
        engine.num_draft_tokens, engine.tree_nodes = number, 0
        before = Counter(engine.stats.fallbacks)
        found = measure_parity(engine, cases, number)
        self.fallbacks["challenger"] += Counter(engine.stats.fallbacks) - before
        return found


def _result(prompt: GatePrompt, by_way: dict[Way, Completion]) -> PromptResult:
    return PromptResult(
        prompt=prompt,
        answers={way: completion.token_ids for way, completion in by_way.items()},
        rounds={
            way: PLAIN_ROUNDS if way == "plain" else PromptRounds.of(completion.acceptance)
            for way, completion in by_way.items()
        },
    )


def _sequences(engine: Engine, module: DrafterModule, results: Sequence[PromptResult]) -> list[TrainingSequence]:
    """Prompts and plain answers with the features of the module's layers."""
    layers, width = list(engine.target_layer_ids), engine.backend.hidden_size
    places = [layers.index(layer) for layer in module.config.target_layer_ids]
    sequences = []
    for first in range(0, len(results), engine.num_slots):
        some = results[first : first + engine.num_slots]
        texts = [r.prompt.prompt_ids + r.answers["plain"] for r in some]
        for r, ids, features_TF in zip(some, texts, read_features(engine, texts), strict=True):
            features_TF = features_TF.reshape(len(features_TF), len(layers), width)[:, places].flatten(1)
            sequences.append(TrainingSequence(torch.tensor(ids), len(r.prompt.prompt_ids), features_TF))
    return sequences


def parted_answers(
    results: Sequence[PromptResult], target_path: Path, *, rounding: torch.dtype | None, device: str
) -> list[PartedAnswer]:
    """Where drafted answers part from plain ones. `rounding` is the dtype that decoded, where its rounding may differ
    with the rows of a pass; then it is looked at with the target in this dtype and in a wider one, loaded anew. None:
    rounding is no excuse."""
    parted = [
        (way, r.prompt.prompt_ids, answer, r.answers["plain"])
        for r in results
        for way, answer in r.answers.items()
        if answer != r.answers["plain"]
    ]
    if rounding is None:
        return [PartedAnswer(way, near_tie=False) for way, *_ in parted]
    judged = near_ties([(ids, got, expected) for _, ids, got, expected in parted], target_path, rounding, device)
    return [PartedAnswer(way, near_tie) for (way, *_), near_tie in zip(parted, judged, strict=True)]
