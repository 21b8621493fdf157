"""Where a training run keeps its state and puts its drafter: an output path or URI in. Local folder or object store.

The state lies beside the output, under a hidden name, until the drafter is in its place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.fs import FSSpecHandler, PyFileSystem

from drafters.atomic_files import AtomicFolder
from drafters.checkpoint import CONFIG, is_drafter
from drafters.remote import RemoteFile, first_line, open_filesystem, patiently
from pipelines.joint_setup import TRUNK
from pipelines.train_config import TrainError
from pipelines.training_log import METRICS, PLOT, TENSORBOARD

DRAFTER_FILES = {
    CONFIG, "model.safetensors", "provenance.json", "evaluation.json", METRICS, TENSORBOARD, PLOT, TRUNK,
}  # fmt: skip


class LocalStorage:
    """A folder."""

    def __init__(self, output: Path):
        self.output = output
        self.work = output.parent / f".{output.name}.training"

    @property
    def uri(self) -> str:
        return str(self.output)

    @property
    def run_options(self) -> dict[str, Any]:
        """What Ray Train is told of the run's state."""
        return {"storage_path": str(self.work)}

    @property
    def state(self) -> AtomicFolder:
        return AtomicFolder(str(self.work), scratch=".")

    @property
    def live_log(self) -> Path | None:
        """Where metrics are written while the run goes on."""
        return self.work / "live"

    def check(self) -> None:
        """Refuse to replace anything but an older drafter, such as a target's folder. Raises TrainError."""
        output = self.output
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            names = {p.name for p in output.iterdir() if not p.name.startswith(".")} if output.exists() else set()
        except OSError as error:
            raise TrainError(f"output {output} cannot be used ({error.strerror}); give a new or empty folder") from None
        refuse_foreign(self.uri, names, drafter=is_drafter(output))
        if not os.access(output.parent, os.W_OK):
            raise TrainError(f"output {output} cannot be written; give a folder that you may write to")

    def staging_folder(self) -> Path:
        """A new folder for the finished drafter, from where `install` takes it."""
        return Path(tempfile.mkdtemp(prefix=f".{self.output.name}-", dir=self.output.parent))

    def install(self, folder: Path) -> None:
        """Move a finished checkpoint to its place, whole; `folder` lies in the staging folder."""
        staged, output = folder.parent, self.output
        if output.exists():
            os.replace(output, staged / "old")
            for hidden in (staged / "old").glob(".*"):  # a file browser's or an editor's: no part of the drafter
                os.replace(hidden, folder / hidden.name)
        os.replace(folder, output)

    def clear(self) -> None:
        """Remove the run's state."""
        shutil.rmtree(self.work, ignore_errors=True)


class RemoteStorage:
    """A place on an object store, such as s3://bucket/drafter."""

    def __init__(self, uri: str):
        self.uri = uri.rstrip("/")
        self.folder = AtomicFolder(self.uri)
        parent, _, name = self.folder.root.rpartition("/")
        if not parent:
            raise TrainError(f"output {uri} is a whole bucket; give a folder in it, such as {self.uri}/drafter")
        self.state = AtomicFolder(f"{self.uri.rpartition('/')[0]}/.{name}.training")
        self.live_log: Path | None = None  # an object store knows no appending

    @property
    def run_options(self) -> dict[str, Any]:
        return {"storage_path": self.state.root, "storage_filesystem": patient_filesystem(self.uri)}

    def check(self) -> None:
        """As `LocalStorage.check`; also writes and removes a file, so that wrong access is told at once."""
        probe = self.state.path("probe")
        try:
            self.folder.check_bucket()
            names = set(self.folder.names())
            begun = bool(self.folder.fs.find(self.state.root))
            self.folder.fs.pipe_file(probe, b"")
            self.folder.fs.rm_file(probe)
        except Exception as error:  # every remote file system has its own kinds
            reason = first_line(error)
            raise TrainError(f"output {self.uri} cannot be written ({reason}); check path and access") from error
        half_uploaded = begun and CONFIG not in names  # by a run of the same command that was interrupted
        refuse_foreign(self.uri, names, drafter=half_uploaded or (CONFIG in names and self._is_drafter()))

    def _is_drafter(self) -> bool:
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / CONFIG).write_bytes(self.folder.read(CONFIG))
            return is_drafter(Path(name))

    def staging_folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="draftloop-"))

    def install(self, folder: Path) -> None:
        """Upload a finished checkpoint. Its config.json goes first and comes last: without it there is no drafter."""
        fs = self.folder.fs
        old = patiently(lambda: fs.find(self.folder.root)) if self.folder.names() else []
        for path in sorted(old, key=lambda path: not path.endswith(f"/{CONFIG}")):
            patiently(partial(_remove, fs, path))
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        for file in sorted(files, key=lambda file: file == folder / CONFIG):
            path = self.folder.path(file.relative_to(folder).as_posix())
            patiently(partial(fs.put_file, str(file), path))

    def clear(self) -> None:
        fs = self.state.fs
        fs.invalidate_cache()
        if patiently(lambda: fs.exists(self.state.root)):
            patiently(lambda: fs.rm(self.state.root, recursive=True))


