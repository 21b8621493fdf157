"""Who was champion when: numbered files, each created once. The newest is the pointer, all of them are the history.

    champion/00000001.json  00000002.json  ...

Creating the next number is the compare-and-set: of several writers one gets it, the others look again. Removals of
versions take a number too. So a promotion either sees that its version is being removed, or the removal sees that it
is champion, whoever is killed in between.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from drafters.registry_files import RegistryFiles
from drafters.registry_records import SCHEMA_VERSION, Change, Pruning, RegistryError, entry_from_json

FOLDER = "champion"
TRIES = 50  # numbers that other writers may take first
_FILE = re.compile(r"(\d{8})\.json")


@dataclass(frozen=True, kw_only=True)
class Log:
    """The whole log at one moment."""

    entries: tuple[Change | Pruning, ...]  # in order
    next_number: int

    @cached_property
    def changes(self) -> list[Change]:
        return [entry for entry in self.entries if isinstance(entry, Change)]

    @cached_property
    def prunings(self) -> list[Pruning]:
        return [entry for entry in self.entries if isinstance(entry, Pruning)]

    @cached_property
    def removed(self) -> dict[str, Pruning]:
        """The versions that are gone or going, and with which removal."""
        return {name: pruning for pruning in self.prunings for name in pruning.removed}

    @property
    def champion(self) -> Change | None:
        return self.changes[-1] if self.changes else None

    def way_back(self) -> list[str | None]:
        """What rollbacks return to, the champion last: before the first promotion stands None, decoding plainly.

        A rollback takes away what it undoes: the next one goes further back, never to what was rolled back.
        """
        way: list[str | None] = [None]
        for change in self.changes:
            if change.action == "rollback" and change.version in way:
                del way[len(way) - way[::-1].index(change.version) :]
            else:
                if change.action == "rollback":
                    del way[max(1, len(way) - 1) :]
                way.append(change.version)
        return way


class ChampionLog:
    """The log in a registry's folder."""

    def __init__(self, files: RegistryFiles):
        self._files = files

    def champion(self) -> Change | None:
        """The latest change: one listing and one small file."""
        for number in reversed(self._numbers()):
            entry = self._files.read(_name(number), entry_from_json)
            if entry is not None:
                return entry.champion if isinstance(entry, Pruning) else entry
        return None

    def read(self) -> Log:
        """Every file of the log."""
        numbers = self._numbers()
        entries = self._files.read_all({_name(number): entry_from_json for number in numbers})
        return Log(entries=tuple(entries), next_number=numbers[-1] + 1 if numbers else 1)

    def append(self, decide: Callable[[Log], Change | Pruning | None]) -> Change | Pruning | None:
        """Add what `decide` makes of the log; it is asked again whenever another writer was faster.

        It may also return None or an entry that is there already; then nothing is added.
        """
        for _ in range(TRIES):
            log = self.read()
            entry = decide(log)
            if entry is None or entry.number < log.next_number:
                return entry
            told = {"schema_version": SCHEMA_VERSION, "token": uuid.uuid4().hex}  # tells two equal writers apart
            if self._files.create(_name(entry.number), entry.as_json() | told):
                return entry
        raise RegistryError(f"registry {self._files.uri} is changed by others all the time; try again in a while")

    def _numbers(self) -> list[int]:
        found = []
        for name in self._files.folder.names(FOLDER):
            if match := _FILE.fullmatch(name):
                found.append(int(match[1]))
            else:
                self._files.warn(f"{FOLDER}/{name}", "it is no change of the champion")
        return sorted(found)


def _name(number: int) -> str:
    return f"{FOLDER}/{number:08d}.json"
