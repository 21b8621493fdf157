"""Whose state a run goes on with: the same options only, and what changes nothing may change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafters.atomic_files import AtomicFolder
from pipelines.run_plan import run_name, run_plan, take_up
from pipelines.step_config import StepConfig
from pipelines.train_config import OnlineOptions, TrainConfig, TrainError

CONFIG = TrainConfig(rollouts=("r",), output="o", steps=StepConfig(micro_batches=4))
SETS = [SimpleNamespace(manifest_sha256="a" * 64)]


def plan_of(config: TrainConfig = CONFIG, sets=SETS) -> dict:
    return run_plan(config, sets)


@pytest.mark.parametrize(
    "change",
    [
        {"num_workers": 2, "min_workers": 1, "cpus_per_worker": 3.0},
        {"save_every_steps": 7, "keep_checkpoints": 9, "max_failures": 8, "cache_bytes": 0},
        {"resources": (("trainer", 1.0),), "threads_per_worker": 2, "output": "elsewhere", "rollouts": ("moved",)},
    ],
)
def test_what_changes_no_weight_may_change(change, tmp_path: Path):
    state = AtomicFolder(str(tmp_path))
    take_up(state, plan_of())
    take_up(state, plan_of(replace(CONFIG, **change)))
    assert run_name(plan_of()) == run_name(plan_of(replace(CONFIG, **change)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda: plan_of(replace(CONFIG, steps=replace(CONFIG.steps, epochs=6.0))), "steps.epochs was 8.0, now 6.0"),
        (lambda: plan_of(replace(CONFIG, kind="independent")), 'kind was "recursive", now "independent"'),
        (lambda: plan_of(replace(CONFIG, steps=StepConfig(micro_batches=2))), "steps.micro_batches was 4, now 2"),
        (lambda: plan_of(replace(CONFIG, online=OnlineOptions())), "online.num_taps was null, now 3"),
        (lambda: plan_of(sets=[SimpleNamespace(manifest_sha256="b" * 64)]), r'rollouts was \["aa.*, now \["bb'),
    ],
)
def test_another_run_s_state_is_left_alone_and_the_difference_named(changed, message, tmp_path: Path):
    state = AtomicFolder(str(tmp_path))
    take_up(state, plan_of())
    with pytest.raises(TrainError, match=rf"an interrupted run with other options lies in {tmp_path} \({message}"):
        take_up(state, changed())
    assert run_name(changed()) != run_name(plan_of())
    take_up(state, plan_of())


def test_actors_of_online_training_may_change():
    one, other = (replace(CONFIG, online=OnlineOptions(num_actors=(1, n), batch=n)) for n in (1, 4))
    assert plan_of(one) == plan_of(other)
    assert plan_of(one) != plan_of(replace(CONFIG, online=OnlineOptions(dtype="bfloat16")))
