"""Counters in Prometheus text, with vLLM's names without their prefix. `GET /metrics` renders one replica's.

Figures of requests are counted here as they happen; those of the engine are copied from its own counters when asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from drafters.acceptance import Acceptance
from serving.engine.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True, kw_only=True)
class EngineSnapshot:
    """What the engine counted, copied between two rounds."""

    running: int
    waiting: int
    passes: int
    acceptance: Acceptance
    draft_lengths: dict[int, int]  # by drafts asked for, 0 included: sequences of rounds that could have drafted
    fallbacks: dict[str, int]
    drafter: str | None


def engine_snapshot(engine: Engine) -> EngineSnapshot:
    """Call it in the engine's thread."""
    return EngineSnapshot(
        running=engine.num_slots - engine.free_slots,
        waiting=engine.num_waiting,
        passes=engine.stats.passes,
        acceptance=deepcopy(engine.stats.acceptance),
        draft_lengths=dict(engine.stats.draft_lengths),
        fallbacks=dict(engine.stats.fallbacks),
        drafter=engine.drafter_name,
    )


class _RequestRecord:
    """Times of one request."""

    def __init__(self, metrics: RequestMetrics):
        self._metrics = metrics
        self._started = self._last = time.perf_counter()
        self._tokens = 0
        self.outcome = "abort"  # unless it gets further: the client left, or an error

    def tokens(self, count: int) -> None:
        """`count` tokens so far."""
        now = time.perf_counter()
        if self._tokens == 0 and count:
            self._metrics.first_token_s.observe(now - self._started)
        elif count > self._tokens:
            self._metrics.per_token_s.observe((now - self._last) / (count - self._tokens))
        self._metrics.generation_tokens.inc(count - self._tokens)
        self._tokens, self._last = count, now

    def finished(self, reason: str) -> None:
        self.outcome = reason


class RequestMetrics:
    """Counters of one replica."""

    def __init__(self, model_name: str):
        self._model_name = model_name
        self._registry = registry = CollectorRegistry()
        model = ("model_name",)
        self._requests = Counter("request", "Requests by outcome", (*model, "finished_reason"), registry=registry)
        self._refused = Counter("request_refused", "Error responses", (*model, "status"), registry=registry)
        self._swaps = Counter("drafter_swaps", "Hot swaps by result", (*model, "result"), registry=registry)
        self._prompt_tokens = Counter("prompt_tokens", "Prompt tokens", model, registry=registry).labels(model_name)
        self.generation_tokens = Counter("generation_tokens", "Emitted tokens", model, registry=registry).labels(
            model_name
        )
        self.first_token_s = Histogram(
            "time_to_first_token_seconds", "Request to first token", model, registry=registry, buckets=_SECONDS
        ).labels(model_name)
        self.per_token_s = Histogram(
            "time_per_output_token_seconds", "Between rounds, per token", model, registry=registry, buckets=_SECONDS
        ).labels(model_name)

    @contextmanager
    def request(self, prompt_tokens: int) -> Iterator[_RequestRecord]:
        """Counts one request, however it ends."""
        self._prompt_tokens.inc(prompt_tokens)
        record = _RequestRecord(self)
        try:
            yield record
        finally:
            self._requests.labels(self._model_name, record.outcome).inc()

    def refused(self, status: int) -> None:
        """Counts an error response."""
        self._refused.labels(self._model_name, str(status)).inc()

    def swapped(self, result: str) -> None:
        """Counts a hot swap: done or refused."""
        self._swaps.labels(self._model_name, result).inc()

    def render(self, engine: EngineSnapshot | None) -> bytes:
        """Prometheus text; without the engine's part if there was no answer from it."""
        text = generate_latest(self._registry)
        if engine is not None:
            registry = CollectorRegistry()
            registry.register(_EngineCollector(engine, self._model_name))
            text += generate_latest(registry)
        return text


class _EngineCollector(Collector):
    def __init__(self, engine: EngineSnapshot, model_name: str):
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        engine, acceptance = self._engine, self._engine.acceptance
        for name, help_text, value in (
            ("num_requests_running", "Requests that hold a slot", engine.running),
            ("num_requests_waiting", "Requests that wait for a slot", engine.waiting),
        ):
            gauge = GaugeMetricFamily(name, help_text, labels=("model_name",))
            gauge.add_metric((self._model_name,), value)
            yield gauge
        for name, help_text, value in (
            ("engine_passes", "Forward passes of the target", engine.passes),
            ("spec_decode_num_drafts", "Verify rounds", acceptance.rounds),
            ("spec_decode_num_draft_tokens", "Drafts proposed", acceptance.proposed),
            ("spec_decode_num_accepted_tokens", "Drafts accepted", acceptance.accepted),
        ):
            counter = CounterMetricFamily(name, help_text, labels=("model_name", "drafter"))
            counter.add_metric((self._model_name, engine.drafter or ""), value)
            yield counter
        positions = CounterMetricFamily(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted by position",
            labels=("model_name", "drafter", "position"),
        )
        for position, value in enumerate(acceptance.accepted_by_position):
            positions.add_metric((self._model_name, engine.drafter or "", str(position)), value)
        yield positions
        lengths = CounterMetricFamily(
            "spec_decode_draft_lengths",
            "Sequences of rounds by the drafts asked for",
            labels=("model_name", "drafter", "num_draft_tokens"),
        )
        for length, value in sorted(engine.draft_lengths.items()):
            lengths.add_metric((self._model_name, engine.drafter or "", str(length)), value)
        yield lengths
        fallbacks = CounterMetricFamily(
            "spec_decode_fallbacks", "Rounds decoded plainly because of the drafter", labels=("model_name", "reason")
        )
        for reason, value in engine.fallbacks.items():
            fallbacks.add_metric((self._model_name, reason), value)
        yield fallbacks
