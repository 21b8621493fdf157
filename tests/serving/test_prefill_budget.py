"""Prompts beside running streams: how long a pass may take, and who gets its rows; all counted in rows."""

from __future__ import annotations

import pytest

from serving.engine import engine as engine_module
from serving.engine.engine import Engine, EngineConfig
from serving.engine.native_rows import NativeRows
from serving.engine.prefill_budget import LEAST_ROWS, divide
from serving.engine.rows import Rows, RowsOutput
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.serving.test_prefix_reuse import backend, make
from tests.toy_target import toy_model, toy_prompts

ROW_S = 1 / 512  # of the clock below: 51 rows in a tenth of a second


class SlowRows(TorchRows):
    """Takes so long for a row by a clock of its own, and 14 at least; notes the rows of every pass."""

    def __init__(self, num_slots: int):
        super().__init__(toy_model(), num_slots=num_slots, max_len=500)
        self.now, self.factor = 0.0, 1.0
        self.passes: list[int] = []

    def forward(self, rows: Rows) -> RowsOutput:
        self.passes.append(len(rows.ids_R))
        self.now += self.factor * max(0.014, len(rows.ids_R) * ROW_S)
        return super().forward(rows)

    def perf_counter(self) -> float:
        return self.now


def slow_engine(monkeypatch: pytest.MonkeyPatch, num_slots: int = 4, **config) -> tuple[Engine, SlowRows]:
    rows = SlowRows(num_slots)
    monkeypatch.setattr(engine_module, "time", rows)
    return Engine(rows, config=EngineConfig(reuse_prefixes=False, **config)), rows


def passes(engine: Engine, rows: SlowRows, count: int) -> list[int]:
    before = len(rows.passes)
    for _ in range(count):
        engine.step()
    return rows.passes[before:]


LONG, LONGER, SHORT = toy_prompts(1, seed=1, low=400, high=400) + toy_prompts(2, seed=2, low=400, high=400)
STREAM = Sampling(max_new_tokens=80)


def test_a_pass_with_streams_stays_within_its_time(monkeypatch):
    engine, rows = slow_engine(monkeypatch, max_prefill_stall_s=0.1)
    engine.add(SHORT[:20], STREAM)
    assert passes(engine, rows, 1) == [20]
    engine.add(LONG, STREAM)
    assert passes(engine, rows, 2) == [1 + LEAST_ROWS, 51], "what a row costs is measured first"
    rows.factor = 2.0  # the machine slows down: at most eight passes later the median is of slow ones
    engine.add(LONGER, STREAM)
    later = passes(engine, rows, 20)
    assert max(later) <= 51
    assert 25 in later


def test_one_slow_pass_changes_little(monkeypatch):
    engine, rows = slow_engine(monkeypatch, max_prefill_stall_s=0.1)
    engine.add(SHORT[:20], STREAM)
    engine.step()
    engine.add(LONG, STREAM)
    passes(engine, rows, 3)
    rows.factor = 20.0
    passes(engine, rows, 1)
    rows.factor = 1.0
    assert passes(engine, rows, 2) == [51, 51]


def test_with_nobody_waiting_for_tokens_the_pass_is_whole(monkeypatch):
    engine, rows = slow_engine(monkeypatch, max_prefill_stall_s=0.1, max_prefill_rows=300)
    engine.add(LONG, STREAM)
    assert passes(engine, rows, 2) == [300, 100]


def test_drafted_rows_count_in_the_time(monkeypatch):
    rows = SlowRows(4)
    monkeypatch.setattr(engine_module, "time", rows)
    config = EngineConfig(reuse_prefixes=False, num_draft_tokens=8, max_prefill_stall_s=0.1)
    engine = Engine(rows, make("always right"), config=config)
    engine.add(SHORT[:20], STREAM)
    passes(engine, rows, 2)
    engine.add(LONG, STREAM)
    assert passes(engine, rows, 2) == [9 + LEAST_ROWS, 51]


def test_native_output_does_not_depend_on_the_chunks():
    rows = backend("native", 3)
    assert isinstance(rows, NativeRows)
    prompts = [p[:100] for p in (LONG, LONGER, SHORT)]
    sampling = [Sampling(max_new_tokens=12, temperature=t, seed=1) for t in (0.0, 0.9, 1.2)]
    found = set()
    for config in ({}, {"max_prefill_rows": 3}, {"max_prefill_stall_s": 1e-9}, {"max_prefill_rows": 37}):
        done = Engine(rows, make("native recursive"), config=EngineConfig(**config)).generate(prompts, sampling)
        found.add(str([(c.token_ids, c.acceptance) for c in done]))
    assert len(found) == 1


# -- who gets the rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "left", "shares"),
    [
        (64, [10, 10], [10, 10]),  # enough for all
        (64, [400], [64]),
        (64, [400, 400], [48, 16]),  # of equals the oldest
        (64, [400, 400, 400, 20], [28, 8, 8, 20]),
        (9, [400, 400, 3], [5, 1, 3]),
        (4, [400] * 8, [3, 1, 0, 0, 0, 0, 0, 0]),
        (4, [400, 400, 400, 1], [2, 1, 0, 1]),
        (1, [400, 2], [1, 0]),
        (8, [], []),
    ],
)
def test_shares_by_hand(rows, left, shares):
    assert divide(rows, left) == shares


def first_tokens(engine: Engine, most: int) -> dict[str, int]:
    """After how many passes each request had its first token."""
    found: dict[str, int] = {}
    for number in range(1, most + 1):
        for progress in engine.step():
            found.setdefault(progress.request_id, number)
    return found


def test_a_short_prompt_does_not_wait_for_the_long_ones_before_it():
    engine = Engine(TorchRows(toy_model(), num_slots=8, max_len=500), config=EngineConfig(max_prefill_rows=64))
    for i, prompt in enumerate(toy_prompts(7, seed=8, low=400, high=400)):
        engine.add(prompt, Sampling(max_new_tokens=1), request_id=f"long {i}")
    engine.step()
    engine.add(SHORT[:30], Sampling(max_new_tokens=1), request_id="short")
    found = first_tokens(engine, 60)
    assert found["short"] == 1  # in order of arrival it would be pass 44
    assert sorted(found, key=lambda name: found[name])[1] == "long 0"
    assert max(found.values()) <= (7 * 400 + 30) // 64 + 1, "rows were left unused"
    assert engine.free_slots == 8


def test_a_long_prompt_does_not_wait_for_the_short_ones_behind_it():
    engine = Engine(TorchRows(toy_model(), num_slots=4, max_len=500), config=EngineConfig(max_prefill_rows=16))
    engine.add(LONG[:160], Sampling(max_new_tokens=1), request_id="long")
    found: dict[str, int] = {}
    for number in range(1, 200):
        while engine.num_waiting < 4:  # shorts that would fill every pass by themselves
            engine.add(toy_prompts(1, seed=number, low=12, high=12)[0], Sampling(max_new_tokens=1))
        for progress in engine.step():
            found.setdefault(progress.request_id, number)
        if "long" in found:
            break
    assert found["long"] <= 160 // (16 // 2 // 4)
    assert len(found) > 50, "the short ones went on meanwhile"
