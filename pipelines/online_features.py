"""Training rows with features computed on the way: chunks asked for by a trainer in, their sequences out, in order.

Every trainer has a Ray Data stage of target actors of its own, which reads the rows' tokens where they are stored and
streams features back; nothing is written. The offline counterpart is `training_data.fetch_from`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import ray.data

from pipelines.arrivals import Arrivals, NothingCameError
from pipelines.features import FeatureReader, FeatureTarget
from pipelines.pack_source import Fetch
from pipelines.ray_session import silence_ray_data
from pipelines.rollout_index import read_rows, shards_of, training_sequence
from pipelines.rollout_schema import Rollout, rollout_table, rollouts_of
from pipelines.rollout_store import open_rollouts
from pipelines.step_order import Chunk
from pipelines.training_sequence import TrainingSequence

START_DEADLINE_S = 900  # until the least number of target actors runs
STALL_S = 1800.0  # longest wait for a chunk's features, as for a shard's rollouts
NUMBER = "number"  # the column that tells which chunk of the asked-for ones a row is of


@dataclass(frozen=True, kw_only=True)
class FeatureActors:
    """The pool of target actors of one trainer."""

    least: int = 1
    most: int = 1
    cpus: float = 1.0  # CPUs that Ray sets aside for each
    gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)  # custom ones, such as {"target_node": 1}


@dataclass(frozen=True, kw_only=True)
class OnlineSource:
    """What the stage's actors are told."""

    rollouts: list[str]  # absolute addresses
    target: FeatureTarget
    actors: FeatureActors


class FeatureStage:
    """One actor: a chunk's address in, its rows with features out."""

    def __init__(self, source: OnlineSource):
        self.shards = shards_of([open_rollouts(uri) for uri in source.rollouts])
        self.reader = FeatureReader(source.target)

    def __call__(self, batch: pa.Table) -> pa.Table:
        tables = []
        for item in batch.to_pylist():
            rollouts, shard = self.shards[item["shard"]]
            rows = list(read_rows(rollouts, shard, item["rows"], with_features=False))
            features = self.reader.read([row.prompt_ids + row.response_ids for row in rows])
            for row, features_TF in zip(rows, features, strict=True):
                row.features_TF = features_TF
            table = rollout_table(rows, rollouts.metadata).replace_schema_metadata(None)
            tables.append(table.append_column(NUMBER, pa.array([item[NUMBER]] * len(rows), pa.int64())))
        return pa.concat_tables(tables)


def fetch_online(source: OnlineSource, chunks: Sequence[Chunk]) -> Fetch:
    """Asks the target for the features of chunks, some ahead of their use."""

    def fetch(wanted: Sequence[int]) -> Iterator[tuple[int, list[TrainingSequence]]]:
        items = [
            {NUMBER: number, "shard": chunks[c].shard, "rows": list(chunks[c].rows)} for number, c in enumerate(wanted)
        ]
        rows: list[TrainingSequence] = []
        number = 0
        for of, rollout in _rows(_stream(items, source)):
            assert of == number, "chunks must come in the order in which they were asked for"
            rows.append(training_sequence(rollout))
            if len(rows) == len(chunks[wanted[number]].rows):
                yield wanted[number], rows
                rows, number = [], number + 1
        if number < len(wanted):
            raise RuntimeError(f"the target gave {number} of {len(wanted)} chunks")

    return fetch


def _rows(tables: Iterator[pa.Table]) -> Iterator[tuple[int, Rollout]]:
    """(number, rollout) of every row."""
    for table in tables:
        for batch in table.to_batches():
            yield from zip(batch.column(NUMBER).to_pylist(), rollouts_of(batch.drop_columns([NUMBER])), strict=True)


def _stream(items: list[dict[str, Any]], source: OnlineSource) -> Iterator[pa.Table]:
    """Tables of rows, chunk by chunk in order."""
    silence_ray_data()
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.wait_for_min_actors_s = START_DEADLINE_S  # without it Ray waits for ever where there is no room
    actors = source.actors
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        FeatureStage,
        fn_constructor_args=(source,),
        batch_size=1,
        batch_format="pyarrow",
        concurrency=(actors.least, actors.most),
        num_cpus=actors.cpus,
        num_gpus=actors.gpus,
        resources=actors.resources or None,
    )
    batches = partial(dataset.iter_batches, batch_size=None, batch_format="pyarrow")
    try:
        with Arrivals(batches, timeout_s=STALL_S, ahead=1) as tables:
            yield from tables
    except NothingCameError as error:  # this run ends, and the next one goes on from its last state
        raise RuntimeError(f"the target gave no features: {error}; see the Ray logs") from None
