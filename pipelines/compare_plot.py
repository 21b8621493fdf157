"""A comparison as a picture: tau above, S below, by the drafts of a round; a column for each prompt set.

Nothing is painted behind it and every colour is of middle lightness: it can be read on a white page and on a dark one.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from pipelines.compare_figures import CompareReport, PairFigures
from pipelines.compare_timing import quartiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#808080"  # axes and words
COLOURS = ("#3b82f6", "#e8710a", "#2f9e44", "#d6409f", "#8b5cf6", "#0f9aa8", "#b08900", "#e03131")


def plot(report: CompareReport) -> str:
    """SVG text, the same for the same report."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure  # no pyplot: it would hold on to figures, and look for a display
    from matplotlib.lines import Line2D

    style: Any = {
        "svg.hashsalt": "draftloop",  # names in the file depend on it
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "axes.titlecolor": INK,
        "xtick.color": INK, "ytick.color": INK,
    }  # fmt: skip
    colours = {d.name: COLOURS[i % len(COLOURS)] for i, d in enumerate(report.drafters)}
    batch = report.config["batches"][0]
    with matplotlib.rc_context(style):
        width = max(7.0, 3.4 * len(report.sets) + 1.0)
        figure = Figure(figsize=(width, 6.4), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(2, max(1, len(report.sets)), sharex=True, sharey="row", squeeze=False)
        for column, one in enumerate(report.sets):
            above, below = panels[0][column], panels[1][column]
            above.set_title(one.name, fontsize=10)
            below.set_xlabel("drafts of a round")
            for pair in (p for p in report.pairs if p.prompt_set == one.name):
                _draw(above, below, pair, colours[pair.drafter], batch)
            below.axhline(1.0, color=INK, linewidth=1.0, linestyle=":")
            for panel in (above, below):
                panel.grid(alpha=0.25, color=INK)
                panel.patch.set_alpha(0.0)
        panels[0][0].set_ylabel("tau")
        panels[1][0].set_ylabel(f"S at batch {batch}")
        handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
        handles += [
            Line2D([], [], color=INK, marker="o", markersize=4, label="chains (S predicted)"),
            Line2D([], [], color=INK, marker="s", markersize=4, linestyle="--", label="trees (S predicted)"),
            Line2D([], [], color=INK, marker="*", markersize=10, linestyle="", label="S measured, quartiles"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return stream.getvalue()


def _draw(above: Axes, below: Axes, pair: PairFigures, colour: str, batch: int) -> None:
    """One drafter's lines: chains whole, trees dashed, a star where whole answers were timed."""
    for trees, marker, line in ((False, "o", "-"), (True, "s", "--")):
        lengths = [one for one in pair.lengths if bool(one.nodes) == trees and one.tau is not None]
        drafts = [one.shape.drafts for one in lengths]
        look: dict[str, Any] = {
            "color": colour, "marker": marker, "markersize": 4, "linestyle": line, "linewidth": 1.4,
        }  # fmt: skip
        above.plot(drafts, [float("nan") if one.tau is None else one.tau for one in lengths], **look)
        predicted = [one.s_predicted[0] for one in lengths]
        below.plot(drafts, [float("nan") if s is None else s for s in predicted], **look)
    speed = pair.speed(batch)
    low, high = quartiles(speed.ratios)
    measured = speed.s_measured
    below.errorbar(
        [speed.shape.drafts], [measured], yerr=[[max(0.0, measured - low)], [max(0.0, high - measured)]],
        color=colour, marker="*", markersize=11, linestyle="", capsize=3,
    )  # fmt: skip
