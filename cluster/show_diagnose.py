"""What people see of a diagnosis: the headline, every check with its evidence, the likely causes with their mends."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipelines.diagnose_report import Diagnosis

GRADES = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "fault": "[red]fault[/red]"}


def diagnosis_view(found: Diagnosis) -> RenderableType:
    """Headline, table of checks, findings."""
    style = {"sound": "green", "fault": "red"}.get(found.verdict, "yellow")
    measured = f" on {found.prompts} prompts of {found.prompt_set}" if found.prompts else ""
    table = Table(
        title=escape(f"{found.drafter} for {found.target}{measured}"), title_justify="left", title_style="bold"
    )
    table.add_column("check", style="cyan", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("evidence", overflow="fold")
    for check in found.checks:
        table.add_row(escape(check.name), GRADES[check.grade], escape(check.evidence))
    return Group(table, *_findings(found), Text(f"\n{found.headline}", style=f"bold {style}"))


def _findings(found: Diagnosis) -> list[RenderableType]:
    """The likely causes, numbered, if there is one."""
    if not found.findings:
        return []
    table = Table(title="likely causes", title_justify="left", title_style="bold")
    table.add_column("", justify="right")
    table.add_column("cause", overflow="fold")
    table.add_column("mend", overflow="fold")
    for number, finding in enumerate(found.findings, 1):
        table.add_row(str(number), escape(finding.says), escape(finding.mend))
    return [table]
