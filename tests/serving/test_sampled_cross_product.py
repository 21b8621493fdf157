"""Every drafter with every shape of sampling: 50,000 tokens that verify rounds decided follow the target (chi-square).

The method is that of `test_sampled_distribution.py` at full size, which takes a minute or two. All cases together raise
a false alarm at a rate of 1e-3 (Bonferroni), on fixed seeds. Wrong rules are planted to show what would be found.
"""

from __future__ import annotations

import itertools

import pytest

from tests.serving.test_sampled_distribution import (
    DRAFTERS,
    NEW_TOKENS,
    SHAPES,
    draw_from_target,
    emitted,
    keep_some_drafts,
    num_verified,
    worst_p,
)

pytestmark = pytest.mark.statistical

SAMPLES = 50_000  # tokens of a case that verify rounds decided
REQUESTS = SAMPLES // (NEW_TOKENS - 1)  # a request's first token is the prefill's
CASES = [case for case in itertools.product(DRAFTERS, SHAPES) if case[0] != "random-any"]  # "random-few" is its like
FAMILY_ALPHA = 1e-3  # false-alarm rate of all cases together


@pytest.mark.parametrize(("drafter", "shape"), CASES)
def test_emitted_tokens_follow_the_target(drafter, shape):
    counts = emitted(drafter, SHAPES[shape], REQUESTS)
    assert num_verified(counts) == SAMPLES
    assert worst_p(counts, SHAPES[shape]) > FAMILY_ALPHA / len(CASES)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("fault", "drafter"),
    [
        (draw_from_target, "random-few"),
        (keep_some_drafts, "always-wrong"),
        (draw_from_target, "sampled-trees"),
    ],
)
def test_wrong_rules_are_found_in_every_shape(fault, drafter, shape, monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    assert worst_p(emitted(drafter, SHAPES[shape], REQUESTS // 4), SHAPES[shape]) < 1e-8
