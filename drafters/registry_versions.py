"""The versions of a registry: a checkpoint in, an immutable folder out.

    versions/<version>/provenance.json  config.json  model.safetensors  version.json

version.json is written last and removed first: a folder without it, or that lacks a file it names, is no version.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from drafters.atomic_files import AtomicFolder
from drafters.checkpoint import CONFIG, PROVENANCE, WEIGHTS, read_config, read_provenance
from drafters.registry_files import RegistryFiles
from drafters.registry_records import NAME, RegistryError, Version
from drafters.remote import first_line, patiently
from drafters.remote_checkpoint import local_checkpoint

FOLDER, MARK = "versions", "version.json"
EVALUATION = "evaluation.json"  # `draftloop evaluate` writes it beside a drafter
ORDER = (PROVENANCE, CONFIG, WEIGHTS)  # provenance first: of two trainings under one name one stops before its weights
LEFTOVER_AFTER_S = 86400.0  # a publication that has written nothing for so long was killed
READ_BYTES = 2**23


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint on this machine that shall become a version."""

    path: Path
    target_fingerprint: str
    files: dict[str, str]  # name -> sha256

    @classmethod
    def read(cls, checkpoint: str | Path) -> Source:
        """Raises CheckpointError or RegistryError if it is none, or not whole."""
        path = local_checkpoint(str(checkpoint))
        read_config(path)
        fingerprint = read_provenance(path).get("target_fingerprint")
        if not isinstance(fingerprint, str):
            raise RegistryError(f"drafter {checkpoint} does not say its target ({PROVENANCE}); train it with draftloop")
        try:
            with safe_open(path / WEIGHTS, framework="pt"):  # reads the header, and that nothing is cut off
                pass
            files = {}
            for name in ORDER:
                with _contents(path / name) as data:
                    files[name] = hashlib.sha256(data).hexdigest()
        except (OSError, ValueError, SafetensorError) as error:
            raise RegistryError(f"drafter {checkpoint} is not whole ({first_line(error)}); train it anew") from None
        return cls(path=path, target_fingerprint=fingerprint, files=files)

    @property
    def digest(self) -> str:
        """Of all its files, in hex."""
        return hashlib.sha256("".join(self.files[name] for name in ORDER).encode()).hexdigest()

    @staticmethod
    def evaluation(checkpoint: str | Path) -> dict[str, Any] | None:
        """The evaluation.json beside a checkpoint, if there is one."""
        try:
            found = json.loads(AtomicFolder(str(checkpoint)).read(EVALUATION))
            if not isinstance(found, dict):
                raise ValueError("it is no JSON object")
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RegistryError(f"{checkpoint}/{EVALUATION} is damaged ({first_line(error)}); evaluate anew") from None
        return found


