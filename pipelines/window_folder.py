"""What is kept of a window of traffic while a challenger is made of it, and afterwards.

    <work>/windows/<window id>/  training.parquet  held_out.parquet  selection.json  start.json  rollouts/  challenger/
                                 training.json  gate-<n>.json  report.json

Each file is written whole, after the stage that it stands for; report.json comes last, once: the window is done. A run
that is killed goes on after the last file. gate-<n>.json is the challenger against the champion of change n.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

from drafters.atomic_files import AtomicFolder
from drafters.remote import patiently
from pipelines.redistill_config import RedistillError, RedistillReport
from pipelines.rollout_manifest import json_bytes
from pipelines.traffic_selection import TrafficWindow, WindowError

LOOP, WINDOWS, REPORT, ROLLOUTS = "loop.json", "windows", "report.json", "rollouts"
START, TRAINING = "start.json", "training.json"
USED = ("promoted", "rejected")  # verdicts after which the next window begins behind this one
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)  # of the first window: all traffic there is, whatever the log has lost


class WindowFolder:
    """One window's files."""

    def __init__(self, work: str, window: TrafficWindow):
        self.window = window
        self.folder = AtomicFolder(f"{work.rstrip('/')}/{WINDOWS}/{window.id}")
        self.rollouts, self.challenger = f"{self.folder.uri}/{ROLLOUTS}", f"{self.folder.uri}/challenger"

    def read(self, name: str) -> dict[str, Any] | None:
        """A stage's facts; None before it is over. Raises RedistillError for a file that is damaged."""
        try:
            facts: dict[str, Any] = json.loads(self.folder.read(name))
        except FileNotFoundError:
            return None
        except ValueError:
            raise RedistillError(f"{self.folder.path(name)} is damaged; remove it and run the same again") from None
        return facts

    def write(self, name: str, facts: dict[str, Any]) -> None:
        """A stage is over."""
        self.folder.write(name, json_bytes(facts))

    def report(self) -> RedistillReport | None:
        """How the window ended; None: it has not."""
        facts = self.read(REPORT)
        try:
            return None if facts is None else RedistillReport(**facts)
        except TypeError:
            raise RedistillError(f"{self.folder.path(REPORT)} is no report of a window; remove it") from None

    def finish(self, report: RedistillReport) -> RedistillReport:
        """The window is done. If somebody else has ended it, theirs counts."""
        try:
            self.folder.create(REPORT, json_bytes(asdict(report)))
        except FileExistsError:
            return self.report() or report
        return report


def known_windows(work: str) -> list[WindowFolder]:
    """All windows that were begun, the oldest first. Folders of other names are none."""
    found = []
    for name in AtomicFolder(f"{work.rstrip('/')}/{WINDOWS}").names():
        try:
            found.append(WindowFolder(work, TrafficWindow.from_id(name)))
        except WindowError:
            continue
    return sorted(found, key=lambda folder: (folder.window.until, folder.window.since))


def used_windows(work: str) -> list[WindowFolder]:
    """Those that a challenger was made of, or that were refused: the oldest first."""
    return [folder for folder in known_windows(work) if (r := folder.report()) is not None and r.verdict in USED]


def next_begin(work: str) -> datetime:
    """Where the next window begins: behind the newest that was used."""
    for folder in reversed(known_windows(work)):
        if (report := folder.report()) is not None and report.verdict in USED:
            return folder.window.until
    return BEGINNING


def interrupted(work: str) -> WindowFolder | None:
    """The newest window that was begun and is not done, unless a later one has used its requests."""
    begin = next_begin(work)
    newer = [folder for folder in known_windows(work) if folder.window.until > begin]
    return next((folder for folder in reversed(newer) if folder.report() is None), None)


def tie_work(work: str, **loop: str) -> None:
    """Tie a folder of windows to one registry and target: windows are known by their times alone.

    Raises RedistillError if it belongs to others.
    """
    folder = AtomicFolder(work)
    try:
        folder.create(LOOP, json_bytes(loop))
    except FileExistsError:
        try:
            known = json.loads(folder.read(LOOP))
        except ValueError:
            raise RedistillError(f"{folder.path(LOOP)} is damaged; remove it and run the same again") from None
        if differing := [name for name in loop if known.get(name) != loop[name]]:
            name = differing[0]
            raise RedistillError(
                f"work folder {work} belongs to another {name.replace('_', ' ')} ({known.get(name)}, not "
                f"{loop[name]}); give each loop a folder of its own"
            ) from None


def drop_old_rollouts(work: str, keep: int) -> None:
    """Remove the rollouts of used windows but the newest `keep`: nobody replays them any more."""
    used = used_windows(work)
    for folder in used[: max(0, len(used) - keep)]:
        files, path = folder.folder, folder.folder.path(ROLLOUTS)
        if files.names(ROLLOUTS):
            patiently(partial(files.fs.rm, path, recursive=True), files.patience_s)
