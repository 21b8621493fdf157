"""The actor of the prefill stage: answers of the traffic log in, a shard of rollouts with the target's features out.

Nothing is generated: the target reads every answer once. Where an answer is greedy, the same pass shows whether the
target would have given it. A shard's bytes depend on nothing but its rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipelines.rollout_schema import Rollout
from pipelines.rollout_store import ShardRecord
from pipelines.shard_generator import REPORT_EVERY_S, ShardContext, ShardGenerator
from serving.engine.rows import RowsBackend, Run, make_rows

PASS_ROWS = 512  # tokens that the target reads at once
NOT_FINITE, FOREIGN = "hidden states not finite", "not this target's answer"  # why rows are rejected


@dataclass(frozen=True, kw_only=True)
class PrefillContext(ShardContext):
    """What every actor of a run needs to know, beside its shards."""

    category: str  # of all rows; rejects name it as their file
    min_agreement: float  # share of a greedy answer's tokens that the target must give itself
    near_tie: float  # logits that such a token may lie below the target's best


class Reading(NamedTuple):
    """What the target made of one answer."""

    features_TF: Tensor  # bfloat16 [T - 1, taps * width] on the host: the last token is never fed
    agreed: int  # response tokens that it would have given itself, at temperature 0; 0 of answers that are sampled


class TrafficPrefill(ShardGenerator):
    """Callable for `Dataset.map_batches`, as the generator is."""

    context: PrefillContext

    def _generate(self, name: str, items: list[dict[str, Any]]) -> ShardRecord:
        rollouts, rejected = [], []
        answers = [Rollout(**item["row"], category=self.context.category) for item in items]
        for item, answer, reading in zip(items, answers, self._readings(name, answers), strict=True):
            if problem := self._problem(answer, reading):
                kind, detail = problem
                told = {"file": self.context.category, "line": item["line"], "kind": kind}
                rejected.append(told | {"reason": f"{answer.id}: {detail}"})
            else:
                answer.features_TF = reading.features_TF
                rollouts.append(answer)
        return self.store.write_shard(name, rollouts, self.context.metadata, rejected)

    def _readings(self, name: str, answers: Sequence[Rollout]) -> Iterator[Reading]:
        """Of all answers, in order; the board is told on the way."""
        tokens, reported = 0, time.monotonic()
        readings = read_answers(self.engine().backend, answers, self.context.near_tie)
        for number, (answer, reading) in enumerate(zip(answers, readings, strict=True), 1):
            tokens += len(answer.response_ids)
            if time.monotonic() - reported > REPORT_EVERY_S or number == len(answers):
                reported = time.monotonic()
                self.board.note.remote(name, number, tokens)
            yield reading

    def _problem(self, answer: Rollout, reading: Reading) -> tuple[str, str] | None:
        """(kind, reason) for a row that is left out, or None."""
        if not bool(torch.isfinite(reading.features_TF).all()):
            return NOT_FINITE, "the target's hidden states are not finite"
        tokens = len(answer.response_ids)
        if answer.temperature == 0 and reading.agreed < self.context.min_agreement * tokens:
            return FOREIGN, f"the target would have given {reading.agreed} of its {tokens} tokens"
        return None


class _Part(NamedTuple):
    """Rows of a pass that belong to one answer."""

    number: int  # of the answer
    start: int  # position of the first row
    rows: int


def read_answers(backend: RowsBackend, answers: Sequence[Rollout], near_tie: float) -> Iterator[Reading]:
    """Feed the answers to the target, many at a time, and yield what it made of each, in order.

    A token of a greedy answer agrees if no other's logit is more than `near_tie` above its own: the log may come from
    another dtype or backend, whose rounding decides between tokens that lie so close.
    """
    ids = [answer.prompt_ids + answer.response_ids for answer in answers]
    chunks: list[Tensor] = []  # features of the answer that is being read
    agreed = 0
    for parts in _passes([len(tokens) - 1 for tokens in ids], backend.num_slots):
        runs = [Run(p.number % backend.num_slots, p.start, ids[p.number][p.start : p.start + p.rows]) for p in parts]
        asked = [_checked(answers[p.number], p) for p in parts]
        firsts = [sum(p.rows for p in parts[:i]) for i in range(len(parts))]  # row of the pass where each begins
        wanted = [first + place for first, places in zip(firsts, asked, strict=True) for place in places]
        output = backend.forward(make_rows(runs, wanted))
        said = [ids[p.number][p.start + place + 1] for p, places in zip(parts, asked, strict=True) for place in places]
        right = iter(_agree(output.logits_NV, said, near_tie))
        assert output.features_RF is not None
        for part, first, places in zip(parts, firsts, asked, strict=True):
            features_RF = output.features_RF[first : first + part.rows]
            chunks.append(features_RF.to("cpu", torch.bfloat16, copy=True))
            agreed += sum(next(right) for _ in places)
            if part.start + part.rows == len(ids[part.number]) - 1:
                yield Reading(torch.cat(chunks), agreed)
                chunks, agreed = [], 0


def _passes(lengths: Sequence[int], num_slots: int) -> Iterator[list[_Part]]:
    """Which rows of which answers go together: in order, a slot each, long answers over several passes."""
    parts: list[_Part] = []
    room = PASS_ROWS
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            if not room or len(parts) == num_slots:
                yield parts
                parts, room = [], PASS_ROWS
            count = min(room, length - start)
            parts.append(_Part(number, start, count))
            start, room = start + count, room - count
    if parts:
        yield parts


def _checked(answer: Rollout, part: _Part) -> range:
    """The rows of a part, counted in it, whose next token is a greedy response's."""
    if answer.temperature != 0:
        return range(0)
    return range(max(0, len(answer.prompt_ids) - 1 - part.start), part.rows)


def _agree(logits_NV: Tensor, tokens: list[int], near_tie: float) -> list[bool]:
    if not tokens:
        return []
    own_N = logits_NV.gather(1, torch.tensor(tokens, device=logits_NV.device)[:, None])[:, 0]
    return (logits_NV.amax(dim=1).float() - own_N.float() <= near_tie).tolist()
