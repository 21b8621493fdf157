"""One point of a training curve: what workers tell the driver, and what is logged and plotted.

Imports nothing heavy: the board that holds points is a process of its own (`progress_board.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CurvePoint:
    """State of training after a step."""

    step: int
    total_steps: int
    seconds: float  # of steps, over all starts of the run, waiting for data included; without measuring expected tau
    loss: float | None  # of this step, before it; None: skipped
    accuracy_by_position: list[float]  # K, share of the step's labels that are the module's argmax
    expected_tau: float | None = None  # on the held-out sequences, where measured
    acceptance_by_position: list[float] | None = None
    tokens: int = 0  # response tokens seen so far, repeats counted
    tau_by_category: dict[str, float] | None = None  # expected tau of the held-out sequences, category by category
    skipped_steps: int = 0  # so far, whose gradient was not finite
    skipped_sequences: int = 0  # so far, whose features were not finite
    learning_rate: float = 0.0  # of this step
    gradient_norm: float | None = None  # of this step, before clipping; None: not finite
    waited_seconds: float = 0.0  # of `seconds`, those without data to compute on
    ntp_loss: float | None = None  # joint regime: the trunk's next-token loss in this step

    @property
    def evaluated(self) -> bool:
        """Whether expected tau was measured here; it may be unknown, if all held-out responses are too short."""
        return self.acceptance_by_position is not None
