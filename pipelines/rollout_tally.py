"""One shard's file in, counts over its rows out; counts of shards add up. The bytes of the features are not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.rollout_schema import METADATA_PREFIX

SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens")
_FEATURES = ("features_dtype", "features_shape")
_COLUMNS = [
    "id", "category", "prompt_ids", "response_ids", "loss_mask", "finish_reason", *SAMPLING, *_FEATURES,
]  # fmt: skip
BATCH_ROWS = 256  # rows in memory at a time


@dataclass(frozen=True)
class SampleRow:
    """A row to look at: its ids, and its text where there is a tokenizer."""

    id: str
    category: str
    prompt_ids: list[int]
    response_ids: list[int]
    prompt: str | None = None
    response: str | None = None


@dataclass
class Tally:
    """Counts over rows. Lengths are counted by value, so that their number does not grow with the rows."""

    rows: int = 0
    prompt_lengths: Counter[int] = field(default_factory=Counter)  # tokens -> rows
    response_lengths: Counter[int] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    categories: Counter[str] = field(default_factory=Counter)
    features: Counter[tuple[str, int]] = field(default_factory=Counter)  # (dtype, taps * width) -> rows
    column_bytes: Counter[str] = field(default_factory=Counter)  # as compressed in the file
    loss_tokens: int = 0  # tokens with a loss mask of 1
    sampling: dict[str, tuple[float, float]] = field(default_factory=dict)  # least and most of each parameter
    code_version: str | None = None
    first: list[SampleRow] = field(default_factory=list)

    def add(self, other: Tally, keep_rows: int) -> None:
        """Take over another shard's counts, and its first rows as long as there are fewer than `keep_rows`."""
        self.rows += other.rows
        self.loss_tokens += other.loss_tokens
        for name in ("prompt_lengths", "response_lengths", "finish_reasons", "categories", "features", "column_bytes"):
            getattr(self, name).update(getattr(other, name))
        for name, (low, high) in other.sampling.items():
            self._widen(name, low, high)
        self.code_version = self.code_version or other.code_version
        self.first = (self.first + other.first)[:keep_rows]

    def _widen(self, name: str, low: float, high: float) -> None:
        before = self.sampling.get(name, (low, high))
        self.sampling[name] = (min(low, before[0]), max(high, before[1]))

    def _add_batch(self, batch: pa.RecordBatch, keep_rows: int) -> None:
        column = {name: batch.column(name) for name in _COLUMNS}
        self.rows += batch.num_rows
        self.prompt_lengths.update(pc.list_value_length(column["prompt_ids"]).to_pylist())
        self.response_lengths.update(pc.list_value_length(column["response_ids"]).to_pylist())
        self.finish_reasons.update(column["finish_reason"].to_pylist())
        self.categories.update(column["category"].to_pylist())
        self.loss_tokens += pc.sum(pc.list_flatten(column["loss_mask"])).as_py() or 0
        dtypes, shapes = (column[name].to_pylist() for name in _FEATURES)
        self.features.update((d, shape[1]) for d, shape in zip(dtypes, shapes, strict=True) if d)
        for name in SAMPLING:
            ends = pc.min_max(column[name]).as_py()
            if ends["min"] is not None:
                self._widen(name, ends["min"], ends["max"])
        if wanted := keep_rows - len(self.first):
            rows = batch.slice(0, wanted).select(["id", "category", "prompt_ids", "response_ids"]).to_pylist()
            self.first += [SampleRow(**row) for row in rows]


def tally_shard(stream: IO[bytes], keep_rows: int) -> Tally:
    """Counts over one shard. Raises OSError, pyarrow's errors or KeyError for a file that is not one."""
    tally = Tally()
    file = pq.ParquetFile(stream)
    texts: dict[bytes, bytes] = file.schema_arrow.metadata or {}
    version = texts.get(f"{METADATA_PREFIX}code_version".encode())
    tally.code_version = version.decode() if version else None
    for column in _chunks(file.metadata):
        tally.column_bytes[column.path_in_schema.split(".")[0]] += column.total_compressed_size
    for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=_COLUMNS):
        tally._add_batch(batch, keep_rows)
    return tally


def _chunks(metadata: Any) -> Iterable[Any]:
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            yield metadata.row_group(group).column(column)
