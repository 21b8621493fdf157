"""Generate on a local Ray cluster: right rollouts, and the same bytes whatever was killed on the way."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cluster.cli import app
from drafters.target import TargetError, load_model, load_target
from pipelines import shard_pool
from pipelines.dialogue import row_seed
from pipelines.generate import GenerateConfig, GenerateError, generate
from pipelines.rollout_schema import Rollout
from pipelines.rollout_store import RolloutError, open_rollouts, shard_name
from pipelines.shard_generator import ShardGenerator, pick_layers
from serving.chat_options import ChatOptions
from tests.toy_folder import save_toy_target

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

SHARDS = 5


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, toy_target_dir: Path) -> GenerateConfig:
    """A small run of 18 good rows and 2 bad ones; `output` is set by each test."""
    prompts = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines = [json.dumps({"id": f"r{i}", "category": "toy", "prompt": f"{i} plus {i * 7} is"}) for i in range(18)]
    prompts.write_text("\n".join([*lines[:4], '{"prompt": 5}', *lines[4:], "no json"]) + "\n")
    return GenerateConfig(
        target=str(toy_target_dir),
        prompts=str(prompts),
        output="",
        max_new_tokens=12,
        rows_per_shard=4,
        batch=3,
        backend="torch",
        target_layer_ids=(0, 1),
        cpus_per_actor=1,
        stall_timeout_s=120,
    )


@pytest.fixture(scope="module")
def undisturbed(config: GenerateConfig, tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "rollouts"
    report = generate(replace(config, output=str(folder)))
    assert (report.rows, report.rejected, report.shards_made, report.shards_reused) == (18, 2, SHARDS, 0)
    return folder


def files(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_rollouts_are_the_target_s_own(undisturbed: Path, config: GenerateConfig):
    model = load_model(Path(config.target), torch.float32)
    rollouts = list(open_rollouts(str(undisturbed)))
    assert [r.id for r in rollouts] == [f"r{i}" for i in range(18)]
    for r in rollouts:
        prompt = torch.tensor([r.prompt_ids])
        whole = model.generate(prompt, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompt))
        assert whole[0, len(r.prompt_ids) :].tolist() == r.response_ids
        hidden = model(whole[:, :-1], output_hidden_states=True).hidden_states
        # the last entry of hidden_states has the final norm applied; take the last layer's output from a hook instead
        caught = []
        handle = model.model.layers[1].register_forward_hook(lambda _m, _a, out, caught=caught: caught.append(out))
        model(whole[:, :-1])
        handle.remove()
        last = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
        expected = torch.cat([hidden[1][0], last.reshape(hidden[1][0].shape)], dim=-1)
        torch.testing.assert_close(r.features_TF.float(), expected, rtol=2e-2, atol=2e-2)
        assert r.category == "toy"
        assert r.loss_mask == [0] * len(r.prompt_ids) + [1] * len(r.response_ids)


def test_rejects_and_metadata(undisturbed: Path):
    rejects = [json.loads(line) for line in (undisturbed / "rejects.jsonl").read_text().splitlines()]
    assert [(r["line"], r["reason"].split(" ")[0]) for r in rejects] == [(5, "prompt"), (20, "not")]
    metadata = pq.read_schema(undisturbed / shard_name(0, SHARDS)).metadata
    assert metadata[b"draftloop.target_layer_ids"] == b"[0, 1]"
    assert len(metadata[b"draftloop.target_fingerprint"]) == 32


def test_second_run_reuses_everything(undisturbed: Path, config: GenerateConfig):
    before, messages = files(undisturbed), []
    report = generate(replace(config, output=str(undisturbed)), lambda p: messages.append(p.message))
    assert (report.shards_made, report.shards_reused, report.rows) == (0, SHARDS, 18)
    assert files(undisturbed) == before
    assert messages == [f"{SHARDS} of {SHARDS} shards are there already"]


def test_deleted_shards_are_made_again(undisturbed: Path, config: GenerateConfig, tmp_path: Path):
    folder = Path(shutil.copytree(undisturbed, tmp_path / "rollouts"))
    (folder / shard_name(1, SHARDS)).unlink()
    (folder / shard_name(4, SHARDS)).write_bytes(b"cut short")
    seen = []
    report = generate(replace(config, output=str(folder), num_actors=(1, 2)), seen.append)
    assert (report.shards_made, report.shards_reused) == (2, SHARDS - 2)
    assert files(folder) == files(undisturbed)
    assert seen[-1].rows_done == seen[-1].rows_total == 18


class DiesOnce(ShardGenerator):
    """Kills its own process in the middle of the third shard, once."""

    def _dialogues(self, engine, name, rows):
        marker = Path(self.context.output).parent / "killed"
        for number, finished in enumerate(super()._dialogues(engine, name, rows)):
            if name == shard_name(2, SHARDS) and number == 1 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield finished


def test_killed_actor_costs_nothing(
    undisturbed: Path, config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shard_pool, "ShardGenerator", DiesOnce)
    report = generate(replace(config, output=str(tmp_path / "rollouts")))
    assert (tmp_path / "killed").exists()
    assert report.shards_made == SHARDS
    assert files(tmp_path / "rollouts") == files(undisturbed)


class KillsTheBoard(ShardGenerator):
    """Its third shard begins with the board's death, and ends when the board answers again."""

    def _generate(self, name, rows):
        if name == shard_name(2, SHARDS):
            ray.get(self.board.note.remote("gone", 9, 9), timeout=30)
            ray.kill(self.board, no_restart=False)
            deadline = time.monotonic() + 60
            while self._notes().get("gone", ()) or not self._notes():
                assert time.monotonic() < deadline, "the board did not start again"
                time.sleep(0.2)
        return super()._generate(name, rows)

    def _notes(self) -> dict:
        """What the board knows, "back" among it; nothing while it is away."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self.board.note.remote("back", 0, 0), timeout=5)
            return ray.get(self.board.at_work.remote(), timeout=5)
        return {}


def test_killed_board_starts_again(
    undisturbed: Path, config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shard_pool, "ShardGenerator", KillsTheBoard)
    seen = []
    generate(replace(config, output=str(tmp_path / "rollouts")), seen.append)
    assert seen[-1].rows_done == seen[-1].rows_total == 18
    assert files(tmp_path / "rollouts") == files(undisturbed)


class WaitsForAnother(ShardGenerator):
    """Notes its process, and holds the first shard until another actor has noted its own, or for 100 s."""

    def _generate(self, name, rows):
        seen = Path(self.context.output).parent / "pids"
        seen.mkdir(exist_ok=True)
        (seen / str(os.getpid())).touch()
        deadline = time.monotonic() + 100  # short of stall_timeout_s
        while name == shard_name(0, SHARDS) and len(list(seen.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        return super()._generate(name, rows)


def test_the_pool_grows_while_shards_wait(
    undisturbed: Path, config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shard_pool, "ShardGenerator", WaitsForAnother)
    generate(replace(config, output=str(tmp_path / "rollouts"), num_actors=(1, 2)))
    assert len(list((tmp_path / "pids").iterdir())) == 2
    assert files(tmp_path / "rollouts") == files(undisturbed)


class FailsOnOne(ShardGenerator):
    """Cannot make the second shard."""

    def _generate(self, name, rows):
        if name == shard_name(1, SHARDS):
            raise OSError("the disk is on fire\nand more")
        return super()._generate(name, rows)


def test_failed_shard_takes_no_other_with_it(
    undisturbed: Path, config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = replace(config, output=str(tmp_path / "rollouts"))
    with monkeypatch.context() as patch:
        patch.setattr(shard_pool, "ShardGenerator", FailsOnOne)
        with pytest.raises(GenerateError, match=r"1 of 5 shards failed.*part-00001.*disk is on fire") as caught:
            generate(here)
    assert "\n" not in str(caught.value)
    assert len(list((tmp_path / "rollouts").glob("*.parquet"))) == SHARDS - 1
    with pytest.raises(RolloutError, match="not finished"):
        open_rollouts(here.output)
    report = generate(here)
    assert (report.shards_made, report.shards_reused) == (1, SHARDS - 1)
    assert files(tmp_path / "rollouts") == files(undisturbed)


class WritesElsewhere(ShardGenerator):
    """Its second shard does not reach the driver's disk."""

    def _generate(self, name, rows):
        record = super()._generate(name, rows)
        if name == shard_name(1, SHARDS):
            (Path(self.context.output) / name).unlink()
        return record


