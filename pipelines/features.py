"""Features of known tokens: sequences of ids in, the target's hidden states at the tapped layers out.

The target reads every sequence once (prefill only) through the decode engine, many at a time. It is what `draftloop
train --online` streams into the trainer, computed anew and never stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from drafters.target import target_on_this_node

if TYPE_CHECKING:
    from serving.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class FeatureTarget:
    """Which target reads, and how."""

    target: str  # as it is named
    path: str  # absolute path of the driver's copy
    target_layer_ids: tuple[int, ...]
    fingerprint: str  # with these layers
    dtype: str = "float32"
    backend: str = "auto"
    device: str = "cpu"
    batch: int = 8  # sequences read at once
    max_len: int = 2048  # tokens of the longest sequence
    num_threads: int | None = None  # None: torch's choice


class FeatureReader:
    """A target that reads. Its engine is built with the first sequences."""

    def __init__(self, target: FeatureTarget):
        self.target = target
        self._engine: Engine | None = None

    def read(self, sequences: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Features [T - 1, taps * D] of each sequence of T >= 2 ids, in order; the last token is never fed."""
        yield from read_features(self._ready(), sequences)

    def _ready(self) -> Engine:
        """Raises TargetError if this node's copy of the target is another one."""
        if self._engine is None:
            from serving.engine.build import build_engine

            wanted = self.target
            path = target_on_this_node(wanted.target, wanted.path, wanted.target_layer_ids, wanted.fingerprint)
            self._engine = build_engine(
                path,
                dtype=wanted.dtype,
                backend=wanted.backend,
                device=wanted.device,
                num_slots=wanted.batch,
                max_len=wanted.max_len,
                target_layer_ids=wanted.target_layer_ids,
                num_threads=wanted.num_threads,
            )
        return self._engine


def read_features(engine: Engine, sequences: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """The same by an engine that is there already, with all the layers that it taps, in ascending order."""
    from serving.engine.sampling import Sampling

    once = Sampling(max_new_tokens=1)
    requests = ((str(number), list(ids[:-1]), once) for number, ids in enumerate(sequences))
    found = {c.request_id: c.features_TF for c in engine.run(requests, keep_features=True)}
    for number in range(len(sequences)):
        features_TF = found[str(number)]
        assert features_TF is not None
        yield features_TF