TrainStorage = LocalStorage | RemoteStorage


def train_storage(output: str) -> TrainStorage:
    """The storage of an output path or URI. Raises TrainError."""
    if "://" not in output:
        return LocalStorage(Path(output).expanduser().resolve())
    try:
        fs, path = open_filesystem(output)
    except Exception as error:  # unknown protocols, missing packages
        raise TrainError(f"output {output} cannot be used ({error}); give a path or an s3:// address") from None
    return LocalStorage(Path(path).resolve()) if fs.protocol[0] == "file" else RemoteStorage(output)


def refuse_foreign(output: str, names: set[str], *, drafter: bool) -> None:
    """Raise TrainError if a folder with these files in it is no older drafter."""
    foreign = sorted(names - DRAFTER_FILES)
    if names and not foreign and not drafter:
        foreign = [CONFIG]
    if foreign:
        raise TrainError(f"output {output} holds other files ({foreign[0]}); give a new or empty folder")


def _remove(fs: Any, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # by an earlier try whose answer was lost
        fs.rm_file(path)


# -- the run's state, for Ray Train -----------------------------------------------------------------------------------


def patient_filesystem(uri: str) -> PyFileSystem:
    """The store as pyarrow sees one, with patience for a server that is away; workers can be sent it."""
    fs, _ = open_filesystem(uri)
    return PyFileSystem(_PatientHandler(fs))


class _PatientHandler(FSSpecHandler):
    """Whole files: written when they are closed, read piece by piece, both with patience."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _PatientHandler, (self.fs,)

    def get_file_info(self, paths: list[str]) -> Any:
        self.fs.invalidate_cache()
        return patiently(lambda: super(_PatientHandler, self).get_file_info(paths))

    def get_file_info_selector(self, selector: Any) -> Any:
        self.fs.invalidate_cache()
        return patiently(lambda: super(_PatientHandler, self).get_file_info_selector(selector))

    def create_dir(self, path: str, recursive: bool) -> None:
        """An object store has none; s3fs would make a bucket instead."""

    def delete_dir(self, path: str) -> None:
        self.fs.invalidate_cache()
        patiently(lambda: super(_PatientHandler, self).delete_dir(path))

    def delete_file(self, path: str) -> None:
        patiently(lambda: super(_PatientHandler, self).delete_file(path))

    def open_input_stream(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(RemoteFile(self.fs, path), mode="r")

    open_input_file = open_input_stream

    def open_output_stream(self, path: str, metadata: Any) -> pa.PythonFile:
        return pa.PythonFile(_Upload(self.fs, path), mode="w")


class _Upload:
    """A file to write that is uploaded when it is closed; pyarrow writes through it."""

    def __init__(self, fs: Any, path: str):
        self._fs, self._path = fs, path
        self._file = tempfile.NamedTemporaryFile(prefix="draftloop-", delete=True)  # noqa: SIM115 - closed by close()
        self.closed = False

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        """What is not closed is not there."""

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        with self._file:
            self._file.flush()
            patiently(lambda: self._fs.put_file(self._file.name, self._path))