class VersionFolders:
    """The folders under `versions/`, whatever the log says of them."""

    def __init__(self, files: RegistryFiles):
        self._files, self._folder = files, files.folder

    def committed(self) -> list[Version]:
        """The versions that are whole, oldest first."""
        listed = self._listing()
        marked = [name for name, files in listed.items() if MARK in files]
        read = self._files.read_all({f"{FOLDER}/{name}/{MARK}": self._parser(name) for name in marked})
        whole = [version for version in read if self._is_whole(version, listed[version.name])]
        return sorted(whole, key=lambda version: (version.created_at, version.name))

    def read(self, name: str) -> Version | None:
        """One version, or None if there is no whole one of this name."""
        version = self._marked(name)
        return version if version is not None and self._is_whole(version) else None

    def publish(self, version: Version, source: Source) -> Version:
        """Copy the source's files and commit them; or what is there, if it holds the same ones.

        May be repeated after it was killed anywhere. Raises RegistryError if the name is taken by other files.
        """
        there = self._marked(version.name)
        if there is None or not self._is_whole(there):
            self._refuse_others(there or version, source)
            for name in ORDER:
                self._copy(f"{FOLDER}/{version.name}/{name}", source.path / name, source.files[name])
            if there is None and not self._files.create(f"{FOLDER}/{version.name}/{MARK}", version.as_json()):
                there = self._marked(version.name)
        self._refuse_others(there or version, source)
        committed = self.read(version.name)
        if committed is None:
            raise RegistryError(
                f"version {version.name} lost files while it was published, or its {MARK} is damaged; publish it once "
                f"more, or remove {self.uri(version.name)} first"
            )
        return committed

    def uri(self, name: str) -> str:
        """The checkpoint's folder."""
        return f"{self._files.uri}/{FOLDER}/{name}"

    def remove(self, name: str) -> None:
        """Remove a version, its mark first."""
        folder = f"{FOLDER}/{name}"
        self._files.remove(f"{folder}/{MARK}")
        if self._folder.local is not None:
            shutil.rmtree(self._folder.local / folder, ignore_errors=True)
            return
        for file in self._folder.names(folder):
            self._files.remove(f"{folder}/{file}")

    def there(self) -> set[str]:
        """The folders that hold anything, versions or not."""
        return set(self._listing())

    def remove_leftovers(self) -> None:
        """Remove what killed publications left behind; one that is at work writes, and is left alone."""
        for name, files in self._listing().items():
            if MARK not in files and self._is_old([f"{FOLDER}/{name}/{file}" for file in files]):
                self.remove(name)
        if (local := self._folder.local) is not None:
            for file in (local / self._folder.scratch).glob("*.tmp"):
                with suppress(FileNotFoundError):
                    if time.time() - file.stat().st_mtime > LEFTOVER_AFTER_S:
                        file.unlink()

    def _is_old(self, names: list[str]) -> bool:
        try:
            newest = max(
                patiently(partial(self._folder.fs.modified, self._folder.path(name)), self._folder.patience_s)
                for name in names
            )
        except FileNotFoundError:
            return False
        return bool(time.time() - newest.timestamp() > LEFTOVER_AFTER_S)

    def _listing(self) -> dict[str, set[str]]:
        """The names of the files in each folder."""
        found: dict[str, set[str]] = {}
        for path in self._paths():
            name, _, file = path.partition("/")
            if not file or not NAME.fullmatch(name):
                self._files.warn(f"{FOLDER}/{path}", "it is no version")
            elif "/" not in file:
                found.setdefault(name, set()).add(file)
        return found

    def _paths(self) -> Iterator[str]:
        """The files below `versions/`, relative to it."""
        local = self._folder.local
        if local is not None:  # fsspec would leave out a whole folder if another process removes one in it meanwhile
            top = local / FOLDER
            for folder, _, files in os.walk(top):
                yield from ((Path(folder) / file).relative_to(top).as_posix() for file in files)
            return
        root, fs = self._folder.path(FOLDER), self._folder.fs
        fs.invalidate_cache()
        for path in patiently(lambda: fs.find(root), self._folder.patience_s):
            if str(path) != root:  # some servers keep an empty folder
                yield str(path)[len(root) + 1 :]

    def _marked(self, name: str) -> Version | None:
        return self._files.read(f"{FOLDER}/{name}/{MARK}", self._parser(name))

    def _parser(self, name: str) -> Callable[[Mapping[str, Any]], Version]:
        return partial(Version.from_json, uri=self.uri(name))

    def _is_whole(self, version: Version, there: set[str] | None = None) -> bool:
        """Whether every file of a version is there; `there` are the names in its folder, if they are known."""
        there = set(self._folder.names(f"{FOLDER}/{version.name}")) if there is None else there
        missing = sorted(set(version.files) - there)
        if missing:
            self._files.warn(f"{FOLDER}/{version.name}", f"it lacks {', '.join(missing)}; publish it once more")
        return not missing

    def _refuse_others(self, there: Version, source: Source) -> None:
        if there.files != source.files:
            raise RegistryError(f"version {there.name} is there already with other files; publish under another name")

    def _copy(self, name: str, source: Path, sha256: str) -> None:
        """Write a file that nobody else may have written otherwise. The same one again says that somebody is at work.

        A large one is asked for before it is sent.
        """
        if self._folder.size(name) is None:
            try:
                with _contents(source) as data:
                    self._folder.create(name, data)
                return
            except FileExistsError:
                pass  # by another writer at the same time, or its answer was lost
        if self._sha256(name) != sha256:
            raise RegistryError(
                f"{self._files.uri}/{name} is there with other bytes, from a publication that is at work or was "
                "killed; publish under another name"
            )
        if not name.endswith(WEIGHTS):
            self._folder.write(name, source.read_bytes())  # young again: no prune takes it for a leftover

    def _sha256(self, name: str) -> str:
        digest = hashlib.sha256()
        with self._folder.open(name) as stream:
            while block := stream.read(READ_BYTES):
                digest.update(block)
        return digest.hexdigest()


@contextmanager
def _contents(path: Path) -> Iterator[mmap.mmap]:
    """A file's bytes without reading them into memory. Raises OSError, or ValueError if it is empty."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data
