"""What people see of a drill on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from cluster.drill_report import Stretch


def drill_tables(stretches: Sequence[Stretch], compared: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Live figures between shifts and swaps, and the static drafter against the loop's last one."""
    live = Table(title="in service", title_justify="left", title_style="bold")
    for name in ("traffic", "drafter", "answers", "failed", "tau", "tokens/s of a stream", "longest gap"):
        live.add_column(name, justify="left" if name in ("traffic", "drafter") else "right")
    for s in stretches:
        tau = "-" if s.tau is None else f"{s.tau:.2f}"
        figures = (str(s.replies), str(s.failed), tau, f"{s.tokens_per_s:.1f}", f"{s.longest_gap_s:.2f} s")
        live.add_row(s.phase, escape(s.drafter), *figures)
    beside = Table(title="held-out prompts, batch 1", title_justify="left", title_style="bold")
    for name in ("prompts", "static tau", "loop tau", "static S", "loop S", "equal outputs"):
        beside.add_column(name, justify="left" if name == "prompts" else "right")
    for row in compared:
        taus = ("-" if row[f"{who}_tau"] is None else f"{row[f'{who}_tau']:.2f}" for who in ("static", "loop"))
        speeds = (f"{row[f'{who}_s']:.2f}" for who in ("static", "loop"))
        beside.add_row(row["prompts"], *taus, *speeds, f"{row['equal']} of {row['of']}")
    return Group(live, beside)
