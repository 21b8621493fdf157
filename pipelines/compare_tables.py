"""A comparison as tables: rows of text that the command line and compare.md both show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.compare_config import Shape
from pipelines.compare_figures import CompareReport, DrafterFacts, PairFigures, SpeedFigures
from pipelines.compare_timing import quartiles


@dataclass(frozen=True)
class TextTable:
    """Cells as text, a row below another."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    note: str = ""


def tables(report: CompareReport) -> list[TextTable]:
    """What the drafters are, then every prompt set: all contenders side by side, and tau and S by draft length."""
    found = [drafter_table(report)]
    for one in report.sets:
        found += [set_table(report, one.name), length_table(report, one.name)]
    return found


def drafter_table(report: CompareReport) -> TextTable:
    """Size, memory, training, and what is taken from the target."""
    slot = next((d.slot_tokens for d in report.drafters), 0)
    heads = [
        "drafter", "kind", "parameters, M", "memory: weights, MB", f"a slot of {slot:,} tokens, MB",
        "training, minutes", "takes from the target",
    ]  # fmt: skip
    return TextTable("drafters", heads, [_drafter_row(d) for d in report.drafters])


def _drafter_row(d: DrafterFacts) -> list[str]:
    shares = "" if d.shares is None else ", ".join(d.shares) or "nothing"
    return [
        d.name, d.kind, f"{d.parameters / 1e6:.1f}", f"{d.weights_bytes / 1e6:.1f}", f"{d.slot_bytes / 1e6:.1f}",
        _cell(d.training_minutes, 1), shares,
    ]  # fmt: skip


def set_table(report: CompareReport, prompt_set: str) -> TextTable:
    """Plain decoding and all drafters on one set, each with the drafts that promised most."""
    pairs = [pair for pair in report.pairs if pair.prompt_set == prompt_set]
    batches = report.config["batches"]
    first = batches[0]
    heads = [
        "", "drafts", "tau", "acceptance by position",
        *(f"{what} {_at(batches)}" for what in ("T_draft, ms,", "T_verify, ms,", "S_predicted")),
        *(f"S_measured, tokens/s at {batch}" for batch in batches), "token-path mismatches", "equal to plain",
    ]  # fmt: skip
    plain = ["plain decoding", "", "-", "", "", "", ""] + [
        f"1, {pairs[0].speed(batch).tokens_per_s_plain:.1f}" if pairs else "" for batch in batches
    ]
    base = next((pair.speed(first).t_base_s for pair in pairs), None)
    facts = next(one for one in report.sets if one.name == prompt_set)
    timed = pairs[0].speed(first).prompts if pairs else 0
    title = f"{prompt_set}: {facts.prompts} prompts, {timed} of them timed, T_base {_ms(base)} ms at batch {first}"
    note = (
        "tau is counted along the target's answers to all prompts; T_draft, T_verify and S_predicted are those of the "
        f"drafts that were timed, {_at(batches)}; "
        "S_predicted = T_base * tau / (T_draft + T_verify), by times of rounds of all shapes in turns; in brackets "
        "quartiles over groups of prompts, and the drafts where they are others than in the second column. Acceptance "
        "by position and mismatches are those of the longest chain."
    )
    rows = [[*plain, "", ""], *(_pair_row(pair, batches) for pair in pairs)]
    return TextTable(title, heads, rows, note)


def _pair_row(pair: PairFigures, batches: Sequence[int]) -> list[str]:
    speed = pair.speed(batches[0])
    length = pair.length(speed.shape)
    mismatches = "" if pair.path_mismatch_share is None else f"{pair.path_mismatch_share:.0%} of {pair.rejections}"
    return [
        pair.drafter, speed.shape.name, _cell(length.tau) or "-",
        " ".join(f"{share:.2f}" for share in pair.longest_chain().acceptance_by_position),
        _by_batch([_ms(pair.speed(batch).t_draft_s) for batch in batches]),
        _by_batch([_ms(pair.speed(batch).t_verify_s) for batch in batches]),
        _by_batch([_cell(pair.length(pair.speed(b).shape).s_predicted[i]) for i, b in enumerate(batches)]),
        *(_speed_cell(pair.speed(batch), speed.shape) for batch in batches), mismatches,
        _equal_cell(pair.speeds),
    ]  # fmt: skip


def _equal_cell(speeds: Sequence[SpeedFigures]) -> str:
    ties = sum(s.near_ties for s in speeds)
    cell = f"{sum(s.equal for s in speeds)} of {sum(s.prompts for s in speeds)}"
    return f"{cell}, {ties} part at near-ties" if ties else cell


def _at(batches: Sequence[int]) -> str:
    return f"at {' / '.join(map(str, batches))}"


def _by_batch(cells: Sequence[str]) -> str:
    return " / ".join(cell or "-" for cell in cells)


def _speed_cell(speed: SpeedFigures, usual: Shape) -> str:
    low, high = quartiles(speed.ratios)
    other = "" if speed.shape == usual else f"; {speed.shape.name}"
    return f"{speed.s_measured:.2f} ({low:.2f} to {high:.2f}{other}), {speed.tokens_per_s:.1f}"


def length_table(report: CompareReport, prompt_set: str) -> TextTable:
    """tau and S by shape at the smallest batch; a star where S was measured, not predicted."""
    pairs = [pair for pair in report.pairs if pair.prompt_set == prompt_set]
    batch = report.config["batches"][0]
    shapes = {one.shape for pair in pairs for one in pair.lengths}
    columns = list(dict.fromkeys(shape.name for shape in sorted(shapes, key=lambda s: (s.nodes, s.depth))))
    rows = []
    for pair in pairs:
        cells = {one.shape.name: _by_batch([_cell(one.tau), _cell(one.s_predicted[0])]) for one in pair.lengths}
        speed = pair.speed(batch)
        cells[speed.shape.name] += f" ({speed.s_measured:.2f}*)"
        rows.append([pair.drafter, *(cells.get(column, "") for column in columns)])
    return TextTable(
        f"{prompt_set}: tau / S by drafts of a round, batch {batch}",
        ["", *columns],
        rows,
        "S is S_predicted; with a star S_measured, of whole answers with these drafts.",
    )


def markdown(report: CompareReport, plot: str) -> str:
    """The whole comparison as one page."""
    config = report.config
    lines = [
        "# Drafters compared",
        "",
        f"**{report.advice.line}.**",
        *(f"- {other}" for other in report.advice.others),
        "",
        f"![tau and S by drafts of a round]({plot})",
        "",
        f"Target {report.target}, {config['dtype']}, {report.backend} backend on {config['device']}, greedy, at most "
        f"{config['max_new_tokens']} new tokens; commit {report.commit or 'unknown'}; "
        + ", ".join(f"{name} {version}" for name, version in report.versions.items())
        + ".",
        "",
    ]
    if errors := report.errors():
        lines += [*(f"- {error}" for error in errors), ""]
    for table in tables(report):
        lines += [f"## {table.title}", "", _row(table.heads), "|" + "---|" * len(table.heads)]
        lines += [_row(row) for row in table.rows]
        lines += ["", *([table.note, ""] if table.note else [])]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cell(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"
