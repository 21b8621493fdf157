"""Generate and train on a real S3 server: what a local folder gets, to the byte, also when the server goes away."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters.checkpoint import read_provenance
from drafters.remote_checkpoint import local_checkpoint
from pipelines.generate import GenerateConfig, generate
from pipelines.prompts import PromptError
from pipelines.rollout_store import RolloutError, open_rollouts
from pipelines.step_config import StepConfig
from pipelines.train import train
from pipelines.train_config import TrainConfig, TrainError
from tests.in_process_training import in_process
from tests.s3_server import BUCKET, S3Server

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
]

AWAY_S = 6.0


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, toy_target_dir: Path, ray_cluster: None) -> GenerateConfig:
    """A finished run on a local folder."""
    folder = tmp_path_factory.mktemp("local")
    lines = [json.dumps({"id": f"r{i}", "category": "toy", "prompt": f"{i} plus {i * 7} is"}) for i in range(24)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    config = GenerateConfig(
        target=str(toy_target_dir),
        prompts=str(folder / "prompts.jsonl"),
        output=str(folder / "rollouts"),
        max_new_tokens=24,
        rows_per_shard=4,
        backend="torch",
        target_layer_ids=(0, 1),
        cpus_per_actor=1,
        stall_timeout_s=120,
    )
    generate(config)
    return config


def checksums(uri: str) -> dict[str, str]:
    return {shard.name: shard.sha256 for shard in open_rollouts(uri).manifest.shards}


def test_a_run_on_s3_gives_the_bytes_of_a_local_one(s3_server: S3Server, local: GenerateConfig):
    config = replace(local, output=f"s3://{BUCKET}/rollouts")
    report = generate(config)
    assert (report.rows, report.shards_made) == (24, 6)
    assert checksums(config.output) == checksums(local.output)
    again = generate(config)
    assert (again.shards_made, again.shards_reused) == (0, 6)
    rollouts = open_rollouts(config.output)
    rollouts.check()
    assert [r.id for r in rollouts] == [r.id for r in open_rollouts(local.output)]


@contextmanager
def away_once(server: S3Server, folder: str, ending: str) -> Iterator[None]:
    """Take the server away for some seconds as soon as a file with this ending lies in the folder."""
    events: list[str] = []
    fs, over = server.filesystem(), threading.Event()

    def disturb() -> None:
        deadline = time.monotonic() + 300  # of a machine that is busy
        while time.monotonic() < deadline and not over.is_set():
            with suppress(Exception):  # a look that failed; there is another one
                if any(name.endswith(ending) for name in fs.find(folder)):
                    break
            over.wait(0.05)
        else:
            return
        server.stop()
        events.append("stopped")
        time.sleep(AWAY_S)
        server.start()
        events.append("started")

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    try:
        yield
        assert events, "it was over before the server went away"
    finally:
        over.set()
        thread.join(timeout=120)
    assert events == ["stopped", "started"]


def test_a_server_that_vanishes_and_returns_costs_nothing(s3_server: S3Server, local: GenerateConfig):
    config = replace(local, output=f"s3://{BUCKET}/disturbed")
    with away_once(s3_server, f"{BUCKET}/disturbed", ".parquet"):
        report = generate(config)
    assert report.rows == 24
    assert checksums(config.output) == checksums(local.output)


def test_training_on_s3_gives_the_weights_of_training_on_a_folder(
    s3_server: S3Server, local: GenerateConfig, tmp_path: Path
):
    """Also when the server goes away between two saved states."""
    generate(replace(local, output=f"s3://{BUCKET}/rollouts"))
    config = TrainConfig(
        target=local.target,
        rollouts=(local.output,),
        output=str(tmp_path / "from-folder"),
        num_draft_tokens=3,
        draft_vocab_size=150,
        held_out=0.2,
        steps=StepConfig(epochs=8, tokens_per_step=300, anchors_per_sequence=8, evaluations=2),
        threads_per_worker=1,
        cache_bytes=0,  # every epoch reads anew
        save_every_steps=4,
    )
    with in_process(tmp_path):
        train(config)
    remote = replace(config, rollouts=(f"s3://{BUCKET}/rollouts",), output=f"s3://{BUCKET}/drafters/new")
    with away_once(s3_server, f"{BUCKET}/drafters", "complete.json"):
        report = train(remote)
    assert report.output == remote.output
    fetched = local_checkpoint(remote.output, cache_dir=tmp_path / "cache")
    one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path / "from-folder", fetched))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    assert read_provenance(fetched)["parity"]["served"] == report.served_tau
    left = s3_server.filesystem().find(f"{BUCKET}/drafters")
    assert f"{BUCKET}/drafters/new/training.png" in left
    assert not [name for name in left if ".training/" in name], "the run's state is removed at the end"
    with pytest.raises(TrainError, match=r"output s3://no-such-bucket/new cannot be written \(there is no bucket"):
        train(replace(config, output="s3://no-such-bucket/new"))


def test_prompts_are_found_by_a_pattern(s3_server: S3Server, local: GenerateConfig):
    lines = Path(local.prompts).read_bytes().splitlines(keepends=True)
    fs = s3_server.filesystem()
    for name, part in (("a.jsonl", lines[:10]), ("b.jsonl", lines[10:])):
        fs.pipe_file(f"{BUCKET}/prompts/{name}", b"".join(part))
    config = replace(local, prompts=f"s3://{BUCKET}/prompts/*.jsonl", output=f"s3://{BUCKET}/by-pattern")
    report = generate(config)
    assert report.rows == 24
    assert [r.id for r in open_rollouts(config.output)] == [f"r{i}" for i in range(24)]
    with pytest.raises(PromptError, match="match no file"):
        generate(replace(config, prompts=f"s3://{BUCKET}/prompts/*.parquet"))


def test_a_wrong_key_and_a_missing_bucket_are_told_at_once(
    s3_server: S3Server, local: GenerateConfig, monkeypatch: pytest.MonkeyPatch
):
    import fsspec

    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"cannot be written \(there is no bucket no-such-bucket\); check path"):
        generate(replace(local, output="s3://no-such-bucket/rollouts"))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(RolloutError, match=r"cannot be written \(.*\); check path and access") as caught:
            generate(replace(local, output=f"s3://{BUCKET}/other"))
        assert "\n" not in str(caught.value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert time.monotonic() - started < 60
