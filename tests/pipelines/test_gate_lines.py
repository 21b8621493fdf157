"""The gate's demands on given figures: what passes, what fails, what cannot be told."""

from __future__ import annotations

import pytest

from pipelines.gate_config import GateConfig
from pipelines.gate_decoding import BatchTimes, PartedAnswer, PromptResult
from pipelines.gate_lines import (
    REGRESSION,
    fallback_line,
    held_out_line,
    lossless_line,
    parity_line,
    regression_lines,
    speed_line,
)
from pipelines.gate_prompts import GatePrompt
from pipelines.paired_bootstrap import PLAIN_ROUNDS, PromptRounds
from pipelines.parity import ParityResult

CONFIG = GateConfig(bootstrap_samples=1000)


def result(champion: int | None, challenger: int, category: str = "", rounds: int = 100) -> PromptResult:
    """A prompt on which the drafters gained so many tokens in 100 rounds."""
    sides = {"plain": PLAIN_ROUNDS, "challenger": PromptRounds(challenger, rounds)}
    if champion is not None:
        sides["champion"] = PromptRounds(champion, rounds)
    return PromptResult(prompt=GatePrompt([1], category), answers={way: [1] for way in sides}, rounds=sides)


def prompts(count: int, champion: int | None, challenger: int, category: str = "", spread: int = 0):
    """So many alike, every other one with `spread` tokens more and the next with so many less for the challenger."""
    return [result(champion, challenger + (spread if i % 2 else -spread), category) for i in range(count)]


# -- tau --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("challenger", "spread", "passed", "says"),
    [
        (210, 5, True, "2.10 against 2.00 on 20 prompts, +0.10 (95% interval +0.08 to +0.12); margin 0.04"),
        (203, 5, False, "the gain does not exceed the margin"),
        (210, 40, False, "the gain does not exceed its noise, more prompts would tell"),
        (190, 5, False, "the gain does not exceed the margin"),
    ],
)
def test_held_out_tau_must_gain_more_than_margin_and_noise(challenger, spread, passed, says):
    line = held_out_line(prompts(20, 200, challenger, spread=spread), CONFIG)
    assert line.passed is passed
    assert says in line.says
    assert (line.champion, line.challenger, line.threshold) == (2.0, challenger / 100, pytest.approx(2.04))


def test_prompts_without_rounds_do_not_count_for_the_decision():
    line = held_out_line([*prompts(19, 200, 300), *[result(0, 0, rounds=0)] * 5], CONFIG)
    assert (line.passed, line.challenger) == (False, None)
    assert "too few to decide: 19 prompts with answers long enough to draft for, 20 are needed" in line.says


def test_plain_decoding_has_a_tau_of_one():
    line = held_out_line(prompts(20, None, 103), CONFIG)
    assert (line.champion, line.challenger, line.passed) == (1.0, 1.03, True)
    assert not held_out_line(prompts(20, None, 101), CONFIG).passed


def verdicts(lines):
    return {line.name.removeprefix(REGRESSION).removeprefix(", "): line.passed for line in lines}


def test_one_category_that_fell_fails_although_the_whole_did_not():
    lines = regression_lines([*prompts(30, 200, 220, "chat"), *prompts(10, 200, 180, "code", 4)], CONFIG)
    assert verdicts(lines) == {"": True, "chat": True, "code": False}
    assert "1.80 against 2.00 on 10 prompts, -0.20" in lines[2].says
    assert lines[2].says.endswith("it fell by more than that")
    assert lines[2].threshold == pytest.approx(1.9)


def test_what_noise_does_to_a_category_is_said():
    few = regression_lines([*prompts(20, 200, 200, "chat"), *prompts(8, 200, 188, "code", 60)], CONFIG)
    assert verdicts(few) == {"": True, "chat": True, "code": False}
    assert "it fell by more, though within its noise: more prompts would tell" in few[2].says
    wide = regression_lines([*prompts(20, 200, 200, "chat"), *prompts(8, 200, 200, "code", 60)], CONFIG)
    assert verdicts(wide) == {"": True, "chat": True, "code": True}
    assert "its noise reaches beyond the tolerance" in wide[2].says


def test_small_categories_are_judged_together():
    some = [*prompts(30, 200, 200, "chat"), *prompts(4, 200, 170, "code"), *prompts(4, 200, 180, "math")]
    assert verdicts(regression_lines(some, CONFIG)) == {
        "": True, "chat": True, "small categories (code 4, math 4)": False,
    }  # fmt: skip
    fewer = regression_lines(some[:-1], CONFIG)
    assert verdicts(fewer) == {"": True, "chat": True}
    assert fewer[0].says.endswith("too few prompts to judge by themselves: code 4, math 3")


def test_a_set_without_categories_is_one_line_and_a_tiny_one_no_decision():
    assert verdicts(regression_lines(prompts(9, 200, 200), CONFIG)) == {"": True}
    [line] = regression_lines([*prompts(7, 200, 200), result(0, 0, rounds=0)], CONFIG)
    assert (line.passed, line.says) == (False, "too few to decide: 7 prompts with rounds, 8 are needed")


# -- speed ------------------------------------------------------------------------------------------------------------


def batches(plain: float, champion: list[float] | None, challenger: list[float]) -> list[BatchTimes]:
    """Seconds of 100 tokens, batch by batch."""
    made = []
    for i, seconds in enumerate(challenger):
        by_way = {"plain": plain, "challenger": seconds} | ({"champion": champion[i]} if champion else {})
        made.append(BatchTimes(seconds=by_way, tokens=dict.fromkeys(by_way, 100)))
    return made


