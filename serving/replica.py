"""The Serve deployment: one replica loads target and drafter into an engine and answers the OpenAI endpoints.

`serving/colocated.py` configures and binds it. The drafter comes through `user_config` and can be swapped live.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.exceptions import RayServeException

from drafters.checkpoint import read_provenance
from drafters.drafter import Drafter
from drafters.remote_checkpoint import local_checkpoint
from drafters.target import load_target
from serving.chat_options import ChatTemplate, training_mismatch
from serving.drafter_version import drafter_version
from serving.engine.async_engine import AsyncEngine
from serving.engine.build import build_engine, load_drafter_for
from serving.engine.engine import Engine, EngineConfig
from serving.generation import ServedModel
from serving.metrics import RequestMetrics
from serving.openai_api import make_app
from serving.traffic_log import TrafficLog
from serving.traffic_schema import TrafficMetadata

if TYPE_CHECKING:
    from serving.colocated import ServeConfig

log = logging.getLogger(__name__)

_SWAP_DEADLINE_S = 60.0  # longest wait for the round that a swap comes after
_CLOSE_DEADLINE_S = 5.0  # Serve has drained the replica by then; once for the engine, once for the traffic log


class LiveConfig(BaseModel):
    """`user_config`: what may change without a restart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    drafter: str | None = None  # folder of the drafter; None: decode plainly


def _model_of_this_replica() -> ServedModel:
    replica: Any = serve.get_replica_context().servable_object  # None until the replica's __init__ is done
    return replica.model


def _app_of_this_replica() -> FastAPI:
    return make_app(_model_of_this_replica)


@serve.ingress(_app_of_this_replica)
class Replica:
    """Target, drafter and engine of one replica. A target or drafter that cannot be loaded fails its start."""

    def __init__(self, config: ServeConfig):
        self._config = config
        self._target = load_target(config.target)
        self._template = ChatTemplate(self._target, config.chat_options())
        self._template.check()
        engine = build_engine(
            self._target.path,
            dtype=config.dtype,
            backend=config.backend,
            device=config.device,
            num_slots=config.num_slots,
            max_len=config.max_len,
            drafter_path=local_checkpoint(config.drafter) if config.drafter else None,
            target_layer_ids=config.target_layer_ids,
            num_threads=config.threads,
            cuda_graphs=config.cuda_graphs,
            config=EngineConfig(
                num_draft_tokens=config.num_draft_tokens,
                tree_nodes=config.tree_nodes,
                adapt_draft_length=config.adapt_draft_length,
            ),
        )
        self._backend = engine.backend
        engine.drafter_version = self._version(config.drafter)
        self._engine = AsyncEngine(engine, max_waiting=config.max_waiting, stall_timeout_s=config.stall_timeout_s)
        self.model = ServedModel(
            self._engine,
            self._target,
            name=config.served_name,
            max_len=engine.max_len,
            metrics=RequestMetrics(config.served_name, placement="colocated"),
            chat_options=self._template.options,
            traffic=self._open_traffic_log(),
        )
        self._serving = LiveConfig(drafter=config.drafter)
        if config.drafter:
            self._compare_prompts(config.drafter)
        self._report(engine.drafter_name, None)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Swap the drafter between two rounds. Never raises, since Serve would kill the replica: it reports instead."""
        try:
            wanted = LiveConfig.model_validate(user_config or {})
            if wanted == self._serving:
                return
            drafter, version = await asyncio.to_thread(self._load, wanted.drafter)
            name = await asyncio.wait_for(
                asyncio.wrap_future(self._engine.between_rounds(lambda engine: _swap(engine, drafter, version))),
                _SWAP_DEADLINE_S,
            )
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            log.error("the drafter was not swapped, %s stays: %s", self._serving.drafter, reason)
            self.model.metrics.swapped("refused")
            self._report(self.model.drafter["name"], reason)
        else:
            log.info("the drafter is now %s", wanted.drafter)
            self._serving = wanted
            self.model.metrics.swapped("done")
            self._report(name, None)

    def _load(self, path: str | None) -> tuple[Drafter | None, str | None]:
        if path is None:
            return None, None
        drafter = load_drafter_for(self._backend, local_checkpoint(path), self._target.path)
        self._compare_prompts(path)
        return drafter, self._version(path)

    @staticmethod
    def _version(path: str | None) -> str | None:
        """What counters and the traffic log call the drafter."""
        return drafter_version(path, local_checkpoint(path)) if path else None

    def _open_traffic_log(self) -> TrafficLog | None:
        if self._config.traffic_log.uri is None:
            return None
        metadata = TrafficMetadata.of(self._config.target, self._target, self._template)
        return TrafficLog(self._config.traffic_log, metadata, writer=_replica_id())

    def _compare_prompts(self, path: str) -> None:
        """Say it if the drafter was trained on other prompts than it will meet: it drafts worse, and nothing else."""
        if differs := training_mismatch(read_provenance(local_checkpoint(path)), self._template):
            log.warning("drafter %s was %s: fewer drafts may be accepted", path, differs)

    def _report(self, name: str | None, refused: str | None) -> None:
        """What `/v1/models` says about the drafter, and why the last swap was refused, if it was."""
        self.model.drafter = {"name": name, "path": self._serving.drafter, "last_swap_refused": refused}
        self.model.metrics.drafter_address = self._serving.drafter

    async def check_health(self) -> None:
        """Serve restarts the replica if this raises."""
        if self._engine.refusal is not None:
            raise RuntimeError(self._engine.refusal)

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close(_CLOSE_DEADLINE_S)
        if hasattr(self, "model") and self.model.traffic is not None:
            self.model.traffic.close(_CLOSE_DEADLINE_S)


def _swap(engine: Engine, drafter: Drafter | None, version: str | None) -> str | None:
    engine.set_drafter(drafter, version)
    return engine.drafter_name


def _replica_id() -> str | None:
    """Serve's name for this replica; None outside of Serve."""
    try:
        return serve.get_replica_context().replica_id.unique_id
    except RayServeException:
        return None
