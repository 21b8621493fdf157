"""What the files of a registry say: versions, changes of the champion, removals, what replicas serve; and its errors.

JSON objects in and out. `from_json` raises KeyError, TypeError or ValueError for what is no such object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, cast

from drafters.remote_checkpoint import FILES

SCHEMA_VERSION = 1
STALE_AFTER = timedelta(minutes=15)  # a replica that has said nothing for so long serves nothing
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # of a version: a folder's name on any file system

Action = Literal["promote", "rollback"]


class RegistryError(ValueError):
    """A registry that cannot do what is asked; the message is one line with cause and mend."""


class ChampionChangedError(RegistryError):
    """Somebody else changed the champion first; nothing was done."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """An immutable drafter of the registry."""

    name: str
    created_at: datetime  # UTC
    target_fingerprint: str
    files: dict[str, str]  # name -> sha256, of the checkpoint
    uri: str  # folder of the checkpoint: what `local_checkpoint` and serve's `drafter` take
    parent: str | None = None  # the version whose weights it began with
    data: dict[str, Any] = field(default_factory=dict)  # what it was trained on, such as {"since", "until", "traffic"}
    evaluation: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """All but `uri`: a registry may be copied elsewhere."""
        values = asdict(self) | {"schema_version": SCHEMA_VERSION, "created_at": self.created_at.isoformat()}
        del values["uri"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], uri: str) -> Version:
        name, fingerprint = _texts(values, "name", "target_fingerprint")
        if name != uri.rsplit("/", 1)[-1]:
            raise ValueError(f"it is a copy of {name}")
        files = dict(values["files"])
        if missing := [file for file in FILES if not isinstance(files.get(file), str)]:
            raise ValueError(f"no checksum of {', '.join(missing)}")
        return cls(
            name=name,
            created_at=_time(values["created_at"]),
            target_fingerprint=fingerprint,
            files=files,
            uri=uri,
            parent=_text_or_none(values, "parent"),
            data=dict(values["data"]),
            evaluation=None if values["evaluation"] is None else dict(values["evaluation"]),
        )


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of the champion. Numbers ascend; those in between that are missing are of removals."""

    number: int
    action: Action
    version: str | None  # the champion from now on; None: decode plainly
    previous: str | None  # the champion until then
    by: str
    at: datetime  # UTC
    why: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"at": self.at.isoformat()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Change:
        action, by, why = _texts(values, "action", "by", "why")
        if action not in ("promote", "rollback"):
            raise ValueError(f"{action} is no action")
        return cls(
            number=int(values["number"]),
            action=cast(Action, action),
            version=_text_or_none(values, "version"),
            previous=_text_or_none(values, "previous"),
            by=by,
            at=_time(values["at"]),
            why=why,
        )


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """One removal of versions. It stands among the changes, so that none of them can pass it unseen."""

    number: int
    removed: tuple[str, ...]
    champion: Change | None  # unchanged by it: whoever reads the newest file knows the champion
    by: str
    at: datetime  # UTC
    why: str

    def as_json(self) -> dict[str, Any]:
        champion = None if self.champion is None else self.champion.as_json()
        return asdict(self) | {"action": "prune", "at": self.at.isoformat(), "champion": champion}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Pruning:
        by, why = _texts(values, "by", "why")
        champion = values["champion"]
        return cls(
            number=int(values["number"]),
            removed=tuple(str(name) for name in values["removed"]),
            champion=None if champion is None else Change.from_json(champion),
            by=by,
            at=_time(values["at"]),
            why=why,
        )


def entry_from_json(values: Mapping[str, Any]) -> Change | Pruning:
    """A file of the champion's folder."""
    return Pruning.from_json(values) if values["action"] == "prune" else Change.from_json(values)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What a replica said last."""

    replica: str
    version: str | None  # None: it decodes plainly
    at: datetime  # UTC, by the replica's clock
    stale: bool  # it was silent for longer than STALE_AFTER

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Serving:
        (replica,), at = _texts(values, "replica"), _time(values["at"])
        stale = datetime.now(UTC) - at > STALE_AFTER
        return cls(replica=replica, version=_text_or_none(values, "version"), at=at, stale=stale)


def _texts(values: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    for name in names:
        if not isinstance(values[name], str):
            raise TypeError(f"{name} is no text")
    return tuple(values[name] for name in names)


def _text_or_none(values: Mapping[str, Any], name: str) -> str | None:
    return None if values[name] is None else _texts(values, name)[0]


def _time(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return at.astimezone(UTC)
