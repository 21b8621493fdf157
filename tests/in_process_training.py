"""Ray Train's place in `pipelines.train`, taken by a call in this process: for what a run decides, not where it runs.

A start of Ray Train loads torch and Ray into half a dozen processes, which takes longer than a toy training. Here too
the worker gets a pickled copy of what it is told, and what it hands over is copied before its folder goes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import cloudpickle
from ray.train import Checkpoint

from pipelines import train as train_stage
from pipelines import train_worker as worker_stage


@contextmanager
def in_process(folder: Path) -> Iterator[None]:
    """Let `train` run its one worker here; `folder` takes the states that it saves."""

    class InProcess:
        """In place of `TorchTrainer`."""

        def __init__(
            self, worker: Callable[..., None], *, train_loop_config: Any, scaling_config: Any, run_config: Any
        ):
            assert scaling_config.num_workers == 1
            self.worker, self.told = worker, cloudpickle.dumps(train_loop_config)
            self.saved: list[Checkpoint] = []

        def fit(self) -> SimpleNamespace:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(worker_stage, "ray_train", self)
                patch.setattr(worker_stage, "get_device", lambda: torch.device("cpu"))
                self.worker(cloudpickle.loads(self.told))
            return SimpleNamespace(checkpoint=self.saved[-1] if self.saved else None)

        def get_context(self) -> SimpleNamespace:
            return SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1, get_local_world_size=lambda: 1)

        def get_checkpoint(self) -> None:
            """Every run is a new one."""

        def report(self, metrics: dict[str, Any], checkpoint: Checkpoint) -> None:
            kept = folder / f"state-{len(self.saved)}"
            shutil.copytree(checkpoint.path, kept)
            self.saved.append(Checkpoint.from_directory(str(kept)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_stage, "TorchTrainer", InProcess)
        yield
