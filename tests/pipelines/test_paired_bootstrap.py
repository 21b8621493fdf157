"""The paired bootstrap: its figures by hand, its symmetries, how often it sees a gain where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.acceptance import Acceptance
from pipelines.paired_bootstrap import PromptRounds, tau_gain, with_rounds

SAMPLES = 1000
DRAFTS = 5

sides = st.builds(
    lambda rounds, accepted: PromptRounds(rounds + min(accepted, DRAFTS * rounds), rounds),
    st.integers(1, 60),
    st.integers(0, 200),
)
pair_lists = st.lists(st.tuples(sides, sides), min_size=2, max_size=25)


def test_taus_are_ratios_of_sums():
    found = tau_gain([(PromptRounds(20, 10), PromptRounds(20, 8)), (PromptRounds(5, 5), PromptRounds(5, 2))])
    assert (found.champion, found.challenger) == (pytest.approx(25 / 15), 2.5)  # not the mean of 2.0 and 1.0
    assert (found.gain, found.prompts) == (pytest.approx(2.5 - 25 / 15), 2)
    assert found.low <= found.gain <= found.high


def test_counts_are_those_of_an_acceptance():
    acceptance = Acceptance()
    for kept in (3, 0, 1):
        acceptance.record(3, kept)
    assert PromptRounds.of(acceptance) == PromptRounds(gained=7, rounds=3)
    assert PromptRounds.of(Acceptance()) == PromptRounds(0, 0)


def test_a_prompt_without_rounds_counts_for_neither():
    none, some = PromptRounds(0, 0), PromptRounds(9, 3)
    pairs = [(some, some), (none, some), (some, none), (some, some)]
    assert with_rounds(pairs) == [(some, some)] * 2
    assert tau_gain(pairs, samples=SAMPLES).prompts == 2
    with pytest.raises(ValueError, match="1 prompts with rounds; at least 2"):
        tau_gain(pairs[:3])


@settings(max_examples=30)
@given(pair_lists, st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_interval_and_a_swap_mirrors_it(pairs, seed):
    found = tau_gain(pairs, samples=SAMPLES, seed=seed)
    assert tau_gain(pairs, samples=SAMPLES, seed=seed) == found
    assert found.low <= found.high
    mirrored = tau_gain([(b, a) for a, b in pairs], samples=SAMPLES, seed=seed)
    assert (mirrored.low, mirrored.high) == (pytest.approx(-found.high), pytest.approx(-found.low))


@settings(max_examples=20)
@given(pair_lists)
def test_a_gain_that_every_prompt_shows_alike_has_no_noise(pairs):
    """One token more in every round, however unlike the prompts are."""
    shifted = [(a, PromptRounds(a.gained + a.rounds, a.rounds)) for a, _ in pairs]
    found = tau_gain(shifted, samples=SAMPLES)
    assert (found.gain, found.low, found.high) == (pytest.approx(1), pytest.approx(1), pytest.approx(1))
    same = tau_gain([(a, a) for a, _ in pairs], samples=SAMPLES)
    assert (same.gain, same.low, same.high) == (0, 0, 0)


def decoded(rng: np.random.Generator, chances_N: np.ndarray, tokens: int = 60) -> list[PromptRounds]:
    """Each prompt decoded by a drafter whose drafts are kept with its chance, until `tokens` are there."""
    sides = []
    for chance in chances_N:
        kept_R = np.minimum(rng.geometric(1 - chance, size=tokens) - 1, DRAFTS)
        rounds = int(np.searchsorted((kept_R + 1).cumsum(), tokens)) + 1
        sides.append(PromptRounds(int((kept_R[:rounds] + 1).sum()), rounds))
    return sides


def share_seen(prompts: int, better_by: float, trials: int = 300) -> float:
    """How often the interval lies above zero, for drafters whose chances differ from prompt to prompt."""
    rng, seen = np.random.default_rng(0), 0
    for _ in range(trials):
        champion_N = rng.beta(4, 4, size=prompts) * 0.9
        wobble_N = rng.normal(0, 0.05, size=(2, prompts))  # each has prompts that suit it better
        challenger = decoded(rng, np.clip(champion_N + better_by + wobble_N[0], 0, 0.95))
        champion = decoded(rng, np.clip(champion_N + wobble_N[1], 0, 0.95))
        seen += tau_gain(list(zip(champion, challenger, strict=True)), samples=SAMPLES).low > 0
    return seen / trials


@pytest.mark.parametrize("prompts", [8, 20])
def test_equal_drafters_rarely_seem_unequal(prompts):
    # 2.5% is what is promised; of 300 trials no more than 5% are chance (2.8 standard errors)
    assert share_seen(prompts, better_by=0) <= 0.05


def test_a_real_gain_is_seen_although_prompts_differ_more_than_drafters():
    assert share_seen(40, better_by=0.06, trials=60) > 0.8
