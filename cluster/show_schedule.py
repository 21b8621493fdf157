"""A schedule for people: whether it runs, what it follows, what comes next, what it said."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.schedule_state import ScheduleState, load_state, schedule_folder
from cluster.triggers import TriggerConfig, next_moment
from pipelines.run_lease import LeaseRecord, lease_record

SHOWN = 12  # of the lines it said


@dataclass(frozen=True, kw_only=True)
class ScheduleReport:
    """A schedule's state, and who runs it."""

    folder: str
    runs: str  # by whom; "no" if none, or when it fell silent
    next_moment: str | None  # of its cron expression, ISO 8601
    state: dict[str, Any]


def read_schedule(work: str) -> ScheduleReport | None:
    """None if there never was one."""
    folder = schedule_folder(work)
    state = load_state(folder)
    if state is None:
        return None
    now = datetime.now(UTC)
    coming = _next(state, now)
    return ScheduleReport(
        folder=folder.uri,
        runs=_who(lease_record(folder), now),
        next_moment=coming.isoformat() if coming else None,
        state=state.model_dump(mode="json"),
    )


def schedule_view(report: ScheduleReport) -> RenderableType:
    state = ScheduleState.model_validate(report.state)
    table = Table(title="schedule", title_justify="left", show_header=False)
    table.add_row("runs", report.runs)
    cron, _, zone = state.cron.rpartition(" ")
    table.add_row(
        "cron",
        f"{cron} ({zone})"
        + (f", next {_utc(datetime.fromisoformat(report.next_moment))}" if report.next_moment else ""),
    )
    if run := state.run:
        tries = f", {run.failures} failed before" if run.failures else ""
        table.add_row("run", f"{run.submission_id} since {_utc(run.started_at)}{tries}")
        table.add_row("because", run.why)
    if last := state.last:
        table.add_row("run before", f"{last.submission_id} {last.result} at {_utc(last.ended_at)}")
    if state.bases:
        base = state.bases[-1]
        short = "" if base.settled else ", which is not enough yet"
        table.add_row("base of live tau", f"{base.version}: {base.compared(None)}{short}")
    table.add_row("folder", report.folder)
    said = [Text(f"{_utc(line.at)}  {line.text}") for line in state.said[-SHOWN:]]
    return Group(table, *said)


def _who(record: LeaseRecord | None, now: datetime) -> str:
    if record is None or record.released:
        return "no"
    if record.is_long_dead(now):
        return f"no: {record.owner} fell silent at {_utc(record.at)}"
    return str(record)


def _next(state: ScheduleState, now: datetime) -> datetime | None:
    cron, _, zone = state.cron.rpartition(" ")
    return None if cron == "never" else next_moment(TriggerConfig(cron=cron, time_zone=zone), now)


def _utc(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
