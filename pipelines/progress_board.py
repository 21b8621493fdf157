"""Where workers of a run say how far they are, and its driver looks.

A board is an actor with a process of its own. That process imports this module and what it names: no torch, so that
the board starts in a moment and takes no core from the workers.
"""

from __future__ import annotations

import ray

from pipelines.curve_point import CurvePoint


@ray.remote(num_cpus=0, max_restarts=-1)
class ProgressBoard:
    """Where actors say how far they are and the driver looks once a second. Losing it loses no rollout.

    If its node dies it starts anew, empty: actors say what they said and more, the driver counts what is finished.
    """

    def __init__(self) -> None:
        self.shards: dict[str, tuple[int, int]] = {}  # those at work: name -> rows, response tokens

    def note(self, name: str, rows: int, tokens: int) -> None:
        self.shards[name] = (rows, tokens)

    def forget(self, name: str) -> None:
        self.shards.pop(name, None)

    def at_work(self) -> dict[str, tuple[int, int]]:
        return self.shards


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class CurveBoard:
    """Holds the points that the driver has not fetched yet."""

    def __init__(self) -> None:
        self.points: list[CurvePoint] = []
        self.reason: str | None = None

    def give_up(self, reason: str) -> None:
        """By a worker that knows that another start would not help."""
        self.reason = reason

    def given_up(self) -> str | None:
        return self.reason

    def put(self, point: CurvePoint) -> None:
        self.points.append(point)

    def take(self) -> list[CurvePoint]:
        taken, self.points = self.points, []
        return taken
