"""`draftloop rollouts inspect`: a rollout set in, finished or not, what it holds and whether it is whole out.

Shards are read one by one, without features and a batch of rows at a time: memory does not grow with the set.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pyarrow as pa

from drafters.atomic_files import AtomicFolder
from drafters.remote import first_line
from drafters.target import TargetError
from pipelines.feature_codec import bytes_per_token
from pipelines.rollout_manifest import (
    MANIFEST,
    PLAN,
    RECORDS,
    RolloutError,
    ShardRecord,
    check_version,
    open_folder,
    read_manifest,
)
from pipelines.rollout_schema import RolloutMetadata
from pipelines.rollout_store import file_sha256
from pipelines.rollout_tally import SampleRow, Tally, tally_shard
from pipelines.rollout_text import load_tokenizer

OnProgress = Callable[[int, int, str], None]  # shards done, shards in all, the last one's name


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What to do beside counting."""

    sample: int = 2  # rows to show
    check: bool = True  # compare every shard with its checksum
    target: str | None = None  # whose tokenizer decodes the sample; None: the recorded one, if it is here


@dataclass(frozen=True)
class Lengths:
    """Tokens of the rows: median and p95 are the least length that half (95%) of the rows do not exceed."""

    min: int
    median: int
    p95: int
    max: int


