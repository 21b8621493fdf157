"""`/metrics` as Prometheus reads it: sums that agree with what clients got, drafters that keep their counts."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from drafters.acceptance import Acceptance
from drafters.target import load_model, load_target
from serving import metrics as metrics_module
from serving import node_metrics
from serving.engine import timing
from serving.engine.async_engine import AsyncEngine, EngineError, QueueFullError
from serving.engine.drafter_counts import EARLIER, MOST_VERSIONS, SUM, CountsByDrafter
from serving.engine.drafting import EngineStats
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.sequence import Progress
from serving.engine.torch_rows import TorchRows
from serving.generation import Choice, ServedModel, Totals
from serving.metrics import RequestMetrics, engine_snapshot
from serving.node_metrics import NodeMetrics
from tests.toy_endpoint import paced
from tests.toy_folder import save_toy_target
from tests.toy_target import AlwaysRight, HalfRight

DEADLINE_S = 60
DRAFTS = 3
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Page:
    """The parsed text."""

    series: Series
    kinds: dict[str, str] = field(default_factory=dict)

    def sum(self, name: str, **labels: str) -> float:
        found = [v for (n, at), v in self.series.items() if n == name and labels.items() <= dict(at).items()]
        assert found, f"there is no {name} with {labels}"
        return sum(found)


class Served:
    """A toy model that decodes without an end, so that every answer has the length that was asked for."""

    def __init__(self, folder: Path, num_slots: int = 2, max_waiting: int = 8):
        self.target = load_target(str(folder))
        self.network = load_model(self.target.path, torch.float32)  # of drafters: TorchRows changes its own
        rows = TorchRows(load_model(self.target.path, torch.float32), num_slots=num_slots, max_len=256)
        self.inner = Engine(rows, AlwaysRight(self.network), config=EngineConfig(num_draft_tokens=DRAFTS))
        self.inner.drafter_version = "a@1"
        self.engine = AsyncEngine(self.inner, max_waiting=max_waiting)
        self.metrics = RequestMetrics("toy", placement="colocated", replica="r1")
        self.model = ServedModel(self.engine, self.target, name="toy", max_len=256, metrics=self.metrics)

    async def page(self) -> Page:
        snapshot = None
        if self.engine.healthy:
            snapshot = await asyncio.wrap_future(self.engine.between_rounds(engine_snapshot))
        families = list(text_string_to_metric_families(self.metrics.render(snapshot).decode()))
        series: Series = {}
        for family in families:
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in series, f"{key} twice"
                assert sample.labels["replica"] == "r1", "behind a proxy others have the same names"
                series[key] = sample.value
        return Page(series, {family.name: family.type for family in families})

    async def answer(self, tokens: int, name: str, on_piece: Callable[[], Awaitable[None]] | None = None) -> Totals:
        choice = Choice(prompt_ids=[7] * 5, sampling=Sampling(max_new_tokens=tokens))
        async for piece in self.model.answer([choice], [], name):
            if piece.totals is not None:
                return piece.totals
            if on_piece is not None:
                await on_piece()
        raise AssertionError("an answer without an end")

    async def swap(self, drafter, version: str | None) -> None:
        await asyncio.wrap_future(self.engine.between_rounds(lambda engine: engine.set_drafter(drafter, version)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_toy_target(tmp_path_factory.mktemp("metrics") / "toy", eos_token_id=None)


@pytest.fixture
def served(folder) -> Iterator[Served]:
    made = Served(folder)
    yield made
    assert made.engine.close(deadline_s=0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


def test_the_text_adds_up_to_what_clients_got(served):
    async def main():
        before = await served.page()
        ends = [await served.answer(tokens, f"r{tokens}") for tokens in (1, 1 + 2 * (DRAFTS + 1), 1 + 5 * (DRAFTS + 1))]
        return before, ends, await served.page()

    before, ends, page = run(main())
    emitted, rounds = sum(end.completion_tokens for end in ends), sum(end.acceptance.rounds for end in ends)
    assert before.sum("spec_decode_num_drafts_total", drafter_version="a@1") == 0, "a drafter has its series at once"
    assert before.sum("generation_tokens_total") == 0
    labels = {"model_name": "toy", "drafter_version": "a@1", "placement": "colocated"}
    total = {name: page.sum(f"{name}_total", **labels) for name in ("generation_tokens", "engine_emitted_tokens")}
    assert total == {"generation_tokens": emitted, "engine_emitted_tokens": emitted}
    assert page.sum("prompt_tokens_total", **labels) == 3 * 5
    assert page.sum("request_total", finished_reason="length", **labels) == 3
    accepted = page.sum("spec_decode_num_accepted_tokens_total", **labels)
    assert page.sum("spec_decode_num_drafts_total", **labels) == rounds == 7
    # each answer begins with the token that its prompt gives; then every round emits its accepted drafts and one more
    assert emitted == 3 + accepted + rounds
    assert page.sum("spec_decode_num_draft_tokens_total", **labels) == rounds * DRAFTS
    assert page.sum("spec_decode_num_accepted_tokens_per_pos_total", **labels) == accepted
    assert page.sum("spec_decode_num_accepted_tokens_per_pos_total", position="2", **labels) == rounds
    assert page.sum("spec_decode_draft_lengths_total", num_draft_tokens=str(DRAFTS), **labels) == rounds
    assert page.sum("engine_passes_total", **labels) == 3 + rounds
    for name, count in (
        ("request_queue_time", 3), ("time_to_first_token", 3), ("e2e_request_latency", 3),
        ("time_per_output_token", emitted - 3), ("spec_decode_verify", rounds), ("spec_decode_draft", rounds - 2),
        ("engine_plain_step", 0),
    ):  # fmt: skip
        assert page.kinds[f"{name}_seconds"] == "histogram"
        # the first draft block of the two that drafted reads a prompt and is no measure of T_draft
        assert page.sum(f"{name}_seconds_count", **labels) == count, name
        assert page.sum(f"{name}_seconds_bucket", le="+Inf", **labels) == count
    names = ("request_queue_time", "time_to_first_token", "e2e_request_latency")
    queued, first, whole = (page.sum(f"{name}_seconds_sum") for name in names)
    assert 0 <= queued < first < whole
    assert 0 < page.sum("time_per_output_token_seconds_sum") <= whole - first + 1e-9
    assert page.sum("drafter_info", drafter="always-right", **labels) == 1


def test_the_times_of_a_request_by_hand(monkeypatch):
    clock = SimpleNamespace(now=10.0, perf_counter=lambda: clock.now, time=lambda: 0.0)
    monkeypatch.setattr(metrics_module, "time", clock)
    metrics = RequestMetrics("toy")
    with metrics.request() as record:
        for clock.now, admitted_at, tokens in ((12.0, 11.0, 1), (15.0, None, 5), (16.0, None, 5), (20.0, None, 6)):
            progress = Progress(request_id="r", token_ids=[], num_accepted=0, admitted_at=admitted_at)
            record.progress(progress, prompt_tokens=3, num_tokens=tokens)
        clock.now = 21.0
        record.finished("length")
    counts = metrics.of_version(None)
    sums = {name: value for (name, part), value in counts.items() if part == SUM}
    assert sums == {
        "request_queue_time_seconds": 1, "time_to_first_token_seconds": 2, "e2e_request_latency_seconds": 11,
        "time_per_output_token_seconds": 3 + 5,
    }  # fmt: skip
    assert sum(n for (name, part), n in counts.items() if "per_output" in name and part != SUM) == 4 + 1


def test_a_swap_leaves_every_count_with_the_drafter_that_earned_it(served):
    pages: list[Page] = []
    quick = served.inner.step
    paced(served.inner)  # until all swaps are done

    async def main():
        steps = iter([(HalfRight(served.network), "b@2"), (None, None), (AlwaysRight(served.network), "a@1")])

        async def next_drafter():
            pages.append(await served.page())
            if (step := next(steps, None)) is not None:
                await served.swap(*step)
            else:
                served.inner.step = quick

        ends = [await served.answer(200, "swapped", on_piece=next_drafter)]
        await served.swap(HalfRight(served.network), "b@2")
        ends.append(await served.answer(30, "after"))
        pages.append(await served.page())
        return ends

    ends = run(main())
    for earlier, later in itertools.pairwise(pages):
        for key, value in earlier.series.items():
            if key[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert later.series.get(key, 0) >= value, f"{key} went down"
    last = pages[-1]
    under = {v: last.sum("spec_decode_num_drafts_total", drafter_version=v) for v in ("a@1", "b@2", "none")}
    assert under["none"] == 0
    assert under["a@1"] > 0
    assert sum(under.values()) == sum(end.acceptance.rounds for end in ends)
    # who is always right has every draft accepted, who is half right one of three: nothing went to the other
    accepted = {v: last.sum("spec_decode_num_accepted_tokens_total", drafter_version=v) for v in under}
    assert accepted == {"a@1": under["a@1"] * DRAFTS, "b@2": under["b@2"], "none": 0}
    assert last.sum("engine_plain_step_seconds_count", drafter_version="none", placement="none") > 0
    assert last.sum("engine_plain_step_seconds_count", drafter_version="a@1") == 0
    assert last.sum("generation_tokens_total") == sum(end.completion_tokens for end in ends) == 230
    assert last.sum("generation_tokens_total", drafter_version="none", placement="none") > 0
    assert {dict(at)["drafter_version"] for (name, at) in last.series if name == "drafter_info"} == {"b@2"}


def test_the_node_s_metrics_port_gets_the_series_of_the_page(served, monkeypatch):
    ports: Series = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]):
            assert description
            self.name, self.keys = name, set(tag_keys)

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == self.keys, "Ray refuses others"
            ports[self.name.removeprefix("draftloop_"), frozenset(tags.items())] = value

    monkeypatch.setattr(node_metrics, "Gauge", Gauge)
    node = NodeMetrics(served.engine, served.metrics)

    async def main():
        await served.answer(20, "first")
        await asyncio.to_thread(node.hand_over)
        await served.swap(HalfRight(served.network), "b@2")
        await served.answer(20, "second")
        ports.clear()  # as Ray does: what is not set again is over
        await asyncio.to_thread(node.hand_over)
        return await served.page()

    page = run(main())
    assert ports == page.series


def test_the_load_is_what_is_still_to_do(served):
    engine = served.inner
    for number in range(3):
        engine.add([1] * 10, Sampling(max_new_tokens=20), request_id=str(number))
    load = engine.load()
    assert (load.running, load.waiting, load.tokens_in_flight) == (0, 3, 3 * 30)
    assert load.oldest_wait_s > 0
    engine.step()
    load = engine.load()  # two have been fed and have a token each
    assert (load.running, load.waiting, load.tokens_in_flight) == (2, 1, 30 + 2 * 19)
    assert (load.slot_use, load.token_use) == (1.0, 2 * 10 / (2 * 256))
    while engine.has_work:
        engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.tokens_in_flight, load.oldest_wait_s, load.token_use) == (0, 0, 0, 0, 0)


def test_requests_are_counted_by_how_they_ended(folder):
    served = Served(folder, num_slots=1, max_waiting=0)
    paced(served.inner)

    async def main():
        leaving = served.model.answer([Choice(prompt_ids=[1], sampling=Sampling(max_new_tokens=200))], [], "leaving")
        await anext(leaving)
        busy = await served.page()
        with pytest.raises(QueueFullError):
            await served.answer(3, "refused")
        await leaving.aclose()
        served.inner.step = lambda: 1 // 0
        with pytest.raises(EngineError):
            await served.answer(3, "broken")
        while served.engine.healthy:
            await asyncio.sleep(0.005)
        return busy, await served.page()

    busy, page = run(main())
    assert busy.sum("num_requests_running", model_name="toy") == 1
    assert 0 < busy.sum("num_tokens_in_flight") < 200
    assert busy.sum("kv_slots_usage_perc") == 1.0
    ends = {dict(at)["finished_reason"]: value for (name, at), value in page.series.items() if name == "request_total"}
    assert ends == {"abort": 1, "refused": 1, "error": 1}
    assert served.engine.close(deadline_s=0)


def test_many_versions_are_added_up():
    counts, stats = CountsByDrafter(), EngineStats()
    for version in range(3 * MOST_VERSIONS):
        stats.acceptance.add(Acceptance(rounds=1, proposed=2, proposed_by_position=[1, 1], accepted_by_position=[1, 0]))
        counts.close(f"v{version}", stats)
    totals = counts.totals("new", stats)
    assert len(totals) == MOST_VERSIONS + 1
    assert totals[EARLIER]["spec_decode_num_drafts", ""] == 2 * MOST_VERSIONS
    assert sum(of["spec_decode_num_draft_tokens", ""] for of in totals.values()) == 2 * 3 * MOST_VERSIONS


def test_timings_do_not_grow_with_what_they_see(monkeypatch):
    monkeypatch.setattr(timing, "MOST_KEYS", 8)
    timings, seen = timing.Timings(), defaultdict(int)
    for number in range(4000):
        timings.note_step(1 + number % 40, number % 3, 0.001 * number)
        seen[number % 3 > 0] += 1
    assert len(timings.step) == 8
    assert sum(timings.verify_s.counts) == seen[True]
    assert sum(timings.base_s.counts) == seen[False]


def test_the_page_is_made_from_copies_since_swaps_are_counted_in_other_threads():
    class Counted(Counter):
        def items(self):
            for number, item in enumerate(super().items()):
                self["done", str(number)] += 1
                yield item

    metrics = RequestMetrics("toy")
    metrics._swaps = Counted({("done", "registry"): 1, ("refused", "registry"): 1})
    swaps = b'drafter_swaps_total{model_name="toy",replica="",result="refused",source="registry"} 1.0'
    assert swaps in metrics.render(None)
