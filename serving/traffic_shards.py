"""The files of a traffic log: their names, which of them are deleted, and how they are read back.

`date=YYYY-MM-DD/<first arrival>-<last arrival>-<writer>-<number>.parquet`, times in UTC. Any number of writers share a
folder, local or on s3://: names are their own, and all delete by the same rule, the oldest first. What is not named so
is left alone.
"""

from __future__ import annotations

import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from drafters.acceptance import Acceptance
from drafters.atomic_files import AtomicFolder
from drafters.remote import ServerAwayError, first_line, is_transient, patiently
from serving.traffic_schema import schema_problem

log = logging.getLogger(__name__)

DAY = "date="
_TIME = "%Y%m%dT%H%M%S%f"
_NAME = re.compile(r"(\d{8}T\d{12})-(\d{8}T\d{12})-\w+-\d{6,}\.parquet")
_LEFTOVER_AGE_S = 3600.0  # of a temporary file, after which its writer is taken for dead
_ACCEPTANCE = (
    "drafter_version", "drafter_changed", "rounds", "proposed", "proposed_by_position", "accepted_by_position",
)  # fmt: skip


@dataclass(frozen=True, order=True)
class Shard:
    """A file of the log. The oldest comes first."""

    last: datetime  # arrival of its youngest request
    first: datetime
    name: str  # with its day
    size: int  # bytes


