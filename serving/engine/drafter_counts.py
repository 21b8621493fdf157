"""What was counted under which drafter: an engine's counters in, the same by version of the drafter out.

`EngineStats` count on across hot swaps. What came between two swaps belongs to the drafter that was in service then,
and stays with it: no counter of a version ever goes down. `/metrics` shows these tables.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from serving.engine.drafting import EngineStats
from serving.engine.timing import Histogram

MOST_VERSIONS = 32  # with counts of their own; a service that swaps nightly would name hundreds
EARLIER = "earlier"  # the version of all that came before those
SUM, INFINITE = "sum", "+Inf"  # parts of a histogram, beside its bounds

Counts = defaultdict[tuple[str, str], float]  # by metric and what divides it: a position, a reason, a bucket, or ""
ByVersion = dict[str | None, Counts]  # the version that was counted for last comes last; None: no drafter


def no_counts() -> Counts:
    return defaultdict(float)


def counts_of(stats: EngineStats) -> Counts:
    """All counters as one table, which can be subtracted and added."""
    acceptance, timings = stats.acceptance, stats.timings
    counts = no_counts()
    for name, value in (
        ("engine_passes", stats.passes),
        ("engine_emitted_tokens", stats.emitted_tokens),
        ("prefix_cache_hits", stats.prefix_tokens),
        ("spec_decode_num_drafts", acceptance.rounds),
        ("spec_decode_num_draft_tokens", acceptance.proposed),
        ("spec_decode_num_accepted_tokens", acceptance.accepted),
    ):
        counts[name, ""] = value
    divided: tuple[tuple[str, Mapping[Any, float]], ...] = (
        ("spec_decode_num_draft_tokens_per_pos", dict(enumerate(acceptance.proposed_by_position))),
        ("spec_decode_num_accepted_tokens_per_pos", dict(enumerate(acceptance.accepted_by_position))),
        ("spec_decode_draft_lengths", stats.draft_lengths),
        ("spec_decode_fallbacks", stats.fallbacks),
        ("engine_plain_step_seconds", _parts(timings.base_s)),
        ("spec_decode_draft_seconds", _parts(timings.draft_s)),
        ("spec_decode_verify_seconds", _parts(timings.verify_s)),
    )
    for name, values in divided:
        counts.update({(name, str(part)): value for part, value in values.items()})
    return counts


def _parts(histogram: Histogram) -> dict[str, float]:
    return dict(zip([*map(str, histogram.bounds), INFINITE], histogram.counts, strict=True)) | {SUM: histogram.sum}


def observe(counts: Counts, name: str, bounds: Sequence[float], value: float, times: int = 1) -> None:
    """Count a value `times` in the histogram of that name; each bucket holds what lies above the bound before it."""
    place = bisect_left(bounds, value)
    counts[name, str(bounds[place]) if place < len(bounds) else INFINITE] += times
    counts[name, SUM] += value * times


def _add(counts: Counts, more: Counts, sign: int = 1) -> None:
    for key, value in more.items():
        counts[key] += sign * value


def fold_oldest(by_version: ByVersion) -> None:
    """Add up the counts of the versions that came long ago, so that their number stays bounded."""
    named = [version for version in by_version if version not in (EARLIER, None)]
    for version in named[: max(0, len(named) - MOST_VERSIONS)]:
        _add(by_version.setdefault(EARLIER, no_counts()), by_version.pop(version))


class CountsByDrafter:
    """An engine's counts by version. Of the engine's thread."""

    def __init__(self) -> None:
        self._at_swap = no_counts()  # of all versions together, when the last one left
        self._gone: ByVersion = {}

    def close(self, version: str | None, stats: EngineStats) -> None:
        """The version goes out of service now."""
        self._gone = self.totals(version, stats)
        self._at_swap = counts_of(stats)
        fold_oldest(self._gone)

    def totals(self, version: str | None, stats: EngineStats) -> ByVersion:
        """Counts while this version is in service; one under which nothing was counted is left out."""
        now = counts_of(stats)
        _add(now, self._at_swap, -1)
        totals = {name: counts.copy() for name, counts in self._gone.items()}
        if any(now.values()):
            own = totals[version] = totals.pop(version, no_counts())  # to the end
            _add(own, now)
        return totals
