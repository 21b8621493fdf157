"""What a rerun of generate must agree with, and what may be another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafters.target import load_target
from pipelines.generate import GenerateConfig, _plan
from pipelines.prompts import read_prompts
from pipelines.rollout_plan import rollout_metadata
from pipelines.rollout_store import RolloutError, RolloutStore
from serving.engine.native_rows import NativeRows


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, toy_target_dir: Path) -> GenerateConfig:
    prompts = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    prompts.write_text('{"prompt": "1 plus 7 is"}\n')
    return GenerateConfig(target=str(toy_target_dir), prompts=str(prompts), threads_per_actor=4)


def plan_of(config: GenerateConfig, **changes: Any) -> dict[str, Any]:
    config, target = replace(config, **changes), load_target(config.target)
    prompts = read_prompts(config.prompts, target, max_prompt_tokens=99)
    return _plan(config, target, rollout_metadata(config, target), prompts)


@pytest.mark.parametrize(
    ("change", "threads"),
    [
        ({"backend": "native"}, None),
        ({"backend": "auto"}, None),
        ({"backend": "torch"}, 4),
        ({"backend": "torch", "gpus_per_actor": 1.0}, None),
    ],
)
def test_threads_are_told_where_they_decide_the_bytes(config: GenerateConfig, change: dict, threads: int | None):
    assert plan_of(config, **change).get("threads") == threads


def test_threads_are_told_for_a_target_that_never_runs_natively(
    config: GenerateConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(NativeRows, "unsupported_reason", lambda _: "experts")
    assert plan_of(config, backend="auto")["threads"] == 4


def begun(folder: Path, plan: dict[str, Any]) -> RolloutStore:
    """A folder with this plan, in which something was made."""
    store = RolloutStore(str(folder))
    store.begin(plan)
    (folder / "part-00000-of-00001.parquet").write_bytes(b"made")
    return store


def test_other_threads_go_on_with_a_native_run(config: GenerateConfig, tmp_path: Path):
    begun(tmp_path, plan_of(config)).begin(plan_of(config, threads_per_actor=2))


def test_a_plan_of_an_older_run_that_has_threads_goes_on(config: GenerateConfig, tmp_path: Path):
    store = begun(tmp_path, plan_of(config) | {"threads": 4})
    store.begin(plan_of(config, threads_per_actor=2))
    with pytest.raises(RolloutError, match=r"temperature was 0\.0, now 0\.5"):
        store.begin(plan_of(config, temperature=0.5))
    assert json.loads((tmp_path / "plan.json").read_text())["threads"] == 4


def test_other_threads_are_refused_where_torch_runs(config: GenerateConfig, tmp_path: Path):
    store = begun(tmp_path, plan_of(config, backend="torch"))
    store.begin(plan_of(config, backend="torch"))
    with pytest.raises(RolloutError, match="threads was 4, now 2"):
        store.begin(plan_of(config, backend="torch", threads_per_actor=2))
