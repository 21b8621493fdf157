"""What is known of rollout sets before any feature is read: sets in, chunks of training and held-out rows out.

Only token columns are read. Every n-th usable row is held out, over all sets in their order; the rest is training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from drafters.remote import first_line
from pipelines.draft_vocabulary import FOLDS, TokenCounts
from pipelines.rollout_schema import Rollout, rollouts_of
from pipelines.rollout_store import RolloutError, RolloutSet
from pipelines.step_order import Chunk, chunk_rows, chunk_size
from pipelines.train_config import TrainError
from pipelines.training_sequence import TrainingSequence, spans_of

MIN_SPAN = 3  # tokens of a turn that can be drafted in: the first is the anchor's, and two must follow it
MAX_HELD_OUT = 1024  # rows; more would tell little and take long
INDEX_COLUMNS = ["prompt_ids", "response_ids", "loss_mask"]
TRAINING, HELD_OUT = 0, 1


@dataclass(frozen=True, kw_only=True)
class RolloutIndex:
    """The rows that can be trained on."""

    training: list[Chunk]
    held_out: list[Chunk]
    counts: list[TokenCounts]  # of FOLDS parts of the training rows
    held_out_counts: TokenCounts

    @property
    def rows(self) -> int:
        """Training rows."""
        return sum(len(chunk.rows) for chunk in self.training)

    @property
    def held_out_rows(self) -> int:
        return sum(len(chunk.rows) for chunk in self.held_out)

    @property
    def response_tokens(self) -> int:
        """Tokens of the training rows that the target wrote."""
        return int(TokenCounts.total(self.counts).responses_V.sum())


def shards_of(sets: Sequence[RolloutSet]) -> list[tuple[RolloutSet, int]]:
    """All shards in the order in which `Chunk.shard` counts them."""
    return [(rollouts, i) for rollouts in sets for i in range(len(rollouts.manifest.shards))]


def index_rollouts(
    sets: Sequence[RolloutSet], *, vocab_size: int, held_out: float, lanes: int, weights: Sequence[float] = ()
) -> RolloutIndex:
    """Read the token columns of all sets. `lanes` are the packs of a step; `weights` how often each set is read per
    epoch (none: once). Raises RolloutError or TrainError.
    """
    if not 0 < held_out < 1:
        raise TrainError(f"held_out must be between 0 and 1, got {held_out}")
    rows = sum(len(rollouts) for rollouts in sets)
    scan = _Scan(sets, vocab_size, max(2, round(1 / held_out), -(-rows // MAX_HELD_OUT)))
    if scan.usable < 2:
        raise TrainError(f"{scan.usable} usable rollouts are too few to train on (of {rows}); generate more")
    if scan.usable < scan.every:  # a few rows, of which the last is held out
        scan = _Scan(sets, vocab_size, scan.usable)
    size = chunk_size(scan.usable, lanes)
    of_sets = weights or [1.0] * len(sets)
    of_shards = [w for w, rollouts in zip(of_sets, sets, strict=True) for _ in rollouts.manifest.shards]
    training, chosen = (
        [
            chunk
            for shard, (found, weight) in enumerate(zip(scan.found, of_shards, strict=True))
            for chunk in chunk_rows(shard, found[kind].rows, found[kind].lengths, size, weight)
        ]
        for kind in (TRAINING, HELD_OUT)
    )
    counts = [TokenCounts.of_numpy(responses_V, prompts_V) for responses_V, prompts_V in scan.counts_F2V]
    return RolloutIndex(training=training, held_out=chosen, counts=counts[:FOLDS], held_out_counts=counts[FOLDS])


class _Rows(NamedTuple):
    """Rows of one shard."""

    rows: list[int]
    lengths: list[int]  # tokens


class _Scan:
    """One reading of the token columns of all sets; every `every`-th usable row is held out."""

    def __init__(self, sets: Sequence[RolloutSet], vocab_size: int, every: int):
        self.every, self.usable = every, 0
        self.found: list[tuple[_Rows, _Rows]] = []  # by shard: training and held-out rows
        # by fold of training rows, and at last of the held-out ones: how often a token is the target's, or is not
        self.counts_F2V = np.zeros((FOLDS + 1, 2, vocab_size), dtype=np.int64)
        for rollouts, shard in shards_of(sets):
            self.found.append((_Rows([], []), _Rows([], [])))
            for place, (prompt, response, mask) in enumerate(_token_rows(rollouts, shard)):
                written = mask[len(prompt) :].astype(bool)
                if _is_usable(written):
                    self._add(place, prompt, response, written)

    def _add(self, place: int, prompt: np.ndarray, response: np.ndarray, written: np.ndarray) -> None:
        kind = HELD_OUT if self.usable % self.every == self.every - 1 else TRAINING
        part = self.found[-1][kind]
        part.rows.append(place)
        part.lengths.append(len(prompt) + len(response))
        counts_2V = self.counts_F2V[FOLDS if kind == HELD_OUT else self.usable % FOLDS]
        np.add.at(counts_2V[0], response[written], 1)
        np.add.at(counts_2V[1], prompt, 1)
        np.add.at(counts_2V[1], response[~written], 1)
        self.usable += 1


def read_chunk(sets: Sequence[RolloutSet], chunk: Chunk, *, with_features: bool = True) -> list[TrainingSequence]:
    """The sequences of a chunk's rows. Raises RolloutError."""
    rollouts, shard = shards_of(sets)[chunk.shard]
    rows = read_rows(rollouts, shard, chunk.rows, with_features=with_features)
    return [training_sequence(rollout) for rollout in rows]


