"""What people see: progress while a stage works, a table at its end. Machines get the same facts with --json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from cluster.facts_table import facts_table
from pipelines.curve_point import CurvePoint
from pipelines.evaluate import EvaluateProgress, Evaluation
from pipelines.generate import GenerateProgress, GenerateReport
from pipelines.redistill_config import RedistillReport
from pipelines.train import TrainReport

KINDS = {
    "recursive": "recursive MTP",
    "independent": "independent MTP",
    "own-mtp": "own MTP",
    "dflash": "DFlash",
    "gemma-assistant": "Gemma 4 assistant",
}
PLAIN_EVERY = 0.1  # without a terminal: a line each time this share of the work is done


class Stage:
    """Shows one stage's progress: a bar on a terminal, now and then a line elsewhere. Silent with --json."""

    def __init__(self, console: Console, progress: Progress | None, quiet: bool):
        self._console, self._progress, self._quiet = console, progress, quiet
        self._task: TaskID | None = None
        self._next_share = 0.0

    def say(self, text: str) -> None:
        """A line of its own."""
        if not self._quiet:
            self._console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)

    def at(self, done: float, total: float, text: str) -> None:
        """Where the work stands."""
        if self._quiet or not total:
            return
        if self._progress is None:
            if done / total >= self._next_share or done >= total:
                self._next_share = done / total + PLAIN_EVERY
                self.say(f"{done:g} of {total:g}: {text}")
            return
        if self._task is None:
            self._task = self._progress.add_task("", total=total)
        self._progress.update(self._task, completed=done, total=total, description=text)

    # -- one method per stage ---------------------------------------------------------------------------------------

    def generate(self, progress: GenerateProgress) -> None:
        if progress.message:
            self.say(progress.message)
        elif progress.rows_total:
            text = f"{progress.response_tokens:,} tokens, {progress.tokens_per_s:,.0f} tok/s"
            self.at(progress.rows_done, progress.rows_total, text)

    def train(self, point: CurvePoint) -> None:
        accuracy = " ".join(f"{a:.2f}" for a in point.accuracy_by_position) or "-"
        loss = "skipped" if point.loss is None else f"{point.loss:.3f}"
        if point.expected_tau is not None:
            self.say(
                f"step {point.step}: loss {loss}, accuracy by position {accuracy}, "
                f"expected tau {point.expected_tau:.2f}"
            )
        speed = point.tokens / point.seconds if point.seconds else 0.0
        left = (point.total_steps - point.step) * point.seconds / point.step
        pace = f"{speed:,.0f} tok/s, {_duration(left)} of steps left"
        self.at(point.step, point.total_steps, f"loss {loss}, accuracy {accuracy}, {pace}")

    def evaluate(self, progress: EvaluateProgress) -> None:
        tau = "-" if progress.tau is None else f"{progress.tau:.2f}"
        text = f"tau {tau}, equal {progress.equal}/{progress.prompts_done}"
        self.at(progress.prompts_done, progress.prompts_total, text)


def _duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextmanager
def stage(console: Console, title: str, quiet: bool) -> Iterator[Stage]:
    """A titled stage with its progress."""
    if quiet:
        yield Stage(console, None, quiet=True)
        return
    console.print(f"\n[bold]{escape(title)}[/bold]", soft_wrap=True)
    if not console.is_terminal:
        yield Stage(console, None, quiet=False)
        return
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(TextColumn(" "), *columns, console=console, transient=True) as progress:
        yield Stage(console, progress, quiet=False)


def as_json(report: Any) -> str:
    """A report's facts for machines."""
    return json.dumps(asdict(report))


def generate_table(report: GenerateReport) -> RenderableType:
    """The facts and, where rows were rejected, how many for which reason."""
    table = facts_table("rollouts")
    table.add_row("sequences", f"{report.rows:,} ({report.rejected} rejected)")
    table.add_row("response tokens", f"{report.response_tokens:,}")
    table.add_row("size", f"{report.bytes / 1e6:,.1f} MB")
    table.add_row("shards", f"{report.shards_made} made, {report.shards_reused} reused")
    if report.tokens_per_s:
        table.add_row("speed", f"{report.tokens_per_s:,.0f} tok/s over {report.seconds:.0f} s, start included")
    table.add_row("folder", escape(report.output))
    if not report.rejected_by_kind:
        return table
    reasons = Table(title="rejected rows (each is in rejects.jsonl)", title_justify="left", title_style="bold")
    reasons.add_column("reason", style="cyan")
    reasons.add_column("rows", justify="right")
    for kind, count in report.rejected_by_kind.items():
        reasons.add_row(escape(kind), f"{count:,}")
    return Group(table, reasons)


