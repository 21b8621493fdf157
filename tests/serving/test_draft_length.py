"""The choice of the draft length, on made-up machines and drafters whose best answer is known by arithmetic."""

from __future__ import annotations

import random

import pytest

from serving.engine.draft_length import DraftLengthChooser, PositionAcceptance
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_target import AlwaysRight, AlwaysWrong, HalfRight, toy_model, toy_prompts


def cpu_step(rows: int) -> float:
    """FACTS of a two-core CPU in bfloat16: eight rows are free, then every row costs."""
    return max(7.5e-3, 0.92e-3 * rows)


def simulate(batch: int, acceptance: float, draft_s: float = 0.5e-3, rounds: int = 600, most: int = 8):
    """Rounds of a drafter whose every position is accepted with the same probability."""
    chooser, rng = DraftLengthChooser(most), random.Random(0)
    sequences = [PositionAcceptance() for _ in range(batch)]
    for _ in range(rounds):
        number = chooser.choose(sequences)
        if number:
            chooser.observe_draft(batch, number, number * draft_s)
        chooser.observe_step(batch * (number + 1), cpu_step(batch * (number + 1)))
        for sequence in sequences if number else ():
            accepted = 0
            while accepted < number and rng.random() < acceptance:
                accepted += 1
            chooser.observe_acceptance(sequence, number, accepted)
    return chooser


def true_speed(batch: int, acceptance: float, number: int, draft_s: float = 0.5e-3) -> float:
    """Tokens per second of one sequence with `number` drafts."""
    return sum(acceptance**j for j in range(number + 1)) / (cpu_step(batch * (number + 1)) + number * draft_s)


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.8, 0.95])
def test_finds_the_fastest_number(batch, acceptance):
    chooser = simulate(batch, acceptance)
    best = max(range(9), key=lambda k: true_speed(batch, acceptance, k))
    usual, _ = chooser.chosen.most_common(1)[0]
    assert true_speed(batch, acceptance, usual) > 0.95 * true_speed(batch, acceptance, best)


def test_a_drafter_that_does_not_pay_is_off_but_for_rare_probes():
    chooser = simulate(batch=8, acceptance=0.2, rounds=5000)
    assert chooser.chosen[0] > 0.98 * 5000


def test_comes_back_when_the_drafter_gets_better():
    chooser, sequence = simulate(batch=1, acceptance=0.0, rounds=300), PositionAcceptance()
    assert chooser.chosen.most_common(1)[0][0] == 0
    before = chooser.chosen[0]
    for _ in range(3000):
        number = chooser.choose([sequence])
        chooser.observe_step(number + 1, cpu_step(number + 1))
        if number:
            chooser.observe_draft(1, number, number * 0.5e-3)
            chooser.observe_acceptance(sequence, number, number)
    assert chooser.chosen[0] - before < 2900


def test_an_outlier_of_the_machine_changes_little():
    chooser = simulate(batch=1, acceptance=0.8)
    sequence = [PositionAcceptance()]
    before = chooser.tokens_per_s(sequence, 4)
    chooser.observe_step(5, 20 * cpu_step(5))
    assert chooser.tokens_per_s(sequence, 4) > 0.75 * before


@pytest.mark.parametrize("kind", [AlwaysRight, AlwaysWrong, HalfRight])
def test_adapting_never_changes_the_output(kind):
    prompts = toy_prompts(6)
    rows = TorchRows(toy_model(), num_slots=3, max_len=160)
    plain = Engine(rows).generate(prompts, Sampling(max_new_tokens=60))
    engine = Engine(rows, kind(toy_model()), config=EngineConfig(num_draft_tokens=6, adapt_draft_length=True))
    drafted = engine.generate(prompts, Sampling(max_new_tokens=60))
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert engine.stats.fallbacks == {}
    assert sum(engine.stats.draft_lengths.values()) > 0
    assert len(engine.stats.draft_lengths) >= 3  # it tried none, some and all
