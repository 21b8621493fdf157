"""A source that stops, fails or is left: whoever takes its items never waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pipelines.arrivals import Arrivals, NothingCameError

DEADLINE_S = 30.0


def test_items_come_in_order_and_the_sources_error_after_them():
    def read() -> Iterator[int]:
        yield from range(20)
        raise ValueError("the disk is gone")

    assert list(Arrivals(lambda: range(20), timeout_s=DEADLINE_S, ahead=2)) == list(range(20))
    arrivals = Arrivals(read, timeout_s=DEADLINE_S)
    assert [next(arrivals) for _ in range(20)] == list(range(20))
    with pytest.raises(ValueError, match="the disk is gone"):
        next(arrivals)


def test_an_item_that_does_not_come_is_told_and_may_still_come():
    goes_on = threading.Event()

    def read() -> Iterator[int]:
        yield 1
        goes_on.wait(DEADLINE_S)
        yield 2

    arrivals = Arrivals(read, timeout_s=0.05)
    patient = iter(lambda: asked(arrivals), None)
    assert next(patient) == 1
    with pytest.raises(NothingCameError, match=r"nothing came for 0\.05 s"):
        next(arrivals)
    goes_on.set()
    assert next(patient) == 2
    assert next(patient, "the end") == "the end"


def asked(arrivals: Arrivals[int]) -> int | None:
    """The next item, asked for again and again; None at the end."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        try:
            return next(arrivals, None)
        except NothingCameError:
            continue
    raise AssertionError("nothing came at all")


def test_a_source_is_read_no_further_than_asked_and_let_go_when_nobody_takes():
    given, ended = [], threading.Event()

    def read() -> Iterator[int]:
        try:
            for number in range(1000):
                given.append(number)
                yield number
        finally:
            ended.set()

    with Arrivals(read, timeout_s=DEADLINE_S, ahead=2) as arrivals:
        assert next(arrivals) == 0
    assert ended.wait(DEADLINE_S)
    assert len(given) <= 1 + 2 + 2  # taken, queued, in hand; one more when it was let go
