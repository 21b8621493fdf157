"""Names, help texts and labels of `/metrics`: counts in, Prometheus families out. vLLM's names, without its prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.engine.drafter_counts import INFINITE, SUM, ByVersion, Counts, no_counts
from serving.engine.load import Load
from serving.engine.timing import ROUND_BUCKETS_S
from serving.registry_figures import RegistryFigures
from serving.traffic_schema import TrafficCounts

REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
NONE = "none"  # the version where no drafter serves
OF_REPLICA = ("model_name", "replica")  # what all series of a replica have
BY_VERSION = (*OF_REPLICA, "drafter_version", "placement")

# name -> help text, and the label that divides it
REQUEST_COUNTERS = {
    "request": ("Requests by outcome", "finished_reason"),
    "prompt_tokens": ("Prompt tokens of requests that got a slot", None),
    "generation_tokens": ("Tokens of answers", None),
}
REQUEST_HISTOGRAMS = {
    "request_queue_time_seconds": "From arrival to a slot",
    "time_to_first_token_seconds": "From arrival to the first token",
    "time_per_output_token_seconds": "Between tokens after the first; a round's seconds shared by its tokens",
    "e2e_request_latency_seconds": "From arrival to the end of the answer",
}
ENGINE_COUNTERS = {
    "engine_passes": ("Forward passes of the target", None),
    "engine_emitted_tokens": ("Tokens emitted, those of requests that were given up included", None),
    "prefix_cache_hits": ("Prompt tokens that a slot held already", None),
    "spec_decode_num_drafts": ("Verify rounds, by sequence", None),
    "spec_decode_num_draft_tokens": ("Drafts proposed; of a tree every node", None),
    "spec_decode_num_accepted_tokens": ("Drafts accepted", None),
    "spec_decode_num_draft_tokens_per_pos": ("Rounds with a draft at this position or depth", "position"),
    "spec_decode_num_accepted_tokens_per_pos": ("Drafts accepted at this position or depth", "position"),
    "spec_decode_draft_lengths": ("Rounds of sequences, by the drafts asked for", "num_draft_tokens"),
    "spec_decode_fallbacks": ("Rounds decoded plainly because of the drafter", "reason"),
}
ENGINE_HISTOGRAMS = {
    "engine_plain_step_seconds": "T_base: passes of decoding sequences without drafts",
    "spec_decode_draft_seconds": "T_draft: draft blocks",
    "spec_decode_verify_seconds": "T_verify: passes of decoding sequences with drafts",
}


@dataclass(frozen=True)
class Labels:
    """Values of the labels that all series of a replica have."""

    model_name: str
    replica: str  # Serve's name for it, as in Ray's own metrics; "" outside of Serve
    placement_of: Callable[[str | None], str]  # by version of the drafter

    @property
    def own(self) -> tuple[str, str]:
        """As in OF_REPLICA."""
        return self.model_name, self.replica

    def of(self, version: str | None) -> tuple[str, ...]:
        """As in BY_VERSION."""
        return (*self.own, NONE if version is None else version, self.placement_of(version))


class Page(Collector):
    """Families in the order in which they were added."""

    def __init__(self) -> None:
        self._families: list[Metric] = []

    def add(self, families: Iterable[Metric]) -> None:
        self._families += families

    def collect(self) -> Iterable[Metric]:
        return self._families


def request_families(labels: Labels, counts: ByVersion) -> Iterator[Metric]:
    """What was counted per request."""
    yield from _counters(labels, counts, REQUEST_COUNTERS)
    yield from _histograms(labels, counts, REQUEST_HISTOGRAMS, REQUEST_BUCKETS_S)


def drafter_families(
    labels: Labels, counts: ByVersion, version: str | None, name: str | None, address: str | None
) -> Iterator[Metric]:
    """The engine's counters, and which drafter is in service; its series are there from its first moment."""
    counts = {version: no_counts()} | counts
    yield from _counters(labels, counts, ENGINE_COUNTERS)
    yield from _histograms(labels, counts, ENGINE_HISTOGRAMS, ROUND_BUCKETS_S)
    info = GaugeMetricFamily("drafter_info", "The drafter in service", labels=(*BY_VERSION, "drafter", "address"))
    info.add_metric((*labels.of(version), name or NONE, address or ""), 1)
    yield info


def load_families(labels: Labels, load: Load) -> Iterator[Metric]:
    """What the engine does right now."""
    for name, help_text, value in (
        ("num_requests_running", "Requests that hold a slot", load.running),
        ("num_requests_waiting", "Requests that wait for a slot", load.waiting),
        ("num_tokens_in_flight", "Prompt and new tokens still to do for all requests", load.tokens_in_flight),
        ("oldest_wait_seconds", "Wait so far of the request that waits longest", load.oldest_wait_s),
        ("kv_slots_usage_perc", "Share of slots that are held; 1: all", load.slot_use),
        ("kv_cache_usage_perc", "Share of the slots' positions that running requests fill; 1: all", load.token_use),
    ):
        yield _simple(GaugeMetricFamily, name, help_text, labels, value)


