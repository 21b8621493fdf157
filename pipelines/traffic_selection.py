"""What was chosen from a window of traffic: training and held-out rows, and what became of all the others.

Saved beside a window's other files, since the log goes on: shards come late, and the oldest are deleted. The rows are
files like the log's own, `training.parquet` and `held_out.parquet`; `selection.json` is written last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from drafters.atomic_files import AtomicFolder
from serving.traffic_schema import TrafficColumns, TrafficMetadata, TrafficRow, traffic_table

SELECTION, TRAINING, HELD_OUT = "selection.json", "training.parquet", "held_out.parquet"
_TIME = "%Y%m%dT%H%M%SZ"


class WindowError(ValueError):
    """A window of traffic that cannot be used; one line with cause and mend."""


@dataclass(frozen=True, kw_only=True)
class TrafficWindow:
    """The requests that arrived from `since` on and before `until`. Whole seconds; kept in UTC."""

    since: datetime
    until: datetime

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            time: datetime = getattr(self, name)
            if time.tzinfo is None:
                raise WindowError(f"{name} is {time.isoformat()}, without a time zone; give one, such as +00:00")
            if time.microsecond:
                raise WindowError(f"{name} is {time.isoformat()}; give whole seconds")
            object.__setattr__(self, name, time.astimezone(UTC))
        if self.since >= self.until:
            raise WindowError(f"the window ends at {self.until.isoformat()}, not after {self.since.isoformat()}")

    @property
    def id(self) -> str:
        """20261130T120000Z-20261130T180000Z: the same window has the same id, on every machine."""
        return f"{self.since.strftime(_TIME)}-{self.until.strftime(_TIME)}"

    @classmethod
    def from_id(cls, id: str) -> TrafficWindow:
        """The window that has this id. Raises WindowError."""
        try:
            if not re.fullmatch(r"\d{8}T\d{6}Z-\d{8}T\d{6}Z", id):
                raise ValueError
            since, until = (datetime.strptime(part, _TIME).replace(tzinfo=UTC) for part in id.split("-"))
        except ValueError:
            raise WindowError(f"{id!r} is no window; give <since>-<until> as in {_EXAMPLE}") from None
        return cls(since=since, until=until)


_EXAMPLE = "20261130T120000Z-20261130T180000Z"


@dataclass(frozen=True, kw_only=True)
class RefusedFile:
    """A file of which no row was taken."""

    name: str  # in the log; with the log's address where it is not of the log at all
    reason: str
    rows: int  # 0 where they could not be counted


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What `traffic_window.select` chose. Rows are ordered by arrival, then by id."""

    window: TrafficWindow
    origin: TrafficMetadata  # of the target that answered all of them
    training: list[TrafficRow]
    held_out: list[TrafficRow]  # later than all training rows; no prompt twice, none of them in training
    read: int  # rows of the window; kept and refused ones together
    refused: dict[str, int]  # by reason
    refused_files: list[RefusedFile]

    @property
    def kept(self) -> int:
        return len(self.training) + len(self.held_out)

    def counts(self) -> dict[str, Any]:
        """For a report: `read` is the sum of the rows and of all `refused`."""
        return {
            "read": self.read,
            "training": len(self.training),
            "held_out": len(self.held_out),
            "refused": self.refused,
            "refused_files": [asdict(file) for file in self.refused_files],
        }


def save_selection(folder: AtomicFolder, selection: Selection) -> None:
    """Write a selection; equal ones give equal bytes."""
    folder.write(TRAINING, _parquet(selection.training, selection.origin))
    folder.write(HELD_OUT, _parquet(selection.held_out, selection.origin))
    told = {"window": selection.window.id} | selection.counts()
    folder.write(SELECTION, (json.dumps(told, indent=1, sort_keys=True) + "\n").encode())


def load_selection(folder: AtomicFolder) -> Selection | None:
    """What `save_selection` wrote; None if it did not come to its end. Raises WindowError for damaged files."""
    try:
        told = json.loads(folder.read(SELECTION))
    except FileNotFoundError:
        return None
    except ValueError:
        raise _damaged(folder, SELECTION) from None
    (training, origin), (held_out, _) = (_rows(folder, name) for name in (TRAINING, HELD_OUT))
    if (len(training), len(held_out)) != (told["training"], told["held_out"]):
        raise _damaged(folder, SELECTION)
    return Selection(
        window=TrafficWindow.from_id(told["window"]),
        origin=origin,
        training=training,
        held_out=held_out,
        read=told["read"],
        refused=told["refused"],
        refused_files=[RefusedFile(**file) for file in told["refused_files"]],
    )


def _parquet(rows: Sequence[TrafficRow], origin: TrafficMetadata) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(traffic_table(rows, origin), sink, compression="zstd")
    return sink.getvalue()


def _rows(folder: AtomicFolder, name: str) -> tuple[list[TrafficRow], TrafficMetadata]:
    try:
        data = folder.read(name)
    except FileNotFoundError:
        raise _damaged(folder, name) from None
    try:
        table = pq.read_table(pa.BufferReader(data))
        columns = TrafficColumns(table)
        return [columns.row(i) for i in range(len(columns))], TrafficMetadata.from_texts(table.schema.metadata or {})
    except (OSError, KeyError, ValueError, pa.ArrowException):
        raise _damaged(folder, name) from None


def _damaged(folder: AtomicFolder, name: str) -> WindowError:
    return WindowError(f"{folder.uri}/{name} is damaged; delete {SELECTION} there, and the rows are chosen again")