@dataclass(frozen=True)
class StoredFeatures:
    """Rows whose features are alike."""

    dtype: str
    width: int  # of one tapped layer
    rows: int
    bytes_per_token: int  # before compression


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a set holds. Totals are those of its records; what is marked so comes from the rows of whole shards."""

    uri: str
    finished: bool
    origin: dict[str, Any]  # RolloutMetadata's fields, as far as they are known
    config: dict[str, Any]  # the plan it was made with
    shards: int  # that are recorded
    shards_planned: int | None  # None: unknown
    rows: int
    rows_planned: int | None  # rows that were to be generated, before rejects among them; None: unknown
    rejected: int  # unfinished: those that failed while generating, so far
    prompt_tokens: int
    response_tokens: int
    bytes: int
    checked: bool  # whether checksums were compared
    damaged: dict[str, str]  # shard -> what is wrong with it
    rows_read: int  # rows of whole shards; all that follows is counted over these
    prompt_lengths: Lengths | None
    response_lengths: Lengths | None
    finish_reasons: dict[str, int]
    categories: dict[str, int]
    sampling: dict[str, tuple[float, float]]  # least and most
    loss_mask_share: float | None  # tokens with a loss mask of 1, of all
    bytes_by_column: dict[str, int]  # compressed, largest first
    features: list[StoredFeatures]  # one, unless rows differ; none without features
    sample: list[SampleRow]
    sample_note: str | None  # why there is no text


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """What a folder says about itself."""

    folder: AtomicFolder
    finished: bool
    origin: dict[str, Any]
    config: dict[str, Any]
    shards: list[ShardRecord]
    rejected: int


def inspect_rollouts(
    uri: str, options: InspectOptions | None = None, on_progress: OnProgress | None = None
) -> Inspection:
    """Look at a rollout set. Damaged shards are among the result; raises RolloutError for what is no set."""
    options = options or InspectOptions()
    say = on_progress or (lambda done, total, name: None)
    listing = _listing(uri)
    tally, damaged = Tally(), {}
    for number, shard in enumerate(listing.shards, 1):
        try:
            tally.add(_read_shard(listing.folder, shard, options), options.sample)
        except _DamagedError as damage:
            damaged[shard.name] = str(damage)
        say(number, len(listing.shards), shard.name)
    origin = listing.origin
    if "code_version" not in origin and tally.code_version:
        origin = origin | {"code_version": tally.code_version}
    sample, note = _sample(tally.first, options.target, origin)
    return Inspection(
        uri=listing.folder.uri,
        finished=listing.finished,
        origin=origin,
        config=listing.config,
        checked=options.check,
        damaged=damaged,
        sample=sample,
        sample_note=note,
        **_totals(listing),
        **_counts(tally, len(origin.get("target_layer_ids", ()))),
    )


# -- what is there ----------------------------------------------------------------------------------------------------


def _listing(uri: str) -> _Listing:
    folder = open_folder(uri)
    try:
        names = folder.names()
        if MANIFEST in names:
            manifest = read_manifest(folder)
            return _Listing(
                folder=folder,
                finished=True,
                origin=manifest.metadata.as_json(),
                config=manifest.config,
                shards=manifest.shards,
                rejected=manifest.rejected,
            )
        if PLAN in names:
            return _unfinished(folder)
    except RolloutError:
        raise
    except Exception as error:
        raise RolloutError(f"rollouts {uri} cannot be read ({first_line(error)}); check path and access") from error
    raise RolloutError(f"{uri} is not a rollout set (no {MANIFEST}, no {PLAN}); give the --output of generate")


def _unfinished(folder: AtomicFolder) -> _Listing:
    """A set without a manifest, from its plan and the records of the shards that are done."""
    try:
        plan = json.loads(folder.read(PLAN))
        check_version(folder, plan.get("schema_version", 1))
    except (ValueError, AttributeError) as error:
        if isinstance(error, RolloutError):
            raise
        raise RolloutError(f"rollouts {folder.uri} have a damaged {PLAN}; generate into another folder") from None
    records = []
    for name in folder.names(RECORDS):
        if name.endswith(".parquet.json"):
            try:
                records.append(ShardRecord(**json.loads(folder.read(f"{RECORDS}/{name}"))))
            except (ValueError, TypeError):
                continue  # of no use to generate either: it makes the shard again
    return _Listing(
        folder=folder,
        finished=False,
        origin={f.name: plan[f.name] for f in fields(RolloutMetadata) if f.name in plan},
        config=plan,
        shards=records,
        rejected=sum(len(record.rejected) for record in records),
    )


def _totals(listing: _Listing) -> dict[str, Any]:
    rows, per_shard = listing.config.get("rows"), listing.config.get("rows_per_shard")
    planned = math.ceil(rows / per_shard) if rows and per_shard else None
    totals = {
        name: sum(getattr(shard, name) for shard in listing.shards)
        for name in ("rows", "prompt_tokens", "response_tokens", "bytes")
    }
    shards = len(listing.shards)
    return totals | {
        "shards": shards,
        "shards_planned": shards if listing.finished else planned,
        "rows_planned": rows,
        "rejected": listing.rejected,
    }


# -- what is in it ----------------------------------------------------------------------------------------------------


class _DamagedError(Exception):
    """A shard that is not what its record says; the message is the verdict."""


def _read_shard(folder: AtomicFolder, shard: ShardRecord, options: InspectOptions) -> Tally:
    size = folder.size(shard.name)
    if size is None:
        raise _DamagedError("missing")
    if size != shard.bytes:
        raise _DamagedError(f"{size:,} bytes, not {shard.bytes:,}")
    try:
        if options.check and file_sha256(folder, shard.name) != shard.sha256:
            raise _DamagedError("differs from its checksum")
        with folder.open(shard.name) as stream:
            tally = tally_shard(stream, options.sample)
    except (OSError, pa.ArrowException, KeyError) as error:
        raise _DamagedError(f"cannot be read ({first_line(error)})") from error
    if tally.rows != shard.rows:
        raise _DamagedError(f"{tally.rows} rows, not {shard.rows}")
    return tally


def _counts(tally: Tally, taps: int) -> dict[str, Any]:
    tokens = sum(n * rows for lengths in (tally.prompt_lengths, tally.response_lengths) for n, rows in lengths.items())
    features = []
    for (dtype, all_taps), rows in sorted(tally.features.items()):
        width = all_taps // max(1, taps)
        features.append(StoredFeatures(dtype, width, rows, bytes_per_token(dtype, max(1, taps), width)))
    return {
        "rows_read": tally.rows,
        "prompt_lengths": _lengths(tally.prompt_lengths),
        "response_lengths": _lengths(tally.response_lengths),
        "finish_reasons": dict(tally.finish_reasons.most_common()),
        "categories": dict(tally.categories.most_common()),
        "sampling": tally.sampling,
        "loss_mask_share": tally.loss_tokens / tokens if tokens else None,
        "bytes_by_column": dict(tally.column_bytes.most_common()),
        "features": features,
    }


def _lengths(counted: Counter[int]) -> Lengths | None:
    if not counted:
        return None
    return Lengths(min(counted), _quantile(counted, 50), _quantile(counted, 95), max(counted))


def _quantile(counted: Counter[int], percent: int) -> int:
    """The least length that `percent` of the rows do not exceed."""
    rank = -(-counted.total() * percent // 100)  # rounded up
    for length in sorted(counted):
        rank -= counted[length]
        if rank <= 0:
            return length
    raise AssertionError("no rows")


def _sample(rows: list[SampleRow], target: str | None, origin: dict[str, Any]) -> tuple[list[SampleRow], str | None]:
    """The rows with their text, or as they are and the reason."""
    spec = target or origin.get("target")
    if not rows or not spec:
        return rows, None
    try:
        tokenizer = load_tokenizer(spec, origin.get("tokenizer_hash", ""), may_fetch=target is not None)
    except TargetError as error:
        return rows, f"no text: {first_line(error)}; give --target the target that made the set"
    text = tokenizer.decode
    return [replace(row, prompt=text(row.prompt_ids), response=text(row.response_ids)) for row in rows], None
