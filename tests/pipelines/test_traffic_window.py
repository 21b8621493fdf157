"""What is chosen from a window of traffic: every row is taken or refused for a reason, and always the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drafters.acceptance import Acceptance
from drafters.atomic_files import AtomicFolder
from pipelines.traffic_selection import load_selection, save_selection
from pipelines.traffic_window import (
    TrafficWindow,
    WindowConfig,
    WindowError,
    count_rows,
    repeated_share,
    select,
)
from serving.chat_options import ChatOptions
from serving.engine.sampling import Sampling
from serving.traffic_schema import TrafficMetadata, TrafficRow, traffic_table
from serving.traffic_shards import shard_name

ORIGIN = TrafficMetadata(
    target="toy", target_fingerprint="f", tokenizer_hash="t", chat_template_hash="c", code_version="0"
)
SINCE = datetime(2025, 11, 30, 12, tzinfo=UTC)
WINDOW = TrafficWindow(since=SINCE, until=SINCE + timedelta(hours=6))


def row(number: int, *, at_s: float | None = None, rounds: int = 2, **changes: Any) -> TrafficRow:
    """A request that arrived `at_s` seconds (None: `number`) into the window, with a prompt and response of its own."""
    values = {
        "request_id": f"r{number:05d}",
        "arrived_at": SINCE.timestamp() + (number if at_s is None else at_s),
        "prompt_ids": [number, 1, 2],
        "response_ids": [number, 5, 6, 7, 8],
        "finish_reason": "stop",
        "sampling": Sampling(temperature=0.5, seed=number),
        "drafter_version": "mtp@1",
        "drafter_changed": False,
        "placement": "colocated",
        "acceptance": Acceptance(rounds, 2 * rounds, [rounds, rounds], [rounds, 0]),
    }
    return TrafficRow(**values | changes)


def write_log(folder: Path, rows: Sequence[TrafficRow], origin: TrafficMetadata = ORIGIN, writer: str = "w") -> Path:
    """One shard of a log."""
    arrivals = [row.arrived_us for row in rows]
    file = folder / shard_name(min(arrivals), max(arrivals), writer, 1)
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(traffic_table(rows, origin), file)
    return file


def chosen(folder: Path, **changes: Any):
    changes = {"held_out": 0.0} | changes
    selection = select(str(folder), WINDOW, ORIGIN, WindowConfig(**changes))
    assert selection.read == selection.kept + sum(selection.refused.values())
    return selection


def ids(rows: Sequence[TrafficRow]) -> list[str]:
    return [row.request_id for row in rows]


def test_a_window_has_one_id_and_the_id_one_window():
    assert WINDOW.id == "20251130T120000Z-20251130T180000Z"
    assert TrafficWindow.from_id(WINDOW.id) == WINDOW
    berlin = datetime.fromisoformat("2025-11-30T13:00:00+01:00")
    assert TrafficWindow(since=berlin, until=WINDOW.until).id == WINDOW.id
    for bad in ("", "20251130T120000Z", f"{WINDOW.id}Z", "20251330T120000Z-20251130T180000Z"):
        with pytest.raises(WindowError, match="is no window; give"):
            TrafficWindow.from_id(bad)
    for since, said in (
        (SINCE.replace(tzinfo=None), "without a time zone"),
        (SINCE.replace(microsecond=1), "whole seconds"),
        (WINDOW.until, "not after"),
    ):
        with pytest.raises(WindowError, match=said):
            TrafficWindow(since=since, until=WINDOW.until)


def test_rows_of_another_origin_are_refused_with_their_file_and_the_rest_goes_on(tmp_path: Path):
    others = {
        "another target": replace(ORIGIN, target_fingerprint="x"),
        "another tokenizer": replace(ORIGIN, tokenizer_hash="x"),
        "another chat template": replace(ORIGIN, chat_template_hash="x"),
        "another chat options": replace(ORIGIN, chat_options=ChatOptions(system="Be brief.")),
        "another target, tokenizer": replace(ORIGIN, target_fingerprint="x", tokenizer_hash="x"),
    }
    files = {
        write_log(tmp_path, [row(10 * i), row(10 * i + 1)], origin).relative_to(tmp_path).as_posix(): reason
        for i, (reason, origin) in enumerate(others.items())
    }
    write_log(tmp_path, [row(90)], replace(ORIGIN, target="by another name", code_version="9"))
    bad = tmp_path / "date=2025-11-30" / "half.parquet"
    bad.write_bytes(b"PAR1 and no more")
    table = traffic_table([row(95)], ORIGIN)
    odd = table.set_column(0, "request_id", pa.array([[1]]))
    pq.write_table(odd.replace_schema_metadata(table.schema.metadata), bad.with_name("odd.parquet"))
    found = chosen(tmp_path)
    assert ids(found.training) == ["r00090"]
    assert found.refused == {**dict.fromkeys(others, 2), "columns of other types": 1}
    told = {file.name: (file.reason, file.rows) for file in found.refused_files}
    assert told.pop("date=2025-11-30/odd.parquet") == ("columns of other types", 1)
    reason, rows = told.pop(str(bad))
    assert (rows, "no whole Parquet file" in reason) == (0, True)
    assert told == {name: (reason, 2) for name, reason in files.items()}
    assert found.counts()["read"] == 12


def test_what_cannot_be_learnt_from_is_refused_by_its_reason(tmp_path: Path):
    once = list(range(100, 140))
    kept = [
        row(0, rounds=0, drafter_version=None),  # decoded plainly
        row(1, response_ids=[*once, *[7, 8, 9] * 10]),  # ends in a loop, after something of its own
        row(2, response_ids=once * 2, drafter_changed=True),
    ]
    refused = [
        (row(10, finish_reason="cancelled"), "finish reason"),
        (row(11, response_ids=[1, 2, 3]), "too short"),
        (row(12, prompt_ids=[]), "too short"),
        (row(13, response_ids=[], finish_reason="length"), "too short"),
        (row(14, prompt_ids=list(range(80)), response_ids=list(range(21))), "too long"),
        (row(15, response_ids=[3] * 60), "a loop"),
        (row(16, response_ids=list(range(11)) * 7), "a loop"),  # longer than an n-gram
        (replace(row(17), sampling=Sampling(top_p=0.5)), "sampling out of range"),
        (row(18, prompt_ids=kept[0].prompt_ids, response_ids=kept[0].response_ids), "duplicate"),
    ]
    table = traffic_table([*kept, *(each for each, _ in refused)], ORIGIN)
    top_p = [0.0 if value == 0.5 else value for value in table["top_p"].to_pylist()]  # nobody can have asked for it
    table = table.set_column(table.schema.get_field_index("top_p"), table.schema.field("top_p"), [top_p])
    file = write_log(tmp_path, [*kept, *(each for each, _ in refused)])
    pq.write_table(table, file)
    found = chosen(tmp_path, max_tokens=100)
    assert ids(found.training) == ids(kept)
    assert found.refused == {
        "a loop": 2, "duplicate": 1, "finish reason": 1, "sampling out of range": 1, "too long": 1, "too short": 3,
    }  # fmt: skip
    assert found.refused_files == []
    first, before = found.training[0], kept[0]
    for name in ("arrived_us", "finish_reason", "sampling", "drafter_version", "placement", "acceptance"):
        assert getattr(first, name) == getattr(before, name)
    assert (first.prompt_ids.tolist(), first.response_ids.tolist()) == ([0, 1, 2], [0, 5, 6, 7, 8])
    assert all(r.prompt_ids.base is None and r.response_ids.base is None for r in found.training), "no table is kept"


def test_repetition_is_counted_over_all_n_grams():
    rng = np.random.default_rng(0)
    for length in (0, 3, 4, 5, 40, 200):
        for vocab in (1, 2, 3, 50, 150_000):
            text = rng.integers(0, vocab, length).astype(np.int32)
            grams = [tuple(text[i : i + 4]) for i in range(length - 3)]
            expected = 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0
            assert repeated_share(text, 4) == pytest.approx(expected)


def test_a_prompt_occurs_so_often_and_an_answer_once(tmp_path: Path):
    same = {"prompt_ids": [9, 9]}
    write_log(tmp_path, [row(n, **same, response_ids=[n % 5, 1, 2, 3]) for n in range(10)], writer="a")
    write_log(tmp_path, [row(n, **same, response_ids=[n, 1, 2, 3]) for n in (2, 7)], writer="b")  # after a's
    write_log(tmp_path, [row(20, prompt_ids=[9], response_ids=[9, 0, 1, 2, 3])])  # the same tokens, divided elsewhere
    found = chosen(tmp_path, max_per_prompt=3)
    # b's shard is older: it ends before a's
    assert [r.response_ids[0] for r in found.training] == [0, 2, 7, 9]
    assert found.refused == {"duplicate": 3, "prompt too frequent": 6}


def test_too_many_rows_become_a_spread_over_the_window(tmp_path: Path):
    rows = [row(n) for n in range(1000)]
    for number, part in enumerate(np.array_split(np.arange(1000), 7)):
        write_log(tmp_path / "a", [rows[n] for n in part], writer=f"w{number}")
    write_log(tmp_path / "b", rows)
    found = chosen(tmp_path / "a", max_rows=100)
    assert found.refused == {"over max_rows": 900}
    places = [int(r.request_id[1:]) for r in found.training]
    assert places == sorted(places)
    assert min(np.histogram(places, bins=5, range=(0, 1000))[0]) >= 10
    assert ids(chosen(tmp_path / "b", max_rows=100).training) == ids(found.training), "however the log is cut"
    assert set(ids(chosen(tmp_path / "a", max_rows=50).training)) < set(ids(found.training))


def test_the_latest_are_held_out_and_their_prompts_are_nowhere_else(tmp_path: Path):
    rows = [row(n) for n in range(20)]
    rows[3] = row(3, prompt_ids=[17, 1, 2])  # a prompt that comes again later
    rows[18] = row(18, prompt_ids=[17, 1, 2])  # and once more
    rows[0] = row(0, at_s=900)  # logged early, arrived last
    write_log(tmp_path, rows)
    found = chosen(tmp_path, held_out=0.2)
    assert ids(found.held_out) == [f"r{n:05d}" for n in (17, 19, 0)]
    assert ids(found.training) == [f"r{n:05d}" for n in range(1, 17) if n != 3]
    assert found.refused == {"prompt is held out": 2}
    prompts = [{tuple(r.prompt_ids) for r in part} for part in (found.training, found.held_out)]
    assert not prompts[0] & prompts[1]
    assert len(chosen(tmp_path, held_out=0.01).held_out) == 1
    assert chosen(tmp_path).held_out == []


def test_every_row_is_accounted_for_whatever_the_log_holds(tmp_path: Path):
    rng = np.random.default_rng(1)
    for number in range(12):
        rows = [
            row(
                int(n),
                at_s=float(rng.uniform(-3600, 7 * 3600)),
                prompt_ids=rng.integers(0, 3, rng.integers(0, 4)),
                response_ids=rng.integers(0, 2, rng.choice([2, 4, 5, 30])),
                finish_reason=str(rng.choice(["stop", "length", "error"])),
            )
            for n in rng.integers(0, 10_000, 40)
        ]
        write_log(tmp_path, rows, replace(ORIGIN, tokenizer_hash=str(rng.choice(["t", "t", "u"]))), f"w{number}")
    options = {"max_rows": 30, "held_out": 0.3, "max_repeated_share": 0.4, "loop_ngram": 3}
    found = chosen(tmp_path, **options)
    assert found.read == count_rows(str(tmp_path), WINDOW.since, WINDOW.until) < 480
    assert set(found.refused) == {
        "a loop", "another tokenizer", "duplicate", "finish reason", "over max_rows", "prompt is held out",
        "prompt too frequent", "too short",
    }  # fmt: skip
    assert found.training
    assert max(r.arrived_us for r in found.training) <= min(r.arrived_us for r in found.held_out)
    again = chosen(tmp_path, **options)
    assert (ids(again.training), ids(again.held_out), again.counts()) == (
        ids(found.training), ids(found.held_out), found.counts(),
    )  # fmt: skip


def test_a_selection_outlives_the_log(tmp_path: Path):
    log, work = tmp_path / "log", tmp_path / "work"
    file = write_log(log, [row(n) for n in range(10)])
    (log / "date=2025-11-30" / "half.parquet").write_bytes(b"PAR1")
    found, folder = chosen(log, held_out=0.2), AtomicFolder(str(work))
    assert load_selection(folder) is None
    save_selection(folder, found)
    before = {f.name: f.read_bytes() for f in work.glob("*.*")}
    file.unlink()
    kept = load_selection(folder)
    assert kept is not None
    assert (kept.window, kept.origin, kept.counts()) == (found.window, found.origin, found.counts())
    assert (ids(kept.training), ids(kept.held_out)) == (ids(found.training), ids(found.held_out))
    save_selection(folder, kept)
    assert {f.name: f.read_bytes() for f in work.glob("*.*")} == before
    (work / "training.parquet").write_bytes(before["training.parquet"][:-20])
    with pytest.raises(WindowError, match=r"training\.parquet is damaged; delete selection\.json"):
        load_selection(folder)


def test_a_window_without_traffic_is_empty_and_wrong_options_are_named(tmp_path: Path):
    found = chosen(tmp_path, held_out=0.1)
    assert (found.read, found.kept, found.refused) == (0, 0, {})
    save_selection(AtomicFolder(str(tmp_path)), found)
    assert load_selection(AtomicFolder(str(tmp_path))) == found
    for name, value in (
        ("min_response_tokens", 0), ("max_tokens", 4), ("finish_reasons", ()), ("loop_ngram", 0), ("held_out", 1.0),
        ("max_repeated_share", 1.5), ("max_per_prompt", 0), ("max_rows", 0),
    ):  # fmt: skip
        with pytest.raises(WindowError, match=f"{name} is"):
            WindowConfig(**{name: value})
