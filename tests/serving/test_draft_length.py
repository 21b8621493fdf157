"""The choice of the draft length, on made-up machines and drafters whose best answer is known by arithmetic."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from serving.engine.draft_length import DraftLengthChooser, PositionAcceptance
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_target import AlwaysRight, AlwaysWrong, HalfRight, toy_model, toy_prompts


def cpu_step(rows: int) -> float:
    """A two-core CPU in bfloat16: eight rows are free, then every row costs."""
    return max(7.5e-3, 0.92e-3 * rows)


class Simulation:
    """Rounds on that machine with sequences whose drafts are accepted with given probabilities."""

    def __init__(self, acceptance: list[float], draft_s: float = 0.5e-3, most: int = 8):
        self.chooser, self.acceptance, self.draft_s = DraftLengthChooser(most), acceptance, draft_s
        self.sequences = [PositionAcceptance() for _ in acceptance]
        self.chosen: Counter[tuple[int, ...]] = Counter()
        self.seconds, self.tokens = 0.0, 0
        self._rng = random.Random(0)

    def run(self, rounds: int) -> Simulation:
        for _ in range(rounds):
            lengths = self.chooser.choose(self.sequences)
            self.chosen[tuple(lengths)] += 1
            rows, longest = sum(lengths) + len(lengths), max(lengths)
            if longest:
                self.chooser.observe_draft(len(lengths), longest, longest * self.draft_s)
            self.chooser.observe_step(rows, cpu_step(rows))
            self.seconds += cpu_step(rows) + longest * self.draft_s
            for sequence, length, probability in zip(self.sequences, lengths, self.acceptance, strict=True):
                accepted = 0
                while accepted < length and self._rng.random() < probability:
                    accepted += 1
                self.tokens += accepted + 1
                if length:
                    self.chooser.observe_acceptance(sequence, length, accepted)
        return self

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def true_speed(batch: int, acceptance: float, number: int, draft_s: float = 0.5e-3) -> float:
    """Tokens per second of the batch with `number` drafts each."""
    tokens = batch * sum(acceptance**j for j in range(number + 1))
    return tokens / (cpu_step(batch * (number + 1)) + number * draft_s)


@pytest.mark.statistical
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.8, 0.95])
def test_is_as_fast_as_the_fastest_number(batch, acceptance):
    simulation = Simulation([acceptance] * batch).run(600)
    assert simulation.tokens_per_s > 0.93 * max(true_speed(batch, acceptance, k) for k in range(9))


def test_sequences_of_one_round_have_different_lengths_where_that_pays():
    """Eight rows are free: of two sequences, the one whose drafts are accepted gets most of them."""
    simulation = Simulation([0.95, 0.1]).run(600)
    (good, bad), _ = simulation.chosen.most_common(1)[0]
    assert good >= 5
    assert bad <= 1

    def speed(lengths: tuple[int, int]) -> float:
        tokens = sum(0.95**j for j in range(lengths[0] + 1)) + sum(0.1**j for j in range(lengths[1] + 1))
        return tokens / (cpu_step(2 + sum(lengths)) + max(lengths) * 0.5e-3)

    assert simulation.tokens_per_s > 1.05 * max(speed((k, k)) for k in range(9))


def test_a_drafter_that_does_not_pay_is_off_but_for_rare_probes():
    simulation = Simulation([0.2] * 8).run(5000)
    assert simulation.chosen[(0,) * 8] > 0.98 * 5000
    assert simulation.tokens_per_s > 0.98 * true_speed(8, 0.2, 0)


def test_comes_back_when_the_drafter_gets_better():
    simulation = Simulation([0.0]).run(300)
    assert simulation.chosen.most_common(1)[0][0] == (0,)
    simulation.acceptance = [1.0]
    before = simulation.chosen[0,]
    simulation.run(3000)
    assert simulation.chosen[0,] - before < 1500


def test_a_sequence_that_was_given_up_is_judged_like_the_others_again():
    """Nothing is known of its text by now: what was seen long ago has faded."""
    sequence = PositionAcceptance()
    for _ in range(50):
        sequence.record(4, 0)
    assert sequence.rates([0.8])[0] < 0.2
    for _ in range(300):
        sequence.record(0, 0)
    assert sequence.rates([0.8])[0] > 0.7


def test_an_outlier_of_the_machine_changes_little():
    chooser = Simulation([0.8]).run(600).chooser
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
    assert {0, 1} <= set(engine.stats.draft_lengths)  # what more it tries depends on the machine's times


def test_one_slow_first_timing_does_not_switch_drafting_off():
    simulation = Simulation([0.8] * 2).run(300)
    four = Simulation([0.8] * 4)
    four.chooser = simulation.chooser
    four.chooser.observe_draft(4, 1, 40e-3)  # another process had the core
    four.run(200)
    assert four.chosen[(0,) * 4] < 20


def test_equal_lengths_where_the_backend_wants_them():
    simulation = Simulation([0.95, 0.1])
    simulation.chooser = DraftLengthChooser(8, equal_lengths=True)
    simulation.run(300)
    assert {len(set(lengths)) for lengths in simulation.chosen} == {1}
    assert simulation.tokens_per_s > 0.9 * max(
        (sum(0.95**j for j in range(k + 1)) + sum(0.1**j for j in range(k + 1))) / (cpu_step(2 * k + 2) + k * 0.5e-3)
        for k in range(9)
    )


def test_fewer_drafts_may_be_allowed_from_one_round_to_the_next():
    simulation = Simulation([0.95]).run(100)
    simulation.chooser.max_draft_tokens = 2
    assert max(max(simulation.chooser.choose(simulation.sequences)) for _ in range(100)) == 2