def service_families(
    labels: Labels,
    refused: Mapping[str, float],
    swaps: Mapping[tuple[str, str], float],
    restarts: Mapping[str, float],
    link_events: Mapping[str, float],
) -> Iterator[Metric]:
    """Error responses by status, hot swaps, replaced drafter processes by reason, trouble on their link."""
    yield _divided(labels, "request_refused", "Error responses", "status", refused)
    family = CounterMetricFamily(
        "drafter_swaps", "Hot swaps by result and who asked", labels=(*OF_REPLICA, "result", "source")
    )
    for parts, value in swaps.items():
        family.add_metric((*labels.own, *parts), value)
    yield family
    yield _divided(labels, "drafter_restarts", "Drafter processes that were replaced", "reason", restarts)
    yield _divided(labels, "draft_link_events", "Drafters' replies that were late or dropped", "kind", link_events)


def registry_families(labels: Labels, figures: RegistryFigures) -> Iterator[Metric]:
    """How the replica follows the registry's champion."""
    for name, help_text, value in (
        ("registry_champion_number", "Number of the latest change of champion; 0: none yet", figures.champion),
        ("registry_followed_number", "Number of the change that is served; 0: none", figures.followed),
        ("registry_following", "1: the champion is followed; 0: user_config pins a drafter", figures.following),
    ):
        yield _simple(GaugeMetricFamily, name, help_text, labels, value)
    yield _divided(labels, "registry_polls", "Looks at the registry by result", "result", figures.polls)
    away = "Questions to the roll-out's guard without an answer"
    yield _simple(CounterMetricFamily, "rollout_guard_away", away, labels, figures.guard_away)
    what = "Versions that were rolled back by their live figures; every replica of an app counts each"
    yield _divided(labels, "drafter_rollbacks", what, "reason", figures.rollbacks)


def traffic_families(labels: Labels, counts: TrafficCounts) -> Iterator[Metric]:
    """How the traffic log fares."""
    for name, help_text, value in (
        ("traffic_log_rows", "Requests written to the traffic log", counts.rows),
        ("traffic_log_shards", "Files of the traffic log written", counts.shards),
        ("traffic_log_bytes", "Bytes of these files", counts.bytes),
        ("traffic_log_shards_deleted", "Files deleted as too old or too many", counts.deleted),
    ):
        yield _simple(CounterMetricFamily, name, help_text, labels, value)
    yield _simple(GaugeMetricFamily, "traffic_log_pending", "Rows that wait to be written", labels, counts.pending)
    yield _divided(labels, "traffic_log_rows_dropped", "Rows lost", "reason", counts.dropped)
    yield _divided(labels, "traffic_log_failures", "Attempts that failed", "operation", counts.failures)


def _simple(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, help_text: str, labels: Labels, value: float
) -> Metric:
    family = kind(name, help_text, labels=OF_REPLICA)
    family.add_metric(labels.own, value)
    return family


def _divided(labels: Labels, name: str, help_text: str, by: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=(*OF_REPLICA, by))
    for part, value in counts.items():
        family.add_metric((*labels.own, part), value)
    return family


def _counters(labels: Labels, by_version: ByVersion, named: dict[str, tuple[str, str | None]]) -> Iterator[Metric]:
    for name, (help_text, divided_by) in named.items():
        extra = () if divided_by is None else (divided_by,)
        family = CounterMetricFamily(name, help_text, labels=(*BY_VERSION, *extra))
        for version, counts in by_version.items():
            if divided_by is None:
                family.add_metric(labels.of(version), counts.get((name, ""), 0))
            else:
                for part, value in sorted(_parts(counts, name).items(), key=_by_number):
                    family.add_metric((*labels.of(version), part), value)
        yield family


def _histograms(
    labels: Labels, by_version: ByVersion, named: dict[str, str], bounds: tuple[float, ...]
) -> Iterator[Metric]:
    for name, help_text in named.items():
        family = HistogramMetricFamily(name, help_text, labels=BY_VERSION)
        for version, counts in by_version.items():
            parts, below, buckets = _parts(counts, name), 0.0, []
            for bound in (*map(str, bounds), INFINITE):
                below += parts.get(bound, 0)
                buckets.append((bound, below))
            family.add_metric(labels.of(version), buckets, parts.get(SUM, 0.0))
        yield family


def _parts(counts: Counts, name: str) -> dict[str, float]:
    return {part: value for (of, part), value in counts.items() if of == name}


def _by_number(item: tuple[str, float]) -> tuple[int, str]:
    return (int(item[0]), "") if item[0].isdigit() else (0, item[0])
