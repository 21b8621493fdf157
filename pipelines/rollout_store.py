"""A rollout set on disk or S3: written shard by shard by `draftloop generate`, read by `draftloop train`.

What lies in its folder, and what the folder says about it, is in rollout_manifest.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from drafters.atomic_files import AtomicFolder
from drafters.remote import first_line
from pipelines.feature_codec import ENGINE_DTYPE
from pipelines.prompts import RejectedRow
from pipelines.rollout_manifest import (
    MANIFEST,
    PLAN,
    RECORDS,
    REJECTS,
    Manifest,
    RolloutError,
    ShardRecord,
    json_bytes,
    open_folder,
    read_manifest,
    shard_name,
)
from pipelines.rollout_schema import Rollout, RolloutMetadata, rollout_table, rollouts_of

__all__ = [
    "Manifest",
    "RolloutError",
    "RolloutSet",
    "RolloutStore",
    "ShardRecord",
    "file_sha256",
    "iter_rollouts",
    "open_rollouts",
    "parquet_bytes",
    "shard_name",
]

ROW_GROUP_BYTES = 64 * 2**20  # of features: what a reader holds at a time
READ_BYTES = 2**20  # of a file, at a time, for its checksum
OLDER_PLANS: dict[str, Any] = {"features_dtype": ENGINE_DTYPE}  # what was done before plans had the key
NO_LONGER_IN_PLANS = ("threads",)  # older plans have it also where it decides nothing


class RolloutStore:
    """The writing side of a rollout set; features are stored as `features_dtype`, None: in the dtype they have."""

    def __init__(self, uri: str, *, features_dtype: str | None = None):
        self.features_dtype = features_dtype
        self.folder = open_folder(uri)
        self.uri = self.folder.uri

    def begin(self, plan: dict[str, Any]) -> None:
        """Tie the folder to a plan, or check that it is the plan the folder was begun with. Raises RolloutError.

        A plan that nothing was made with yet ties to nothing: the run may have been refused for want of room.
        """
        try:
            self.folder.check_bucket()
            names = self.folder.names()
            if PLAN in names and self._is_begun(names):
                self._check_plan(plan)
            elif foreign := [name for name in names if name not in (PLAN, RECORDS)]:
                raise RolloutError(f"output {self.uri} holds other files ({foreign[0]}); give a new or empty folder")
            else:
                self.folder.write(PLAN, json_bytes(plan))
            self.folder.clear_scratch(only_temporary=True)
        except RolloutError:
            raise
        except Exception as error:
            raise RolloutError(
                f"output {self.uri} cannot be written ({first_line(error)}); check path and access"
            ) from error

    def _is_begun(self, names: list[str]) -> bool:
        """Whether the folder holds more than a plan and what killed writers left."""
        if set(names) - {PLAN, RECORDS}:
            return True
        return any(not name.endswith(".tmp") for name in self.folder.names(RECORDS))

    def _check_plan(self, plan: dict[str, Any]) -> None:
        try:
            before = json.loads(self.folder.read(PLAN))
        except ValueError:
            raise RolloutError(
                f"output {self.uri} has a damaged {PLAN}; give another folder or delete this one"
            ) from None
        plan = json.loads(json_bytes(plan))
        before = {key: value for key, value in OLDER_PLANS.items() if key in plan} | before
        before = {key: value for key, value in before.items() if key in plan or key not in NO_LONGER_IN_PLANS}
        differing = sorted(key for key in before.keys() | plan.keys() if before.get(key) != plan.get(key))
        if differing:
            changes = "; ".join(f"{key} was {before.get(key)!r}, now {plan.get(key)!r}" for key in differing[:4])
            raise RolloutError(
                f"output {self.uri} was begun with other options ({changes}); use those, or another --output"
            )

    def record(self, name: str) -> ShardRecord | None:
        """The record of a shard that is complete, else None."""
        try:
            record = ShardRecord(**json.loads(self.folder.read(f"{RECORDS}/{name}.json")))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return record if self.folder.size(name) == record.bytes else None

    def records(self, count: int) -> dict[str, ShardRecord]:
        """Records of all complete shards, from the manifest if there is one, else from the shards' own records."""
        names = [shard_name(i, count) for i in range(count)]
        if MANIFEST in self.folder.names():
            listed = {shard.name: shard for shard in read_manifest(self.folder).shards}
            return {n: listed[n] for n in names if n in listed and self.folder.size(n) == listed[n].bytes}
        started = set(self.folder.names(RECORDS))
        found = [self.record(name) for name in names if f"{name}.json" in started]
        return {record.name: record for record in found if record}

    def write_shard(
        self,
        name: str,
        rollouts: Sequence[Rollout],
        metadata: RolloutMetadata,
        rejected: Sequence[dict[str, Any]] = (),
    ) -> ShardRecord:
        """Write one shard and its record, each atomically. Equal rows give equal bytes."""
        data = parquet_bytes(rollout_table(rollouts, metadata, self.features_dtype))
        record = ShardRecord(
            name=name,
            rows=len(rollouts),
            prompt_tokens=sum(len(r.prompt_ids) for r in rollouts),
            response_tokens=sum(sum(r.loss_mask) for r in rollouts),  # what a user said in between is none
            bytes=data.size,
            sha256=hashlib.sha256(data).hexdigest(),
            rejected=list(rejected),
        )
        self.folder.write(name, data)
        self.folder.write(f"{RECORDS}/{name}.json", json_bytes(asdict(record)))
        return record

    def finish(
        self,
        plan: dict[str, Any],
        metadata: RolloutMetadata,
        shards: Sequence[ShardRecord],
        rejects: Sequence[RejectedRow],
    ) -> Manifest:
        """Write the rejects and then the manifest: from here on the set can be read."""
        ordered = sorted(shards, key=lambda shard: shard.name)
        manifest = Manifest(metadata=metadata, config=plan, shards=ordered, rejected=len(rejects))
        lines = [json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rejects]
        self.folder.write(REJECTS, "".join(lines).encode())
        self.folder.write(MANIFEST, json_bytes(manifest.as_json()))
        self.folder.clear_scratch()
        return manifest


