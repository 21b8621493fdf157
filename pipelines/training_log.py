"""What training leaves for people to see: points of the curve in; metrics.jsonl, TensorBoard files and a plot out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.curve_point import CurvePoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS, TENSORBOARD, PLOT = "metrics.jsonl", "tensorboard", "training.png"
SMOOTHED = 10  # points that each point of a plotted curve is the mean of


class LiveLog:
    """Metrics while they come in: one JSON object a line, and TensorBoard files beside them."""

    def __init__(self, folder: Path):
        """A folder that may hold an earlier start's metrics; those are gone on with."""
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._lines = (folder / METRICS).open("a", encoding="utf-8")
        self._writer = SummaryWriter(str(folder / TENSORBOARD))

    def add(self, point: CurvePoint) -> None:
        self._lines.write(json.dumps(asdict(point)) + "\n")
        self._lines.flush()
        for name, value in scalars_of(point).items():
            self._writer.add_scalar(name, value, point.step)

    def close(self) -> None:
        self._lines.close()
        self._writer.close()


def write_log(folder: Path, points: Sequence[CurvePoint]) -> None:
    """The whole run's metrics and plot, without what a killed start did after it was last saved."""
    log = LiveLog(folder)
    for point in points:
        log.add(point)
    log.close()
    plot(points, folder / PLOT)


def scalars_of(point: CurvePoint) -> dict[str, float]:
    """Names and values as TensorBoard groups them."""
    values: dict[str, Any] = {
        "train/loss": point.loss,
        "train/learning_rate": point.learning_rate,
        "train/gradient_norm": point.gradient_norm,
        "train/tokens": point.tokens,
        "train/tokens_per_s": point.tokens / point.seconds if point.seconds else None,
        "train/waited_seconds": point.waited_seconds,
        "train/skipped_steps": point.skipped_steps,
        "train/skipped_sequences": point.skipped_sequences,
        "held_out/expected_tau": point.expected_tau,
    }
    values |= {f"accuracy/position_{k}": share for k, share in enumerate(point.accuracy_by_position, start=1)}
    values |= {f"acceptance/position_{k}": share for k, share in enumerate(point.acceptance_by_position or [], start=1)}
    values |= {f"expected_tau/{name or 'none'}": tau for name, tau in (point.tau_by_category or {}).items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def plot(points: Sequence[CurvePoint], file: Path) -> None:
    """Loss, accuracy by position and expected tau against response tokens, side by side, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: it would hold on to figures, and look for a display

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    loss, accuracy, tau = figure.subplots(1, 3)
    taken = [point for point in points if point.loss is not None]
    seen = [point.tokens / 1e6 for point in taken]
    loss.plot(seen, _smooth([point.loss or 0.0 for point in taken]), linewidth=1.2)
    for k in range(len(taken[0].accuracy_by_position) if taken else 0):
        accuracy.plot(seen, _smooth([p.accuracy_by_position[k] for p in taken]), linewidth=1.2, label=f"{k + 1}")
    _plot_tau(tau, points)
    for panel, title in ((loss, "loss"), (accuracy, "accuracy by draft position"), (tau, "expected tau, held out")):
        panel.set_title(title)
        panel.set_xlabel("response tokens seen, millions")
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8)
    FigureCanvasAgg(figure).print_png(str(file))


def _smooth(values: Sequence[float]) -> list[float]:
    """Means over the last SMOOTHED values at each place: single steps are noisy."""
    sums = [0.0, *itertools.accumulate(values)]
    starts = [max(0, end - SMOOTHED) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]


def _plot_tau(panel: Axes, points: Sequence[CurvePoint]) -> None:
    measured = [point for point in points if point.expected_tau is not None]
    places = [point.tokens / 1e6 for point in measured]
    taus = [point.expected_tau or 0.0 for point in measured]
    panel.plot(places, taus, marker="o", markersize=3, label="all", color="black")
    categories = sorted({name for point in measured for name in point.tau_by_category or {}})
    for name in categories if len(categories) > 1 else []:
        known = [(place, (p.tau_by_category or {}).get(name)) for place, p in zip(places, measured, strict=True)]
        pairs = [(place, value) for place, value in known if value is not None]
        panel.plot(*zip(*pairs, strict=True), marker="o", markersize=2, linewidth=0.9, label=name or "(none)")
