"""One answered request as the traffic log keeps it: token ids, how they were sampled, and how drafting went. No text.

The contract of serve and redistill. Parquet, readable with pyarrow alone; the file's metadata say which target
answered, under the same keys as a rollout's, so that both can be compared before a drafter learns from them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from drafters.acceptance import Acceptance
from drafters.code_version import code_version
from drafters.target import Target, target_fingerprint, tokenizer_hash
from serving.chat_options import ChatOptions, ChatTemplate
from serving.engine.sampling import Sampling

TRAFFIC_VERSION = 1
METADATA_PREFIX = "draftloop."
KIND, TRAFFIC = "kind", "traffic"  # what tells these files from others

_IDS = pa.list_(pa.int32())
TRAFFIC_SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("arrived_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("prompt_ids", _IDS, nullable=False),
        pa.field("response_ids", _IDS, nullable=False),  # as generated, with the stop token, if one ended it
        pa.field("finish_reason", pa.string(), nullable=False),  # "stop" or "length"
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("max_new_tokens", pa.int32(), nullable=False),
        pa.field("drafter_version", pa.string()),  # of the last round; null: no drafter
        pa.field("drafter_changed", pa.bool_(), nullable=False),  # another drafter served the request's beginning
        pa.field("placement", pa.string(), nullable=False),  # "colocated", "disaggregated" or "none"
        pa.field("rounds", pa.int32(), nullable=False),  # verify rounds
        pa.field("proposed", pa.int32(), nullable=False),  # drafts verified; of a tree every node
        pa.field("proposed_by_position", _IDS, nullable=False),
        pa.field("accepted_by_position", _IDS, nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True)
class TrafficRow:
    """One answered request."""

    request_id: str
    arrived_at: float  # seconds since 1970
    prompt_ids: Sequence[int] | np.ndarray  # an int32 array from the beginning on
    response_ids: Sequence[int] | np.ndarray
    finish_reason: str
    sampling: Sampling
    drafter_version: str | None
    drafter_changed: bool
    placement: str
    acceptance: Acceptance

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "response_ids"):  # rows wait in memory: four bytes a token, not a Python integer
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.int32))

    @property
    def arrived_us(self) -> int:
        """Microseconds since 1970."""
        return round(self.arrived_at * 1e6)


@dataclass(frozen=True, kw_only=True)
class TrafficMetadata:
    """What every file says about its origin, as text under `draftloop.<field>`."""

    target: str  # as it was named
    target_fingerprint: str  # without tapped layers: the log has no features
    tokenizer_hash: str
    chat_template_hash: str
    chat_options: ChatOptions = field(default_factory=ChatOptions)
    code_version: str = field(default_factory=code_version)

    @classmethod
    def of(cls, name: str, target: Target, template: ChatTemplate) -> TrafficMetadata:
        """Of a target that was asked for by this name, and the template of its chats."""
        return cls(
            target=name,
            target_fingerprint=target_fingerprint(target.path),
            tokenizer_hash=tokenizer_hash(target.path),
            chat_template_hash=template.hash,
            chat_options=template.options,
        )

    def as_texts(self) -> dict[str, str]:
        """The Parquet metadata."""
        values: dict[str, Any] = {
            KIND: TRAFFIC,
            "schema_version": TRAFFIC_VERSION,
            "target": self.target,
            "target_fingerprint": self.target_fingerprint,
            "tokenizer_hash": self.tokenizer_hash,
            "chat_template_hash": self.chat_template_hash,
            "target_layer_ids": [],
            "chat_options": self.chat_options.as_json(),
            "code_version": self.code_version,
        }
        return {
            METADATA_PREFIX + name: value if isinstance(value, str) else json.dumps(value)
            for name, value in values.items()
        }

    @classmethod
    def from_texts(cls, texts: dict[bytes, bytes]) -> TrafficMetadata:
        """From `table.schema.metadata`. Raises KeyError or ValueError for metadata of another kind or version."""

        def text(name: str) -> str:
            return texts[(METADATA_PREFIX + name).encode()].decode()

        if text(KIND) != TRAFFIC or text("schema_version") != str(TRAFFIC_VERSION):
            raise ValueError(f"a file of {text(KIND)}, version {text('schema_version')}")
        names = ("target", "target_fingerprint", "tokenizer_hash", "chat_template_hash", "code_version")
        options = ChatOptions.from_json(json.loads(text("chat_options")))
        return cls(**{name: text(name) for name in names}, chat_options=options)


@dataclass(frozen=True, kw_only=True)
class TrafficCounts:
    """What a writer has done since it began."""

    rows: int  # written
    shards: int  # written
    bytes: int  # of these shards
    deleted: int  # shards that were too old or too many
    pending: int  # rows that wait, or are being written
    dropped: dict[str, int]  # rows lost, by reason
    failures: dict[str, int]  # attempts, by operation


def traffic_table(rows: Sequence[TrafficRow], metadata: TrafficMetadata) -> pa.Table:
    """The Arrow table of one shard."""
    columns = {
        "request_id": [row.request_id for row in rows],
        "arrived_at": pa.array([row.arrived_us for row in rows], pa.timestamp("us", tz="UTC")),
        "prompt_ids": _lists([row.prompt_ids for row in rows]),
        "response_ids": _lists([row.response_ids for row in rows]),
        "finish_reason": [row.finish_reason for row in rows],
        "drafter_version": [row.drafter_version for row in rows],
        "drafter_changed": [row.drafter_changed for row in rows],
        "placement": [row.placement for row in rows],
        "rounds": [row.acceptance.rounds for row in rows],
        "proposed": [row.acceptance.proposed for row in rows],
        "proposed_by_position": [row.acceptance.proposed_by_position for row in rows],
        "accepted_by_position": [row.acceptance.accepted_by_position for row in rows],
    }
    for name in ("temperature", "top_p", "top_k", "seed", "max_new_tokens"):
        columns[name] = [getattr(row.sampling, name) for row in rows]
    schema = TRAFFIC_SCHEMA.with_metadata(metadata.as_texts())
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _lists(arrays: list[Any]) -> pa.Array:
    """A list column without a Python object per token."""
    offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate([np.empty(0, np.int32), *arrays])))


class TrafficColumns:
    """A table's rows by their place, without a Python object per token. Raises pa.ArrowException for other types."""

    def __init__(self, table: pa.Table):
        table = table.select(TRAFFIC_SCHEMA.names).replace_schema_metadata(None).cast(TRAFFIC_SCHEMA)
        self.prompts, self.responses = (_arrays(table[name]) for name in ("prompt_ids", "response_ids"))
        arrived_us = table["arrived_at"].cast(pa.int64())
        table = table.drop_columns(["prompt_ids", "response_ids", "arrived_at"])
        self._columns = {name: table[name].to_pylist() for name in table.column_names}
        self._arrived_us = arrived_us.to_pylist()

    def __len__(self) -> int:
        return len(self.prompts)

    def value(self, name: str, i: int) -> Any:
        """Of a row, what is neither tokens nor time."""
        return self._columns[name][i]

    def row(self, i: int) -> TrafficRow:
        """A row that keeps nothing of the table. Raises ValueError for sampling parameters out of range."""

        def values(*names: str) -> dict[str, Any]:
            return {name: self._columns[name][i] for name in names}

        return TrafficRow(
            arrived_at=self._arrived_us[i] / 1e6,
            prompt_ids=self.prompts[i].copy(),
            response_ids=self.responses[i].copy(),
            sampling=Sampling(**values("temperature", "top_p", "top_k", "seed", "max_new_tokens")),
            acceptance=Acceptance(**values("rounds", "proposed", "proposed_by_position", "accepted_by_position")),
            **values("request_id", "finish_reason", "drafter_version", "drafter_changed", "placement"),
        )


def _arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    """The rows of a list column, as views."""
    lists = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], _IDS)
    ends = np.cumsum(pc.list_value_length(lists).to_numpy(zero_copy_only=False))
    return np.split(lists.flatten().to_numpy(), ends[:-1]) if len(ends) else []


def schema_problem(schema: pa.Schema) -> str | None:
    """Why a file is not of the traffic log, in one line; None if it is."""
    missing = [name for name in TRAFFIC_SCHEMA.names if name not in schema.names]
    try:
        TrafficMetadata.from_texts(schema.metadata or {})
    except (KeyError, ValueError) as error:
        return f"its metadata are not a traffic log's ({' '.join(map(str, error.args))})"
    return f"it lacks {', '.join(missing)}" if missing else None
