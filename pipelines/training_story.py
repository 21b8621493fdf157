"""What a run remembers beside the trainer's own state: the points that were shown, and its best drafter."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from drafters.drafter_module import DrafterModule
from pipelines.curve_point import CurvePoint

LOSS_POINTS = 10  # the report's loss is the mean over the last ones


@dataclass
class TrainingStory:
    """Saved and restored with every state of the trainer."""

    points: list[CurvePoint] = field(default_factory=list)
    best: CurvePoint | None = None  # of highest expected tau, the latest of equal ones; where none is known, the last
    best_weights: dict[str, Tensor] = field(default_factory=dict)  # of the module at that point
    held_out_ntp_loss: float | None = None  # joint regime, at the end: of the trunk; not saved

    def add(self, point: CurvePoint, module: DrafterModule) -> None:
        self.points.append(point)
        if not point.evaluated:
            return
        if self.best is None or (point.expected_tau or 0.0) >= (self.best.expected_tau or 0.0):
            self.best = point
            self.best_weights = {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}

    @property
    def curve(self) -> list[CurvePoint]:
        """The points at which expected tau was measured."""
        return [point for point in self.points if point.evaluated]

    @property
    def late_loss(self) -> float | None:
        """Mean over the last points; None if every step was skipped."""
        losses = [point.loss for point in self.points if point.loss is not None][-LOSS_POINTS:]
        return statistics.mean(losses) if losses else None

    def state_dict(self) -> dict[str, Any]:
        best = self.best and asdict(self.best)
        return {"points": [asdict(point) for point in self.points], "best": best, "best_weights": self.best_weights}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TrainingStory:
        best = state["best"] and CurvePoint(**state["best"])
        return cls([CurvePoint(**point) for point in state["points"]], best, state["best_weights"])
