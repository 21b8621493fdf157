"""One run at a time over all machines: a lease in a folder, local or s3://. `redistill` and `schedule` hold one.

Its records are numbered, each created exclusively (`AtomicFolder.create`), and the highest is the one that counts: a
holder renews by creating the next one, and whoever takes over from a dead holder creates that same one, so that one of
them wins and the other learns of it.

What is assumed of clocks: that they run equally fast. A holder counts as dead when somebody who watched has seen no new
record for the holder's `ttl_s`, by the watcher's own clock. Only a record that is older than CLOCKS_S on top of that is
believed at once, so machines may differ by up to CLOCKS_S.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from drafters.atomic_files import AtomicFolder
from drafters.remote import first_line

TTL_S = 60.0
CLOCKS_S = 300.0  # by which the clocks of two machines may differ
FOLDER = "lease"
KEPT = 8  # records; a listing that is under way while others write must still meet the highest
TRIES = 5  # times that a lease which another gave back meanwhile is tried for again


class LeaseError(RuntimeError):
    """A lease that cannot be read; one line."""


class LeaseHeldError(LeaseError):
    """Another holds the lease; one line: who, since when."""


class LeaseLostError(LeaseError):
    """The lease is no longer this run's; one line: why, and who has it."""


@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    """What the highest record says of the lease's holder."""

    number: int
    owner: str
    token: str  # of one `RunLease`: two may have the same owner
    since: datetime  # UTC, when its holder got it
    at: datetime  # UTC, when this record was begun, by the holder's clock
    ttl_s: float
    process: str = ""  # of the holder: its machine since its start, its process id; "" where the system does not tell
    released: bool = False

    def __str__(self) -> str:
        return f"{self.owner} since {_said(self.since)} (last heard of at {_said(self.at)})"

    def is_long_dead(self, now: datetime) -> bool:
        """Whether its holder has been silent for so long that nobody needs to watch it, whatever the clocks."""
        return not self.released and (now - self.at).total_seconds() > self.ttl_s + CLOCKS_S

    def is_gone_here(self) -> bool:
        """Whether its holder was a process of this machine that is no more: nobody needs to wait for it."""
        machine, _, number = self.process.rpartition(" ")
        if not machine or machine != _this_process().rpartition(" ")[0]:
            return False
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            return True
        except OSError:  # another user's
            pass
        return False

    def as_json(self) -> bytes:
        fields = asdict(self) | {"since": self.since.isoformat(), "at": self.at.isoformat()}
        return json.dumps(fields, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> LeaseRecord:
        fields: dict[str, Any] = json.loads(data)
        times = {name: datetime.fromisoformat(fields[name]) for name in ("since", "at")}
        return cls(**fields | times)


def lease_record(folder: AtomicFolder) -> LeaseRecord | None:
    """The lease's latest record, also one that was given back or whose holder is dead; None if there is none yet."""
    for _ in range(TRIES):
        number = _highest(folder)
        if number == 0:
            return None
        with contextlib.suppress(FileNotFoundError):  # many newer ones since the listing
            return _read(folder, number)
    raise LeaseError(f"the lease in {folder.uri} changes faster than it can be read; try again")


class RunLease:
    """The lease of a folder, held from `with` to its end, and renewed by a thread meanwhile.

    Raises LeaseHeldError when another holds it, which takes up to a third of the holder's `ttl_s` to see, and takes it
    over from one that is dead: at once from a killed process of this machine, else after its `ttl_s` at the latest.
    `owner` is for people. A holder that was suspended, or kept from its file server, for longer than `ttl_s` has lost
    the lease: call `check` before what must not be done by two.
    """

    def __init__(self, folder: AtomicFolder, owner: str, ttl_s: float = TTL_S):
        self.ttl_s, self.owner = ttl_s, f"{owner} on {socket.gethostname()} (process {os.getpid()})"
        # a server that is away for longer than the lease lasts need not be waited for
        self._folder = AtomicFolder(folder.uri, folder.scratch, patience_s=min(folder.patience_s, ttl_s))
        self._token = uuid.uuid4().hex
        self._record: LeaseRecord | None = None
        self._fresh_until = 0.0  # monotonic: nobody can have taken it over before
        self._lost: str | None = None
        self._trouble = ""
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="run lease", daemon=True)

    def __enter__(self) -> RunLease:
        self._take()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._lost is None and self._record is not None:
            with contextlib.suppress(OSError):  # then it runs out by itself
                self._claim(replace(self._next(self._record.number), released=True))

    def check(self) -> None:
        """Raise LeaseLostError if another may have the lease by now. Asks nobody, so call it often."""
        if self._lost is not None:
            raise LeaseLostError(self._lost)
        if time.monotonic() > self._fresh_until:
            why = f" ({self._trouble})" if self._trouble else ""
            raise LeaseLostError(
                f"the lease in {self._folder.uri} could not be renewed for {self.ttl_s:g} s{why}, so another run may "
                "have it; this one stops, run the same command again"
            )

    def renew(self) -> None:
        """Renew the lease now, which also proves it: raises LeaseLostError if another took it over."""
        with self._lock:
            if self._lost is None and self._record is not None and not self._claim(self._next(self._record.number)):
                self._lost = (
                    f"the lease in {self._folder.uri} went to {lease_record(self._folder)} after {self.ttl_s:g} s "
                    "without a sign of this run; this one stops, the other goes on"
                )
            if self._lost is not None:
                raise LeaseLostError(self._lost)

    def _keep(self) -> None:
        while not self._ended.wait(self.ttl_s / 3):
            try:
                self.renew()
            except LeaseLostError:
                return
            except (OSError, RuntimeError) as error:  # the server may be back in time; `check` tells if it is not
                self._trouble = first_line(error)

    def _take(self) -> None:
        latest = lease_record(self._folder)
        for _ in range(TRIES):
            if latest is not None and not latest.released:
                latest = self._await_silence(latest)
            if self._claim(self._next(latest.number if latest else 0)):
                return
            latest = lease_record(self._folder)
            if latest is not None and not latest.released:
                break  # another was faster, this moment
        raise self._held(latest)

    def _await_silence(self, seen: LeaseRecord) -> LeaseRecord:
        """The record after which its holder said no more, or gave the lease back. Raises LeaseHeldError."""
        began = time.monotonic()
        if seen.is_long_dead(datetime.now(UTC)) or seen.is_gone_here():
            return seen
        while time.monotonic() - began < seen.ttl_s:
            time.sleep(min(seen.ttl_s / 10, 1.0))
            latest = lease_record(self._folder)
            if latest is not None and latest.number > seen.number:
                if latest.released:
                    return latest
                raise self._held(latest)
        return seen

    def _held(self, by: LeaseRecord | None) -> LeaseHeldError:
        return LeaseHeldError(f"{self._folder.uri} is held by {by}; let it end, or stop it, and try again")

    def _next(self, number: int) -> LeaseRecord:
        now = datetime.now(UTC)
        since = self._record.since if self._record else now
        return LeaseRecord(
            number=number + 1, owner=self.owner, token=self._token, since=since, at=now, ttl_s=self.ttl_s,
            process=_this_process(),
        )  # fmt: skip

    def _claim(self, record: LeaseRecord) -> bool:
        """Create the record, and see whether that makes the lease ours."""
        began = time.monotonic()
        try:
            self._folder.create(_name(record.number), record.as_json())
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if _read(self._folder, record.number).token != self._token:  # else: a try whose answer got lost
                    return False
        if _highest(self._folder) != record.number:
            # Slower than all of KEPT records: its number had been given out and removed. The highest only grows.
            self._remove(record.number)
            return False
        # Others count from when they first saw the record, which is later; a tenth for clocks that run unequally.
        self._record, self._fresh_until, self._trouble = record, began + 0.9 * self.ttl_s, ""
        for number in _numbers(self._folder):
            if number <= record.number - KEPT:
                self._remove(number)
        return True

    def _remove(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._folder.fs.rm_file(self._folder.path(_name(number)))


def _this_process() -> str:
    """What tells this process from all others, also of other machines and containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return ""
    return f"{boot} {namespace} {os.getpid()}"


def _name(number: int) -> str:
    return f"{FOLDER}/{number:08d}.json"


def _numbers(folder: AtomicFolder) -> list[int]:
    stems = [name.removesuffix(".json") for name in folder.names(FOLDER)]
    return [int(stem) for stem in stems if stem.isdigit()]


def _highest(folder: AtomicFolder) -> int:
    return max(_numbers(folder), default=0)


def _read(folder: AtomicFolder, number: int) -> LeaseRecord:
    try:
        return LeaseRecord.from_json(folder.read(_name(number)))
    except (ValueError, TypeError, KeyError, AttributeError):
        where = f"{folder.uri}/{_name(number)}"
        raise LeaseError(f"{where} is no record of a lease; if nothing runs there, remove {FOLDER}/") from None


def _said(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
