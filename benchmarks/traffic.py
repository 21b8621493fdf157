"""Random traffic for an engine: requests join between rounds, leave, are cancelled, and the draft length changes.

In: an engine, prompts, a random stream. Out: every request's answer and how it must compare with a reference.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from serving.engine.engine import Engine
from serving.engine.sampling import Sampling
from serving.engine.sequence import Completion

JOIN_CHANCE = 0.3  # per round, while fewer wait than there are slots
LENGTH_CHANCE = 1 / 16  # per round
OFF_CHANCE = 1 / 16  # of those changes; drafting that was off stays off for MTP's running requests, so it is rare
MOST_DRAFTS = 8
MOST_NODES = 16  # of a tree
TREE_CHANCE = 0.5  # of trees in place of chains, when the length changes


@dataclass(frozen=True)
class Request:
    """One request and how it ends."""

    prompt: int  # index
    max_new_tokens: int
    cancel_after: int | None = None  # emitted tokens; None: it runs to its end


@dataclass(frozen=True)
class Answer:
    """What a request was given."""

    request: Request
    token_ids: list[int]
    cancelled: bool

    def expected(self, reference: list[int]) -> list[int]:
        """What it must be, given the prompt's reference: a prefix, of its own length if it was cancelled."""
        return reference[: len(self.token_ids) if self.cancelled else self.request.max_new_tokens]


def plan_requests(prompts: int, tokens: int, rng: random.Random) -> list[Request]:
    """Every prompt once in full, and beside it an eighth with a random limit and an eighth to cancel; shuffled."""
    some = -(-prompts // 8)
    requests = [Request(i, tokens) for i in range(prompts)]
    requests += [Request(i, rng.randint(1, tokens)) for i in rng.sample(range(prompts), some)]
    requests += [Request(i, tokens, rng.randint(0, tokens - 1)) for i in rng.sample(range(prompts), some)]
    rng.shuffle(requests)
    return requests


def drive(
    engine: Engine,
    prompts: list[list[int]],
    requests: list[Request],
    rng: random.Random,
    on_answer: Callable[[int], None] | None = None,
) -> list[Answer]:
    """Put the requests through the engine in their order. Raises RuntimeError if a stream or a slot was lost."""
    pending = list(reversed(requests))
    open_requests: dict[str, Request] = {}
    emitted: dict[str, list[int]] = {}
    answers: list[Answer] = []
    while pending or engine.has_work:
        crowded = engine.num_waiting >= engine.num_slots
        if pending and (not engine.has_work or (not crowded and rng.random() < JOIN_CHANCE)):
            for _ in range(min(len(pending), rng.randint(1, engine.num_slots))):
                request = pending.pop()
                name = engine.add(prompts[request.prompt], Sampling(max_new_tokens=request.max_new_tokens))
                open_requests[name], emitted[name] = request, []
        for name, request in open_requests.items():
            if request.cancel_after is not None and len(emitted[name]) >= request.cancel_after:
                engine.cancel(name)
        _change_length(engine, rng)
        for progress in engine.step():
            emitted[progress.request_id] += progress.token_ids
            if progress.completion:
                name = progress.request_id
                answers.append(_answer(open_requests.pop(name), emitted.pop(name), progress.completion))
                if on_answer:
                    on_answer(len(answers))
    if len(answers) != len(requests) or engine.free_slots != engine.num_slots:
        raise RuntimeError(f"{len(answers)} of {len(requests)} answers, {engine.free_slots} of {engine.num_slots} free")
    return answers


def _answer(request: Request, emitted: list[int], completion: Completion) -> Answer:
    if emitted != completion.token_ids:
        raise RuntimeError(f"{completion.request_id}: the stream differs from the completion")
    return Answer(request, completion.token_ids, completion.finish_reason == "cancelled")


def _change_length(engine: Engine, rng: random.Random) -> None:
    if engine.drafter is None:
        return
    if engine.num_draft_tokens == 0 or rng.random() < LENGTH_CHANCE:
        off = engine.num_draft_tokens > 0 and rng.random() < OFF_CHANCE
        engine.num_draft_tokens = 0 if off else rng.randint(1, min(MOST_DRAFTS, engine.drafter.max_draft_tokens))
        most_nodes = min(MOST_NODES, engine.drafter.max_tree_nodes)
        engine.tree_nodes = rng.randint(1, most_nodes) if most_nodes and rng.random() < TREE_CHANCE else 0
