"""Trainings side by side: what a switch of `draftloop train` costs or brings, on the same rollouts and seed.

    python benchmarks/compare_trainings.py --name online \\
        "offline: --rollouts with-features" "online: --rollouts tokens-only --online" \\
        --common "--epochs 2 --taps 3"

Every contender is LABEL: OPTIONS of `draftloop train`, beside the common ones; the first is what the others are
compared with. Tells expected tau (held out) and served tau, the loss of both, the largest difference of the loss in the
first steps, bytes that were read and written, and seconds of steps. Writes benchmarks/results/NAME-DATE.{md,json,svg}.
Needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from references import write_json, write_text
from svg_plot import svg_text, two_panels

from pipelines.evaluate import versions
from pipelines.rollout_store import open_rollouts

RESULTS = Path(__file__).parent / "results"


def train(options: list[str], output: Path) -> dict[str, Any]:
    """One training in a process of its own: its report, its curve, and what it read and wrote."""
    command = [sys.executable, "-m", "cluster.cli", "train", *options, "--output", str(output), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    report: dict[str, Any] = json.loads(done.stdout)
    rollouts = [Path(value) for name, value in itertools.pairwise(options) if name == "--rollouts"]
    manifests = [open_rollouts(str(folder)).manifest for folder in rollouts]
    curve = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {
        "exit_code": done.returncode,
        "report": {name: value for name, value in report.items() if name != "output"},
        "curve": curve,
        "rollout_bytes": sum(manifest.bytes for manifest in manifests),
        "rollout_tokens": sum(m.prompt_tokens + m.response_tokens for m in manifests),
        "written_bytes": sum(file.stat().st_size for file in output.rglob("*") if file.is_file()),
    }


def largest_difference(one: list[dict[str, Any]], other: list[dict[str, Any]], steps: int) -> tuple[float, int] | None:
    """(largest difference of the loss, its step) over the first steps that both show."""
    losses = {point["step"]: point["loss"] for point in one}
    found = [
        (abs(point["loss"] - losses[point["step"]]), point["step"])
        for point in other
        if point["step"] <= steps and losses.get(point["step"]) is not None and point["loss"] is not None
    ]
    return max(found, default=None)


def plot(runs: dict[str, dict[str, Any]], steps: int) -> str:
    """The losses of the first steps, and of all of them, as SVG text."""
    figure, panels = two_panels(4)
    for panel, last in ((panels[0], steps), (panels[1], None)):
        for number, (label, run) in enumerate(runs.items()):
            points = [p for p in run["curve"] if p["loss"] is not None and (last is None or p["step"] <= last)]
            style = "-" if number == 0 else "--"
            panel.plot([p["step"] for p in points], [p["loss"] for p in points], style, linewidth=1.2, label=label)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("loss")
    panels[1].legend(fontsize=8)
    return svg_text(figure)


def table(runs: dict[str, dict[str, Any]], steps: int) -> str:
    lines = [
        "| training | steps | expected tau | served tau | loss | L_NTP, held out | largest loss difference, "
        f"first {steps} steps "
        "| rollouts read, MB (bytes per token) | written, MB | seconds (waiting for data) | response tokens/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    first = next(iter(runs.values()))["curve"]
    for number, (label, run) in enumerate(runs.items()):
        report, last = run["report"], run["curve"][-1]
        found = largest_difference(first, run["curve"], steps) if number else None
        difference = "" if found is None else f"{found[0]:.1e} (step {found[1]})"
        per_token = run["rollout_bytes"] / run["rollout_tokens"]
        cells = (
            label, report["steps"], _figure(report["expected_tau"], 3), _figure(report["served_tau"], 3),
            _figure(report["loss"], 3), _figure(report["ntp_loss"], 4), difference,
            f"{run['rollout_bytes'] / 1e6:.1f} ({per_token:,.0f})", f"{run['written_bytes'] / 1e6:.1f}",
            f"{last['seconds']:.0f} ({last['waited_seconds']:.0f})", f"{last['tokens'] / last['seconds']:,.0f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainings", nargs="+", help="LABEL: OPTIONS")
    parser.add_argument("--common", default="", help="options of all")
    parser.add_argument("--name", required=True, help="of the files in benchmarks/results")
    parser.add_argument("--first-steps", type=int, default=50)
    parser.add_argument("--note", default="", help="a line of text for the table")
    args = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {}
    for training in args.trainings:
        label, _, options = training.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            runs[label.strip()] = train(shlex.split(options) + shlex.split(args.common), Path(folder) / "drafter")
        last = runs[label.strip()]["report"]
        print(f"{label}: expected tau {last['expected_tau']}, served {last['served_tau']}", flush=True)
    date = datetime.date.today().isoformat()
    file = RESULTS / f"{args.name}-{date}"
    write_json(file.with_suffix(".json"), {"versions": versions(), "common": args.common, "runs": runs})
    write_text(file.with_suffix(".svg"), plot(runs, args.first_steps))
    note = f"{args.note}\n\n" if args.note else ""
    title = f"# Trainings side by side: {args.name}, {date}\n\n"
    text = f"{title}{note}![losses]({file.name}.svg)\n\n{table(runs, args.first_steps)}\n"
    write_text(file.with_suffix(".md"), text)
    print(text)


if __name__ == "__main__":
    main()
