"""Every drafter with every shape of sampling: 50,000 tokens that verify rounds decided follow the target (chi-square).

The method is that of `test_sampled_distribution.py` at full size, which takes a minute or two. All cases together raise
a false alarm at a rate of 1e-3 (Bonferroni), on fixed seeds. Wrong rules are planted to show what would be found.

Here the target runs on the native backend, which is quicker with so many rows, and there on torch: both must draw the
same tokens. Without a compiler all runs on torch.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import pytest
import torch

from serving.engine import native_build
from serving.engine.native_rows import NativeRows
from serving.engine.rows import RowsBackend
from tests.serving.test_sampled_distribution import (
    DRAFTERS,
    MAX_LEN,
    NEW_TOKENS,
    NUM_SLOTS,
    SHAPES,
    draw_from_target,
    emitted,
    keep_some_drafts,
    new_target,
    num_verified,
    rows,
    worst_p,
)
from tests.toy_mtp import TAPS

pytestmark = pytest.mark.statistical

SAMPLES = 50_000  # tokens of a case that verify rounds decided
REQUESTS = SAMPLES // (NEW_TOKENS - 1)  # a request's first token is the prefill's
LIKES = ("random-any", "own-mtp")  # of "random-few", of "mtp-recursive"
CASES = [case for case in itertools.product(DRAFTERS, SHAPES) if case[0] not in LIKES]
FAMILY_ALPHA = 1e-3  # false-alarm rate of all cases together


@lru_cache
def quick_rows() -> RowsBackend:
    """One backend for all cases."""
    if native_build.unavailable_reason():
        return rows()
    return NativeRows(
        new_target(), dtype=torch.float32, num_slots=NUM_SLOTS, max_len=MAX_LEN, target_layer_ids=TAPS, num_threads=1
    )


@pytest.mark.parametrize(("drafter", "shape"), CASES)
def test_emitted_tokens_follow_the_target(drafter, shape):
    counts = emitted(drafter, SHAPES[shape], REQUESTS, quick_rows())
    assert num_verified(counts) == SAMPLES
    assert worst_p(counts, SHAPES[shape]) > FAMILY_ALPHA / len(CASES)


@pytest.mark.skipif(bool(native_build.unavailable_reason()), reason="one backend here")
@pytest.mark.parametrize("drafter", [None, "random-few", "sampled-trees"])
def test_both_backends_draw_the_same_tokens(drafter):
    shape = SHAPES["t1"]
    assert emitted(drafter, shape, NUM_SLOTS, quick_rows()) == emitted(drafter, shape, NUM_SLOTS)


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
    assert worst_p(emitted(drafter, SHAPES[shape], REQUESTS // 4, quick_rows()), SHAPES[shape]) < 1e-8
