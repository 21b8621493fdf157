"""Which layers condition a drafter, and what target actors are told where features are computed online."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafters.checkpoint import read_config
from drafters.remote_checkpoint import local_checkpoint
from drafters.target import Target, mtp_target_layer_ids, target_fingerprint
from pipelines.rollout_store import RolloutSet
from pipelines.train_config import OnlineOptions, TrainConfig, TrainError
from pipelines.training_data import TrainingData

if TYPE_CHECKING:
    from pipelines.online_features import OnlineSource


def tapped_layers(config: TrainConfig, target: Target, rollouts: RolloutSet) -> tuple[int, ...]:
    """The layers that condition the drafter: those of the rollouts' features or, of tokens alone, the wanted
    ones, those that a drafter to go on from reads."""
    if config.online is None and config.joint is None:
        return rollouts.metadata.target_layer_ids
    options = config.online or config.joint or OnlineOptions()
    layers = config.online.target_layer_ids if config.online else None
    if layers is None and config.init_from is not None:
        return read_config(local_checkpoint(config.init_from)).target_layer_ids
    if layers is None:
        return mtp_target_layer_ids(target.num_layers, options.num_taps)
    layers = tuple(sorted(set(layers)))
    if not 0 <= layers[0] <= layers[-1] < target.num_layers:
        raise TrainError(f"target_layer_ids {list(layers)} do not fit; give layers from 0 to {target.num_layers - 1}")
    return layers


def online_source(
    config: TrainConfig, target: Target, layers: tuple[int, ...], rollouts: list[str], data: TrainingData
) -> OnlineSource | None:
    """What target actors are told; None offline."""
    if config.online is None:
        return None
    from pipelines.features import FeatureTarget
    from pipelines.online_features import FeatureActors, OnlineSource

    online = config.online
    longest = max(length for chunk in (*data.training, *data.held_out) for length in chunk.lengths)
    return OnlineSource(
        rollouts=rollouts,
        target=FeatureTarget(
            target=config.target,
            path=str(target.path.absolute()),
            target_layer_ids=layers,
            fingerprint=target_fingerprint(target.path, layers),
            dtype=online.dtype,
            backend=online.backend,
            device="cuda" if online.gpus_per_actor else "cpu",
            batch=online.batch,
            max_len=min(target.max_len, longest + 1),
            num_threads=online.threads_per_actor,
        ),
        actors=FeatureActors(
            least=online.num_actors[0],
            most=online.num_actors[1],
            cpus=online.cpus_per_actor,
            gpus=online.gpus_per_actor,
            resources=dict(online.resources),
        ),
    )
