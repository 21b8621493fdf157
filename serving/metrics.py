"""What one replica counts, and `GET /metrics`, which shows it as Prometheus text.

Figures of requests are counted here as they happen, by the version of the drafter that served them; those of the engine
are copied from its own counters when asked. `metric_families` has the names.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest

from serving.engine.async_engine import QueueFullError
from serving.engine.drafter_counts import ByVersion, Counts, fold_oldest, no_counts, observe
from serving.engine.engine import Engine, RequestError
from serving.engine.load import Load
from serving.engine.sequence import Progress
from serving.metric_families import (
    REQUEST_BUCKETS_S,
    Labels,
    Page,
    drafter_families,
    load_families,
    registry_families,
    request_families,
    service_families,
    traffic_families,
)
from serving.registry_figures import RegistryFigures
from serving.traffic_schema import TrafficCounts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class EngineSnapshot:
    """What the engine does and has counted, copied between two rounds."""

    load: Load
    counts: ByVersion
    drafter: str | None  # its name
    drafter_version: str | None


def engine_snapshot(engine: Engine) -> EngineSnapshot:
    """Call it in the engine's thread: `AsyncEngine.between_rounds(engine_snapshot)`."""
    return EngineSnapshot(
        load=engine.load(),
        counts=engine.counts_by_drafter(),
        drafter=engine.drafter_name,
        drafter_version=engine.drafter_version,
    )


class RequestRecord:
    """Times of one request, and who drafted for it."""

    def __init__(self, metrics: RequestMetrics):
        self._metrics = metrics
        self._started = self._last = time.perf_counter()
        self._progressed = False
        self._tokens = 0
        self.arrived_at = time.time()  # seconds since 1970
        self.drafter_version: str | None = metrics.drafter_version
        self.drafter_changed = False  # whether one drafter began and another went on
        self.outcome = "abort"  # unless it gets further: the client left

    def progress(self, progress: Progress, prompt_tokens: int, num_tokens: int) -> None:
        """A round's news; the answer has `num_tokens` tokens by now."""
        now = time.perf_counter()
        self.drafter_changed |= self._progressed and progress.drafter_version != self.drafter_version
        self.drafter_version = self._metrics.drafter_version = progress.drafter_version
        if not self._progressed and progress.admitted_at is not None:
            self._count("prompt_tokens", prompt_tokens)
            self._observe("request_queue_time_seconds", progress.admitted_at - self._started)
        self._progressed = True
        new = num_tokens - self._tokens
        if new > 0:
            if self._tokens == 0:
                self._observe("time_to_first_token_seconds", now - self._started)
            else:
                self._observe("time_per_output_token_seconds", (now - self._last) / new, new)
            self._count("generation_tokens", new)
            self._tokens, self._last = num_tokens, now

    def finished(self, reason: str) -> None:
        """The answer is whole: "stop" or "length"."""
        self.outcome = reason
        self._observe("e2e_request_latency_seconds", time.perf_counter() - self._started)

    def ended(self) -> None:
        self._count("request", 1, self.outcome)

    def _count(self, name: str, value: float, part: str = "") -> None:
        self._metrics.of_version(self.drafter_version)[name, part] += value

    def _observe(self, name: str, seconds: float, times: int = 1) -> None:
        counts = self._metrics.of_version(self.drafter_version)
        observe(counts, name, REQUEST_BUCKETS_S, max(0.0, seconds), times)


class RequestMetrics:
    """Counters of one replica, under Serve's name for it. `placement`: where its drafter runs, "colocated" or
    "disaggregated"."""

    def __init__(self, model_name: str, placement: str = "colocated", replica: str = ""):
        self._model_name, self._replica = model_name, replica
        self.placement = placement
        self.drafter_version: str | None = None  # of the latest round that a request had
        self.drafter_address: str | None = None  # where the drafter in service came from, if it came from somewhere
        self.traffic: Callable[[], TrafficCounts] | None = None  # asked whenever the page is shown
        self.registry: Callable[[], RegistryFigures] | None = None  # the same
        self.restarts: Mapping[str, int] = {}  # of the drafter's process, where it has one, by reason
        self.link_events: Mapping[str, int] = {}  # of the link to it, by kind
        self._requests: ByVersion = {}
        self._refused: Counter[str] = Counter()  # by status
        self._swaps: Counter[tuple[str, str]] = Counter()  # by result and who asked

    @contextmanager
    def request(self) -> Iterator[RequestRecord]:
        """Counts one request, however it ends."""
        record = RequestRecord(self)
        try:
            yield record
        except (RequestError, QueueFullError):
            record.outcome = "refused"
            raise
        except Exception:
            record.outcome = "error"
            raise
        finally:
            record.ended()

    def of_version(self, version: str | None) -> Counts:
        """The counts of requests that this drafter serves."""
        known = self._requests.pop(version, None)
        self._requests[version] = no_counts() if known is None else known  # the latest comes last
        if known is None:
            fold_oldest(self._requests)
        return self._requests[version]

    def refused(self, status: int) -> None:
        """Counts an error response."""
        self._refused[str(status)] += 1

    def swapped(self, result: str, source: str) -> None:
        """Counts a hot swap: done or refused, asked for by user_config or by the registry."""
        self._swaps[result, source] += 1

    def placement_of(self, version: str | None) -> str:
        """Where the drafter of this version runs; "none" without a drafter."""
        return "none" if version is None else self.placement

    def page(self, engine: EngineSnapshot | None) -> Page:
        """All families; without the engine's part if there was no answer from it."""
        labels = Labels(self._model_name, self._replica, self.placement_of)
        page = Page()
        page.add(request_families(labels, ({engine.drafter_version: no_counts()} if engine else {}) | self._requests))
        # copies: other threads count on meanwhile
        counts = dict(self._refused), dict(self._swaps), dict(self.restarts), dict(self.link_events)
        page.add(service_families(labels, *counts))
        if self.traffic is not None:
            page.add(traffic_families(labels, self.traffic()))
        if self.registry is not None:
            page.add(registry_families(labels, self.registry()))
        if engine is not None:
            page.add(load_families(labels, engine.load))
            version = engine.drafter_version
            page.add(drafter_families(labels, engine.counts, version, engine.drafter, self.drafter_address))
        return page

    def render(self, engine: EngineSnapshot | None) -> bytes:
        """The page as Prometheus text."""
        registry = CollectorRegistry()
        registry.register(self.page(engine))
        return generate_latest(registry)
