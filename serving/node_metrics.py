"""A replica's figures on its node's metrics port too, where Ray shows those of all replicas that the node has.

A proxy leads a scrape of `/metrics` to one replica, whichever has room. No proxy stands before the node's port. It has
the same series, with `ray_draftloop_` before their names, each as a gauge: Ray's counters cannot be set, and rates do
not mind.
"""

from __future__ import annotations

import logging
import threading

from ray.util.metrics import Gauge

from drafters.remote import first_line
from serving.engine.async_engine import AsyncEngine, EngineError
from serving.metrics import RequestMetrics, engine_snapshot

log = logging.getLogger(__name__)

PREFIX = "draftloop_"
EVERY_S = 5.0  # Ray collects every 10 s what was set since; a series that is not set again is over soon after
ENGINE_ANSWER_S = 5.0  # longest wait for the engine's counters


class NodeMetrics:
    """Hands a replica's figures over to Ray again and again, in a thread of its own."""

    def __init__(self, engine: AsyncEngine, metrics: RequestMetrics):
        self._engine, self._metrics = engine, metrics
        self._gauges: dict[str, Gauge] = {}
        self._over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="draftloop-metrics", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def hand_over(self) -> None:
        """All figures, as they are now; without the engine's if it does not answer."""
        try:
            snapshot = self._engine.between_rounds(engine_snapshot).result(ENGINE_ANSWER_S)
        except (EngineError, TimeoutError):
            snapshot = None
        for family in self._metrics.page(snapshot).collect():
            for sample in family.samples:
                if sample.name not in self._gauges:
                    keys = tuple(sample.labels)
                    self._gauges[sample.name] = Gauge(PREFIX + sample.name, family.documentation, keys)
                self._gauges[sample.name].set(sample.value, dict(sample.labels))

    def _run(self) -> None:
        told = ""
        while not self._over.wait(EVERY_S):
            try:
                self.hand_over()
            except Exception as error:  # whatever Ray's metrics have, a replica goes on without them
                if told != (told := first_line(error)):
                    log.warning("the node's metrics port lacks this replica's figures: %s", told)
