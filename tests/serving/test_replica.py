"""A replica without a cluster: it loads, swaps drafters between rounds, and refuses broken ones without raising."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from drafters.checkpoint import PROVENANCE, CheckpointError, save_checkpoint
from drafters.mtp import MtpConfig, make_mtp
from drafters.target import load_target, target_fingerprint
from serving.colocated import build
from serving.drafter_version import drafter_version
from serving.engine.sampling import Sampling
from serving.generation import Choice
from serving.metrics import engine_snapshot
from serving.replica import Replica
from serving.serve_config import ServeConfig
from serving.traffic_shards import read_traffic

ReplicaClass = Replica.__mro__[1]  # the class that Serve's ingress wraps
DEADLINE_S = 60


def save_untrained_drafter(
    folder: Path, target_dir: Path, fingerprint: str | None = None, taps: tuple[int, ...] | None = None
) -> Path:
    """A drafter that drafts nonsense, by the last layer of the toy target if `taps` names no others."""
    target = load_target(str(target_dir))
    taps = taps or (target.num_layers - 1,)
    vocab = target.config.vocab_size
    config = MtpConfig(
        hidden_size=target.width, vocab_size=vocab, draft_vocab_size=vocab, target_layer_ids=taps,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, intermediate_size=32,
    )  # fmt: skip
    provenance = {"target_fingerprint": fingerprint or target_fingerprint(target.path, taps)}
    save_checkpoint(folder, make_mtp(config), provenance)
    return folder


@pytest.fixture(scope="module")
def drafter_dir(tmp_path_factory, toy_target_dir) -> Path:
    return save_untrained_drafter(tmp_path_factory.mktemp("drafters") / "mtp", toy_target_dir)


@pytest.fixture
def replica(toy_target_dir, drafter_dir):
    made = ReplicaClass(
        ServeConfig(target=str(toy_target_dir), drafter=str(drafter_dir), num_slots=2, max_len=256, threads=1)
    )
    yield made
    assert made._engine.close(0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


async def tokens_of(replica, swap=None) -> list[int]:
    tokens, swapped = [], swap is None
    async for progress in replica._engine.stream([1, 2, 3], Sampling(max_new_tokens=100)):
        tokens += progress.token_ids
        if not swapped:
            swapped = True
            await replica.reconfigure({"drafter": swap})
    return tokens


def test_a_swap_under_a_stream_leaves_its_tokens(replica, drafter_dir, tmp_path):
    other = shutil.copytree(drafter_dir, tmp_path / "other")
    expected = run(tokens_of(replica))
    assert run(tokens_of(replica, swap=str(other))) == expected
    assert replica.model.drafter["path"] == str(other)
    run(replica.reconfigure({"drafter": None}))
    assert [replica.model.drafter[key] for key in ("name", "path", "last_swap_refused")] == [None] * 3
    assert run(tokens_of(replica)) == expected
    assert (
        'drafter_swaps_total{model_name="toy",replica="",result="done",source="user_config"} 2.0'
        in replica.model.metrics.render(None).decode()
    )


@pytest.mark.parametrize("what", ["absent", "truncated", "foreign", "unknown key", "no object"])
def test_a_bad_swap_is_refused_and_the_old_drafter_stays(replica, drafter_dir, toy_target_dir, tmp_path, what):
    folder = tmp_path / "bad"
    if what == "truncated":
        shutil.copytree(drafter_dir, folder)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    if what == "foreign":
        save_untrained_drafter(folder, toy_target_dir, fingerprint="of another target")
    user_config = {"unknown key": {"draftr": "x"}, "no object": 3}.get(what, {"drafter": str(folder)})
    before = run(tokens_of(replica))
    run(replica.reconfigure(user_config))
    report = replica.model.drafter
    assert report["path"] == str(drafter_dir)
    assert report["name"] is not None
    assert report["last_swap_refused"]
    assert "\n" not in report["last_swap_refused"]
    assert 'result="refused",source="user_config"} 1.0' in replica.model.metrics.render(None).decode()
    assert run(tokens_of(replica)) == before
    run(replica.check_health())


def test_counters_and_traffic_log_go_by_the_version_of_the_drafter(toy_target_dir, drafter_dir, tmp_path):
    address = str(shutil.copytree(drafter_dir, tmp_path / "v1"))
    config = {"target": str(toy_target_dir), "drafter": address, "num_slots": 2, "max_len": 256, "threads": 1}
    log = tmp_path / "log"
    replica = ReplicaClass(ServeConfig.model_validate(config | {"traffic_log": {"uri": str(log)}}))

    choice = Choice(prompt_ids=[1, 2, 3], sampling=Sampling(max_new_tokens=40))

    async def answered(name: str) -> None:
        assert [piece async for piece in replica.model.answer([choice], [], name)]

    run(answered("first"))
    other = shutil.copytree(drafter_dir, tmp_path / "again" / "v1")
    provenance = json.loads((other / PROVENANCE).read_text())
    (other / PROVENANCE).write_text(json.dumps(provenance | {"seed": 1}))
    run(replica.reconfigure({"drafter": str(other)}))
    run(answered("second"))
    run(replica.reconfigure({"drafter": None}))
    run(answered("third"))
    versions = [drafter_version(address, Path(address)), drafter_version(str(other), other), None]
    assert re.fullmatch("v1@[0-9a-f]{8}", versions[0])
    assert versions[0] != versions[1]
    text = replica.model.metrics.render(replica._engine.between_rounds(engine_snapshot).result(DEADLINE_S)).decode()
    for version in versions[:2]:
        labels = f'drafter_version="{version}",model_name="toy",placement="colocated",replica=""'
        assert f"generation_tokens_total{{{labels}}} 40.0" in text
    assert 'generation_tokens_total{drafter_version="none",model_name="toy",placement="none",replica=""} 40.0' in text
    replica.__del__()  # Serve calls it, too
    (table,) = read_traffic(str(log))
    assert table["request_id"].to_pylist() == ["first", "second", "third"]
    assert table["drafter_version"].to_pylist() == versions
    assert table["placement"].to_pylist() == ["colocated", "colocated", "none"]


def test_a_replica_that_cannot_load_fails_its_start(toy_target_dir, tmp_path):
    with pytest.raises(CheckpointError, match="no drafter at"):
        ReplicaClass(ServeConfig(target=str(toy_target_dir), drafter=str(tmp_path / "none")))


def test_the_config_refuses_what_it_does_not_know():
    for bad in (
        {"drafer": "x"},
        {"port": 0},
        {"port": 70000},
        {"num_slots": 0},
        {"dtype": "float8"},
        {"traffic_log": {"url": "x"}},
        {"traffic_log": {"sample_rate": 2}},
    ):
        with pytest.raises(ValidationError):
            ServeConfig.model_validate({"target": "t"} | bad)
    assert inspect.signature(build).parameters["config"].annotation is ServeConfig  # so a Serve YAML becomes one
    config = ServeConfig(target="org/Model-7B", host="0.0.0.0", port=9)
    assert (config.served_name, config.base_url) == ("Model-7B", "http://127.0.0.1:9/v1")
