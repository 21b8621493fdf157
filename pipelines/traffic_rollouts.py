"""Rows of the traffic log in, an ordinary rollout set with features out: a prefill-only stage on Ray Data.

`draftloop redistill` trains on the set beside older ones. Response ids are the log's own, never made again. Shards,
their names and the manifest are those of `draftloop generate`: killed and run again with the same rows, the stage goes
on where it stopped and ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from drafters.target import Target
from pipelines.feature_codec import ENGINE_DTYPE
from pipelines.generate_config import GenerateConfig
from pipelines.prompts import RejectedRow
from pipelines.rollout_plan import origin_plan, rollout_metadata, threads_plan
from pipelines.rollout_schema import RolloutMetadata
from pipelines.rollout_size import SizeEstimate, check_size
from pipelines.rollout_store import RolloutSet, RolloutStore, ShardRecord, open_rollouts, shard_name
from pipelines.shard_pool import GenerateProgress, Meter, OnProgress, make_shards
from pipelines.traffic_prefill import FOREIGN, PrefillContext, TrafficPrefill
from pipelines.traffic_selection import WindowError
from serving.chat_options import ChatOptions
from serving.traffic_schema import TrafficRow

__all__ = ["TrafficRolloutsConfig", "check_provenance", "write_rollouts"]


@dataclass(frozen=True, kw_only=True)
class TrafficRolloutsConfig:
    """How rows are read, and by what. Fields up to `batch` decide the bytes, and torch's threads on CPUs.

    Raises GenerateError for values that generate would refuse too.
    """

    category: str = "traffic"  # of all rows
    min_agreement: float = 0.9  # share of a greedy response's tokens that the target must give itself
    near_tie: float = 0.25  # logits that such a token may lie below the target's best
    rows_per_shard: int = 64  # per Parquet file, the unit of resuming
    target: str  # as it is named: nodes without the driver's folder look for it
    chat_options: ChatOptions = field(default_factory=ChatOptions)  # what it was served with
    target_layer_ids: tuple[int, ...] | None = None  # layers to tap, those of older sets; None: `num_taps`, spread
    num_taps: int = 3
    features_dtype: str = ENGINE_DTYPE  # bfloat16 as the engine gives them, float32, or int8 with scales
    dtype: str = "float32"  # of the target: float32 or bfloat16
    backend: str = "auto"  # of the engine: auto, native or torch
    batch: int = 8  # rows read at once
    threads_per_actor: int | None = None  # compute threads; None: cpus_per_actor
    num_actors: tuple[int, int] = (1, 1)  # least and most actors of the pool
    cpus_per_actor: float | None = None  # CPUs that Ray sets aside; None: this machine's cores divided among the actors
    gpus_per_actor: float = 0.0  # GPUs for an actor; 0 runs on the CPU
    resources: tuple[tuple[str, float], ...] = ()  # custom ones that an actor's node must have: (name, amount)
    max_bytes: int | None = None  # refuse to write more than this; None: what the disk holds
    stall_timeout_s: float = 1800.0  # give up when no actor reports progress for so long
    max_foreign: float = 0.1  # share of the greedy rows that may be another target's, left out, before all are refused

    def __post_init__(self) -> None:
        for name in ("min_agreement", "max_foreign"):
            if not 0 <= getattr(self, name) <= 1:
                raise WindowError(f"{name} is {getattr(self, name)}; give 0 to 1")
        if not self.near_tie >= 0:
            raise WindowError(f"near_tie is {self.near_tie}; give 0 or more")
        self.stage("")

    def stage(self, output: str) -> GenerateConfig:
        """The same for what this stage shares with generate."""
        names = {f.name for f in fields(GenerateConfig)} & {f.name for f in fields(self)}
        return GenerateConfig(output=output, **{name: getattr(self, name) for name in names})


def write_rollouts(
    rows: Sequence[TrafficRow],
    target: Target,
    output_uri: str,
    config: TrafficRolloutsConfig,
    on_progress: OnProgress | None = None,
) -> RolloutSet:
    """Make (or complete) the rollout set of these rows.

    Rows that the target cannot read, whose features are not finite, or that are not its own go to the set's rejects,
    under the category and their place among `rows`. Raises WindowError, RolloutError, GenerateError or TargetError.
    """
    say = on_progress or (lambda _: None)
    stage = config.stage(output_uri)
    metadata = rollout_metadata(stage, target)
    items, unreadable = _items(rows, target, config.category)
    if not items:
        raise WindowError(f"none of {len(rows)} rows can be read by the target; choose another window")
    shards = _divide(items, config.rows_per_shard)
    plan = _plan(config, items, len(rows)) | threads_plan(stage, target) | origin_plan(metadata)
    store = RolloutStore(output_uri)
    store.begin(plan)
    done = store.records(len(shards))
    missing = {name: part for name, part in shards.items() if name not in done}
    size = _size(stage, target, metadata, [item for part in missing.values() for item in part])
    there = f"{len(done)} of {len(shards)} shards are there already"
    say(GenerateProgress(message=f"{size}; {there}" if missing else there))
    check_size(stage, store, missing=size, whole=_size(stage, target, metadata, items))
    meter = Meter(say, rows_total=len(items), rows_before=len(items) - size.rows)
    work = {name: {"name": name, "rows": f"[{','.join(item.text for item in part)}]"} for name, part in missing.items()}
    made = make_shards(_context(config, stage, target, metadata, store, items), work, meter, TrafficPrefill)
    records = sorted([*done.values(), *made], key=lambda record: record.name)
    check_provenance(records, sum(item.greedy for item in items), config)
    store.finish(plan, metadata, records, _rejects(unreadable, records))
    return open_rollouts(store.uri)


def check_provenance(records: Sequence[ShardRecord], greedy: int, config: TrafficRolloutsConfig) -> None:
    """Raise WindowError if too many of the greedy rows are not what this target answers to their prompts.

    Files of another target are refused by their fingerprint before; this is for a log that was altered or belongs to
    another model in spite of what it says. Sampled rows cannot be told.
    """
    found = [entry for record in records for entry in record.rejected if entry["kind"] == FOREIGN]
    if len(found) > config.max_foreign * greedy:
        raise WindowError(
            f"{len(found)} of {greedy} greedy rows are not this target's answers (first {found[0]['reason']}, at "
            f"least {config.min_agreement:.0%} expected): the traffic log is another model's or was altered; serve "
            "with this target and log anew"
        )


class _Item(NamedTuple):
    """A row for an actor: tokens as text, since a list of Python integers takes six times as much."""

    text: str  # JSON: its place in the rows, from 1, and the fields of a Rollout
    tokens: int
    greedy: bool


def _items(rows: Sequence[TrafficRow], target: Target, category: str) -> tuple[list[_Item], list[RejectedRow]]:
    """The rows for the actors, and those that the target cannot read."""
    items, unreadable = [], []
    for line, row in enumerate(rows, 1):
        if reason := _unreadable(row, target):
            unreadable.append(RejectedRow(category, line, f"{row.request_id}: {reason}"))
        else:
            text = json.dumps({"line": line, "row": _fields(row)})
            tokens = len(row.prompt_ids) + len(row.response_ids)
            items.append(_Item(text, tokens, row.sampling.temperature == 0))
    return items, unreadable


def _context(
    config: TrafficRolloutsConfig,
    stage: GenerateConfig,
    target: Target,
    metadata: RolloutMetadata,
    store: RolloutStore,
    items: list[_Item],
) -> PrefillContext:
    """What all actors are told."""
    return PrefillContext(
        config=replace(stage, threads_per_actor=stage.threads),  # other nodes have other numbers of cores
        metadata=metadata,
        target=str(target.path.absolute()),
        drafter=None,
        output=store.uri,
        max_len=min(target.max_len, math.ceil(max(item.tokens for item in items) / 64) * 64),
        category=config.category,
        min_agreement=config.min_agreement,
        near_tie=config.near_tie,
    )


def _unreadable(row: TrafficRow, target: Target) -> str | None:
    vocab_size = int(target.config.get_text_config().vocab_size)
    ids = np.concatenate([row.prompt_ids, row.response_ids])
    if not len(row.prompt_ids) or not len(row.response_ids):
        return "no tokens"
    if len(ids) > target.max_len:
        return f"{len(ids)} tokens are more than the target's context of {target.max_len}"
    if ids.min() < 0 or ids.max() >= vocab_size:
        return f"a token is outside the target's vocabulary of {vocab_size}"
    return None


def _fields(row: TrafficRow) -> dict[str, Any]:
    """Of a Rollout, but for its category and features."""
    sampling = ("temperature", "top_p", "top_k", "seed", "max_new_tokens")
    return {
        "id": row.request_id,
        "prompt_ids": np.asarray(row.prompt_ids).tolist(),
        "response_ids": np.asarray(row.response_ids).tolist(),
        "finish_reason": row.finish_reason,
    } | {name: getattr(row.sampling, name) for name in sampling}


def _divide(items: list[_Item], rows_per_shard: int) -> dict[str, list[_Item]]:
    count = math.ceil(len(items) / rows_per_shard)
    return {shard_name(i, count): items[i * rows_per_shard : (i + 1) * rows_per_shard] for i in range(count)}


def _plan(config: TrafficRolloutsConfig, items: list[_Item], rows: int) -> dict[str, Any]:
    """Everything of this stage that decides the bytes: a rerun must agree with all of it."""
    names = ("category", "min_agreement", "near_tie", "rows_per_shard", "features_dtype", "dtype", "backend", "batch")
    digest = hashlib.sha256()
    for item in items:
        digest.update(item.text.encode() + b"\n")
    return {name: getattr(config, name) for name in names} | {"rows": rows, "traffic_sha256": digest.hexdigest()}


def _size(stage: GenerateConfig, target: Target, metadata: RolloutMetadata, items: list[_Item]) -> SizeEstimate:
    return SizeEstimate(
        rows=len(items),
        tokens=sum(item.tokens for item in items),
        taps=len(metadata.target_layer_ids),
        width=target.width,
        features_dtype=stage.features_dtype,
    )


def _rejects(unreadable: list[RejectedRow], records: Sequence[ShardRecord]) -> list[RejectedRow]:
    """All rows that are left out, by their place."""
    found = [RejectedRow(e["file"], e["line"], e["reason"]) for record in records for e in record.rejected]
    return sorted([*unreadable, *found], key=lambda row: row.line)
