"""What people see of a comparison: its progress, its tables, and the advice in one line."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cluster.show import Stage
from pipelines.compare import CompareProgress
from pipelines.compare_figures import CompareReport
from pipelines.compare_tables import TextTable, tables


def progress(stage: Stage) -> Callable[[CompareProgress], None]:
    """Shows what a comparison is at."""

    def show(at: CompareProgress) -> None:
        if at.message:
            stage.say(at.message)
        else:
            stage.at(at.done, at.total, at.text)

    return show


def compare_view(report: CompareReport) -> RenderableType:
    """All tables, then what to choose."""
    parts: list[RenderableType] = [_rich(table) for table in tables(report)]
    colour = "yellow" if report.advice.drafter is None or not report.advice.told_apart else "green"
    parts.append(Text(report.advice.line, style=f"bold {colour}"))
    parts += [Text(f"  {other}") for other in report.advice.others]
    parts.append(Text(f"  {report.output}: compare.md, compare.json, compare.svg"))
    return Group(*parts)


def _rich(table: TextTable) -> Table:
    """A column for each drafter, so that they stand side by side; terminals are narrow."""
    shown = Table(title=escape(table.title), title_justify="left", title_style="bold", box=box.SIMPLE)
    shown.add_column(escape(table.heads[0]), style="cyan", min_width=11, overflow="fold")
    for row in table.rows:
        shown.add_column(escape(row[0]), overflow="fold")
    for number, head in enumerate(table.heads[1:], start=1):
        shown.add_row(escape(head), *(escape(row[number]) for row in table.rows))
    return shown
