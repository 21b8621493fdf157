"""The Ray actor that holds a replica's drafter where it is disaggregated: loads drafters, serves them over the link.

`serving/drafter_supervisor.py` makes it, watches it, and replaces it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from drafters.remote_checkpoint import local_checkpoint
from drafters.target import load_target
from serving.draft_link import DrafterInfo, LinkKeys
from serving.draft_server import DraftServer
from serving.engine import native_build
from serving.engine.available_memory import available_bytes
from serving.engine.build import DTYPES, TORCH_THREADS, load_drafter
from serving.engine.memory_plan import DrafterPlan, Form, plan_drafter


@dataclass(frozen=True, kw_only=True)
class DrafterSettings:
    """How drafters run in the actor."""

    target: str  # whose embedding and LM head they borrow
    dtype: str  # where they run in torch
    device: str  # cpu or cuda
    threads: int | None  # None: torch's choice
    num_slots: int
    max_len: int


class DrafterMemoryError(ValueError):
    """A drafter that its bundle has no memory for; one line with the mend."""


class DrafterActor:
    """One process with the drafter at work, and the next one during a swap. Becomes an actor by `ray.remote`."""

    def __init__(self, keys: LinkKeys, peer: bytes, settings: DrafterSettings):
        self._settings = settings
        self._server = DraftServer(keys, peer)

    def load(self, session: str, address: str) -> DrafterInfo:
        """Load a drafter from a folder or URI, answer for it under `session`.

        Raises CheckpointError, TargetError, or DrafterMemoryError if it does not fit.
        """
        settings = self._settings
        threads = settings.threads or TORCH_THREADS
        native = settings.device == "cpu" and not native_build.unavailable_reason()
        torch.set_num_threads(1 if native else threads)
        path, target_path = local_checkpoint(address), Path(load_target(settings.target).path)
        memory = self._plan(path, target_path, "packed" if native else "plain")
        drafter = load_drafter(
            path,
            target_path,
            DTYPES[settings.dtype],
            torch.device(settings.device),
            threads if native else None,
        )
        drafter.allocate(settings.num_slots, settings.max_len)
        self._server.add(session, drafter)
        return DrafterInfo(
            name=drafter.name,
            target_layer_ids=tuple(drafter.target_layer_ids),
            max_draft_tokens=drafter.max_draft_tokens,
            max_tree_nodes=drafter.max_tree_nodes,
            memory=memory.describe(),
        )

    def _plan(self, path: Path, target_path: Path, form: Form) -> DrafterPlan:
        """What it takes here, where the engine's own plan does not look."""
        settings = self._settings
        plan = plan_drafter(
            path,
            target_path,
            dtype=DTYPES[settings.dtype],
            form=form,
            num_slots=settings.num_slots,
            max_len=settings.max_len,
        )
        free = available_bytes(settings.device)
        if plan.total_bytes > free:
            raise DrafterMemoryError(
                f"the drafter does not fit where it is to run ({plan.describe()}; {free / 1e6:.0f} MB are free); "
                "give fewer num_slots, a smaller max_len, or a drafter bundle with more memory"
            )
        return plan

    def keep(self, session: str | None) -> None:
        """Let go of all drafters but this one."""
        self._server.keep(session)

    def ping(self) -> int:
        """The process id: the actor is alive."""
        return os.getpid()
