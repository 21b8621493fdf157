"""How much a generate run will write, said and checked before it starts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from drafters.target import Target, mtp_target_layer_ids
from pipelines.feature_codec import FEATURE_DTYPES, bytes_per_token
from pipelines.generate_config import GenerateConfig, GenerateError
from pipelines.prompts import PromptRow
from pipelines.rollout_store import RolloutStore

PLAIN_TOKEN_BYTES = 6  # an id and a mask entry per token, before compression
PLAIN_ROW_BYTES = 400  # the other columns


@dataclass(frozen=True, kw_only=True)
class SizeEstimate:
    """Upper bounds: every response as long as it may be."""

    rows: int
    tokens: int
    taps: int
    width: int  # of one tapped layer
    features_dtype: str  # as they will be stored

    def bytes_per_token(self, features_dtype: str) -> int:
        """What a token takes with features of that dtype, the row's other columns not counted."""
        return PLAIN_TOKEN_BYTES + bytes_per_token(features_dtype, self.taps, self.width)

    @property
    def bytes_without_features(self) -> int:
        return PLAIN_TOKEN_BYTES * self.tokens + PLAIN_ROW_BYTES * self.rows

    @property
    def bytes_with_features(self) -> int:
        return self.bytes_per_token(self.features_dtype) * self.tokens + PLAIN_ROW_BYTES * self.rows

    def __str__(self) -> str:
        others = [dtype for dtype in FEATURE_DTYPES if dtype != self.features_dtype]
        instead = ", ".join(f"{as_size(self.bytes_per_token(dtype))} in {dtype}" for dtype in others)
        return (
            f"{self.rows} rows, up to {self.tokens:,} tokens: {as_size(self.bytes_with_features)} with features, "
            f"{as_size(self.bytes_without_features)} without; per token with features "
            f"{as_size(self.bytes_per_token(self.features_dtype))} in {self.features_dtype} ({instead})"
        )


def tapped_layers(config: GenerateConfig, target: Target) -> tuple[int, ...]:
    """The layers whose outputs are stored, ascending; () without features. Raises GenerateError."""
    if not config.with_features:
        return ()
    if config.target_layer_ids is None:
        return mtp_target_layer_ids(target.num_layers, config.num_taps)
    layers = tuple(sorted(set(config.target_layer_ids)))
    if not layers or not 0 <= layers[0] <= layers[-1] < target.num_layers:
        raise GenerateError(
            f"target_layer_ids {list(layers)} do not fit; give layers from 0 to {target.num_layers - 1}"
        )
    return layers


def estimate_size(config: GenerateConfig, target: Target, rows: list[PromptRow]) -> SizeEstimate:
    """How much the rows may come to."""
    tokens = sum(len(row.prompt_ids) + config.max_new_tokens for row in rows)
    return SizeEstimate(
        rows=len(rows),
        tokens=tokens,
        taps=len(tapped_layers(config, target)) or config.num_taps,
        width=target.width,
        features_dtype=config.features_dtype,
    )


def check_size(config: GenerateConfig, store: RolloutStore, *, missing: SizeEstimate, whole: SizeEstimate) -> None:
    """Raise GenerateError if the set exceeds `max_bytes`, or the rest of it the free disk."""

    def wanted(size: SizeEstimate) -> int:
        return size.bytes_with_features if config.with_features else size.bytes_without_features

    lighter = "" if config.features_dtype == "int8" else "store features as int8, "
    mend = f"generate fewer rows or tokens, tap fewer layers, {lighter}or leave the features out"
    if config.max_bytes is not None and wanted(whole) > config.max_bytes:
        raise GenerateError(
            f"the rollouts may take {as_size(wanted(whole))}, more than max_bytes {as_size(config.max_bytes)}; {mend}"
        )
    folder = store.folder.local
    if folder is None:
        return
    free = shutil.disk_usage(folder).free
    if wanted(missing) > free:
        raise GenerateError(
            f"the rollouts may take {as_size(wanted(missing))}, but {folder} has {as_size(free)} free; {mend}"
        )


def as_size(num_bytes: float) -> str:
    """Bytes in words: 1.3 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:  # what rounds to 1000 is 1 of the next
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"
