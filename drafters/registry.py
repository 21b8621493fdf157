"""The registry of one target's drafters, a folder or s3://: immutable versions, one champion, its whole history.

    versions/<version>/    a checkpoint and version.json, which is written last
    champion/00000001.json ...    changes of the champion, each created once; the highest number is the pointer
    verdicts/<version>.json    why a challenger was rejected
    serving/<replica>.json    what each replica serves

`draftloop registry` is its command. Several processes on several machines may use it at a time, and be killed anywhere.
"""

from __future__ import annotations

import difflib
import getpass
import hashlib
import re
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from drafters.registry_files import RegistryFiles
from drafters.registry_log import ChampionLog, Log
from drafters.registry_records import (
    NAME,
    Action,
    ChampionChangedError,
    Change,
    Pruning,
    RegistryError,
    Serving,
    Version,
)
from drafters.registry_versions import Source, VersionFolders
from drafters.remote import PATIENCE_S

__all__ = ["PLAIN", "ChampionChangedError", "Change", "Pruning", "Registry", "RegistryError", "Serving", "Version"]

PLAIN = "(plain)"  # for `rollback(to=...)`: no drafter; no version is called so
FORGOTTEN_AFTER = timedelta(days=1)  # a silent replica's report is removed


class Registry:
    """A registry by its address. Raises RegistryError, and OSError for a store that is away or forbids it.

    An object store that is away gets `patience_s`.
    """

    def __init__(self, uri: str, *, patience_s: float = PATIENCE_S):
        self._files = RegistryFiles(uri, patience_s)
        self._log = ChampionLog(self._files)
        self._folders = VersionFolders(self._files)
        self.uri = self._files.uri

    # -- versions -----------------------------------------------------------------------------------------------------

    def versions(self) -> list[Version]:
        """The versions that are whole, oldest first."""
        return self._listed(self._log.read())

    def version(self, name: str) -> Version:
        """One version. Raises RegistryError, naming the nearest, if there is none."""
        return self._version(name, self._log.read())

    def publish(
        self,
        checkpoint: str | Path,
        *,
        name: str | None = None,
        parent: str | None = None,
        data: Mapping[str, Any] | None = None,
        evaluation: Mapping[str, Any] | None = None,
    ) -> Version:
        """Copy a checkpoint (path or address) into the registry as a new version, committed last.

        Without `name` it is called <UTC time>-<8 digits of its content>, unless its files are a version already; with a
        name, the same files again give what is there. So a publication that was killed may be repeated. Without
        `evaluation` the evaluation.json beside the checkpoint is taken, if there is one. Raises RegistryError if the
        name is taken by other files or was removed, or if the checkpoint is of another target than the versions here.
        """
        if name is not None and not NAME.fullmatch(name):
            raise RegistryError(f"{name!r} is no name for a version; give letters, digits, dots, dashes or underscores")
        source = Source.read(checkpoint)
        self._files.folder.check_bucket()
        log = self._log.read()
        known = self._listed(log)
        _refuse_other_target(str(checkpoint), source, known)
        if name is None and (same := [version for version in known if version.files == source.files]):
            return same[-1]
        now = datetime.now(UTC)
        name = name or f"{now:%Y%m%dT%H%M%S}-{source.digest[:8]}"
        _refuse_removed(name, log)
        version = Version(
            name=name,
            created_at=now,
            target_fingerprint=source.target_fingerprint,
            files=source.files,
            uri=self._folders.uri(name),
            parent=parent,
            data=dict(data or {}),
            evaluation=Source.evaluation(checkpoint) if evaluation is None else dict(evaluation),
        )
        published = self._folders.publish(version, source)
        _refuse_removed(name, self._log.read())  # a prune may have come between, and a second publisher of this name
        return published

    def _listed(self, log: Log) -> list[Version]:
        """Without those whose removal has begun."""
        return [version for version in self._folders.committed() if version.name not in log.removed]

    def _version(self, name: str, log: Log) -> Version:
        _refuse_removed(name, log)
        found = self._folders.read(name) if NAME.fullmatch(name) else None
        if found is None:
            names = [version.name for version in self._listed(log)]
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.3) or names[-1:]
            mend = f"did you mean {near[0]}?" if near else "it has none yet: publish a drafter first"
            raise RegistryError(f"registry {self.uri} has no version {name}; {mend}")
        return found

    # -- the champion -------------------------------------------------------------------------------------------------

    def champion(self) -> Change | None:
        """The latest change; None before the first. One listing and one small file, to be asked every few seconds."""
        return self._log.champion()

    def history(self) -> list[Change]:
        """Every change of the champion, oldest first."""
        return self._log.read().changes

    def prunings(self) -> list[Pruning]:
        """Every removal of versions, oldest first."""
        return self._log.read().prunings

    def promote(self, version: str, *, by: str, why: str, expected: Change | None) -> Change:
        """Make a version the champion; if it is that already, nothing is changed.

        `expected` is what `champion()` told the caller. Raises ChampionChangedError if there is a newer change, and
        RegistryError if there is no such version.
        """
        self.version(version)  # whether it is being removed is looked at again for every number that is tried
        return self._change("promote", by, why, expected, lambda log: version)

    def rollback(self, *, by: str, why: str, expected: Change | None, to: str | None = None) -> Change:
        """Make an earlier version the champion: the one before the present one, or `to` (PLAIN: no drafter).

        What is rolled back is taken out of the way back: after A, B, C one rollback leads to B, the next one to A and
        not to C, the one after that to plain decoding. Raises as `promote` does.
        """
        if to not in (None, PLAIN):
            self.version(str(to))

        def decide(log: Log) -> str | None:
            if to is not None:
                return None if to == PLAIN else to
            way = log.way_back()
            if len(way) < 2:
                raise RegistryError(f"registry {self.uri} has nothing to roll back to; promote a version")
            if way[-2] is not None and (way[-2] in log.removed or self._folders.read(way[-2]) is None):
                gone = f"{way[-2]}, the champion before {way[-1]}, is gone"
                raise RegistryError(f"{gone}; name a version to roll back to, or roll back to plain decoding")
            return way[-2]

        return self._change("rollback", by, why, expected, decide)

    def _change(
        self, action: Action, by: str, why: str, expected: Change | None, decide: Callable[[Log], str | None]
    ) -> Change:
        """Add a change to the version that `decide` tells of the log."""
        _need_reason(by, why)

        def entry(log: Log) -> Change:
            present = log.champion
            if (present.number if present else 0) != (expected.number if expected else 0):
                raise ChampionChangedError(_changed(expected, present))
            version = decide(log)
            _refuse_removed(version, log)
            previous = present.version if present else None
            if present is not None and version == previous:
                return present
            at = datetime.now(UTC)
            return Change(
                number=log.next_number, action=action, version=version, previous=previous, by=by, at=at, why=why
            )

        change = self._log.append(entry)
        assert isinstance(change, Change)
        return change

    # -- verdicts and replicas ----------------------------------------------------------------------------------------

    def reject(self, version: str, *, by: str, why: str, report: Mapping[str, Any]) -> None:
        """Keep why a version must not become champion. The first verdict on a version stands."""
        _need_reason(by, why)
        self.version(version)
        at = datetime.now(UTC).isoformat()
        verdict = {"version": version, "by": by, "at": at, "why": why, "report": dict(report)}
        self._files.create(f"verdicts/{version}.json", verdict)

    def verdict(self, version: str) -> dict[str, Any] | None:
        """{"version", "by", "at", "why", "report"} of a version that was rejected, even after its removal; or None."""
        return self._files.read(f"verdicts/{version}.json", dict)

    def rejected(self) -> set[str]:
        """The versions that have a verdict."""
        return {name.removesuffix(".json") for name in self._files.folder.names("verdicts") if name.endswith(".json")}

    def report_serving(self, replica: str, version: str | None) -> None:
        """A replica says what it serves (None: it decodes plainly), at least every few minutes."""
        said = {"replica": replica, "version": version, "at": datetime.now(UTC).isoformat()}
        self._files.write(f"serving/{_file_name(replica)}.json", said)

    def serving(self) -> dict[str, Serving]:
        """What each replica said last."""
        names = [f"serving/{name}" for name in self._files.folder.names("serving")]
        return {said.replica: said for said in self._files.read_all(dict.fromkeys(names, Serving.from_json))}

    # -- removal ------------------------------------------------------------------------------------------------------

    def prune(self, *, keep: int, by: str | None = None, why: str | None = None) -> list[str]:
        """Remove all but the newest `keep` versions; the names of those removed, also for a prune that was killed.

        Rejected versions count as older than all others. Never removed are the champion, its predecessor (the last
        champion, and what a rollback leads to), what a replica said to serve in the last minutes, and what is being
        published. Files that killed publications left a day ago go too.
        """
        if keep < 0:
            raise RegistryError(f"{keep} versions cannot be kept; give 0 or more")
        by, why = by or who(), why or f"the newest {keep} are kept"

        def entry(log: Log) -> Pruning | None:
            removed = self._old_versions(log, keep)
            at, number = datetime.now(UTC), log.next_number
            pruning = Pruning(number=number, removed=removed, champion=log.champion, by=by, at=at, why=why)
            return pruning if removed else None

        self._log.append(entry)
        going = [name for name in self._log.read().removed if name in self._folders.there()]
        for name in going:
            self._folders.remove(name)
        self._folders.remove_leftovers()
        self._forget_replicas()
        return going

    def _old_versions(self, log: Log, keep: int) -> tuple[str, ...]:
        rejected = self.rejected()
        order = sorted(self._listed(log), key=lambda version: version.name not in rejected)  # stable: oldest first
        needed = {said.version for said in self.serving().values() if not said.stale} | set(log.way_back()[-2:])
        if log.champion is not None:
            needed |= {log.champion.version, log.champion.previous}
        return tuple(version.name for version in order[: max(0, len(order) - keep)] if version.name not in needed)

    def _forget_replicas(self) -> None:
        for said in self.serving().values():
            if datetime.now(UTC) - said.at > FORGOTTEN_AFTER:
                self._files.remove(f"serving/{_file_name(said.replica)}.json")