STEADY = [1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0, 1.0]


def speed(champion: list[float] | None, factor: float, plain: float = 2.0, challenger: list[float] = STEADY):
    return speed_line(batches(plain, champion, [factor * seconds for seconds in challenger]), CONFIG)


@pytest.mark.parametrize(("factor", "passed"), [(0.8, True), (1.0, True), (1.02, True), (1.05, False), (1.5, False)])
def test_speed_may_fall_by_the_tolerance(factor, passed):
    line = speed(STEADY, factor)
    assert line.passed is passed
    assert line.challenger == pytest.approx(2 / factor)
    assert line.champion == pytest.approx(2)
    assert line.threshold == pytest.approx(2 * 0.97)
    assert f"{2 / factor:.2f} (quartiles" in line.says
    assert "against 2.00 (quartiles 1.99 to 2.02) on 8 batches" in line.says


def test_an_outlier_moves_neither_the_figure_nor_the_verdict():
    assert speed(STEADY, 1.0, challenger=[20.0, *STEADY[1:]]).passed
    assert not speed([20.0, *STEADY[1:]], 1.1).passed


def test_the_tolerance_covers_the_run_s_own_noise_up_to_a_limit():
    restless = [0.95, 1.05, 0.96, 1.04, 0.97, 1.03, 1.0, 1.0] * 2
    line = speed(STEADY * 2, 1.03, challenger=restless)
    assert line.passed
    assert 1.94 > line.threshold > 1.8
    assert not speed(STEADY * 2, 1.15, challenger=restless).passed
    wild = speed(STEADY, 1.0, challenger=[0.5, 1.5, 0.6, 1.4, 0.7, 1.3, 1.0, 1.0])
    assert not wild.passed
    assert "too much to tell: measure again on a quieter machine" in wild.says


def test_plain_decoding_is_beaten_above_one_only():
    assert speed(None, 1.9).passed
    slower = speed(None, 2.1)
    assert (slower.passed, slower.champion) == (False, 1.0)
    assert "against 1.00 of plain decoding" in slower.says


def test_few_batches_tell_nothing_of_speed():
    line = speed(STEADY, 0.5, challenger=STEADY[:5])
    assert (line.passed, line.challenger) == (False, None)
    assert "5 batches, 6 are needed" in line.says


def test_tokens_count_beside_seconds():
    """In bfloat16 answers may part, and be of other lengths."""
    by_way = {"plain": 100, "champion": 100, "challenger": 50}
    times = [BatchTimes(seconds=dict.fromkeys(by_way, 1.0), tokens=by_way)] * 8
    assert speed_line(times, CONFIG).challenger == 0.5


# -- what must simply hold --------------------------------------------------------------------------------------------


def test_one_answer_that_differs_fails():
    some = prompts(10, 200, 200)
    assert lossless_line(some, [], exact=True).passed
    line = lossless_line(some, [PartedAnswer("challenger", near_tie=False)], exact=True)
    assert (line.passed, line.champion, line.challenger, line.threshold) == (False, 10, 9, 10)
    assert "challenger 9 of 10 answers equal" in line.says


def test_near_ties_may_part_where_rounding_may_differ():
    some = prompts(10, 200, 200)
    ties = [PartedAnswer("champion", near_tie=True), PartedAnswer("challenger", near_tie=True)]
    line = lossless_line(some, ties, exact=False)
    assert (line.passed, line.challenger, line.threshold) == (True, 9, 9)
    assert "1 part at near-ties, 0 otherwise" in line.says
    assert not lossless_line(some, [*ties, PartedAnswer("challenger", near_tie=False)], exact=False).passed
    told = lossless_line(some, [*ties, PartedAnswer("champion", near_tie=False)], exact=False)
    assert told.passed, "a champion that is wrong must not keep out a challenger that is right"
    assert "drafting changed what the target says" in told.says


@pytest.mark.parametrize(
    ("served", "tolerance", "verdict", "says"),
    [
        (1.96, 0.05, True, "1.96 served, 2.00 expected in chains on 9 prompts: within 5%"),
        (1.5, 0.05, False, "1.50 served, 2.00 expected in chains on 9 prompts: more than 5% apart"),
        (1.96, 0.2, None, "too little text to tell (one round's drafts are 20% of it)"),
        (None, 0.05, None, "not measured on 9 prompts: no answer is long enough"),
        (None, 0.05, False, "texts part from those of plain decoding"),
    ],
)
def test_parity_must_be_measured_and_hold(served, tolerance, verdict, says):
    found = ParityResult(expected=2.0, served=served, prompts=9, tolerance=tolerance, passed=verdict)
    line = parity_line(found)
    assert line.passed is (verdict is True)
    assert line.decided is (verdict is not None)
    assert says in line.says


def test_a_fallback_of_the_challenger_fails_and_one_of_the_champion_is_told():
    assert fallback_line({"plain": {}, "challenger": {}}).passed
    line = fallback_line({"plain": {}, "champion": {"RuntimeError": 3}, "challenger": {}})
    assert (line.passed, line.champion, line.challenger) == (True, 3, 0)
    assert line.says == "champion fell back to plain decoding, rounds by reason: RuntimeError 3"
    line = fallback_line({"plain": {}, "champion": {}, "challenger": {"RuntimeError": 3}})
    assert (line.passed, line.decided) == (False, True)
    assert line.says == "challenger fell back to plain decoding, rounds by reason: RuntimeError 3"
