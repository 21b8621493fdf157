"""A rollout: a prompt, the target's own continuation, and optionally its features. The contract of generate and train.

One Parquet row per sequence, readable with pyarrow alone; the file's metadata say which target made it. README and
DESIGN call the columns by the names below. Features lie as raw bytes, since Arrow has no bfloat16.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from serving.chat_options import ChatOptions

SCHEMA_VERSION = 1
METADATA_PREFIX = "draftloop."

ROLLOUT_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("category", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),  # as generated, never re-tokenised
        pa.field("loss_mask", pa.list_(pa.int8()), nullable=False),  # over prompt + response; 1 where the target wrote
        pa.field("finish_reason", pa.string(), nullable=False),  # "stop" or "length"
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),  # of this row's own random stream
        pa.field("max_new_tokens", pa.int32(), nullable=False),
        pa.field("features", pa.large_binary()),  # row-major bytes, or null
        pa.field("features_dtype", pa.string()),  # "bfloat16" or "float32"
        pa.field("features_shape", pa.list_(pa.int32())),  # [tokens - 1, taps * width]: the last token was never fed
    ]
)

# numpy type that carries each feature dtype's bits
_CARRIERS: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype("<u2"), "float32": np.dtype("<f4")}


@dataclass(kw_only=True)
class Rollout:
    """One row. `features_TF[i]` is the hidden state at position i, tapped layers concatenated in order."""

    id: str
    category: str
    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_new_tokens: int
    features_TF: Tensor | None = None  # T = len(prompt_ids) + len(response_ids) - 1
    loss_mask: list[int] = field(default_factory=list)  # empty: all of the response

    def __post_init__(self) -> None:
        if not self.loss_mask:
            self.loss_mask = [0] * len(self.prompt_ids) + [1] * len(self.response_ids)


@dataclass(frozen=True, kw_only=True)
class RolloutMetadata:
    """What every file of a rollout set says about its origin, as text under `draftloop.<field>`."""

    target: str  # as it was named
    target_fingerprint: str  # with the tapped layers below
    tokenizer_hash: str
    chat_template_hash: str
    target_layer_ids: tuple[int, ...]  # from 0 at the first decoder layer's output; () without features
    chat_options: ChatOptions = field(default_factory=ChatOptions)  # written where they are not the defaults
    schema_version: int = SCHEMA_VERSION
    code_version: str = field(default_factory=lambda: code_version())

    def as_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "chat_options"}
        if self.chat_options != ChatOptions():  # without them the bytes are those of sets that know no options
            values["chat_options"] = self.chat_options.as_json()
        return values | {"target_layer_ids": list(self.target_layer_ids)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RolloutMetadata:
        known = {f.name: values[f.name] for f in fields(cls) if f.name != "chat_options"}
        known["chat_options"] = ChatOptions.from_json(values.get("chat_options", {}))
        return cls(**known | {"target_layer_ids": tuple(values["target_layer_ids"])})


def code_version() -> str:
    """The installed project's version; "unknown" in a bare checkout."""
    try:
        return importlib.metadata.version("draftloop")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def rollout_table(rollouts: Sequence[Rollout], metadata: RolloutMetadata) -> pa.Table:
    """The Arrow table of one shard."""
    columns: dict[str, list[Any]] = {name: [] for name in ROLLOUT_SCHEMA.names}
    for rollout in rollouts:
        tokens = len(rollout.prompt_ids) + len(rollout.response_ids)
        if len(rollout.loss_mask) != tokens:
            raise ValueError(f"rollout {rollout.id} has {tokens} tokens and a loss mask of {len(rollout.loss_mask)}")
        row = _encoded_features(rollout, tokens)
        for name, values in columns.items():
            values.append(row[name] if name in row else getattr(rollout, name))
    texts = {METADATA_PREFIX + name: _text(value) for name, value in metadata.as_json().items()}
    return pa.table(columns, schema=ROLLOUT_SCHEMA.with_metadata(texts))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _encoded_features(rollout: Rollout, tokens: int) -> dict[str, Any]:
    features = rollout.features_TF
    if features is None:
        return {"features": None, "features_dtype": None, "features_shape": None}
    dtype = str(features.dtype).removeprefix("torch.")
    if dtype not in _CARRIERS or features.ndim != 2 or features.shape[0] != tokens - 1:
        raise ValueError(f"rollout {rollout.id}: features {dtype}{list(features.shape)} for {tokens} tokens")
    bits = features.contiguous().view(torch.int16) if dtype == "bfloat16" else features.contiguous()
    return {
        "features": bits.cpu().numpy().tobytes(),
        "features_dtype": dtype,
        "features_shape": list(features.shape),
    }


def decode_features(data: Any, dtype: str, shape: Sequence[int]) -> Tensor:
    """A tensor [T, F] that owns its memory, from a row's raw bytes (anything with the buffer protocol)."""
    if dtype not in _CARRIERS:
        raise ValueError(f"features of dtype {dtype} are not known; known are {', '.join(_CARRIERS)}")
    values = np.frombuffer(data, dtype=_CARRIERS[dtype]).reshape(tuple(shape)).copy()
    if dtype == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def rollouts_of(batch: pa.RecordBatch) -> Iterator[Rollout]:
    """The rows of a record batch; its `features` column may be left out."""
    plain = [name for name in batch.schema.names if not name.startswith("features")]
    columns = {name: batch.column(name).to_pylist() for name in plain}
    with_features = "features" in batch.schema.names
    for i in range(batch.num_rows):
        features = None
        if with_features and batch.column("features")[i].is_valid:
            features = decode_features(
                batch.column("features")[i].as_buffer(),
                batch.column("features_dtype")[i].as_py(),
                batch.column("features_shape")[i].as_py(),
            )
        yield Rollout(**{name: values[i] for name, values in columns.items()}, features_TF=features)
