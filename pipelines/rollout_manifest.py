"""What a rollout set says about itself: the names of its files, the record of every shard, and the manifest.

    plan.json  part-00000-of-00012.parquet ...  rejects.jsonl  manifest.json

plan.json comes first and ties the folder to one kind of rollouts; manifest.json comes last and lists every shard with
its checksum: a folder without it is not finished. `_work/` holds one record per finished shard until then.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from drafters.atomic_files import AtomicFolder
from drafters.remote import first_line
from pipelines.rollout_schema import READABLE_VERSIONS, RolloutMetadata

PLAN, MANIFEST, REJECTS, RECORDS = "plan.json", "manifest.json", "rejects.jsonl", "_work"


class RolloutError(ValueError):
    """A folder that is no usable rollout set, or that must not be written to; one line with cause and mend."""


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What the manifest says about one shard."""

    name: str
    rows: int
    prompt_tokens: int
    response_tokens: int
    bytes: int
    sha256: str
    rejected: list[dict[str, Any]] = field(default_factory=list)  # rows that failed while generating: {line, reason}


def shard_name(index: int, count: int) -> str:
    """The name of shard `index` of `count`."""
    return f"part-{index:05d}-of-{count:05d}.parquet"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a finished rollout set holds."""

    metadata: RolloutMetadata
    config: dict[str, Any]  # the plan it was made with
    shards: list[ShardRecord]
    rejected: int

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def prompt_tokens(self) -> int:
        return sum(shard.prompt_tokens for shard in self.shards)

    @property
    def response_tokens(self) -> int:
        return sum(shard.response_tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def as_json(self) -> dict[str, Any]:
        totals = {
            name: getattr(self, name) for name in ("rows", "rejected", "prompt_tokens", "response_tokens", "bytes")
        }
        shards = [asdict(shard) for shard in self.shards]
        return self.metadata.as_json() | totals | {"config": self.config, "shards": shards}


def open_folder(uri: str) -> AtomicFolder:
    """The folder of a set, local or not. Raises RolloutError."""
    try:
        return AtomicFolder(uri, scratch=RECORDS)
    except Exception as error:  # an unknown protocol, missing credentials
        raise RolloutError(
            f"{uri} cannot be opened ({first_line(error)}); give a folder or an s3:// address"
        ) from error


def check_version(folder: AtomicFolder, version: Any) -> None:
    """Raise RolloutError for a set of a version that this code cannot read."""
    if version not in READABLE_VERSIONS:
        known = " and ".join(map(str, READABLE_VERSIONS))
        raise RolloutError(
            f"rollouts {folder.uri} have schema version {version}, known are {known}; update, or generate them again"
        )


def read_manifest(folder: AtomicFolder) -> Manifest:
    """The manifest of a finished set. Raises RolloutError if it is damaged or of an unknown version."""
    try:
        values = json.loads(folder.read(MANIFEST))
        check_version(folder, values["schema_version"])
        return Manifest(
            metadata=RolloutMetadata.from_json(values),
            config=values["config"],
            shards=[ShardRecord(**shard) for shard in values["shards"]],
            rejected=values["rejected"],
        )
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
        raise RolloutError(
            f"rollouts {folder.uri} have a damaged {MANIFEST}; delete it and run generate again"
        ) from None


def json_bytes(value: Any) -> bytes:
    """How plan, records and manifest are written: equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
