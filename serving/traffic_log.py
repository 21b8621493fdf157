"""The traffic log: answered requests in, Parquet shards out, written by a thread that no response ever waits for.

`serving/replica.py` makes one per replica, `traffic_shards.read_traffic` reads what they wrote. While disk or object
store are full, slow or away, rows wait in memory up to a bound; further ones are dropped, and counted.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from drafters.atomic_files import AtomicFolder
from drafters.remote import first_line
from serving.traffic_schema import TrafficCounts, TrafficMetadata, TrafficRow, traffic_table
from serving.traffic_shards import delete_old, shard_name

log = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0  # between two attempts to write a shard, doubling
CLOSING_RETRY_S = 0.2  # the same once the end is near
CHECK_PATIENCE_S = 10.0  # for an object store at the start of a service
IDLE_SWEEP_S = 3600.0  # old shards are deleted that often even if none is written
FULL, UNWRITABLE, SHUTDOWN = "full", "unwritable", "shutdown"  # why rows are dropped
WRITE, DELETE = "write", "delete"  # what fails

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class TrafficLogError(ValueError):
    """A traffic log that cannot be opened; one line with cause and mend."""


class TrafficLogConfig(BaseModel):
    """Where and how much of the traffic is logged. `uri` None: nothing is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    uri: str | None = None  # folder, local or s3://; replicas share it
    sample_rate: Annotated[float, Field(ge=0, le=1)] = 1.0  # share of the requests, chosen by their ids
    rows_per_shard: Count = 1024  # a shard is written as soon as so many rows wait,
    flush_interval_s: Seconds = 60.0  # and after so long with fewer
    max_bytes: Count = 10 * 2**30  # of all shards together, whoever wrote them; the oldest are deleted
    max_age_s: Seconds = 30 * 86400.0  # of a shard's youngest request
    max_pending_rows: Count = 4096  # that wait in memory, four bytes a token


def open_folder(config: TrafficLogConfig, patience_s: float = 0.0) -> AtomicFolder:
    """The log's folder; nothing is asked of it yet. Raises TrafficLogError for an address that nothing can open."""
    assert config.uri is not None, "the traffic log is off"
    try:
        return AtomicFolder(config.uri, patience_s=patience_s)
    except (ValueError, ImportError, OSError) as error:
        raise TrafficLogError(
            f"traffic log {config.uri} cannot be opened ({first_line(error)}); give a folder, local or s3://"
        ) from error


def check_folder(config: TrafficLogConfig) -> None:
    """Raise TrafficLogError if nothing could be written there, before a service starts."""
    folder = open_folder(config, CHECK_PATIENCE_S)
    try:
        if folder.local is None:
            folder.check_bucket()
        else:
            folder.local.mkdir(parents=True, exist_ok=True)
            if not os.access(folder.local, os.W_OK):
                raise PermissionError("permission denied")
    except Exception as error:  # every file system has its own kinds
        raise TrafficLogError(
            f"traffic log {config.uri} cannot be written ({first_line(error)}); check address and access"
        ) from error


