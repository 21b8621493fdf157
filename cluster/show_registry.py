"""What people see of a registry: its versions, one of them, its history; and the same facts for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from cluster.facts_table import facts_table
from drafters.registry import Change, Pruning, Registry

PLAIN_SHOWN = "none (plain decoding)"
HISTORY_SHOWN = 12  # changes and removals


@dataclass(frozen=True, kw_only=True)
class Added:
    registry: str
    version: dict[str, Any]
    uri: str  # of the checkpoint
    was_there: bool


@dataclass(frozen=True, kw_only=True)
class Listing:
    registry: str
    champion: dict[str, Any] | None  # the latest change
    versions: list[dict[str, Any]]  # oldest first, each with its role, verdict and the replicas that serve it
    serving: list[dict[str, Any]]
    history: list[dict[str, Any]]  # changes and removals, oldest first


@dataclass(frozen=True, kw_only=True)
class Shown:
    registry: str
    version: dict[str, Any]
    uri: str  # of the checkpoint
    role: str
    verdict: dict[str, Any] | None
    served_by: list[str]
    changes: list[dict[str, Any]]  # that made it champion or ended that


@dataclass(frozen=True, kw_only=True)
class Changed:
    registry: str
    change: dict[str, Any]
    was_there: bool  # it was champion already, nothing was changed


@dataclass(frozen=True, kw_only=True)
class Pruned:
    registry: str
    removed: list[str]
    left: list[str]


def listing(registry: Registry) -> Listing:
    """All of a registry."""
    changes, champion, rejected = registry.history(), registry.champion(), registry.rejected()
    serving = [said for _, said in sorted(registry.serving().items())]
    versions = [
        version.as_json()
        | {
            "uri": version.uri,
            "role": role(version.name, champion),
            "rejected": version.name in rejected,
            "served_by": [said.replica for said in serving if said.version == version.name and not said.stale],
        }
        for version in registry.versions()
    ]
    entries: list[Change | Pruning] = [*changes, *registry.prunings()]
    return Listing(
        registry=registry.uri,
        champion=None if champion is None else champion.as_json(),
        versions=versions,
        serving=[
            {"replica": said.replica, "version": said.version, "at": said.at.isoformat(), "stale": said.stale}
            for said in serving
        ],
        history=[_history_line(entry.as_json()) for entry in sorted(entries, key=lambda entry: entry.number)],
    )


def shown(registry: Registry, name: str) -> Shown:
    """One version. Raises RegistryError."""
    version = registry.version(name)
    return Shown(
        registry=registry.uri,
        version=version.as_json(),
        uri=version.uri,
        role=role(name, registry.champion()),
        verdict=registry.verdict(name),
        served_by=sorted(s.replica for s in registry.serving().values() if s.version == name and not s.stale),
        changes=[change.as_json() for change in registry.history() if name in (change.version, change.previous)],
    )


def changed(registry: Registry, change: Change, before: Change | None) -> Changed:
    """What a promotion or a rollback did."""
    was_there = before is not None and before.number == change.number
    return Changed(registry=registry.uri, change=change.as_json(), was_there=was_there)


def role(name: str, champion: Change | None) -> str:
    """What a version is now: champion, predecessor, or nothing of both."""
    if champion is not None and name in (champion.version, champion.previous):
        return "champion" if name == champion.version else "predecessor"
    return ""


def added_table(report: Added) -> RenderableType:
    facts = [("version", report.version["name"])]
    if report.was_there:
        facts = [("version", f"{report.version['name']}, which was there already with the same files")]
    return facts_table(f"registry {report.registry}", [*facts, *_origin(report.version), ("folder", report.uri)])


def listing_view(report: Listing) -> RenderableType:
    """The versions, below them the history."""
    columns = ("version", "role", "made", "parent", "tau", "data", "served by")
    table = _table(f"registry {report.registry}", columns, map(_version_cells, report.versions))
    parts: list[RenderableType] = [table if report.versions else f"registry {escape(report.registry)}: no versions yet"]
    if report.champion is not None and report.champion["version"] is None:
        parts.append(f"champion: {PLAIN_SHOWN}")
    if silent := [said["replica"] for said in report.serving if said["stale"]]:
        parts.append(f"silent replicas: {escape(', '.join(silent))}")
    if report.history:
        parts.append(_history(report.history[-HISTORY_SHOWN:], len(report.history)))
    return Group(*parts)


def shown_table(report: Shown) -> RenderableType:
    facts = [("version", report.version["name"]), ("role", report.role or "-"), *_origin(report.version)]
    evaluation = report.version["evaluation"] or {}
    figures = [f"{name} {_figure(value)}" for name, value in evaluation.items() if isinstance(value, int | float | str)]
    facts.append(("evaluation", ", ".join(figures) or "none"))
    if report.verdict is not None:
        facts.append(("rejected", f"{report.verdict.get('why')} (by {report.verdict.get('by')})"))
    facts.append(("served by", ", ".join(report.served_by) or "-"))
    facts += [("sha256", f"{digest}  {name}") for name, digest in report.version["files"].items()]
    table = facts_table(f"registry {report.registry}", [*facts, ("folder", report.uri)])
    return Group(table, _history([_history_line(change) for change in report.changes], 0)) if report.changes else table


def change_table(report: Changed) -> RenderableType:
    change = report.change
    if report.was_there:
        told = f"{change['version'] or PLAIN_SHOWN}, which it was already; nothing is changed"
        return facts_table(f"registry {report.registry}", [("champion", told)])
    facts = [("champion", change["version"] or PLAIN_SHOWN), ("before", change["previous"] or PLAIN_SHOWN)]
    return facts_table(f"registry {report.registry}", [*facts, ("by", change["by"]), ("why", change["why"])])


def pruned_table(report: Pruned) -> RenderableType:
    facts = [("removed", ", ".join(report.removed) or "none"), ("left", ", ".join(report.left) or "none")]
    return facts_table(f"registry {report.registry}", facts)


def _origin(version: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("made", _when(version["created_at"])),
        ("parent", version["parent"] or "-"),
        ("target fingerprint", version["target_fingerprint"]),
        ("data", json.dumps(version["data"]) if version["data"] else "-"),
    ]


def _version_cells(version: dict[str, Any]) -> tuple[str, ...]:
    what = ", ".join(filter(None, [version["role"], "rejected" if version["rejected"] else ""]))
    data, tau = version["data"], (version["evaluation"] or {}).get("tau")
    span = f"{data['since']} to {data['until']}" if data.keys() >= {"since", "until"} else ""
    return (
        version["name"], what, _when(version["created_at"]), version["parent"] or "",
        f"{tau:.2f}" if isinstance(tau, int | float) else "", span, ", ".join(version["served_by"]),
    )  # fmt: skip


def _history_line(entry: dict[str, Any]) -> dict[str, Any]:
    """A change or a removal, without the champion that the file of a removal repeats."""
    return {name: value for name, value in entry.items() if name != "champion"}


def _history(entries: Iterable[dict[str, Any]], of: int) -> Table:
    entries = list(entries)
    title = f"history, the latest {len(entries)} of {of}" if of > len(entries) else "history"
    return _table(title, ("", "when", "what", "version", "by", "why"), map(_entry_cells, entries))


def _entry_cells(entry: dict[str, Any]) -> tuple[str, ...]:
    what = ", ".join(entry["removed"]) if entry["action"] == "prune" else entry["version"] or PLAIN_SHOWN
    return str(entry["number"]), _when(entry["at"]), entry["action"], what, entry["by"], entry["why"]


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold", style="cyan" if name == "version" else None)
    for cells in rows:
        table.add_row(*map(escape, cells))
    return table


def _when(text: str) -> str:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC"


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
