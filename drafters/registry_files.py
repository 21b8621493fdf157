"""The JSON files of a registry's folder, local or s3://: whole or absent, foreign ones passed over with a warning."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from drafters.atomic_files import AtomicFolder
from drafters.registry_records import RegistryError
from drafters.remote import first_line, patiently

T = TypeVar("T")
log = logging.getLogger(__name__)

READERS = 8  # small files of an object store asked for at once


class RegistryFiles:
    """A registry's folder. Raises RegistryError if the address cannot be used."""

    def __init__(self, uri: str, patience_s: float):
        try:
            self.folder = AtomicFolder(uri, patience_s=patience_s)
        except Exception as error:  # an unknown protocol, missing credentials
            raise RegistryError(
                f"registry {uri} cannot be opened ({first_line(error)}); give a folder or an s3:// address"
            ) from error
        self.uri = self.folder.uri
        self._warned: set[str] = set()

    def warn(self, name: str, what: str) -> None:
        """Say it once: a registry is asked every few seconds."""
        if name not in self._warned:
            self._warned.add(name)
            log.warning("%s is passed over: %s", self.folder.path(name), what)

    def read(self, name: str, parse: Callable[[Mapping[str, Any]], T]) -> T | None:
        """What a file says; None if it is absent, or broken, which is warned of."""
        try:
            values = json.loads(self.folder.read(name))
            if not isinstance(values, dict):
                raise TypeError("it is no JSON object")
            return parse(values)
        except FileNotFoundError:
            return None
        except (IsADirectoryError, KeyError, TypeError, ValueError) as error:
            self.warn(name, f"{type(error).__name__}: {first_line(error)}")
            return None

    def read_all(self, asked: Mapping[str, Callable[[Mapping[str, Any]], T]]) -> list[T]:
        """What those of the files say that are sound, in the same order; `asked` holds what parses each."""
        if self.folder.local is not None:
            found = [self.read(name, parse) for name, parse in asked.items()]
        else:
            with ThreadPoolExecutor(READERS) as threads:
                found = list(threads.map(self.read, asked, asked.values()))
        return [value for value in found if value is not None]

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a file, replacing an older one."""
        self.folder.write(name, json_bytes(values))

    def create(self, name: str, values: Mapping[str, Any]) -> bool:
        """Write a file if there is none of this name; whether this writer's lies there now.

        A writer meets its own file where the answer to its first try was lost, so `values` must be like no other's.
        """
        data = json_bytes(values)
        try:
            self.folder.create(name, data)
        except FileExistsError:
            return self.folder.read(name) == data
        return True

    def remove(self, name: str) -> None:
        """Remove a file; one that is gone does not matter."""
        with suppress(FileNotFoundError):
            patiently(partial(self.folder.fs.rm_file, self.folder.path(name)), self.folder.patience_s)


def json_bytes(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()
