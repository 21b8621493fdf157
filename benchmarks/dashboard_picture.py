"""A picture of cluster/monitoring/dashboard.json, panel by panel from the dashboard's own queries. It is no Grafana.

    python benchmarks/dashboard_picture.py --prometheus http://127.0.0.1:9090 --seconds 600 --output dashboard.png
    python benchmarks/dashboard_picture.py --url http://127.0.0.1:8000/metrics --seconds 60 --keep scrapes.jsonl
    python benchmarks/dashboard_picture.py --scrapes scrapes.jsonl

The figures come from a Prometheus, or from the text of `/metrics`: polled now, or kept as JSON lines of `at` (seconds),
`text` and, with several replicas, `instance`. For these two `benchmarks/promql.py` evaluates the queries; what Grafana
draws differs in looks and in the points' times, not in the queries.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

DASHBOARD = Path(__file__).parents[1] / "cluster" / "monitoring" / "dashboard.json"
POINTS = 240  # of a curve
COLUMNS = 3
Curves = list[tuple[dict[str, str], list[float], list[float]]]  # labels, seconds since the beginning, values
Ask = Callable[[str, list[float]], Curves]  # a query at times


def from_scrapes(scrapes: Any) -> Ask:
    """Queries of scrapes that were kept."""
    from promql import evaluate, parse

    def ask(query: str, times: list[float]) -> Curves:
        expression = parse(query)
        curves: dict[frozenset[tuple[str, str]], tuple[list[float], list[float]]] = {}
        for at in times:
            values = evaluate(expression, scrapes, at)
            for key, value in ({frozenset(): values} if isinstance(values, float) else values).items():
                xs, ys = curves.setdefault(key, ([], []))
                xs.append(at)
                ys.append(value)
        return [(dict(key), xs, ys) for key, (xs, ys) in curves.items()]

    return ask


def from_prometheus(address: str) -> Ask:
    """Queries of a running Prometheus."""

    def ask(query: str, times: list[float]) -> Curves:
        asked = {"query": query, "start": times[0], "end": times[-1], "step": times[1] - times[0]}
        url = f"{address.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            series = json.load(answer)["data"]["result"]
        return [(s["metric"], [t for t, _ in s["values"]], [float(v) for _, v in s["values"]]) for s in series]

    return ask


def poll(url: str, seconds: float, every_s: float, keep: Path | None) -> Any:
    """Scrape an endpoint for a while. A scrape without an answer leaves a gap."""
    from promql import Scrapes

    scrapes, end, said = Scrapes(), time.time() + seconds, ""
    while True:
        at = time.time()
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode()
        except OSError as error:
            said = str(error)
        else:
            scrapes.add(at, text)
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"at": at, "text": text}) + "\n")
        if at + every_s > end:
            if not scrapes.names():
                raise SystemExit(f"{url} did not answer ({said}); start the endpoint, then run again")
            return scrapes
        time.sleep(max(0.0, at + every_s - time.time()))


def filled(query: str, rate_interval_s: float) -> str:
    """The query with the dashboard's variables filled in, as Grafana does: every model."""
    query = query.replace("$__rate_interval", f"{max(1, math.ceil(rate_interval_s))}s")
    return query.replace("$model", ".*")


def legend(template: str, labels: dict[str, str]) -> str:
    """A curve's name."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), template)


def beginnings(curves: Curves, step_s: float) -> list[tuple[float, dict[str, str]]]:
    """When the curves of an annotation begin, and begin again: an event each."""
    events = []
    for labels, xs, _ys in curves:
        events += [(x, labels) for n, x in enumerate(xs) if n == 0 or x - xs[n - 1] > 1.5 * step_s]
    return sorted(events, key=lambda event: event[0])


def draw(dashboard: dict[str, Any], ask: Ask, span: tuple[float, float], rate_interval_s: float) -> Any:
    """The dashboard's panels as a matplotlib figure, time in seconds from the span's beginning."""
    from matplotlib import pyplot

    begin, end = span
    step = max((end - begin) / POINTS, 0.5)
    times = [begin + n * step for n in range(int((end - begin) / step) + 1)]
    panels = dashboard["panels"]
    rows = math.ceil(len(panels) / COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(6 * COLUMNS, 3 * rows), sharex=True, squeeze=False)
    events = [
        (x - begin, note["iconColor"], legend(note["titleFormat"], labels))
        for note in dashboard["annotations"]["list"]
        for x, labels in beginnings(ask(filled(note["expr"], rate_interval_s), times), step)
    ]
    for panel, axis in zip(panels, axes.flat, strict=False):
        _panel(axis, panel, [(t, ask(filled(t["expr"], rate_interval_s), times)) for t in panel["targets"]], begin)
        for x, color, _name in events:
            axis.axvline(x, color=color, linestyle=":", linewidth=1)
    for x, _color, name in events:
        axes.flat[0].text(x, axes.flat[0].get_ylim()[1], name, rotation=90, fontsize=6, va="top", ha="right")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    figure.suptitle(f"{dashboard['title']}: the dashboard's queries, drawn by matplotlib", fontsize=10)
    figure.tight_layout()
    return figure


def _panel(axis: Any, panel: dict[str, Any], targets: list[tuple[dict[str, Any], Curves]], begin: float) -> None:
    for target, curves in targets:
        for labels, xs, ys in sorted(curves, key=lambda curve: sorted(curve[0].items())):
            axis.plot([x - begin for x in xs], ys, linewidth=1.2, label=legend(target["legendFormat"], labels))
    axis.set_title(panel["title"], fontsize=9)
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=7)
    if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
        axis.yaxis.set_major_formatter(lambda value, _place: f"{value:.0%}")
    if axis.lines:
        axis.set_ylim(bottom=panel["fieldConfig"]["defaults"].get("min"))
        axis.legend(fontsize=6, loc="best")
    else:
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", color="grey")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prometheus", help="address of a Prometheus; the last --seconds are drawn")
    source.add_argument("--url", help="address of a /metrics, polled for --seconds")
    source.add_argument("--scrapes", type=Path, help="JSON lines of scrapes that were kept")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two polls, or a Prometheus' scrapes")
    parser.add_argument("--keep", type=Path, help="append what was polled to this file")
    parser.add_argument("--dashboard", type=Path, default=DASHBOARD)
    parser.add_argument("--output", type=Path, default=Path("dashboard.png"))
    options = parser.parse_args()
    matplotlib.use("agg")
    if options.prometheus:
        now = time.time()
        ask, span = from_prometheus(options.prometheus), (now - options.seconds, now)
    else:
        from promql import Scrapes

        polled = None if options.scrapes else poll(options.url, options.seconds, options.every, options.keep)
        scrapes = polled or Scrapes.read(options.scrapes)
        ask, span = from_scrapes(scrapes), scrapes.span()
    dashboard = json.loads(options.dashboard.read_text(encoding="utf-8"))
    draw(dashboard, ask, span, 4 * options.every).savefig(options.output, dpi=110)
    print(options.output)


if __name__ == "__main__":
    main()
