"""Training curves of several drafters side by side: expected tau against minutes and tokens, as a plot and a table.

    pip install -e '.[bench]'
    python benchmarks/training_curves.py recursive=drafter-a "recursive, D-PACE=drafter-b" --name switches

Reads each checkpoint's provenance.json. tau is expected tau on held-out rollouts of the run (none of them trained on),
of all together and of one category. Writes benchmarks/results/NAME-DATE.{svg,md,json}; minutes hold for a machine that
did nothing else.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

from references import write_json, write_text
from svg_plot import svg_text, two_panels

from drafters.checkpoint import read_provenance

RESULTS = Path(__file__).parent / "results"


def curve_of(folder: Path, category: str) -> list[dict[str, Any]]:
    """The points at which expected tau was measured."""
    points = []
    for point in read_provenance(folder)["training_curve"]:
        by_category = point.get("tau_by_category") or {}
        points.append(
            {
                "minutes": point["seconds"] / 60,
                "step": point["step"],
                "tokens": point["tokens"],
                "loss": point["loss"],
                "tau": point["expected_tau"],
                f"tau_{category}": by_category.get(category),
            }
        )
    return points


AXES = {"minutes": ("minutes of training", 1.0), "tokens": ("response tokens seen, K", 1e-3)}  # label, scale


def plot(curves: dict[str, list[dict[str, Any]]], category: str, against: str) -> str:
    """Two panels as SVG text: all held-out rollouts, and those of the category."""
    axis, scale = AXES[against]
    figure, panels = two_panels(4.2, sharey=True)
    for panel, key, title in ((panels[0], "tau", "all held-out rollouts"), (panels[1], f"tau_{category}", category)):
        for label, points in curves.items():
            known = [(p[against] * scale, p[key]) for p in points if p[key] is not None]
            if known:
                panel.plot(*zip(*known, strict=True), marker="o", markersize=3, linewidth=1.3, label=label)
        panel.set_xlabel(axis)
        panel.set_title(title)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("expected tau (chain)")
    panels[1].legend(fontsize=8)
    return svg_text(figure)


def table(curves: dict[str, list[dict[str, Any]]], category: str) -> str:
    lines = [
        f"| drafter | steps | response tokens seen, K | minutes | loss | tau, all | tau, {category} |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, points in curves.items():
        last = points[-1]
        taus = ["" if last[key] is None else f"{last[key]:.2f}" for key in ("tau", f"tau_{category}")]
        cells = (
            label, last["step"], f"{last['tokens'] / 1000:.0f}", f"{last['minutes']:.1f}", f"{last['loss']:.2f}", *taus,
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", help="LABEL=FOLDER")
    parser.add_argument("--category", default="math", help="of the rollouts' prompts")
    parser.add_argument("--name", default="training-curves", help="of the files in benchmarks/results")
    parser.add_argument("--against", default="minutes", choices=list(AXES), help="what the plots have below")
    parser.add_argument("--note", default="", help="a line of text for the table: how they were trained")
    args = parser.parse_args()
    folders = dict(pair.split("=", 1) for pair in args.drafters)
    curves = {label: curve_of(Path(folder), args.category) for label, folder in folders.items()}
    date = datetime.date.today().isoformat()
    file = RESULTS / f"{args.name}-{date}"
    write_text(file.with_suffix(".svg"), plot(curves, args.category, args.against))
    write_json(file.with_suffix(".json"), curves)
    note = f"{args.note}\n\n" if args.note else ""
    picture = f"![tau against {args.against}]({file.name}.svg)"
    text = f"# Training curves, {date}\n\n{note}{picture}\n\n{table(curves, args.category)}\n"
    write_text(file.with_suffix(".md"), text)
    print(text)


if __name__ == "__main__":
    main()