def training_sequence(rollout: Rollout) -> TrainingSequence:
    """A rollout as the trainer sees it; features without width if it has none."""
    tokens = len(rollout.prompt_ids) + len(rollout.response_ids)
    features_TF = torch.zeros(tokens - 1, 0) if rollout.features_TF is None else rollout.features_TF
    spans = spans_of(rollout.loss_mask)
    whole = ((len(rollout.prompt_ids), tokens),)
    return TrainingSequence(
        torch.tensor(rollout.prompt_ids + rollout.response_ids),
        len(rollout.prompt_ids),
        features_TF,
        rollout.category,
        rollout.temperature == 0,
        () if spans == whole else spans,
    )


def read_rows(
    rollouts: RolloutSet, shard: int, rows: Sequence[int], *, with_features: bool = True
) -> Iterator[Rollout]:
    """Rows of a shard by their places, ascending; only the row groups that hold them are read. Raises RolloutError."""
    name = rollouts.manifest.shards[shard].name
    try:
        with rollouts.folder.open(name) as stream:
            file = pq.ParquetFile(stream)
            names = file.schema_arrow.names
            columns = names if with_features else [name for name in names if not name.startswith("features")]
            wanted = np.asarray(rows, dtype=np.int64)
            start = 0
            for group in range(file.num_row_groups):
                end = start + file.metadata.row_group(group).num_rows
                inside = wanted[(wanted >= start) & (wanted < end)] - start
                if len(inside):
                    for batch in file.read_row_group(group, columns).take(inside).to_batches():
                        yield from rollouts_of(batch)
                start = end
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(rollouts, name, error) from error


def _token_rows(rollouts: RolloutSet, shard: int) -> Iterator[tuple[np.ndarray, ...]]:
    """(prompt ids, response ids, loss mask) of every row of a shard. Raises RolloutError."""
    name = rollouts.manifest.shards[shard].name
    try:
        with rollouts.folder.open(name) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(batch_size=1024, columns=INDEX_COLUMNS):
                yield from zip(*(_lists(batch.column(column)) for column in INDEX_COLUMNS), strict=True)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(rollouts, name, error) from error


def _lists(column: pa.Array) -> list[np.ndarray]:
    """The rows of a list column."""
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    return [values[first:end] for first, end in pairwise(offsets)]


def _is_usable(written_mask: np.ndarray) -> bool:
    """Whether some turn is long enough to draft in."""
    if written_mask.all():
        return len(written_mask) >= MIN_SPAN
    return any(end - first >= MIN_SPAN for first, end in spans_of(written_mask.tolist()))


def _unreadable(rollouts: RolloutSet, name: str, error: Exception) -> RolloutError:
    reason = first_line(error)
    return RolloutError(f"shard {rollouts.uri}/{name} cannot be read ({reason}); delete it and run generate again")
