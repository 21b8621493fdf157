"""What a drill does to the loop: windows of traffic that teach nothing, and a drafter that only looks well."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from drafters.checkpoint import PROVENANCE, WEIGHTS
from drafters.registry import Registry
from drafters.remote_checkpoint import local_checkpoint
from serving.traffic_schema import TrafficColumns, TrafficMetadata, TrafficRow, traffic_table
from serving.traffic_shards import read_traffic, shard_name

Poison = Literal["garbage", "another model"]
POISONS: tuple[Poison, ...] = ("garbage", "another model")
LOOP_TOKENS = 4  # that garbage repeats


def poison(traffic: Path, output: Path, kind: Poison) -> Path:
    """A copy of a traffic log with other answers: loops of a few tokens, or each request with the next one's."""
    for number, table in enumerate(read_traffic(str(traffic))):
        columns, origin = TrafficColumns(table), TrafficMetadata.from_texts(table.schema.metadata)
        rows = [columns.row(i) for i in range(len(columns))]
        changed = _changes[kind](rows)
        arrivals = [row.arrived_us for row in changed]
        file = output / shard_name(min(arrivals), max(arrivals), "drill", number)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(traffic_table(changed, origin), file)
    return output


def _looped(rows: list[TrafficRow]) -> list[TrafficRow]:
    loops = (
        list(itertools.islice(itertools.cycle(row.response_ids[:LOOP_TOKENS]), max(32, len(row.response_ids))))
        for row in rows
    )
    return [replace(row, response_ids=loop) for row, loop in zip(rows, loops, strict=True)]


def _of_others(rows: list[TrafficRow]) -> list[TrafficRow]:
    others = rows[1:] + rows[:1]
    return [replace(row, response_ids=other.response_ids) for row, other in zip(rows, others, strict=True)]


_changes: dict[Poison, Callable[[list[TrafficRow]], list[TrafficRow]]] = {
    "garbage": _looped,
    "another model": _of_others,
}


def publish_bad(registry: Registry, good: str, folder: Path) -> str:
    """A version with the evaluation of a good one and weights that know nothing; its name."""
    version = registry.version(good)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(local_checkpoint(version.uri), folder)
    for name in ("version.json", "evaluation.json"):
        (folder / name).unlink(missing_ok=True)
    weights, stream = load_file(folder / WEIGHTS), torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.dim() == 2:
            weights[name] = tensor[torch.randperm(len(tensor), generator=stream)].contiguous()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    provenance = json.loads((folder / PROVENANCE).read_text())
    (folder / PROVENANCE).write_text(json.dumps(provenance | {"drill": "rows of its matrices are shuffled"}, indent=2))
    return registry.publish(
        folder, name=f"{good}-looks-well", parent=good, data={"drill": "bad live"}, evaluation=version.evaluation
    ).name
