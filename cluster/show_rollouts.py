"""What people see of a rollout set: one table of what it holds, and its first rows as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from cluster.facts_table import facts_table
from pipelines.rollout_inspect import Inspection, Lengths
from pipelines.rollout_size import as_size
from pipelines.rollout_tally import SampleRow

MOST_SHOWN = 8  # categories, damaged shards
TEXT_SHOWN = 600  # characters of a prompt or a response
IDS_SHOWN = 40
LEAST_SHARE = 0.001  # of all columns: smaller ones are shown as one


def inspection_view(found: Inspection) -> RenderableType:
    """The table and, below it, the sample."""
    facts = (*_content_facts(found), *_storage_facts(found), *_origin_facts(found), *_soundness(found))
    table = facts_table(f"rollouts {found.uri}", facts)
    return Group(table, *(part for row in found.sample for part in _sample(row)), *_note(found.sample_note))


def _content_facts(found: Inspection) -> Iterator[tuple[str, str]]:
    shards = f"{found.shards} shards" if found.shards_planned is None else f"{found.shards} of {found.shards_planned}"
    if not found.finished:
        planned = "" if found.rows_planned is None else f" of {found.rows_planned:,}"
        yield "unfinished", f"{shards} shards, {found.rows:,}{planned} rows; the same generate command goes on with it"
    yield "sequences", f"{found.rows:,} ({found.rejected} rejected{'' if found.finished else ' so far'})"
    if found.rows_read != found.rows:
        yield "read", f"{found.rows_read:,} sequences of whole shards: lengths, counts and columns are theirs"
    yield "prompt tokens", f"{found.prompt_tokens:,}{_lengths('prompts', found.prompt_lengths)}"
    yield "response tokens", f"{found.response_tokens:,}{_lengths('responses', found.response_lengths)}"
    yield "finish reasons", _counted(found.finish_reasons)
    yield "categories", _counted(found.categories)
    share = found.loss_mask_share
    yield "loss mask", "-" if share is None else f"1 for {share:.1%} of the tokens"
    ranges = [f"{name} {_range(*ends)}" for name, ends in found.sampling.items()]
    yield "sampling", ", ".join([*ranges, *_told(found, "seed")]) or "-"
    if made := ", ".join(_told(found, "prompts", "dtype", "backend", "drafter")):
        yield "made with", made


def _storage_facts(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "size", f"{as_size(found.bytes)} in {found.shards} {'shard' if found.shards == 1 else 'shards'}"
    total = sum(found.bytes_by_column.values())
    large = {name: size for name, size in found.bytes_by_column.items() if size >= total * LEAST_SHARE}
    columns = [f"{name} {as_size(size)} ({size / total:.1%})" for name, size in large.items()]
    rest = total - sum(large.values())
    yield "columns", ", ".join(columns + ([f"others {as_size(rest)}"] if rest else [])) or "-"
    layers = ", ".join(map(str, found.origin.get("target_layer_ids", ())))
    for kind in found.features:
        rows = "" if kind.rows == found.rows_read else f" in {kind.rows:,} rows"
        yield (
            "features",
            (f"{kind.dtype}, {kind.bytes_per_token:,} bytes per token{rows}; layers {layers} of width {kind.width:,}"),
        )
    if not found.features:
        yield "features", "none"


def _origin_facts(found: Inspection) -> Iterator[tuple[str, str]]:
    def told(name: str) -> str:
        return str(found.origin.get(name, "unknown"))

    yield "target", f"{told('target')}, fingerprint {told('target_fingerprint')}"
    yield "tokenizer", told("tokenizer_hash")
    yield "chat template", told("chat_template_hash")
    options = found.origin.get("chat_options", {})
    if told_it := [f"{name} {options[name]}" for name in ("system", "thinking") if options.get(name)]:
        yield "chat options", ", ".join(told_it)
    yield "written by", f"draftloop {told('code_version')}, schema version {told('schema_version')}"


def _soundness(found: Inspection) -> Iterator[tuple[str, str]]:
    if not found.checked:
        yield "checksums", "not compared"
    elif not found.damaged:
        yield "checksums", f"right for {found.shards} of {found.shards} shards"
    for name in list(found.damaged)[:MOST_SHOWN]:
        yield "damaged", f"{name}: {found.damaged[name]}"
    if len(found.damaged) > MOST_SHOWN:
        yield "damaged", f"and {len(found.damaged) - MOST_SHOWN} more shards"


def _told(found: Inspection, *names: str) -> list[str]:
    return [f"{name} {found.config[name]}" for name in names if found.config.get(name) is not None]


def _lengths(what: str, lengths: Lengths | None) -> str:
    if lengths is None:
        return ""
    return f"; {what} of {lengths.min:,} to {lengths.max:,}, median {lengths.median:,}, p95 {lengths.p95:,}"


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _counted(counts: dict[str, int]) -> str:
    shown = [f"{name or '(none)'} {count:,}" for name, count in list(counts.items())[:MOST_SHOWN]]
    more = [f"and {len(counts) - MOST_SHOWN} more"] if len(counts) > MOST_SHOWN else []
    return ", ".join(shown + more) or "-"


def _sample(row: SampleRow) -> Iterator[Text]:
    yield Text(f"\n{_printable(row.id)}", style="bold")
    for name, text, ids in (("prompt", row.prompt, row.prompt_ids), ("response", row.response, row.response_ids)):
        shown = _printable(text) if text is not None else _ids(ids)
        if len(shown) > TEXT_SHOWN:
            shown = f"{shown[:TEXT_SHOWN]}... ({len(shown) - TEXT_SHOWN:,} more characters)"
        yield Text(f"{name}: ", style="cyan") + Text(shown, style="default")


def _printable(text: str) -> str:
    """A model may write anything, escape sequences for terminals included."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _ids(ids: list[int]) -> str:
    more = [f"... ({len(ids) - IDS_SHOWN:,} more)"] if len(ids) > IDS_SHOWN else []
    return " ".join([*map(str, ids[:IDS_SHOWN]), *more])


def _note(note: str | None) -> list[Text]:
    return [Text(f"\n{note}", style="yellow")] if note else []