def train_table(report: TrainReport) -> Table:
    table = facts_table("drafter")
    table.add_row("kind", f"{KINDS[report.kind]}, {report.parameters / 1e6:.1f} M parameters")
    table.add_row("trained on", f"{report.training_sequences:,} sequences, {report.response_tokens:,} response tokens")
    table.add_row("steps", f"{report.steps} in {report.seconds:.0f} s, start included")
    if report.best_step != report.steps:
        table.add_row("kept", f"the drafter of step {report.best_step}, whose expected tau was best")
    if report.skipped_steps or report.skipped_sequences:
        skipped = f"{report.skipped_steps} steps, {report.skipped_sequences} sequences that were not finite"
        table.add_row("[yellow]skipped[/yellow]", skipped)
    if report.ntp_loss is not None:
        table.add_row("next-token loss", f"{report.ntp_loss:.4f} of the trained target, on held-out sequences")
    table.add_row("loss", "-" if report.loss is None else f"{report.loss:.3f}")
    table.add_row("accuracy by position", _by_position(report.accuracy_by_position))
    expected = "-" if report.expected_tau is None else f"{report.expected_tau:.2f}"
    table.add_row("expected tau", f"{expected} on {report.held_out_sequences} held-out sequences")
    if len(report.tau_by_category) > 1:
        table.add_row("by category", "  ".join(f"{name} {tau:.2f}" for name, tau in report.tau_by_category.items()))
    table.add_row("parity", escape(report.parity_verdict))
    table.add_row("draft vocabulary", f"{report.draft_vocab_size:,} tokens, {report.draft_vocab_coverage:.1%} covered")
    table.add_row("folder", escape(report.output))
    return table


def evaluation_table(e: Evaluation) -> Table:
    title = f"{e.drafter} on {e.prompt_set}: {e.prompts} prompts, batch {e.batch}, {e.dtype}, {e.backend} backend"
    table = facts_table(title)
    low, _, high = e.s_measured_quartiles
    shape = f"trees of {e.tree_nodes} nodes" if e.tree_nodes else f"{e.num_draft_tokens} drafts"
    table.add_row("tau", "-" if e.tau is None else f"{e.tau:.2f} ({shape} per round)")
    table.add_row("acceptance rate by position", _by_position(e.acceptance_by_position))
    table.add_row("T_base", _ms(e.t_base_s))
    table.add_row("T_draft", _ms(e.t_draft_s))
    table.add_row("T_verify", _ms(e.t_verify_s))
    table.add_row("S_predicted", "-" if e.s_predicted is None else f"{e.s_predicted:.2f}")
    table.add_row("S_measured", f"{e.s_measured:.2f} (quartiles {low:.2f} to {high:.2f})")
    table.add_row("tokens/s, plain and drafted", f"{e.tokens_per_s_plain:.1f}, {e.tokens_per_s_drafted:.1f}")
    verdict = "equal to plain decoding, token for token"
    table.add_row("outputs", f"{e.equal} of {e.prompts} {verdict}")
    if e.prompts_differ:
        table.add_row("prompts", f"{e.prompts_differ}: fewer drafts may be accepted")
    return table


def redistill_table(report: RedistillReport) -> RenderableType:
    """What became of the window, and the gate's lines."""
    table = facts_table(f"window {report.window}{' (done before)' if report.repeated else ''}")
    table.add_row("verdict", f"[{'green' if report.verdict == 'promoted' else 'yellow'}]{report.verdict}[/]")
    table.add_row("why", escape(report.why))
    if report.version:
        table.add_row("challenger", report.version)
    table.add_row("champion before", escape(report.previous or "none: plain decoding"))
    counts = report.counts
    if counts:
        refused = "".join(f", {count:,} {escape(reason)}" for reason, count in counts["refused"].items())
        kept = f"{counts['training']:,} to train on, {counts['held_out']:,} held out"
        table.add_row("requests", f"{counts['read']:,}: {kept}{refused}")
    if report.training:
        table.add_row("training", f"{report.training['steps']} steps in {report.training['seconds']:.0f} s")
    if not report.gate:
        return table
    gate = Table(title="gate", title_justify="left", title_style="bold")
    for name in ("demand", "champion", "challenger", "threshold", "verdict"):
        gate.add_column(name, style="cyan" if name == "demand" else None)
    for line in report.gate["lines"]:
        figures = ("-" if v is None else f"{v:.2f}" for v in (line["champion"], line["challenger"], line["threshold"]))
        gate.add_row(line["name"], *figures, "[green]passed[/]" if line["passed"] else "[red]failed[/]")
    return Group(table, gate)


def _by_position(values: list[float]) -> str:
    return "  ".join(f"{value:.2f}" for value in values)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
