"""Two panels side by side, and a figure as SVG text that is the same for the same curves."""

from __future__ import annotations

import io
from typing import Any

import matplotlib


def two_panels(height: float, **options: Any) -> tuple[Any, Any]:
    """(figure, its two axes); `options` are those of `pyplot.subplots`."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "draftloop"  # names in the file depend on it
    from matplotlib import pyplot

    return pyplot.subplots(1, 2, figsize=(11, height), **options)


def svg_text(figure: Any) -> str:
    """Without a date, which would change from run to run."""
    figure.tight_layout()
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()
