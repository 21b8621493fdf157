"""Tau and its counters, by hand."""

from __future__ import annotations

import pytest

from drafters.acceptance import Acceptance


def test_by_hand():
    acceptance = Acceptance()
    for proposed, accepted in [(3, 3), (3, 1), (3, 0), (2, 2)]:
        acceptance.record(proposed, accepted)
    assert acceptance.tau == 1 + 6 / 4
    assert acceptance.rate == 6 / 11
    assert acceptance.by_position == [3 / 4, 2 / 4, 1 / 3]


def test_no_rounds_is_none_and_no_offer_is_a_round():
    acceptance = Acceptance()
    assert acceptance.tau is None
    assert acceptance.rate is None
    acceptance.record(0, 0)
    assert acceptance.tau == 1.0


def test_adding_equals_recording_together():
    parts, whole = [Acceptance(), Acceptance()], Acceptance()
    for i, (proposed, accepted) in enumerate([(4, 2), (1, 1), (0, 0), (5, 5)]):
        parts[i % 2].record(proposed, accepted)
        whole.record(proposed, accepted)
    parts[0].add(parts[1])
    assert parts[0] == whole


def test_more_accepted_than_proposed_is_refused():
    with pytest.raises(ValueError, match="2 of 1"):
        Acceptance().record(1, 2)
