"""What triggers ask of the traffic log: right sums by drafter, right counts by time, and no tokens fetched for it."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from drafters.acceptance import Acceptance
from drafters.atomic_files import AtomicFolder
from serving.engine.sampling import Sampling
from serving.traffic_schema import TrafficMetadata, TrafficRow, traffic_table
from serving.traffic_shards import count_rows, live_tau, read_traffic, shard_name

ORIGIN = TrafficMetadata(target="toy", target_fingerprint="f", tokenizer_hash="t", chat_template_hash="c")
START = datetime(2026, 11, 30, 23, 59, 50, tzinfo=UTC)
TOKENS = np.random.default_rng(0).integers(0, 2**30, 6000)  # that no compression makes small


def row(
    second: int, version: str | None = "a@1", *, changed: bool = False, tokens: int = 3, **acceptance: Any
) -> TrafficRow:
    counts = {"rounds": 4, "proposed": 8, "proposed_by_position": [4, 4], "accepted_by_position": [3, 1]}
    return TrafficRow(
        request_id=f"r{second}",
        arrived_at=START.timestamp() + second,
        prompt_ids=TOKENS[:tokens],
        response_ids=TOKENS[:tokens] + 7919 * second,
        finish_reason="stop",
        sampling=Sampling(),
        drafter_version=version,
        drafter_changed=changed,
        placement="colocated",
        acceptance=Acceptance(**counts | acceptance),
    )


def write_log(folder: Path, *shards: list[TrafficRow]) -> int:
    """The bytes of all shards."""
    size = 0
    for number, rows in enumerate(shards):
        arrivals = [row.arrived_us for row in rows]
        file = folder / shard_name(min(arrivals), max(arrivals), "w", number)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(traffic_table(rows, ORIGIN), file)
        size += file.stat().st_size
    return size


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of everything that is read from any log."""
    found: list[int] = []
    open_file, read_file = AtomicFolder.open, AtomicFolder.read

    class Counted(io.BufferedReader):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            found.append(len(data))
            return data

    def read(folder: AtomicFolder, name: str) -> bytes:
        data = read_file(folder, name)
        found.append(len(data))
        return data

    monkeypatch.setattr(AtomicFolder, "open", lambda folder, name: Counted(open_file(folder, name)))
    monkeypatch.setattr(AtomicFolder, "read", read)
    return found


def test_tau_is_summed_by_drafter(tmp_path: Path):
    write_log(
        tmp_path,
        [row(0), row(1, "b@2", rounds=2, proposed=9, proposed_by_position=[2, 2, 1], accepted_by_position=[2, 2, 1])],
        [row(2, changed=True), row(3, None, rounds=0, proposed=0, proposed_by_position=[], accepted_by_position=[])],
        [row(4, rounds=1, proposed=3, proposed_by_position=[1, 1, 1], accepted_by_position=[0, 0, 0]), row(5, "b@2")],
    )
    found = live_tau(str(tmp_path))
    assert found == {
        "a@1": Acceptance(5, 11, [5, 5, 1], [3, 1, 0]),
        "b@2": Acceptance(6, 17, [6, 6, 1], [5, 3, 1]),
    }
    assert (found["a@1"].tau, found["b@2"].tau) == (1.8, 2.5)
    later = live_tau(str(tmp_path), START + timedelta(seconds=1), START + timedelta(seconds=5))
    assert {version: acceptance.rounds for version, acceptance in later.items()} == {"a@1": 1, "b@2": 2}
    assert live_tau(str(tmp_path / "nothing here")) == {}


def test_rows_are_counted_as_they_would_be_read(tmp_path: Path):
    write_log(tmp_path, [row(0), row(3)], [row(1), row(5), row(20)], [row(6)])
    strange = tmp_path / "date=2026-12-01" / "merged-by-hand.parquet"  # its name does not say when
    pq.write_table(traffic_table([row(2), row(40)], ORIGIN), strange)
    times = [None, *(START + timedelta(seconds=s) for s in (0, 1, 3, 5, 6, 20, 30, 50))]
    counts = set()
    for since in times:
        for until in times:
            expected = sum(table.num_rows for table in read_traffic(str(tmp_path), since=since, until=until))
            assert count_rows(str(tmp_path), since, until) == expected
            counts.add(expected)
    assert counts == set(range(9))


def test_no_token_is_fetched_to_count(tmp_path: Path, fetched: list[int]):
    size = write_log(tmp_path, [row(n, tokens=6000) for n in range(50)], [row(n, tokens=6000) for n in range(40, 90)])
    since = START + timedelta(seconds=45)
    assert count_rows(str(tmp_path), since) == 50
    assert live_tau(str(tmp_path), since)["a@1"].rounds == 200
    assert 0 < sum(fetched) < size / 10