def test_shards_on_another_node_s_disk_are_told(
    undisturbed: Path, config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = replace(config, output=str(tmp_path / "rollouts"))
    with monkeypatch.context() as patch:
        patch.setattr(shard_pool, "ShardGenerator", WritesElsewhere)
        patch.setattr(shard_pool, "VISIBLE_S", 1.0)
        with pytest.raises(GenerateError, match=r"part-00001.*on another node; give a shared folder or an s3://"):
            generate(here)
    with pytest.raises(RolloutError, match="not finished"):
        open_rollouts(here.output)
    generate(here)
    assert files(tmp_path / "rollouts") == files(undisturbed)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": 0.7}, r"temperature was 0\.0, now 0\.7"),
        ({"max_new_tokens": 13}, "max_new_tokens was 12, now 13"),
        ({"target_layer_ids": (1,)}, r"target_layer_ids was \[0, 1\], now \[1\]"),
        ({"limit": 3}, "rows was 18, now 3"),
        ({"dtype": "bfloat16"}, "dtype was 'float32', now 'bfloat16'"),
    ],
)
def test_changed_option_is_refused_by_name(undisturbed: Path, config: GenerateConfig, change: dict, named: str):
    before = files(undisturbed)
    with pytest.raises(RolloutError, match=named):
        generate(replace(config, output=str(undisturbed), **change))
    assert files(undisturbed) == before


