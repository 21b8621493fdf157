"""Whole files or none, on a local folder or on s3:// (fsspec): what a killed run leaves behind can be trusted."""

from __future__ import annotations

import io
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from fsspec.implementations.local import LocalFileSystem

from drafters.remote import PATIENCE_S, RemoteFile, open_filesystem, patiently

T = TypeVar("T")

REMOTE_READ_BYTES = 2**16  # asked for at once, at least


class AtomicFolder:
    """A folder given by path or URI. Files appear under their name only when they are complete.

    Local files are written under a temporary name in `scratch`, flushed and renamed; object stores take one PUT, and
    get `patience_s` when they are away.
    """

    def __init__(self, uri: str, scratch: str = "_work", patience_s: float = PATIENCE_S):
        if "://" not in uri:
            uri = str(Path(uri).expanduser().absolute())
        self.scratch, self.patience_s = scratch, patience_s
        self.fs, root = open_filesystem(uri.rstrip("/"))
        self.root = str(root).rstrip("/")
        # absolute, so that it means the same to workers, whose working directory is another
        self.uri = self.root if isinstance(self.fs, LocalFileSystem) else uri.rstrip("/")

    @property
    def local(self) -> Path | None:
        """The folder's path if it is local."""
        return Path(self.root) if isinstance(self.fs, LocalFileSystem) else None

    def check_bucket(self) -> None:
        """Raise FileNotFoundError if the folder's bucket does not exist: some servers make one of any name."""
        bucket = self.root.split("/")[0]
        if "s3" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,)):
            try:
                patiently(lambda: self.fs.info(bucket), self.patience_s)
            except FileNotFoundError:
                raise FileNotFoundError(f"there is no bucket {bucket}") from None
            except PermissionError:
                pass  # who may not look at a bucket may still write into it

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def write(self, name: str, data: Any) -> None:
        """Write a file (bytes or a buffer) atomically, replacing an older one."""
        if self.local is None:
            patiently(lambda: self.fs.pipe_file(self.path(name), bytes(data)), self.patience_s)
        else:
            self._place(name, data, os.replace)

    def create(self, name: str, data: Any) -> None:
        """Write a file as `write` does, if there is none of this name yet: of several writers one wins.

        Raises FileExistsError. After a server's lost answer a writer may meet its own file: compare what it holds.
        """
        if self.local is None:
            patiently(lambda: self._put_new(name, bytes(data)), self.patience_s)
        else:
            self._place(name, data, os.link)

    def _put_new(self, name: str, data: bytes) -> None:
        try:
            self.fs.pipe_file(self.path(name), data, mode="create")
        except OSError as error:
            told = error.__cause__ or error  # s3fs knows no error of its own for a condition that fails
            code = getattr(told, "response", {}).get("Error", {}).get("Code", "")
            if code in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise FileExistsError(f"{self.path(name)} is there already") from error
            raise

    def _place(self, name: str, data: Any, put: Callable[[Path, Path], object]) -> None:
        """Write a whole local file aside, then `put` it under its name."""
        assert self.local is not None
        final = self.local / name
        temp = self.local / self.scratch / f"{final.name}.{uuid.uuid4().hex}.tmp"
        for folder in (temp.parent, final.parent):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            with temp.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            put(temp, final)
        finally:
            temp.unlink(missing_ok=True)
        _sync_folder(final.parent)

    def read(self, name: str) -> bytes:
        """The file's bytes. Raises FileNotFoundError."""
        return bytes(self._ask(lambda: self.fs.cat_file(self.path(name))))

    def open(self, name: str) -> IO[bytes]:
        """The file, to read anywhere in. Raises FileNotFoundError."""
        if self.local is not None:
            return self.fs.open(self.path(name), "rb")
        return io.BufferedReader(RemoteFile(self.fs, self.path(name)), REMOTE_READ_BYTES)

    def _ask(self, operation: Callable[[], T]) -> T:
        """With patience for a server; a local disk gets none."""
        return operation() if self.local is not None else patiently(operation, self.patience_s)

    def size(self, name: str) -> int | None:
        """Bytes of a file, or None if it does not exist."""
        try:
            return int(self._ask(lambda: self.fs.info(self.path(name)))["size"])
        except FileNotFoundError:
            return None

    def names(self, folder: str = "") -> list[str]:
        """Names in the folder (or a sub-folder of it), sorted; none if it does not exist."""
        self.fs.invalidate_cache()
        try:
            entries = self._ask(lambda: self.fs.ls(self.path(folder).rstrip("/"), detail=False))
        except FileNotFoundError:
            return []
        return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries)

    def clear_scratch(self, only_temporary: bool = False) -> None:
        """Remove the scratch folder, or only what killed writers left in it."""
        local = self.local
        if local is None:
            if not only_temporary and self.names(self.scratch):
                patiently(lambda: self.fs.rm(self.path(self.scratch), recursive=True))
        elif only_temporary:
            for file in (local / self.scratch).glob("*.tmp"):
                file.unlink(missing_ok=True)
        else:
            shutil.rmtree(local / self.scratch, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
