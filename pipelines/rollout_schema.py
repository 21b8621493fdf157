"""A rollout: a prompt, the target's own continuation, and optionally its features. The contract of generate and train.

One Parquet row per sequence, readable with pyarrow (and numpy, for features: see README) alone; the file's metadata say
which target made it. README and DESIGN call the columns by the names below. Features lie as raw bytes, since Arrow has
no bfloat16. Version 2 is version 1 with scales for int8 features, and is written only with these: other sets stay
readable by older code, and keep their bytes when they are continued.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from drafters.code_version import code_version
from pipelines.feature_codec import decode_features, encode_features
from serving.chat_options import ChatOptions

SCHEMA_VERSION = 1  # of sets without int8 features
INT8_SCHEMA_VERSION = 2
READABLE_VERSIONS = (SCHEMA_VERSION, INT8_SCHEMA_VERSION)
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
        pa.field("features_dtype", pa.string()),  # "bfloat16" or "float32"; version 2: "int8"
        pa.field("features_shape", pa.list_(pa.int32())),  # [tokens - 1, taps * width]: the last token was never fed
    ]
)
# version 2: float32 [tokens - 1, taps], row-major, little-endian; features are values times their tap's scale
SCALE_FIELD = pa.field("features_scale", pa.binary())


def schema_version_of(features_dtype: str) -> int:
    """The version that sets with such features have."""
    return INT8_SCHEMA_VERSION if features_dtype == "int8" else SCHEMA_VERSION


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
    code_version: str = field(default_factory=code_version)

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


def rollout_table(
    rollouts: Sequence[Rollout], metadata: RolloutMetadata, features_dtype: str | None = None
) -> pa.Table:
    """The Arrow table of one shard, features stored as `features_dtype`; None: in the dtype that they have.

    Raises ValueError for rows that do not fit together with their mask, their features or the metadata.
    """
    if features_dtype and schema_version_of(features_dtype) != metadata.schema_version:
        raise ValueError(f"{features_dtype} features do not go into a set of schema version {metadata.schema_version}")
    schema = ROLLOUT_SCHEMA if metadata.schema_version == SCHEMA_VERSION else ROLLOUT_SCHEMA.append(SCALE_FIELD)
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    for rollout in rollouts:
        tokens = len(rollout.prompt_ids) + len(rollout.response_ids)
        if len(rollout.loss_mask) != tokens:
            raise ValueError(f"rollout {rollout.id} has {tokens} tokens and a loss mask of {len(rollout.loss_mask)}")
        row = _features_columns(rollout, tokens, features_dtype, len(metadata.target_layer_ids))
        for name, values in columns.items():
            values.append(row[name] if name in row else getattr(rollout, name))
    texts = {METADATA_PREFIX + name: _text(value) for name, value in metadata.as_json().items()}
    return pa.table(columns, schema=schema.with_metadata(texts))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _features_columns(rollout: Rollout, tokens: int, dtype: str | None, taps: int) -> dict[str, Any]:
    names = ("features", "features_dtype", "features_shape", "features_scale")
    if rollout.features_TF is None:
        return dict.fromkeys(names)
    try:
        encoded = encode_features(rollout.features_TF, dtype, taps=taps)
        if encoded.shape[0] != tokens - 1:
            raise ValueError(f"features of {encoded.shape[0]} tokens")
    except ValueError as error:
        raise ValueError(f"rollout {rollout.id} of {tokens} tokens: {error}") from None
    return dict(zip(names, (encoded.data, encoded.dtype, list(encoded.shape), encoded.scale), strict=True))


def rollouts_of(batch: pa.RecordBatch) -> Iterator[Rollout]:
    """The rows of a record batch; its `features` column may be left out. int8 features become bfloat16."""
    plain = [name for name in batch.schema.names if not name.startswith("features")]
    columns = {name: batch.column(name).to_pylist() for name in plain}
    with_features = "features" in batch.schema.names
    for i in range(batch.num_rows):
        features = _features_of(batch, i) if with_features and batch.column("features")[i].is_valid else None
        yield Rollout(**{name: values[i] for name, values in columns.items()}, features_TF=features)


def _features_of(batch: pa.RecordBatch, i: int) -> Tensor:
    dtype = batch.column("features_dtype")[i].as_py()
    scale = batch.column("features_scale")[i].as_buffer() if dtype == "int8" else None
    shape = batch.column("features_shape")[i].as_py()
    features = decode_features(batch.column("features")[i].as_buffer(), dtype, shape, scale)
    # training keeps all rows in memory: in float32 they would take twice what a bfloat16 set does, for digits that
    # quantising has lost
    return features.to(torch.bfloat16) if dtype == "int8" else features
