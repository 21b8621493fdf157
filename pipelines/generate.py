"""`draftloop generate`: prompts in, rollouts (Parquet shards, manifest, rejects) out.

The target continues every prompt. Ray Data hands one missing shard at a time to a pool of actors, each with its own
decode engine; features come from the passes that wrote the text. Killed and run again, it goes on where it stopped.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafters.target import (
    Target,
    TargetError,
    check_shareable,
    load_target,
)
from pipelines.generate_config import GenerateConfig, GenerateError
from pipelines.prompts import PromptRow, PromptSet, RejectedRow, read_prompts
from pipelines.rollout_plan import origin_plan, rollout_metadata, threads_plan
from pipelines.rollout_schema import RolloutMetadata
from pipelines.rollout_size import SizeEstimate, check_size, estimate_size
from pipelines.rollout_store import RolloutStore, ShardRecord, shard_name
from pipelines.shard_generator import ShardContext, shard_item
from pipelines.shard_pool import GenerateProgress, Meter, OnProgress, make_shards

__all__ = ["GenerateConfig", "GenerateError", "GenerateProgress", "GenerateReport", "generate"]


@dataclass(frozen=True, kw_only=True)
class GenerateReport:
    """What a finished run made."""

    output: str
    rows: int
    rejected: int
    rejected_by_kind: dict[str, int]  # the most frequent first
    shards_made: int
    shards_reused: int
    prompt_tokens: int
    response_tokens: int  # of the whole set
    bytes: int
    seconds: float  # of making the missing shards, Ray's and the engines' start included
    tokens_per_s: float  # while the engines ran, their start not counted; 0 if all shards were reused


def generate(config: GenerateConfig, on_progress: OnProgress | None = None) -> GenerateReport:
    """Make (or complete) a rollout set.

    Raises TargetError, PromptError, ChatOptionsError, RolloutError or GenerateError.
    """
    say = on_progress or (lambda _: None)
    target = load_target(config.target, on_progress=lambda text: say(GenerateProgress(message=text)))
    if config.with_features:
        _check_trainable(target)
    prompts = read_prompts(
        config.prompts,
        target,
        max_prompt_tokens=_max_prompt_tokens(config, target),
        chat=config.chat,
        limit=config.limit,
        options=config.chat_options,
    )
    metadata = rollout_metadata(config, target)
    shards = _divide(prompts.rows, config.rows_per_shard)
    plan = _plan(config, target, metadata, prompts)
    store = RolloutStore(config.output)
    store.begin(plan)
    done = store.records(len(shards))
    missing = {name: rows for name, rows in shards.items() if name not in done}
    size = _size(config, target, [row for rows in missing.values() for row in rows])
    there = f"{len(done)} of {len(shards)} shards are there already"
    say(GenerateProgress(message=f"{size}; {there}" if missing else there))
    check_size(config, store, missing=size, whole=_size(config, target, prompts.rows))

    started, meter = (
        time.monotonic(),
        Meter(say, rows_total=len(prompts.rows), rows_before=len(prompts.rows) - size.rows),
    )
    longest = max(row.most_tokens(config.max_new_tokens) for row in prompts.rows)
    max_len = min(target.max_len, math.ceil(longest / 64) * 64)
    context = ShardContext(
        config=replace(config, threads_per_actor=config.threads),  # other nodes have other numbers of cores
        metadata=metadata,
        target=str(target.path.absolute()),
        drafter=_absolute(config.drafter),
        output=store.uri,
        max_len=max_len,
    )
    made = make_shards(context, {name: shard_item(name, rows) for name, rows in missing.items()}, meter)
    records = [*done.values(), *made]
    manifest = store.finish(plan, metadata, records, _all_rejects(config, prompts, records))
    return GenerateReport(
        output=store.uri,
        rows=manifest.rows,
        rejected=manifest.rejected,
        rejected_by_kind=_kinds(prompts, records),
        shards_made=len(made),
        shards_reused=len(done),
        prompt_tokens=manifest.prompt_tokens,
        response_tokens=manifest.response_tokens,
        bytes=manifest.bytes,
        seconds=time.monotonic() - started,
        tokens_per_s=meter.tokens_per_s,
    )


# -- before the work: what it is, and whether there is room -----------------------------------------------------------


def _check_trainable(target: Target) -> None:
    """Refuse at once what `draftloop train` would refuse after all the generating."""
    try:
        check_shareable(target.path)
    except TargetError as error:
        raise TargetError(
            f"{error}; features could not be used for MTP training, give --no-features if only the tokens are wanted"
        ) from None


def _max_prompt_tokens(config: GenerateConfig, target: Target) -> int:
    room = target.max_len - config.max_new_tokens
    if room < 1:
        raise GenerateError(
            f"max_new_tokens is {config.max_new_tokens}; the target's context is {target.max_len} tokens"
        )
    return min(room, config.max_prompt_tokens or room)


def _divide(rows: list[PromptRow], rows_per_shard: int) -> dict[str, list[PromptRow]]:
    count = math.ceil(len(rows) / rows_per_shard)
    return {shard_name(i, count): rows[i * rows_per_shard : (i + 1) * rows_per_shard] for i in range(count)}


def _size(config: GenerateConfig, target: Target, rows: list[PromptRow]) -> SizeEstimate:
    """How much the rows may come to, every turn of theirs counted as a row of its own."""
    turns = [replace(row, prompt_ids=ids) for row in rows for ids in (row.prompt_ids, *_added(row))]
    return replace(estimate_size(config, target, turns), rows=len(rows))


def _added(row: PromptRow) -> list[list[int]]:
    """What is put before each further turn, at its longest."""
    return [follow_up.closing_ids + follow_up.opening_ids for follow_up in row.follow_ups]


def _absolute(drafter: str | None) -> str | None:
    """The address as workers in another folder understand it."""
    return drafter if drafter is None or "://" in drafter else str(Path(drafter).expanduser().absolute())


def _plan(config: GenerateConfig, target: Target, metadata: RolloutMetadata, prompts: PromptSet) -> dict[str, Any]:
    """Everything that decides the bytes: a rerun must agree with all of it.

    Batch is among them: the torch backend rounds differently in other company.
    """
    own = ("prompts", "limit", "chat", "max_prompt_tokens", "max_new_tokens", "temperature", "top_k", "top_p", "seed")
    engine = ("with_features", "features_dtype", "dtype", "backend", "batch", "rows_per_shard", "drafter")
    return (
        {name: getattr(config, name) for name in own + engine}
        | threads_plan(config, target)
        | origin_plan(metadata)
        | {"prompts_sha256": prompts.sha256, "rows": len(prompts.rows)}
    )


def _all_rejects(config: GenerateConfig, prompts: PromptSet, records: list[ShardRecord]) -> list[RejectedRow]:
    """Rows that the reader refused, and rows that failed while generating, by file and line."""
    failed = [
        RejectedRow(entry.get("file") or config.prompts, entry["line"], entry["reason"])
        for record in records
        for entry in record.rejected
    ]
    order = {name: place for place, name in enumerate(prompts.files)}
    return sorted([*prompts.rejected, *failed], key=lambda row: (order.get(row.file, 0), row.line))


def _kinds(prompts: PromptSet, records: list[ShardRecord]) -> dict[str, int]:
    """How many rows were rejected for each kind of reason, the most frequent first."""
    failed = [entry.get("kind", "generation failed") for record in records for entry in record.rejected]
    return dict(Counter([*prompts.kinds, *failed]).most_common())
