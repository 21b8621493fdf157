"""The table of what was made: names on the left, what they are on the right."""

from __future__ import annotations

from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table


def facts_table(title: str, facts: Iterable[tuple[str, str]] = ()) -> Table:
    """Title and facts are shown as they are; rows that are added to it may have markup."""
    table = Table(title=escape(title), show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, escape(value))
    return table
