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
from typing import Any

from drafters.atomic_files import AtomicFolder
from pipelines.redistill_config import RedistillError, RedistillReport
from pipelines.rollout_manifest import json_bytes
from pipelines.traffic_selection import TrafficWindow, WindowError

WINDOWS, REPORT = "windows", "report.json"
START, TRAINING = "start.json", "training.json"
USED = ("promoted", "rejected")  # verdicts after which the next window begins behind this one
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)  # of the first window: all traffic there is, whatever the log has lost


class WindowFolder:
    """One window's files."""

    def __init__(self, work: str, window: TrafficWindow):
        self.window = window
        self.folder = AtomicFolder(f"{work.rstrip('/')}/{WINDOWS}/{window.id}")
        self.rollouts, self.challenger = f"{self.folder.uri}/rollouts", f"{self.folder.uri}/challenger"

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
        return None if facts is None else RedistillReport(**facts)

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
    used = used_windows(work)
    return used[-1].window.until if used else BEGINNING


def interrupted(work: str) -> WindowFolder | None:
    """The newest window that was begun and is not done."""
    open_ones = [folder for folder in known_windows(work) if folder.report() is None]
    return open_ones[-1] if open_ones else None
