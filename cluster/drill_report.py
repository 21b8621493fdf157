"""What a drill shows: answers and events in; live tau and tokens/s as a plot, and a table of its phases out."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.drill_traffic import Reply, acceptance_of

WINDOW_S = 20.0  # over which live figures are taken
PHASE_COLOURS = ("#e8eef7", "#f7efe0", "#eaf5ea")
EVENT_COLOURS = {
    "promoted": "#1a7f37", "rejected": "#b35900", "rolled back": "#b00020", "serving": "#0b5cad",
    "redistill": "#777777",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, in seconds from the drill's beginning."""

    at_s: float
    kind: str  # shift, or of EVENT_COLOURS
    what: str  # one line


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Traffic of one phase under one drafter."""

    phase: str
    drafter: str  # version in service
    replies: int
    failed: int
    tokens: int
    tau: float | None
    tokens_per_s: float  # of each stream: tokens over the seconds of its answers
    longest_gap_s: float


def stretches(replies: Sequence[Reply], events: Sequence[Event]) -> list[Stretch]:
    """Figures between a shift or a swap and the next, answers that a swap fell into left out of tau's stretches."""
    found: list[Stretch] = []
    phase, drafter, since = "", "", 0.0
    marks = [event for event in events if event.kind in ("shift", "serving")]
    for number, mark in enumerate(marks):
        phase = mark.what if mark.kind == "shift" else phase
        drafter = mark.what if mark.kind == "serving" else drafter
        since, until = mark.at_s, marks[number + 1].at_s if number + 1 < len(marks) else float("inf")
        whole = [r for r in replies if r.phase == phase and since <= r.at_s - r.seconds and r.at_s < until]
        ended = [r for r in replies if since <= r.at_s < until]
        failed = sum(r.error is not None for r in ended)
        if not whole and not failed:
            continue
        good = [r for r in whole if r.error is None]
        seconds = sum(r.seconds for r in good)
        found.append(
            Stretch(
                phase=phase,
                drafter=drafter,
                replies=len(whole),
                failed=failed,
                tokens=sum(r.tokens for r in good),
                tau=acceptance_of(good).tau,
                tokens_per_s=sum(r.tokens for r in good) / seconds if seconds else 0.0,
                longest_gap_s=max((r.longest_gap_s for r in ended), default=0.0),
            )
        )
    return found


def live_figures(replies: Sequence[Reply]) -> tuple[list[float], list[float | None], list[float]]:
    """(seconds, tau, tokens/s of all streams together) of a window that slides by a quarter of itself."""
    end = max((r.at_s for r in replies), default=0.0)
    times, taus, rates = [], [], []
    at = WINDOW_S
    while at <= end:
        inside = [r for r in replies if at - WINDOW_S < r.at_s <= at and r.error is None]
        times.append(at)
        taus.append(acceptance_of(inside).tau)
        rates.append(sum(_tokens_between(r, at - WINDOW_S, at) for r in replies) / WINDOW_S)
        at += WINDOW_S / 4
    return times, taus, rates


def _tokens_between(reply: Reply, start: float, end: float) -> float:
    """Its tokens in a stretch of time, as if they had come evenly."""
    if reply.seconds <= 0:
        return 0.0
    begun = reply.at_s - reply.seconds
    return reply.tokens * max(0.0, min(end, reply.at_s) - max(start, begun)) / reply.seconds


def plot(replies: Sequence[Reply], events: Sequence[Event], title: str) -> str:
    """The drill as SVG: tau above, tokens/s below, phases as bands and events as lines."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    times, taus, rates = live_figures(replies)
    figure, axes = pyplot.subplots(2, 1, figsize=(11, 6.5), sharex=True)
    end = times[-1] if times else 1.0
    shifts = [event for event in events if event.kind == "shift"]
    for axis, values, label in ((axes[0], taus, "live tau"), (axes[1], rates, "tokens/s, all streams")):
        axis.plot(times, [float("nan") if v is None else v for v in values], color="#222222", linewidth=1.5)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        for number, shift in enumerate(shifts):
            until = shifts[number + 1].at_s if number + 1 < len(shifts) else end
            axis.axvspan(shift.at_s, until, color=PHASE_COLOURS[number % len(PHASE_COLOURS)], zorder=0)
        for event in events:
            if event.kind in EVENT_COLOURS:
                axis.axvline(event.at_s, color=EVENT_COLOURS[event.kind], linestyle="--", linewidth=1)
    top = axes[0].get_ylim()[1]
    step = 0.09 * (top - axes[0].get_ylim()[0])
    for number, shift in enumerate(shifts):  # a short phase's name would run into the next one
        axes[0].text(shift.at_s, top - step * (number % 2), f" {shift.what}", va="top", fontsize=10, weight="bold")
    place = axes[1].get_ylim()[1]
    for event in events:
        if event.kind in EVENT_COLOURS:
            axes[1].text(
                event.at_s, place, f" {event.kind}", va="top", fontsize=7, rotation=90, color=EVENT_COLOURS[event.kind]
            )
    axes[1].set_xlabel("seconds")
    axes[0].set_title(title)
    figure.tight_layout()
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return stream.getvalue()


def markdown(stretch_rows: Sequence[Stretch], compared: Sequence[dict[str, Any]]) -> str:
    """Both tables: live figures of each stretch, and the static drafter against the loop's last one."""
    lines = ["| traffic | drafter in service | answers | failed | tau | tokens/s of a stream | longest gap |"]
    lines.append("|---|---|---|---|---|---|---|")
    for s in stretch_rows:
        lines.append(
            f"| {s.phase} | {s.drafter} | {s.replies} | {s.failed} | {_tau(s.tau)} | {s.tokens_per_s:.1f} | "
            f"{s.longest_gap_s:.2f} s |"
        )
    lines += ["", "| held-out prompts | static drafter: tau, S | the loop's last: tau, S | equal outputs |"]
    lines.append("|---|---|---|---|")
    for row in compared:
        lines.append(
            f"| {row['prompts']} ({row['count']}) | {_tau(row['static_tau'])}, {row['static_s']:.2f} | "
            f"{_tau(row['loop_tau'])}, {row['loop_s']:.2f} | {row['equal']} of {row['of']} |"
        )
    return "\n".join(lines) + "\n"


def _tau(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
