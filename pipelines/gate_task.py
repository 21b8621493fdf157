"""The gate as a task of Ray: on a node that has what the target needs, which a job's own process may not.

In: addresses and prompts. Out: the gate's report. `redistill.py` waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drafters.remote_checkpoint import local_checkpoint
from drafters.target import load_target, target_on_this_node
from pipelines.cores import usable_cores
from pipelines.gate import GateConfig, GatePrompt, GateReport, run_gate
from pipelines.ray_session import start_ray

LOOK_EVERY_S = 5.0
DEADLINE_S = 6 * 3600.0  # for a node to be found, and for all prompts to be decoded
MAX_RETRIES = 2  # of a task whose node or process is lost


class GateTaskError(RuntimeError):
    """The gate could not be held; one line."""


@dataclass(frozen=True, kw_only=True)
class GateTask:
    """What `run_gate` needs, in a form that goes to another node."""

    target: str  # as it is named
    target_path: str  # absolute path of the driver's copy
    target_fingerprint: str  # without tapped layers
    champion: str | None  # address
    challenger: str  # address
    held_out: Sequence[GatePrompt]
    regression: Sequence[GatePrompt]
    config: GateConfig

    def run(self) -> GateReport:
        """On whichever node this is."""
        path = target_on_this_node(self.target, self.target_path, (), self.target_fingerprint)
        return run_gate(
            load_target(str(path)),
            _here(self.champion) if self.champion else None,
            _here(self.challenger),
            self.held_out,
            self.regression,
            # Ray's workers are told of one thread, whatever the node has
            replace(self.config, num_threads=self.config.num_threads or usable_cores()),
        )


def _here(address: str) -> Path:
    """A copy on this node; an address that leads nowhere is for the gate to tell."""
    try:
        return local_checkpoint(address)
    except ValueError:
        return Path(address)


def hold_gate(task: GateTask, *, num_gpus: float, while_waiting: Callable[[], Any]) -> GateReport:
    """The gate's report. `while_waiting` is called every few seconds and may raise, which ends the wait.

    Without a GPU it stays on this node, which has the files. Raises GateTaskError, or what `run_gate` raises.
    """
    start_ray()
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote = ray.remote(_run).options(
        num_cpus=1,
        num_gpus=num_gpus,
        max_retries=MAX_RETRIES,
        scheduling_strategy="DEFAULT" if num_gpus else here,
    )
    reference, waited_s = remote.remote(task), 0.0
    while not ray.wait([reference], timeout=LOOK_EVERY_S)[0]:
        waited_s += LOOK_EVERY_S
        try:
            while_waiting()
            if waited_s > DEADLINE_S:
                raise GateTaskError(f"the gate took more than {DEADLINE_S / 3600:g} hours; run the same command again")
        except BaseException:
            ray.cancel(reference, force=True)
            raise
    try:
        report: GateReport = ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, ValueError):  # the gate's own words
            raise error.cause from None
        raise GateTaskError(f"the gate failed ({error.cause}); run the same command again") from error
    except ray.exceptions.RayError as error:
        raise GateTaskError(f"the gate's process was lost ({type(error).__name__}); run the same again") from error
    return report


def _run(task: GateTask) -> GateReport:
    return task.run()
