"""What the driver of a training run tells its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.train_config import TrainConfig
from pipelines.training_data import TrainingData

if TYPE_CHECKING:
    from pipelines.online_features import OnlineSource


@dataclass(frozen=True, kw_only=True)
class WorkerArguments:
    """The same for every worker. Paths are absolute: a worker runs in a folder of its own."""

    config: TrainConfig
    target_path: str  # of the driver's copy
    target_layer_ids: tuple[int, ...]
    target_fingerprint: str  # with these layers
    rollouts: list[str]
    online: OnlineSource | None  # None: features are read from the rollouts
    data: TrainingData
    mask_token_id: int | None
    versions: dict[str, str]
    board: Any = None  # actor that shows progress; known once Ray runs
