"""What decides a training run's weights: options in, a plan out that tells whether another command goes on with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from drafters.atomic_files import AtomicFolder
from drafters.checkpoint import WEIGHTS
from drafters.remote_checkpoint import local_checkpoint
from pipelines.rollout_store import RolloutSet
from pipelines.train_config import TrainConfig, TrainError

PLAN = "plan.json"  # beside a run's state
# options that change how fast a run is, or how often it is saved, and nothing else
FREE = (
    "output", "num_workers", "min_workers", "cpus_per_worker", "threads_per_worker", "use_gpu", "resources",
    "cache_bytes", "save_every_steps", "keep_checkpoints", "max_failures", "parity_prompts",
)  # fmt: skip
FREE_ONLINE = ("batch", "num_actors", "cpus_per_actor", "gpus_per_actor", "resources", "threads_per_actor")
LONGEST_SHOWN = 40  # characters of a value in an error


def run_plan(config: TrainConfig, sets: Sequence[RolloutSet]) -> dict[str, Any]:
    """The facts, as JSON has them."""
    facts = {name: value for name, value in asdict(config).items() if name not in FREE}
    if config.online is not None:
        facts["online"] = {name: value for name, value in facts["online"].items() if name not in FREE_ONLINE}
    facts["steps"]["micro_batches"] = config.steps.order(config.num_workers).lanes
    facts["rollouts"] = [rollouts.manifest_sha256 for rollouts in sets]
    if config.init_from is not None:
        weights = (local_checkpoint(config.init_from) / WEIGHTS).read_bytes()
        facts["init_from"] = hashlib.sha256(weights).hexdigest()
    plan: dict[str, Any] = json.loads(json.dumps(facts))
    return plan


def run_name(plan: dict[str, Any]) -> str:
    """The same for the same plan only."""
    return "train-" + hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def take_up(state: AtomicFolder, plan: dict[str, Any]) -> None:
    """Write the plan beside the run's state. Raises TrainError if the state there is another run's."""
    try:
        before: dict[str, Any] = json.loads(state.read(PLAN))
    except (FileNotFoundError, ValueError):
        state.write(PLAN, json.dumps(plan, indent=2).encode())
        return
    if before == plan:
        return
    old, new = dict(_flat(before)), dict(_flat(plan))
    name = next(name for name in [*new, *old] if old.get(name) != new.get(name))
    raise TrainError(
        f"an interrupted run with other options lies in {state.uri} ({name} was {_short(old.get(name))}, now "
        f"{_short(new.get(name))}); give its options to go on with it, another output, or remove that folder"
    )


def _flat(facts: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of every option, options of options as steps.epochs."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{within}{name}.")
        else:
            yield within + name, value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "..."
