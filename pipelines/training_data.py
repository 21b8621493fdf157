"""What a drafter is trained on: addresses of rollout sets in, their training and held-out sequences out. No Ray.

Several sets are one: in the order given, each checked, made by one target with one chat template and the same taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafters.target import Target, target_fingerprint
from pipelines.rollout_schema import Rollout, RolloutMetadata
from pipelines.rollout_store import RolloutSet, open_rollouts
from pipelines.train_config import TrainError
from pipelines.training import TrainingSequence


def open_sets(uris: Sequence[str]) -> list[RolloutSet]:
    """The finished sets at `uris`. Raises RolloutError, or TrainError if they cannot be trained on together."""
    sets = [open_rollouts(uri) for uri in uris]
    for place, rollouts in enumerate(sets):
        if rollouts.manifest_sha256 in [other.manifest_sha256 for other in sets[:place]]:
            raise TrainError(f"rollouts {uris[place]} are given twice; give every set once")
        if differing := _differing(sets[0].metadata, rollouts.metadata):
            name, first, this = differing
            raise TrainError(
                f"rollouts {uris[0]} and {uris[place]} differ in {name} ({first} and {this}); give sets that agree"
            )
    return sets


def _differing(first: RolloutMetadata, other: RolloutMetadata) -> tuple[str, object, object] | None:
    """The first fact in which two sets may not differ but do, with both values."""
    for name in ("target_layer_ids", "target_fingerprint", "tokenizer_hash", "chat_template_hash"):
        mine, theirs = getattr(first, name), getattr(other, name)
        if mine != theirs:
            return name, mine, theirs
    return None


def check_sets(uris: Sequence[str], target: Target) -> list[RolloutSet]:
    """The sets, if this target made them and they are whole, with features. Raises RolloutError or TrainError."""
    sets = open_sets(uris)
    for uri, rollouts in zip(uris, sets, strict=True):
        rollouts.check_target(target_fingerprint(target.path, rollouts.metadata.target_layer_ids))
        if not rollouts.has_features:
            raise TrainError(f"rollouts {uri} have no features; generate them again with features")
        if rollouts.folder.local:  # from afar it would mean to fetch everything twice
            rollouts.check()
    usable = sum(is_usable(rollout) for rollouts in sets for rollout in rollouts.rollouts(with_features=False))
    if usable < 2:
        rows = sum(len(rollouts) for rollouts in sets)
        raise TrainError(f"{usable} usable rollouts are too few to train on (of {rows}); generate more")
    return sets


def read_sequences(sets: Sequence[RolloutSet]) -> list[TrainingSequence]:
    """All rollouts with a response long enough to draft in."""
    sequences = []
    for rollout in (row for rollouts in sets for row in rollouts.rollouts()):
        if rollout.features_TF is not None and is_usable(rollout):
            ids = torch.tensor(rollout.prompt_ids + rollout.response_ids)
            greedy = rollout.temperature == 0
            prompt_len, features = len(rollout.prompt_ids), rollout.features_TF
            sequences.append(TrainingSequence(ids, prompt_len, features, rollout.category, greedy))
    return sequences


def is_usable(rollout: Rollout) -> bool:
    """Whether the response is long enough to draft in: the first token is the anchor's, and two must follow it."""
    return len(rollout.response_ids) >= 3


def split(sequences: list[TrainingSequence], held_out: float) -> tuple[list[TrainingSequence], list[TrainingSequence]]:
    """(training, held out): every n-th sequence is held out, so that both see all parts of the sets."""
    if not 0 < held_out < 1:
        raise TrainError(f"held_out must be between 0 and 1, got {held_out}")
    if len(sequences) < 2:
        raise TrainError(f"{len(sequences)} usable rollouts are too few to train on; generate more")
    every = max(2, min(round(1 / held_out), len(sequences)))
    chosen = [s for i, s in enumerate(sequences) if i % every == every - 1]
    return [s for i, s in enumerate(sequences) if i % every != every - 1], chosen