def test_sampled_rows_depend_on_seed_and_id_only(config: GenerateConfig, tmp_path: Path):
    def responses(name: str, **changes) -> dict[str, list[int]]:
        changes = {"temperature": 1.0, "with_features": False, "limit": 6} | changes
        generate(replace(config, output=str(tmp_path / name), **changes))
        return {r.id: r.response_ids for r in open_rollouts(str(tmp_path / name))}

    first = responses("a")
    assert responses("b", rows_per_shard=2, batch=1) == first
    assert responses("c", seed=1) != first
    rollout: Rollout = next(iter(open_rollouts(str(tmp_path / "a"))))
    assert rollout.features_TF is None
    assert rollout.seed == row_seed(0, rollout.id)


def test_size_is_refused_before_work(config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = replace(config, output=str(tmp_path / "rollouts"))
    with pytest.raises(GenerateError, match=r"more than max_bytes 10 kB; generate fewer rows"):
        generate(replace(here, max_bytes=10_000))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5000))
    with pytest.raises(GenerateError, match=r"has 5 kB free"):
        generate(here)
    assert not list((tmp_path / "rollouts").glob("*.parquet"))


def test_pool_that_could_never_start_is_refused(config: GenerateConfig, tmp_path: Path):
    for change, cause in (({"gpus_per_actor": 1}, "GPU"), ({"cpus_per_actor": 99}, "Ray has 8")):
        with pytest.raises(GenerateError, match=cause):
            generate(replace(config, output=str(tmp_path / cause), **change))


def test_features_that_could_never_train_are_refused_at_once(config: GenerateConfig, tmp_path: Path):
    target = save_toy_target(tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    weights["model.odd.weight"] = weights.pop("model.norm.weight")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"no final norm.*give --no-features") as caught:
        generate(replace(config, target=str(target), output=str(tmp_path / "rollouts")))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "rollouts").exists()


def test_broken_engine_option_is_the_shards_error(config: GenerateConfig, tmp_path: Path):
    with pytest.raises(GenerateError, match=r"5 of 5 shards failed.*unknown backend 'abacus'"):
        generate(replace(config, output=str(tmp_path / "r"), backend="abacus"))


@pytest.mark.parametrize(
    "change",
    [{"batch": 0}, {"temperature": -1}, {"num_actors": (2, 1)}, {"dtype": "int4"}, {"limit": 0}, {"max_new_tokens": 0}],
)
def test_wrong_option_is_named(config: GenerateConfig, change: dict):
    with pytest.raises(GenerateError, match=next(iter(change))):
        replace(config, **change)


def test_layers_that_do_not_exist_are_named(config: GenerateConfig, tmp_path: Path):
    with pytest.raises(GenerateError, match=r"target_layer_ids \[0, 9\]"):
        generate(replace(config, output=str(tmp_path), target_layer_ids=(0, 9)))
    with pytest.raises(GenerateError, match="max_new_tokens is 512"):
        generate(replace(config, output=str(tmp_path), max_new_tokens=512))


def test_layers_that_a_drafter_adds_are_left_out():
    features = torch.arange(12.0).reshape(2, 6)  # three layers of width 2
    assert pick_layers(features, (0, 1, 4), (0, 4)).tolist() == [[0, 1, 4, 5], [6, 7, 10, 11]]
    assert pick_layers(features, (0, 1, 4), (0, 1, 4)) is features


def test_a_folder_of_turns_with_chat_options(config: GenerateConfig, tmp_path: Path):
    """From the command line: files of two kinds, rows of several turns, what was told is in every file."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"turns": ["one", "two"]}\n{"turns": []}\n{"id": "x", "turns": ["one"]}\n')
    pq.write_table(pa.table({"id": ["x", "y"], "turns": [["again"], ["un", "deux", "trois"]]}), folder / "b.parquet")
    arguments = [
        "generate", "--target", config.target, "--prompts", str(folder / "*"), "--output", str(tmp_path / "out"),
        "--max-new-tokens", "6", "--backend", "torch", "--system", "be brief",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rollouts = open_rollouts(str(tmp_path / "out"))
    rows = list(rollouts)
    assert [r.id for r in rows] == ["a-line-000001", "x", "y"]
    replies = [sum(mine > before for before, mine in pairwise(r.loss_mask)) for r in rows]
    assert replies == [2, 1, 3]
    assert [len(r.features_TF) + 1 for r in rows] == [len(r.loss_mask) for r in rows]
    tokenizer = load_target(config.target).tokenizer
    assert all(tokenizer.decode(r.prompt_ids).startswith("<|im_start|>system\nbe brief<|im_end|>") for r in rows)
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert [(Path(r["file"]).name, r["line"]) for r in rejects] == [("a.jsonl", 2), ("b.parquet", 1)]
    assert "already that of line 3 of" in rejects[1]["reason"]
    assert "duplicate id" in result.stdout
    assert rollouts.metadata.chat_options == ChatOptions(system="be brief")
    shard = pq.read_schema(tmp_path / "out" / shard_name(0, 1)).metadata
    assert json.loads(shard[b"draftloop.chat_options"])["system"] == "be brief"
    other = CliRunner().invoke(app, [*arguments[:-1], "be long"])
    assert other.exit_code == 1
    assert "system was 'be brief', now 'be long'" in other.stderr
