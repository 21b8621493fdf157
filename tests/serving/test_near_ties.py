"""In bfloat16 the torch backend may part from its plain decoding at near-ties of the target, and nowhere else; and the
rule that says what a near-tie is can say no."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.traffic import drive, plan_requests
from pipelines.near_ties import Parting, find_parting, first_difference, logits_of, tie
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_target import AlwaysRight, HalfRight, toy_model, toy_prompts

TOKENS = 40
PROMPTS = toy_prompts(20, low=3, high=20)


@pytest.fixture(scope="module")
def exact():
    """The bfloat16 weights, computed with in float32."""
    return toy_model().bfloat16().float()


@pytest.fixture(scope="module")
def rounded():
    return toy_model().bfloat16()


@pytest.fixture(scope="module")
def rows() -> TorchRows:
    return TorchRows(toy_model().bfloat16(), num_slots=4, max_len=96)


@pytest.fixture(scope="module")
def plain(rows) -> list[list[int]]:
    """Plain decoding of each prompt alone."""
    return [Engine(rows).generate([p], Sampling(max_new_tokens=TOKENS))[0].token_ids for p in PROMPTS]


def partings_of(outputs, references, exact, rounded) -> list[Parting]:
    found = [
        find_parting(prompt, got, expected, logits_of(exact), logits_of(rounded))
        for prompt, got, expected in zip(PROMPTS, outputs, references, strict=True)
    ]
    return [parting for parting in found if parting]


def test_drafted_bfloat16_parts_from_plain_at_near_ties_only(exact, rounded, rows, plain):
    right, half = AlwaysRight(exact), HalfRight(exact)
    half.argmax = right.argmax  # the same target: what one has looked up, the other knows
    for drafter in (right, half):
        engine = Engine(rows, drafter, config=EngineConfig(num_draft_tokens=4))
        outputs = [c.token_ids for c in engine.generate(PROMPTS, Sampling(max_new_tokens=TOKENS))]
        partings = partings_of(outputs, plain, exact, rounded)
        near = sum(parting.near_tie for parting in partings)
        print(f"{drafter.name}: {near} near-ties, {len(partings) - near} others, {len(PROMPTS)} answers")
        assert near == len(partings) < len(PROMPTS) / 2
        assert engine.stats.acceptance.accepted > 0
        assert engine.stats.fallbacks == {}


def test_a_wrong_token_is_not_a_near_tie_wherever_it_is_planted(exact, rounded, plain):
    for position in (0, 7, TOKENS - 1):
        outputs = []
        for prompt, answer in zip(PROMPTS, plain, strict=True):
            logits_V = logits_of(exact)(prompt + answer[:position], 1)[0]
            fourth = int(logits_V.topk(4).indices[3])
            outputs.append([*answer[:position], fourth, *answer[position + 1 :]])
        partings = partings_of(outputs, plain, exact, rounded)
        assert [parting.position for parting in partings] == [position] * len(PROMPTS)
        assert sum(parting.near_tie for parting in partings) <= len(PROMPTS) / 10


def test_a_wrong_token_after_a_near_tie_is_found(exact, rounded):
    prompt = PROMPTS[0]
    exact_of, rounded_of = logits_of(exact), logits_of(rounded)

    def close_calls(ids: list[int], count: int):  # claims an error so large that the first row is always a near-tie
        logits_NV = rounded_of(ids, count).clone()
        logits_NV[0, 0] += 1e4
        return logits_NV

    answer: list[int] = []
    for _ in range(6):
        answer.append(int(exact_of(prompt + answer, 1)[0].argmax()))
    second = int(exact_of(prompt, 1)[0].topk(2).indices[1])
    after = [second]
    for _ in range(5):
        after.append(int(exact_of(prompt + after, 1)[0].argmax()))
    assert find_parting(prompt, after, answer, exact_of, close_calls).near_tie
    after[4] = int(exact_of(prompt + after[:4], 1)[0].argmin())
    parting = find_parting(prompt, after, answer, exact_of, close_calls)
    assert parting.tie.near
    assert parting.stray_position == 4
    assert not parting.near_tie


@pytest.mark.parametrize(
    ("tokens", "near"),
    [((0, 1), True), ((1, 0), True), ((0, 2), False), ((1, 2), False), ((2,), False), ((1,), True)],
)
def test_the_bound_is_twice_the_rounding_error(tokens, near):
    exact_V = torch.tensor([3.0, 2.8, 2.7, -1.0])
    rounded_V = torch.tensor([3.0, 2.875, 2.7, -0.875])  # off by 0.125 at most: the bound is 0.25
    found = tie(exact_V, rounded_V, tokens)
    assert found.bound == pytest.approx(0.25)
    assert found.top_two_gap == pytest.approx(0.2)
    assert found.near is near


def test_without_rounding_only_an_equal_logit_is_a_tie():
    logits_V = torch.tensor([1.0, 2.0, 2.0, 1.999])
    assert tie(logits_V, logits_V, (1, 2)).near
    assert not tie(logits_V, logits_V, (1, 3)).near


def test_first_difference_counts_an_early_end():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 5, 3], [1, 2, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], []) is None


def test_an_answer_that_ends_early_is_no_near_tie(exact, rounded, plain):
    [parting] = partings_of([plain[0][:-1], *plain[1:]], plain, exact, rounded)
    assert parting.position == TOKENS - 1
    assert parting.got is None
    assert not parting.near_tie


def test_random_traffic_covers_every_prompt_and_gives_the_reference():
    rows = TorchRows(toy_model(), num_slots=3, max_len=96)
    prompts = PROMPTS[:8]
    alone = [Engine(rows).generate([p], Sampling(max_new_tokens=TOKENS))[0].token_ids for p in prompts]
    rng = random.Random(0)
    requests = plan_requests(len(prompts), TOKENS, rng)
    engine = Engine(rows, HalfRight(toy_model()))
    answers = drive(engine, prompts, requests, rng)
    assert all(a.token_ids == a.expected(alone[a.request.prompt]) for a in answers)
    whole = [a.request.prompt for a in answers if len(a.token_ids) == TOKENS]
    assert set(whole) == set(range(len(prompts)))
    assert any(a.cancelled and 0 < len(a.token_ids) < TOKENS for a in answers)
    assert any(not a.cancelled and len(a.token_ids) < TOKENS for a in answers)
    assert engine.stats.acceptance.rounds > 0
