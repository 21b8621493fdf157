"""Patience with a server that is away, none with a wrong key; reading anywhere in a remote file."""

from __future__ import annotations

import errno
import io
import random

import botocore.exceptions
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error

from drafters import remote
from drafters.remote import RemoteFile, ServerAwayError, is_transient, patiently, storage_options


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Sleeping takes no time; what was slept is noted."""
    slept: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", slept.append)
    monkeypatch.setattr(remote.time, "monotonic", lambda: sum(slept))
    return slept


AWAY = [
    ConnectionRefusedError(),
    TimeoutError(),
    OSError(errno.EBUSY, "slow down"),
    OSError(errno.EIO, "cut off"),
    translate_boto_error(ClientError({"Error": {"Code": "InternalError"}}, "PutObject")),
    translate_boto_error(ClientError({"Error": {"Code": "500"}}, "PutObject")),
    translate_boto_error(ClientError({"Error": {"Code": "SlowDown"}}, "PutObject")),
    botocore.exceptions.EndpointConnectionError(endpoint_url="http://127.0.0.1:1"),
    botocore.exceptions.ReadTimeoutError(endpoint_url="http://127.0.0.1:1"),
]
FINAL = [
    FileNotFoundError("no bucket"),
    PermissionError("wrong key"),
    OSError(errno.ENOSPC, "disk full"),
    botocore.exceptions.NoCredentialsError(),
    ValueError("a bug"),
]


@pytest.mark.parametrize("error", AWAY, ids=lambda error: type(error).__name__)
def test_a_server_that_comes_back_costs_time_only(error, clock):
    answers = iter([error, error, error, "data"])

    def operation():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert is_transient(error)
    assert patiently(operation) == "data"
    assert len(clock) == 3
    assert clock[0] < clock[1] < clock[2] <= 4 * remote.FIRST_WAIT_S


@pytest.mark.parametrize("error", FINAL, ids=lambda error: type(error).__name__)
def test_what_waiting_does_not_mend_is_told_at_once(error, clock):
    def operation():
        raise error

    with pytest.raises(type(error)):
        patiently(operation)
    assert clock == []


def test_patience_ends(clock):
    def operation():
        raise ConnectionRefusedError

    with pytest.raises(ServerAwayError, match=r"no answer for 60 s \(ConnectionRefusedError\); run the same") as caught:
        patiently(operation, patience_s=60)
    assert not is_transient(caught.value), "whoever waits around it must not begin anew"
    assert 45 < sum(clock) <= 60
    assert max(clock) <= remote.LONGEST_WAIT_S


def test_a_remote_file_is_read_like_a_local_one():
    data = random.Random(0).randbytes(100_000)
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/remote-test/file", data)
    file = io.BufferedReader(RemoteFile(fs, "/remote-test/file"), 4096)
    rng = random.Random(1)
    for _ in range(50):
        start, count = rng.randrange(100_000), rng.randrange(9_000)
        file.seek(start)
        assert file.read(count) == data[start : start + count]
    assert file.seek(-10, io.SEEK_END) == 99_990
    assert file.read() == data[-10:]
    assert file.read() == b""


def test_parquet_is_read_through_it_in_pieces():
    table = pa.table({"small": list(range(1000)), "large": ["x" * 1000] * 1000})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="none", use_dictionary=False)
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/remote-test/table", sink.getvalue())
    read = 0

    class Counting:
        info = staticmethod(fs.info)

        @staticmethod
        def cat_file(path, start, end):
            nonlocal read
            read += end - start
            return fs.cat_file(path, start=start, end=end)

    found = pq.ParquetFile(io.BufferedReader(RemoteFile(Counting, "/remote-test/table"))).read(columns=["small"])
    assert found.column("small").to_pylist() == list(range(1000))
    assert read < 100_000, "a column of numbers took the whole file"


def test_other_servers_are_asked_by_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert storage_options("s3://bucket/x") == {}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert storage_options("s3://bucket/x") == {"config_kwargs": {"s3": {"addressing_style": "path"}}}
    assert storage_options("/local/x") == {}
