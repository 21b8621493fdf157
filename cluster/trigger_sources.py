"""Where the figures of the triggers really come from: the traffic log, the registry, the windows that are done."""

from __future__ import annotations

from datetime import datetime

from cluster.tau_base import Champion, Found
from cluster.triggers import Sources


def sources_of(traffic: str, registry: str, work: str) -> Sources:
    """The sources of a traffic log, a registry and a folder of windows. They read when they are asked."""

    def new_rows(since: datetime | None) -> int:
        from pipelines.traffic_window import count_rows

        return int(count_rows(traffic, since=since))

    def live_tau(since: datetime | None, until: datetime | None) -> Found:
        from pipelines.traffic_window import live_tau as read

        found = read(traffic, since=since, until=until)
        return {version: (seen.tau, seen.rounds) for version, seen in found.items() if seen.tau is not None}

    def champion() -> Champion | None:
        from drafters.registry import Registry

        versions = Registry(registry)
        change = versions.champion()
        if change is None or change.version is None:
            return None
        evaluated = (versions.version(change.version).evaluation or {}).get("tau")
        return Champion(version=change.version, since=change.at, evaluated=evaluated)

    def begins() -> datetime:
        from pipelines.window_folder import next_begin

        return next_begin(work)

    return Sources(
        new_rows=new_rows, live_tau=live_tau, champion=champion, done_until=lambda: done_until(work), begins=begins
    )


def done_until(work: str) -> datetime | None:
    """Where the newest window ends that is done; None if none is."""
    from pipelines.window_folder import REPORT, known_windows

    newest_first = reversed(known_windows(work))
    return next((known.window.until for known in newest_first if known.folder.size(REPORT) is not None), None)