def who() -> str:
    """Who changes something, where nobody says so: user@machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _refuse_other_target(checkpoint: str, source: Source, known: list[Version]) -> None:
    if known and source.target_fingerprint != known[-1].target_fingerprint:
        raise RegistryError(
            f"drafter {checkpoint} was made for another target, or for other tapped layers, than version "
            f"{known[-1].name} (fingerprint {source.target_fingerprint}, not {known[-1].target_fingerprint}); "
            "give it a registry of its own"
        )


def _need_reason(by: str, why: str) -> None:
    if not by.strip() or not why.strip():
        raise RegistryError("a change of the registry needs who and why; give both")


def _refuse_removed(version: str | None, log: Log) -> None:
    if version in log.removed:
        pruning = log.removed[version]
        told = f"version {version} was removed on {pruning.at:%Y-%m-%d} by {pruning.by} ({pruning.why})"
        raise RegistryError(f"{told}; publish its drafter under another name")


def _changed(expected: Change | None, present: Change | None) -> str:
    then = "none" if expected is None else f"{expected.version or 'plain decoding'} (change {expected.number})"
    if present is None:
        return f"the champion was {then}, now there is none; look at the registry and decide again"
    now = f"{present.version or 'plain decoding'} (change {present.number}, by {present.by}: {present.why})"
    return f"the champion was {then}, meanwhile it is {now}; look at the registry and decide again"


def _file_name(replica: str) -> str:
    """A file's name for a replica, whose own may hold any character."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", replica)
    return plain if plain == replica else f"{plain}-{hashlib.sha256(replica.encode()).hexdigest()[:8]}"
