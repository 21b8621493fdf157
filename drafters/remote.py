"""Files on an object store: addresses and operations in, the same with the right options and with patience out.

Credentials come the usual ways (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, a machine's role), another
server than Amazon's by AWS_ENDPOINT_URL. A server that is away for some minutes costs these minutes and nothing else; a
wrong key or a missing bucket is told at once.
"""

from __future__ import annotations

import errno
import io
import os
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec

T = TypeVar("T")

PATIENCE_S = 300.0  # how long an operation is tried again
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0  # between two tries, doubling
REMOTE_IO = getattr(errno, "EREMOTEIO", 121)  # s3fs's word for a server's internal error; not every system has it
TRANSIENT = {
    errno.EBUSY, errno.EIO, REMOTE_IO, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.EPIPE,
}  # fmt: skip


class ServerAwayError(OSError):
    """A server that was away for longer than anybody waits; one line."""


AWAY = {  # by name: other object stores come without botocore
    "botocore.exceptions.HTTPClientError",
    "botocore.exceptions.ConnectionError",
    "aiohttp.client_exceptions.ClientError",
}


def storage_options(uri: str) -> dict[str, Any]:
    """What fsspec must be told beside the address."""
    if uri.startswith(("s3://", "s3a://")) and os.environ.get("AWS_ENDPOINT_URL"):
        return {"config_kwargs": {"s3": {"addressing_style": "path"}}}  # other servers know no bucket as a host name
    return {}


def open_filesystem(uri: str) -> tuple[Any, str]:
    """(file system, path in it) of a path or an address."""
    return fsspec.core.url_to_fs(uri, **storage_options(uri))


def is_transient(error: BaseException) -> bool:
    """Whether the same operation may succeed a moment later."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return False
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    names = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    return bool(names & AWAY) or (isinstance(error, OSError) and error.errno in TRANSIENT)


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def patiently(operation: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """The operation's result; while it fails as a server does that is away, it is tried again.

    Raises what the operation raises, or ServerAwayError when patience is over.
    """
    deadline = time.monotonic() + patience_s
    wait = FIRST_WAIT_S
    while True:
        try:
            return operation()
        except Exception as error:
            if not is_transient(error):
                raise
            if time.monotonic() + wait > deadline:
                raise ServerAwayError(
                    f"the file server gave no answer for {patience_s:.0f} s ({first_line(error)}); "
                    "run the same command again when it is back"
                ) from error
        time.sleep(wait * random.uniform(0.7, 1.0))  # many workers must not come back in step
        wait = min(2 * wait, LONGEST_WAIT_S)


class RemoteFile(io.RawIOBase):
    """A remote file to read anywhere in, each piece with patience. Wrap it into a buffer for small reads."""

    def __init__(self, fs: Any, path: str):
        self._fs, self._path, self._place = fs, path, 0
        self._size = int(patiently(lambda: fs.info(path))["size"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, start + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        start, end = self._place, min(self._place + len(buffer), self._size)
        if end <= start:
            return 0
        data = patiently(lambda: self._fs.cat_file(self._path, start=start, end=end))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