def parquet_bytes(table: pa.Table) -> pa.Buffer:
    """The table as a Parquet file.

    Features go uncompressed, since zstd saves little on them and costs time, but for int8: most codes are small, and
    zstd takes two fifths away.
    """
    feature_bytes = table.column("features").nbytes
    rows_per_group = max(1, int(table.num_rows * ROW_GROUP_BYTES / max(feature_bytes, ROW_GROUP_BYTES)))
    int8 = "features_scale" in table.column_names
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=rows_per_group,
        compression={n: "none" if n == "features" and not int8 else "zstd" for n in table.column_names},
        use_dictionary=["category", "finish_reason", "features_dtype"],
        write_statistics=[name for name in table.column_names if name not in ("features", "features_scale")],
    )
    return sink.getvalue()


@dataclass(frozen=True)
class RolloutSet:
    """The reading side of a finished rollout set."""

    folder: AtomicFolder
    manifest: Manifest
    manifest_sha256: str  # names the data in a drafter's provenance

    @property
    def uri(self) -> str:
        return self.folder.uri

    @property
    def metadata(self) -> RolloutMetadata:
        return self.manifest.metadata

    @property
    def has_features(self) -> bool:
        return bool(self.metadata.target_layer_ids)

    @property
    def shard_uris(self) -> list[str]:
        """For readers of their own, such as ray.data.read_parquet."""
        return [f"{self.uri}/{shard.name}" for shard in self.manifest.shards]

    def __len__(self) -> int:
        return self.manifest.rows

    def __iter__(self) -> Iterator[Rollout]:
        return self.rollouts()

    def rollouts(self, *, with_features: bool = True, shards: Sequence[int] | None = None) -> Iterator[Rollout]:
        """Rows in order, a few in memory at a time; `shards` picks shards by index. Raises RolloutError."""
        for index in range(len(self.manifest.shards)) if shards is None else shards:
            yield from self._read_shard(self.manifest.shards[index], with_features)

    def _read_shard(self, shard: ShardRecord, with_features: bool) -> Iterator[Rollout]:
        try:
            with self.folder.open(shard.name) as stream:
                file = pq.ParquetFile(stream)
                names = file.schema_arrow.names
                columns = names if with_features else [name for name in names if not name.startswith("features")]
                for batch in file.iter_batches(batch_size=16, columns=columns):
                    yield from rollouts_of(batch)
        except (OSError, pa.ArrowException) as error:
            raise RolloutError(
                f"shard {self.uri}/{shard.name} cannot be read ({first_line(error)}); delete it and run generate again"
            ) from error

    def check_target(self, fingerprint: str) -> None:
        """Raise RolloutError if another target made the set."""
        if fingerprint != self.metadata.target_fingerprint:
            raise RolloutError(
                f"rollouts {self.uri} were made by another target ({self.metadata.target}, fingerprint "
                f"{self.metadata.target_fingerprint}, not {fingerprint}); generate them with this one"
            )

    def check(self) -> None:
        """Compare every shard with its checksum. Raises RolloutError naming the shards that differ."""
        bad = [shard.name for shard in self.manifest.shards if file_sha256(self.folder, shard.name) != shard.sha256]
        if bad:
            raise RolloutError(f"rollouts {self.uri}: {', '.join(bad)} are damaged; delete them and run generate again")


def file_sha256(folder: AtomicFolder, name: str) -> str:
    """The checksum of a file, read piece by piece."""
    digest = hashlib.sha256()
    with folder.open(name) as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def open_rollouts(uri: str, *, target_fingerprint: str | None = None) -> RolloutSet:
    """A finished rollout set. Raises RolloutError if it is none, unfinished, lacks shards, or is another target's."""
    folder = open_folder(uri)
    try:
        names = folder.names()
    except Exception as error:
        raise RolloutError(f"rollouts {uri} cannot be read ({first_line(error)}); check path and access") from error
    if MANIFEST not in names:
        if PLAN in names:
            raise RolloutError(f"rollouts {uri} are not finished; run the same generate command again")
        raise RolloutError(f"{uri} is not a rollout set (no {MANIFEST}); give the --output of generate")
    manifest = read_manifest(folder)
    broken = [shard.name for shard in manifest.shards if folder.size(shard.name) != shard.bytes]
    if broken:
        raise RolloutError(f"rollouts {uri}: {', '.join(broken[:3])} missing or cut short; run generate again")
    rollouts = RolloutSet(folder, manifest, hashlib.sha256(folder.read(MANIFEST)).hexdigest())
    if target_fingerprint:
        rollouts.check_target(target_fingerprint)
    return rollouts


def iter_rollouts(uri: str, *, with_features: bool = True) -> Iterator[Rollout]:
    """The rows of a finished rollout set."""
    return open_rollouts(uri).rollouts(with_features=with_features)
