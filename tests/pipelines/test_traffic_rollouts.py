"""Answers of the traffic log become rollouts as generate would have made them, and foreign ones do not. No Ray."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.acceptance import Acceptance
from drafters.target import Target, load_target
from pipelines import generate as generate_stage
from pipelines import traffic_prefill, traffic_rollouts
from pipelines.generate import GenerateConfig, generate
from pipelines.generate_config import GenerateError
from pipelines.rollout_index import index_rollouts, read_chunk
from pipelines.rollout_schema import Rollout
from pipelines.rollout_store import RolloutError, RolloutSet, ShardRecord, open_rollouts, shard_name
from pipelines.shard_generator import ShardGenerator
from pipelines.traffic_prefill import TrafficPrefill
from pipelines.traffic_rollouts import TrafficRolloutsConfig, write_rollouts
from pipelines.traffic_window import WindowError
from pipelines.training_data import open_sets
from serving.engine import native_build
from serving.engine.build import build_engine
from serving.engine.sampling import Sampling
from serving.traffic_schema import TrafficRow

LAYERS = (0, 1)
BOARD = SimpleNamespace(note=SimpleNamespace(remote=lambda *_: None))


def make_here(
    context: Any, items: dict[str, dict], meter: Any, actor: type[ShardGenerator] | None = None
) -> list[ShardRecord]:
    """In place of `make_shards`: an actor without its process."""
    made, records = (actor or ShardGenerator)(context, BOARD), []
    for item in items.values():
        result = json.loads(made({name: [value] for name, value in item.items()})["result"][0])
        if "error" in result:
            raise GenerateError(result["error"])
        records.append(ShardRecord(**result["record"]))
    return records


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_stage, "make_shards", make_here)
    monkeypatch.setattr(traffic_rollouts, "make_shards", make_here)


@pytest.fixture(scope="module")
def target(toy_target_dir: Path) -> Target:
    return load_target(str(toy_target_dir))


def config(target: Target, **changes: Any) -> TrafficRolloutsConfig:
    fields = {
        "target": "toy", "backend": "torch", "target_layer_ids": LAYERS, "rows_per_shard": 4, "batch": 3,
        "cpus_per_actor": 1,
    }  # fmt: skip
    return TrafficRolloutsConfig(**fields | changes)


def generated(target: Target, folder: Path, **changes: Any) -> RolloutSet:
    """What generate makes of ten prompts of the toy target."""
    prompts = folder.with_suffix(".jsonl")
    rows = [{"id": f"r{i}", "prompt": f"{i} plus {i * 7} is" * (1 + i % 3)} for i in range(10)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"max_new_tokens": 24, "target_layer_ids": LAYERS, "backend": "torch", "batch": 3, "cpus_per_actor": 1}
    where = {"target": str(target.path), "prompts": str(prompts), "output": str(folder)}
    generate(GenerateConfig(**where | options | changes))
    return open_rollouts(str(folder))


def answered(rollout: Rollout, **changes: Any) -> TrafficRow:
    """The row that a service would have logged for this rollout."""
    sampling = ("temperature", "top_p", "top_k", "seed", "max_new_tokens")
    values = {
        "request_id": rollout.id,
        "arrived_at": 0.0,
        "prompt_ids": rollout.prompt_ids,
        "response_ids": rollout.response_ids,
        "finish_reason": rollout.finish_reason,
        "sampling": Sampling(**{name: getattr(rollout, name) for name in sampling}),
        "drafter_version": None,
        "drafter_changed": False,
        "placement": "none",
        "acceptance": Acceptance(),
    }
    return TrafficRow(**values | changes)


@pytest.fixture(scope="module")
def rows(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[TrafficRow]:
    """Ten greedy answers."""
    with pytest.MonkeyPatch.context() as patch:  # of a wider scope than `in_process`
        patch.setattr(generate_stage, "make_shards", make_here)
        return [answered(rollout) for rollout in generated(target, tmp_path_factory.mktemp("rows") / "set")]


def altered(row: TrafficRow, *places: int) -> TrafficRow:
    """The same answer with other tokens at some places."""
    response = row.response_ids.copy()
    for place in places:
        response[place] = (response[place] + 100) % 256
    return replace(row, response_ids=response)


def rejects(rollouts: RolloutSet) -> dict[int, str]:
    lines = [json.loads(line) for line in rollouts.folder.read("rejects.jsonl").splitlines()]
    assert {line["file"] for line in lines} <= {"traffic"}
    return {line["line"]: line["reason"] for line in lines}


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_features_are_those_that_generate_gives(
    target: Target, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
):
    if backend == "native" and (reason := native_build.unavailable_reason()):
        pytest.skip(reason)
    monkeypatch.setattr(traffic_prefill, "PASS_ROWS", 50)  # most answers are cut, and share passes with others
    older = generated(target, tmp_path / "older", backend=backend, temperature=0.5, seed=3)
    before = list(older)
    fresh = write_rollouts(
        [answered(rollout) for rollout in before], target, str(tmp_path / "fresh"), config(target, backend=backend)
    )
    assert (len(fresh), rejects(fresh), len(fresh.manifest.shards)) == (10, {}, 3)
    for mine, theirs in zip(fresh, before, strict=True):
        facts = [{k: v for k, v in asdict(r).items() if k not in ("features_TF", "category")} for r in (mine, theirs)]
        assert facts[0] == facts[1]
        assert (mine.category, mine.temperature) == ("traffic", 0.5)
        assert mine.features_TF.dtype == torch.bfloat16
        if backend == "native":
            assert torch.equal(mine.features_TF, theirs.features_TF)
        else:
            torch.testing.assert_close(mine.features_TF, theirs.features_TF, rtol=1e-2, atol=1e-2)
    sets = open_sets([str(tmp_path / "older"), str(tmp_path / "fresh")])  # they are trained on together
    index = index_rollouts(sets, vocab_size=260, held_out=0.1, lanes=1, weights=[0.25, 1.0])
    sequences = [s for chunk in index.training for s in read_chunk(sets, chunk)]
    assert {s.category for s in sequences} == {"", "traffic"}
    assert all(len(s.features) == len(s.ids) - 1 for s in sequences)


def test_foreign_answers_are_left_out_by_name_and_many_refuse_the_window(
    rows: list[TrafficRow], target: Target, tmp_path: Path
):
    sampled = replace(altered(rows[9], *range(24)), sampling=Sampling(temperature=1.0))  # anything can be sampled
    given = [*rows[:9], sampled]
    given[2] = altered(rows[2], 5, 9, 14)  # and what follows an altered token need not be right either
    given[4] = altered(rows[4], 23)  # one of 24 is within what is allowed
    found = write_rollouts(given, target, str(tmp_path / "a"), config(target, max_foreign=0.2))
    assert [r.id for r in found] == [f"r{n}" for n in (0, 1, 3, 4, 5, 6, 7, 8, 9)]
    (line, reason), = rejects(found).items()  # fmt: skip
    assert line == 3
    agreed = int(reason.removeprefix("r2: the target would have given ").removesuffix(" of its 24 tokens"))
    assert 3 < agreed <= 21
    with pytest.raises(
        WindowError, match=r"^1 of 9 greedy rows are not.*\(first r2: .*24 tokens, at least 90%"
    ) as told:
        write_rollouts(given, target, str(tmp_path / "b"), config(target))
    assert "\n" not in str(told.value)
    with pytest.raises(RolloutError, match="not finished"):
        open_rollouts(str(tmp_path / "b"))
    with pytest.raises(WindowError, match=r"^1 of 9"):  # told again from what was found before
        write_rollouts(given, target, str(tmp_path / "b"), config(target))
    lenient = config(target, near_tie=1e9)
    assert rejects(write_rollouts(given, target, str(tmp_path / "c"), lenient)) == {}


@pytest.mark.parametrize("pass_rows", [512, 7])
def test_agreement_is_counted_token_by_token(
    rows: list[TrafficRow], target: Target, pass_rows: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(traffic_prefill, "PASS_ROWS", pass_rows)
    backend = build_engine(target.path, backend="torch", num_slots=3, max_len=128, target_layer_ids=LAYERS).backend

    def agreed(*answers: TrafficRow, near_tie: float = 0.0) -> list[int]:
        asked = [Rollout(**traffic_rollouts._fields(answer), category="") for answer in answers]
        return [reading.agreed for reading in traffic_prefill.read_answers(backend, asked, near_tie)]

    last = altered(rows[1], 23)
    assert agreed(rows[0], last, rows[2]) == [22, 23, 24]
    assert rows[0].finish_reason == "stop", "its own end is among the tokens that agree"
    short = replace(rows[3], response_ids=rows[3].response_ids[:1])
    assert agreed(short, altered(short, 0)) == [1, 0]
    assert agreed(replace(rows[0], sampling=Sampling(temperature=0.1))) == [0]
    assert agreed(last, near_tie=1e9) == [24]


class SeesInfinity(TrafficPrefill):
    """Its target has a hidden state that is not finite in every second answer."""

    def _readings(self, name: str, answers: Any):
        for number, reading in enumerate(super()._readings(name, answers)):
            reading.features_TF[-1, -1] = float("inf") if number % 2 else 0.0
            yield reading


def test_what_cannot_be_read_is_counted(
    rows: list[TrafficRow], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(traffic_rollouts, "TrafficPrefill", SeesInfinity)
    given = [
        replace(rows[0], response_ids=[1, 260]),
        rows[1],
        replace(rows[2], prompt_ids=[-1]),
        replace(rows[3], prompt_ids=[7] * 490),
        rows[4],
        replace(rows[5], response_ids=[]),
    ]
    said: list[str] = []
    found = write_rollouts(
        given, target, str(tmp_path / "set"), config(target, features_dtype="int8"),
        lambda progress: said.append(progress.message or ""),
    )  # fmt: skip
    assert [r.id for r in found] == ["r1"]
    assert len(found) + found.manifest.rejected == len(given)
    assert rejects(found) == {
        1: "r0: a token is outside the target's vocabulary of 260",
        3: "r2: a token is outside the target's vocabulary of 260",
        4: "r3: 514 tokens are more than the target's context of 512",
        5: "r4: the target's hidden states are not finite",
        6: "r5: no tokens",
    }
    assert "2 rows" in said[0]
    assert "0 of 1 shards are there already" in said[0]
    with pytest.raises(WindowError, match="none of 1 rows"):
        write_rollouts(given[:1], target, str(tmp_path / "other"), config(target))


def test_it_goes_on_where_it_stopped_and_never_with_other_rows(rows: list[TrafficRow], target: Target, tmp_path: Path):
    whole = tmp_path / "whole"
    write_rollouts(rows, target, str(whole), config(target))
    part = Path(shutil.copytree(whole, tmp_path / "part"))
    (part / "manifest.json").unlink()
    (part / shard_name(0, 3)).unlink()
    (part / shard_name(2, 3)).write_bytes(b"cut short")
    write_rollouts(rows, target, str(part), config(target))
    assert files(part) == files(whole)

    def refused(match: str, rows: list[TrafficRow] = rows, **changes: Any) -> None:
        with pytest.raises(RolloutError, match=match):
            write_rollouts(rows, target, str(part), config(target, **changes))

    refused("traffic_sha256 was", [*rows[:9], altered(rows[9], 3)])
    refused("rows was 10, now 9", rows[:9])
    refused("near_tie was 0.25, now 0.1", near_tie=0.1)
    refused("target_layer_ids was", target_layer_ids=(1,))
    assert files(part) == files(whole)


@pytest.mark.parametrize(
    ("change", "error"),
    [({"min_agreement": 2}, WindowError), ({"near_tie": float("nan")}, WindowError), ({"batch": 0}, GenerateError)],
)
def test_wrong_options_are_named(target: Target, change: dict, error: type[Exception]):
    with pytest.raises(error, match=next(iter(change))):
        config(target, **change)
