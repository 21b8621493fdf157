"""The driver's side of generate without Ray: what counts as a sign of life, and what progress says of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines import shard_pool
from pipelines.generate_config import GenerateConfig, GenerateError
from pipelines.shard_pool import GenerateProgress, Meter

BETWEEN_S = 0.3  # two results, by a clock of the test's own
STALL_S = 0.8
SHARD_ROWS = 3


class LostBoard:
    """Every call of it fails, as those of an actor whose node died."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *_: None)


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


class Results:
    """In place of the dataset: shards that arrive one by one, the last after a longer pause.

    The clock goes on once the driver has counted the shard before, and each shard comes after a look at the clock.
    """

    def __init__(self, count: int, pause_s: float):
        self.count, self.pause_s, self.now = count, pause_s, 0.0
        self.seen: list[GenerateProgress] = []  # what the driver said, once after each look

    def iter_rows(self) -> Iterator[dict[str, str]]:
        for number in range(self.count):
            counted = SHARD_ROWS * number
            wait(lambda counted=counted: (self.seen[-1].rows_done if self.seen else 0) == counted)
            self.now += self.pause_s if number == self.count - 1 else BETWEEN_S
            looks = len(self.seen)
            wait(lambda looks=looks: len(self.seen) > looks)
            record = {"rows": 2, "rejected": [{}], "response_tokens": 5}
            yield {"result": json.dumps({"name": str(number), "record": record})}


def take_all(monkeypatch: pytest.MonkeyPatch, results: Results) -> list[GenerateProgress]:
    def lost(*_: Any, **__: Any) -> None:
        raise shard_pool.ray.exceptions.RayActorError

    monkeypatch.setattr(shard_pool, "time", SimpleNamespace(monotonic=lambda: results.now))
    monkeypatch.setattr(shard_pool, "POLL_S", 0.02)
    monkeypatch.setattr(shard_pool, "_dataset", lambda *_: results)
    monkeypatch.setattr(shard_pool.ray, "get", lost)
    context: Any = SimpleNamespace(config=GenerateConfig(stall_timeout_s=STALL_S))
    list(shard_pool._results(context, [], LostBoard(), Meter(results.seen.append, rows_total=12, rows_before=0)))
    return results.seen


def test_a_lost_board_ends_no_run(monkeypatch: pytest.MonkeyPatch):
    last = take_all(monkeypatch, Results(4, BETWEEN_S))[-1]
    assert (last.rows_done, last.response_tokens) == (12, 20)


def test_no_result_for_long_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(GenerateError, match="no actor reported progress"):
        take_all(monkeypatch, Results(2, 4 * STALL_S))


def test_a_shard_counts_once_also_when_the_board_starts_anew():
    seen: list[GenerateProgress] = []
    meter = Meter(seen.append, rows_total=10, rows_before=1)
    meter.at_work = {"a": (3, 30), "b": (1, 10)}
    meter.show()
    meter.take({"name": "a", "record": {"rows": 3, "rejected": [], "response_tokens": 30}})
    meter.at_work = {}
    meter.show()
    meter.at_work = {"a": (3, 30), "b": (2, 20)}
    meter.show()
    assert [(p.rows_done, p.response_tokens) for p in seen] == [(5, 40), (4, 30), (6, 50)]
