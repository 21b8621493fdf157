"""`draftloop export` and `draftloop import`: drafters in other projects' layouts, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from cluster.command import JsonOption, TargetOption, end, one_line_errors
from cluster.facts_table import facts_table

if TYPE_CHECKING:  # the help of a command need not load torch
    from drafters.formats.exchange import ExportReport, FileFact, ImportReport

OutputOption = Annotated[Path, typer.Option(help="Folder to write.")]


def export(
    drafter: Annotated[str, typer.Argument(help="--output of train: a folder or an s3:// address.")],
    layout: Annotated[
        Literal["z-lab", "speculators", "medusa"],
        typer.Option(
            "--format",
            help="z-lab (DFlash for SGLang, vLLM, dflash), speculators (DFlash for vLLM), medusa (heads for vLLM).",
        ),
    ],
    output: OutputOption,
    target: TargetOption = "smollm2",
    as_json: JsonOption = False,
) -> None:
    """Write a drafter in the layout that another server loads.

    What the layout cannot say is refused by name.
    """
    with one_line_errors():
        from drafters.formats.exchange import export_checkpoint

        report = export_checkpoint(drafter, target, layout, output)
        end(report, export_table, as_json, next(iter(report.commands.values())))


def import_drafter(
    source: Annotated[
        str,
        typer.Argument(help="A folder, a Hugging Face id, or the word own: the target's own MTP layers."),
    ],
    output: OutputOption,
    target: TargetOption = "smollm2",
    layout: Annotated[
        Literal["auto", "z-lab", "speculators", "medusa", "own", "gemma4-assistant"],
        typer.Option("--format", help="Of the source."),
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Make a drafter of another project one of ours, to evaluate, serve and train.

    Nothing is guessed: a key that is missing or contradicted is named, and what was taken for one is shown.
    """
    with one_line_errors():
        from drafters.formats.exchange import import_checkpoint

        report = import_checkpoint(source, target, output, layout)
        end(report, import_table, as_json, f"draftloop evaluate --target {target} --drafter {output}")


def export_table(report: ExportReport) -> RenderableType:
    """Files, what to know, and how servers load them."""
    table = facts_table("export")
    table.add_row("layout", report.format)
    table.add_row("drafts per round", f"up to {report.draft_tokens}")
    for note in report.notes:
        table.add_row("note", escape(note))
    for server, command in report.commands.items():
        table.add_row(server, escape(command))
    table.add_row("folder", escape(report.output))
    return Group(table, _files("files", report.files))


def import_table(report: ImportReport) -> RenderableType:
    """What the drafter is, what was taken for keys that its source lacks, and files."""
    table = facts_table("import")
    table.add_row("layout", report.format)
    table.add_row("drafter", f"{report.kind}, {report.parameters / 1e6:,.1f} M parameters")
    table.add_row("drafts per round", f"up to {report.draft_tokens}")
    table.add_row("tapped layers", ", ".join(map(str, report.target_layer_ids)))
    for key, value in report.taken.items():
        table.add_row(f"taken: {escape(key)}", escape(value))
    table.add_row("folder", escape(report.output))
    return Group(table, _files("read", report.read), _files("written", report.files))


def _files(title: str, facts: list[FileFact]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("file", no_wrap=True)
    table.add_column("bytes", justify="right")
    table.add_column("sha256")
    for fact in facts:
        table.add_row(escape(fact.name), f"{fact.bytes:,}", fact.sha256[:16])
    return table