class TrafficLog:
    """Writes one replica's rows. `record`, `wants` and `counts` may be called from any thread and return at once."""

    def __init__(self, config: TrafficLogConfig, metadata: TrafficMetadata, *, writer: str | None = None):
        """`writer` names the replica in its files' names; None: a random name. Raises TrafficLogError."""
        self._config, self._metadata = config, metadata
        self._folder = open_folder(config)
        self._writer = writer or uuid.uuid4().hex[:12]
        self._numbers = 0  # of the thread
        self._failing: set[str] = set()  # of the thread: what failed last time
        self._next_sweep = 0.0  # of the thread
        self._wake = threading.Condition()  # over all below
        self._pending: deque[TrafficRow] = deque()
        self._writing = 0  # rows of the shard that is being written
        self._close_at: float | None = None
        self._told_full = False
        self._done: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="draftloop-traffic", daemon=True)
        self._thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    def wants(self, request_id: str) -> bool:
        """Whether this request is in the sample: the same answer for the same id, everywhere."""
        share = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8]) / 2**64
        return share < self._config.sample_rate

    def record(self, row: TrafficRow) -> None:
        """Log a row soon, if its request is in the sample. Never waits for a file, never fails."""
        if not self.wants(row.request_id):
            return
        with self._wake:
            waiting = len(self._pending) + self._writing
            reason = SHUTDOWN if self._close_at is not None else FULL if waiting >= self._most else None
            if reason is not None:
                self._dropped[reason] += 1
            else:
                self._pending.append(row)
                if len(self._pending) >= self._batch:
                    self._wake.notify()
            newly_full = reason == FULL and not self._told_full
            self._told_full = reason == FULL
        if newly_full:
            log.warning("traffic log %s: %d rows wait already, further ones are dropped", self._config.uri, waiting)

    def counts(self) -> TrafficCounts:
        """What was written and lost so far."""
        with self._wake:
            return TrafficCounts(
                rows=self._done["rows"],
                shards=self._done["shards"],
                bytes=self._done["bytes"],
                deleted=self._done["deleted"],
                pending=len(self._pending) + self._writing,
                dropped=dict(self._dropped),
                failures=dict(self._failures),
            )

    def close(self, deadline_s: float) -> bool:
        """Take no more rows, write those that wait for up to `deadline_s`, drop the rest. True: nothing was left."""
        with self._wake:
            self._close_at = time.monotonic() + deadline_s
            self._wake.notify()
        self._thread.join(timeout=deadline_s)  # an attempt that hangs is not waited for
        with self._wake:
            left = len(self._pending) + self._writing
            self._pending.clear()
            self._writing = 0
            if left:
                self._dropped[SHUTDOWN] += left
        if left:
            log.warning("traffic log %s: %d rows were not written before the end", self._config.uri, left)
        return not left

    # -- the thread -----------------------------------------------------------------------------------------------

    @property
    def _most(self) -> int:
        return self._config.max_pending_rows

    @property
    def _batch(self) -> int:
        """Rows that make a shard."""
        return min(self._config.rows_per_shard, self._most)

    def _run(self) -> None:
        try:
            self._sweep()
            while (rows := self._next_rows()) is not None:
                if rows:
                    self._write_until_done(rows)
                    self._next_sweep = 0.0
                self._sweep()
        except Exception:  # the service goes on without its log
            log.exception("traffic log %s: nothing more is written", self._config.uri)

    def _next_rows(self) -> list[TrafficRow] | None:
        """The next shard's rows, none if the interval brought none; None at the end."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._close_at is not None or len(self._pending) >= self._batch, self._config.flush_interval_s
            )
            if self._close_at is not None and (not self._pending or time.monotonic() >= self._close_at):
                return None
            rows = [self._pending.popleft() for _ in range(min(self._batch, len(self._pending)))]
            self._writing = len(rows)
            return rows

    def _write_until_done(self, rows: list[TrafficRow]) -> None:
        """The same file with the same bytes at each attempt: one that failed may have arrived all the same."""
        try:
            name, data = self._shard(rows)
        except Exception:  # a bug; it must not stop the log
            log.exception("traffic log %s: %d rows make no shard", self._config.uri, len(rows))
            with self._wake:
                self._dropped[UNWRITABLE] += self._writing
                self._writing = 0
            return
        wait_s = FIRST_RETRY_S
        while not self._attempt(WRITE, lambda: self._folder.write(name, data)):
            if not self._pause(wait_s):
                return  # `close` counts them
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)
        with self._wake:
            if self._writing:  # else `close` has given them up
                self._done.update(rows=len(rows), shards=1, bytes=len(data))
            self._writing = 0

    def _pause(self, seconds: float) -> bool:
        """Before another attempt. False: there is no time for one."""
        with self._wake:
            self._wake.wait_for(lambda: self._close_at is not None, seconds)
            close_at = self._close_at
        if close_at is None:
            return True
        left_s = close_at - time.monotonic()
        time.sleep(max(0.0, min(CLOSING_RETRY_S, left_s)))
        return left_s > 0

    def _attempt(self, what: str, operation: Callable[[], object]) -> bool:
        """Whether it worked. The log has a line when it begins to fail, and when it works again."""
        try:
            operation()
        except Exception as error:  # every file system has its own kinds
            with self._wake:
                self._failures[what] += 1
            if what not in self._failing:
                self._failing.add(what)
                reason = first_line(error.__cause__ or error)
                log.warning("traffic log %s: cannot %s (%s); trying again later", self._config.uri, what, reason)
            return False
        if what in self._failing:
            self._failing.remove(what)
            log.warning("traffic log %s: can %s again", self._config.uri, what)
        return True

    def _shard(self, rows: list[TrafficRow]) -> tuple[str, pa.Buffer]:
        self._numbers += 1
        arrivals = [row.arrived_us for row in rows]
        sink = pa.BufferOutputStream()
        pq.write_table(traffic_table(rows, self._metadata), sink, compression="zstd")
        return shard_name(min(arrivals), max(arrivals), self._writer, self._numbers), sink.getvalue()

    def _sweep(self) -> None:
        """Delete what is too old or too much."""
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + IDLE_SWEEP_S

        def delete() -> None:
            config = self._config
            deleted = delete_old(self._folder, max_bytes=config.max_bytes, max_age_s=config.max_age_s)
            with self._wake:
                self._done["deleted"] += deleted

        self._attempt(DELETE, delete)
