"""One run at a time: exactly one of many gets the lease, a dead holder's is taken over once, a lost one is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafters.atomic_files import AtomicFolder
from pipelines import run_lease
from pipelines.run_lease import CLOCKS_S, KEPT, LeaseHeldError, LeaseLostError, LeaseRecord, RunLease, lease_record
from tests.s3_server import BUCKET

ROOT = Path(__file__).parent.parent.parent
CONTENDERS = 12
LONG_S = 600.0  # nothing runs out within a test
DEADLINE_S = 60.0
SHORT_S = 0.6  # waited for in full where a holder is dead


@pytest.fixture
def folder(tmp_path: Path) -> AtomicFolder:
    return AtomicFolder(str(tmp_path))


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.ray)])  # ray: tests that start servers
def any_folder(request: pytest.FixtureRequest, tmp_path: Path) -> AtomicFolder:
    if request.param == "local":
        return AtomicFolder(str(tmp_path))
    request.getfixturevalue("s3_server")
    return AtomicFolder(f"s3://{BUCKET}/leases")


def dead(number: int, *, ttl_s: float, ago_s: float) -> LeaseRecord:
    at = datetime.now(UTC) - timedelta(seconds=ago_s)
    return LeaseRecord(number=number, owner="a dead run", token="of the dead", since=at, at=at, ttl_s=ttl_s)


def put(folder: AtomicFolder, record: LeaseRecord) -> None:
    folder.create(f"lease/{record.number:08d}.json", record.as_json())


def contend(folder: AtomicFolder, how_many: int = CONTENDERS) -> tuple[list[RunLease], list[LeaseHeldError]]:
    """Leases that contenders got, all of them trying at once, and what the others were told."""
    start, refused = threading.Barrier(how_many), list[LeaseHeldError]()

    def take(number: int) -> RunLease | LeaseHeldError:
        lease = RunLease(folder, f"contender {number}", ttl_s=LONG_S)
        start.wait(DEADLINE_S)
        try:
            lease.__enter__()
        except LeaseHeldError as error:
            refused.append(error)
            return error
        deadline = time.monotonic() + DEADLINE_S
        while len(refused) < how_many - 1 and time.monotonic() < deadline:
            time.sleep(0.1)
            lease.renew()  # a sign of life for those who came after its first record
        return lease

    with ThreadPoolExecutor(how_many) as threads:
        ended = list(threads.map(take, range(how_many)))
    return [e for e in ended if isinstance(e, RunLease)], [e for e in ended if isinstance(e, LeaseHeldError)]


def lease_holds(lease: RunLease) -> bool:
    try:
        lease.check()
    except LeaseLostError:
        return False
    return True


def test_of_many_contenders_one_takes_over_from_a_dead_holder(any_folder: AtomicFolder):
    put(any_folder, dead(7, ttl_s=60, ago_s=60 + CLOCKS_S + 1))
    got, refused = contend(any_folder)
    assert (len(got), len(refused)) == (1, CONTENDERS - 1)
    lease = got[0]
    assert all(f"held by {lease.owner}" in str(error) for error in refused)
    lease.renew()
    lease.check()
    lease.__exit__(None, None, None)
    left = lease_record(any_folder)
    assert left is not None
    assert left.released
    with RunLease(any_folder, "the next", ttl_s=LONG_S) as after:  # at once: it was given back
        after.check()


def test_a_first_lease_is_one_contender_s_too(folder: AtomicFolder):
    got, _ = contend(folder)
    assert len(got) == 1
    got[0].__exit__(None, None, None)


def test_a_killed_holder_is_replaced_by_one_of_those_who_wait(folder: AtomicFolder):
    code = (
        "import sys, time\nfrom drafters.atomic_files import AtomicFolder\nfrom pipelines.run_lease import RunLease\n"
        f"with RunLease(AtomicFolder(sys.argv[1]), 'the first', ttl_s={SHORT_S}):\n"
        "    print('held', flush=True)\n    time.sleep(600)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder.local)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait(timeout=30)
    left = lease_record(folder)
    assert left is not None
    assert not left.released
    got, refused = contend(folder, 6)
    assert (len(got), len(refused)) == (1, 5)
    now = lease_record(folder)
    assert now is not None
    assert now.number > left.number
    got[0].__exit__(None, None, None)
    if not left.process:
        return  # the system does not tell one process from another
    put(folder, replace(left, number=now.number + 2, at=datetime.now(UTC), ttl_s=600.0))
    assert lease_record(folder).is_gone_here()
    with RunLease(folder, "the next"):  # ten minutes are not waited for
        pass
    assert not replace(left, process=f"another machine {os.getpid()}").is_gone_here()


def test_a_holder_that_lives_keeps_it_and_leaves_few_records(folder: AtomicFolder):
    with RunLease(folder, "a run", ttl_s=LONG_S) as lease:
        first = lease_record(folder)
        for _ in range(3 * KEPT):
            lease.renew()
        last = lease_record(folder)
        assert first is not None
        assert last is not None
        assert (last.number - first.number, last.since) == (3 * KEPT, first.since)
        assert len(folder.names("lease")) == KEPT


def test_a_contender_who_sees_a_sign_of_life_is_told_who_holds_it(
    folder: AtomicFolder, monkeypatch: pytest.MonkeyPatch
):
    # older than its `ttl_s` by minutes: its clock may be slow, which is no reason to take it for dead
    seen = dead(1, ttl_s=LONG_S, ago_s=LONG_S + CLOCKS_S / 2)
    put(folder, seen)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: put(folder, replace(seen, number=2)))
    monkeypatch.setattr(run_lease, "time", clock)
    with pytest.raises(LeaseHeldError, match=r"is held by a dead run since .* UTC") as told, RunLease(folder, "late"):
        pass
    assert "\n" not in str(told.value)
    assert folder.names("lease") == ["00000001.json", "00000002.json"], "the refused one left nothing"


def test_a_holder_notices_who_took_over(folder: AtomicFolder):
    with RunLease(folder, "slow", ttl_s=LONG_S) as slow:
        put(folder, replace(dead(2, ttl_s=LONG_S, ago_s=0), owner="quick"))
        slow.check()  # nothing asked yet
        with pytest.raises(LeaseLostError, match="went to quick since"):
            slow.renew()
        with pytest.raises(LeaseLostError, match="went to quick since"):
            slow.check()
    left = lease_record(folder)
    assert left is not None
    assert (left.owner, left.released) == ("quick", False), "what is another's is not given back"


def test_a_number_that_was_given_out_and_removed_is_no_lease(folder: AtomicFolder):
    """A holder that was suspended while others wrote so many records that its next number is gone again."""
    with RunLease(folder, "suspended", ttl_s=LONG_S) as lease:
        folder.fs.rm_file(folder.path("lease/00000001.json"))
        put(folder, dead(40, ttl_s=LONG_S, ago_s=0))
        with pytest.raises(LeaseLostError):
            lease.renew()
    assert folder.names("lease") == ["00000040.json"]


def test_a_lease_that_cannot_be_renewed_counts_as_lost_before_others_take_it(
    folder: AtomicFolder, monkeypatch: pytest.MonkeyPatch
):
    def away(self: AtomicFolder, name: str, data: bytes) -> None:
        raise OSError("the disk is gone")

    with RunLease(folder, "cut off", ttl_s=SHORT_S) as lease:
        monkeypatch.setattr(AtomicFolder, "create", away)
        deadline = time.monotonic() + 30
        while lease_holds(lease) or not lease._trouble:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(LeaseLostError, match=r"could not be renewed for 0\.6 s \(the disk is gone\)"):
            lease.check()
        record = lease_record(folder)
        assert record is not None
        assert not record.released
        monkeypatch.undo()
        lease.ttl_s = LONG_S  # of the next record, however slow the disk is
        lease.renew()  # nobody took it meanwhile
        lease.check()


def test_a_lease_is_given_back_when_a_run_fails(folder: AtomicFolder):
    with pytest.raises(ZeroDivisionError), RunLease(folder, "fails", ttl_s=LONG_S):
        raise ZeroDivisionError
    left = lease_record(folder)
    assert left is not None
    assert left.released


def test_a_damaged_record_is_named(folder: AtomicFolder):
    folder.write("lease/00000003.json", b"{")
    with pytest.raises(RuntimeError, match=r"lease/00000003\.json is no record of a lease"), RunLease(folder, "x"):
        pass