def shard_name(first_us: int, last_us: int, writer: str, number: int) -> str:
    """Of requests that arrived between these microseconds since 1970, both included."""
    first, last = (
        datetime.fromtimestamp(us // 10**6, UTC).replace(microsecond=us % 10**6) for us in (first_us, last_us)
    )
    writer = re.sub(r"\W", "_", writer)
    return f"{DAY}{last:%Y-%m-%d}/{first.strftime(_TIME)}-{last.strftime(_TIME)}-{writer}-{number:06d}.parquet"


def list_shards(folder: AtomicFolder) -> list[Shard]:
    """All shards, the oldest first."""
    found = (_shard(name, size) for name, size in _files(folder))
    return sorted(shard for shard in found if shard is not None)


def _shard(name: str, size: int) -> Shard | None:
    match = _NAME.fullmatch(name.rsplit("/", 1)[-1])
    if match is None:
        return None
    try:
        first, last = (datetime.strptime(text, _TIME).replace(tzinfo=UTC) for text in match.groups())
    except ValueError:
        return None
    return Shard(last, first, name, size)


def _files(folder: AtomicFolder) -> list[tuple[str, int]]:
    """(name, bytes) of the Parquet files of all days."""
    if folder.local is not None:
        return _local_files(folder.local)
    folder.fs.invalidate_cache()
    found = patiently(lambda: folder.fs.find(folder.root, detail=True), folder.patience_s)
    root = folder.root.lstrip("/") + "/"
    files = [(str(path).lstrip("/").removeprefix(root), int(info["size"])) for path, info in found.items()]
    return [(name, size) for name, size in files if re.fullmatch(rf"{DAY}[^/]+/[^/]+\.parquet", name)]


def _local_files(root: Path) -> list[tuple[str, int]]:
    """fsspec would leave out a whole day if another writer deletes one of its files meanwhile."""
    files = []
    for file in root.glob(f"{DAY}*/*.parquet"):
        with suppress(FileNotFoundError):
            files.append((f"{file.parent.name}/{file.name}", file.stat().st_size))
    return files


def delete_old(folder: AtomicFolder, *, max_bytes: int, max_age_s: float) -> int:
    """Delete the oldest shards until all are young enough and fit; how many were. Those gone already do not matter."""
    shards = list_shards(folder)
    oldest = datetime.fromtimestamp(max(0.0, time.time() - max_age_s), UTC)
    left, deleted = sum(shard.size for shard in shards), 0
    for shard in shards:
        if left <= max_bytes and shard.last >= oldest:
            break
        with suppress(FileNotFoundError):
            folder.fs.rm_file(folder.path(shard.name))
            deleted += 1
        left -= shard.size
    if folder.local is not None:
        _tidy(folder.local, folder.local / folder.scratch)
    return deleted


def _tidy(root: Path, scratch: Path) -> None:
    """Remove what killed writers left behind, and days that are empty."""
    now = time.time()
    for file in scratch.glob("*.tmp"):
        with suppress(FileNotFoundError):
            if now - file.stat().st_mtime > _LEFTOVER_AGE_S:
                file.unlink()
    for day in root.glob(f"{DAY}*"):
        with suppress(OSError):  # it is not empty
            if now - day.stat().st_mtime > _LEFTOVER_AGE_S:  # nobody is about to write into it
                os.rmdir(day)


OnSkipped = Callable[[str, str], None]  # a file's address, and why it is left out


def read_traffic(uri: str, *, since: datetime | None = None, until: datetime | None = None) -> Iterator[pa.Table]:
    """The log's requests that arrived from `since` on and before `until`, a table per shard, oldest shards first.

    Columns and metadata as in `traffic_schema`. Times need a time zone. Files that are not of the log, or are broken,
    are skipped with a warning; a shard that is deleted meanwhile is skipped. A server that is away gets the patience
    of `drafters.remote`.
    """
    yield from (table for _, table in read_shards(uri, since=since, until=until))


def read_shards(
    uri: str,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    columns: Sequence[str] | None = None,
    on_skipped: OnSkipped | None = None,
) -> Iterator[tuple[str, pa.Table]]:
    """As `read_traffic`, each table with its file's name in the log.

    Of `columns`, which need `arrived_at` among them, nothing else is fetched. `on_skipped` is told of files that are
    left out; None: a warning is.
    """
    folder = AtomicFolder(uri)
    for shard, name in _overlapping(folder, since, until):
        table = _read(folder, name, columns, on_skipped or _warn)
        if table is not None and not _lies_within(shard, since, until):
            table = _between(table, since, until)
        if table is not None and table.num_rows:
            yield name, table


def count_rows(uri: str, since: datetime | None = None, until: datetime | None = None) -> int:
    """How many requests `read_traffic` would give: from the files' names and footers, and no token is fetched.

    What is not of the log is left out without a word, here and in `live_tau`: both are asked again and again.
    """
    folder, total = AtomicFolder(uri), 0
    for shard, name in _overlapping(folder, since, until):
        within = _lies_within(shard, since, until)
        table = _read(folder, name, [] if within else ["arrived_at"], _pass_over)
        if table is not None:
            total += (table if within else _between(table, since, until)).num_rows
    return total


def live_tau(uri: str, since: datetime | None = None, until: datetime | None = None) -> dict[str, Acceptance]:
    """What verify rounds brought, by drafter version: `.tau` is the acceptance length, `.rounds` says how sure it is.

    Over the requests that `read_traffic` would give, without those that two drafters served and those without any.
    No token is fetched.
    """
    totals: dict[str, Acceptance] = {}
    columns = ["arrived_at", *_ACCEPTANCE]
    for _, table in read_shards(uri, since=since, until=until, columns=columns, on_skipped=_pass_over):
        rows = table.filter(pc.and_(pc.invert(table["drafter_changed"]), pc.is_valid(table["drafter_version"])))
        for version in rows["drafter_version"].unique().to_pylist():
            served = rows.filter(pc.equal(rows["drafter_version"], version))
            totals.setdefault(version, Acceptance()).add(_acceptance(served))
    return totals


def _acceptance(table: pa.Table) -> Acceptance:
    """The sum over all rows."""
    proposed, accepted = (_by_position(table[f"{kind}_by_position"]) for kind in ("proposed", "accepted"))
    width = max(len(proposed), len(accepted))
    return Acceptance(
        rounds=pc.sum(table["rounds"]).as_py(),
        proposed=pc.sum(table["proposed"]).as_py(),
        proposed_by_position=proposed + [0] * (width - len(proposed)),
        accepted_by_position=accepted + [0] * (width - len(accepted)),
    )


def _by_position(column: pa.ChunkedArray) -> list[int]:
    """The sums over the first, second, ... entries of all lists."""
    lists = pa.concat_arrays(column.chunks)
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    values = lists.flatten().to_numpy()
    positions = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return [int(total) for total in np.bincount(positions, weights=values)]


def _overlapping(
    folder: AtomicFolder, since: datetime | None, until: datetime | None
) -> Iterator[tuple[Shard | None, str]]:
    """(shard, name) of the files that may hold requests of that time, the oldest first; None: the name does not tell"""
    listed = [(_shard(name, size), name) for name, size in _files(folder)]
    for shard, name in sorted(listed, key=lambda item: (item[0].last.timestamp() if item[0] else 0.0, item[1])):
        if not (shard and ((since and shard.last < since) or (until and shard.first >= until))):
            yield shard, name


def _lies_within(shard: Shard | None, since: datetime | None, until: datetime | None) -> bool:
    """Whether all requests of a file are of that time."""
    if shard is None:
        return not since and not until
    return (not since or shard.first >= since) and (not until or shard.last < until)


def _warn(address: str, problem: str) -> None:
    log.warning("%s is skipped: %s", address, problem)


def _pass_over(address: str, problem: str) -> None:
    log.debug("%s is skipped: %s", address, problem)


def _read(folder: AtomicFolder, name: str, columns: Sequence[str] | None, on_skipped: OnSkipped) -> pa.Table | None:
    """A file's columns (None: all of them); None if it is gone, or left out."""
    try:
        if columns is None:
            table = pq.read_table(io.BytesIO(folder.read(name)))
            problem = schema_problem(table.schema)
        else:
            with folder.open(name) as stream:
                file = pq.ParquetFile(stream)
                problem = schema_problem(file.schema_arrow)
                table = None if problem else file.read(columns=list(columns))
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError) as error:
        # pyarrow has OSErrors without a number for damaged pages; a server's and a disk's are not the file's fault
        if isinstance(error, OSError) and (error.errno is not None or is_transient(error) or _is_away(error)):
            raise
        problem = f"it is no whole Parquet file ({first_line(error)})"
    if problem:
        on_skipped(folder.path(name), problem)
        return None
    return table


def _is_away(error: OSError) -> bool:
    return isinstance(error, ServerAwayError | PermissionError)


def _between(table: pa.Table, since: datetime | None, until: datetime | None) -> pa.Table:
    arrived, kind = table["arrived_at"], table.schema.field("arrived_at").type
    if since:
        table = table.filter(pc.greater_equal(arrived, pa.scalar(since, kind)))
        arrived = table["arrived_at"]
    return table.filter(pc.less(arrived, pa.scalar(until, kind))) if until else table
