"""The Serve deployment: one replica loads target and drafter into an engine and answers the OpenAI endpoints.

`serving/colocated.py` and `disaggregated.py` configure and bind it. The drafter comes through `user_config`, can be
swapped live, and works in this process or in an actor of its own.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.exceptions import RayServeException

from drafters.checkpoint import read_config, read_provenance
from drafters.drafter import Drafter
from drafters.remote_checkpoint import local_checkpoint
from drafters.target import load_target
from serving.autoscaling import load_figures
from serving.chat_options import ChatTemplate, training_mismatch
from serving.draft_link import RemoteDrafter
from serving.drafter_actor import DrafterSettings
from serving.drafter_supervisor import DrafterSupervisor
from serving.drafter_version import drafter_version
from serving.engine.async_engine import AsyncEngine
from serving.engine.build import build_engine, load_drafter_for
from serving.engine.engine import Engine, EngineConfig
from serving.generation import ServedModel
from serving.metrics import RequestMetrics
from serving.openai_api import make_app
from serving.request_guards import ApiKeys
from serving.serve_config import Disaggregation, ServeConfig
from serving.traffic_log import TrafficLog
from serving.traffic_schema import TrafficMetadata

log = logging.getLogger(__name__)

_SWAP_DEADLINE_S = 60.0  # longest wait for the round that a swap comes after
_CLOSE_DEADLINE_S = 5.0  # Serve has drained the replica by then


class LiveConfig(BaseModel):
    """`user_config`: what may change without a restart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    drafter: str | None = None  # folder or URI of the drafter; None: decode plainly


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
        api_keys = ApiKeys.read(config.api_key_file) if config.api_key_file else None
        engine = _engine_of(config, self._target.path)
        self._memory = engine.memory.describe() if engine.memory else ""
        self._backend = engine.backend
        engine.drafter_version = _version(config.drafter)
        self._supervisor: DrafterSupervisor | None = None
        if config.disaggregated is not None:
            self._supervisor = _supervisor_of(config, engine)
            if config.drafter:
                remote = self._supervisor.load(config.drafter)
                engine.set_drafter(remote, _version(config.drafter))
                self._supervisor.serve(remote, config.drafter)
                self._memory += f"; apart from it {remote.memory}"
        self._engine = AsyncEngine(engine, max_waiting=config.max_waiting, stall_timeout_s=config.stall_timeout_s)
        self.model = ServedModel(
            self._engine,
            self._target,
            name=config.served_name,
            max_len=engine.max_len,
            metrics=RequestMetrics(config.served_name, placement=config.placement),
            chat_options=self._template.options,
            api_keys=api_keys,
            traffic=self._open_traffic_log(),
            page=config.page,
        )
        self._drafter_name, self._drafter_version = engine.drafter_name, engine.drafter_version
        self._swap_refused: str | None = None
        self._serves(LiveConfig(drafter=config.drafter))
        self.model.describe_drafter = self._describe_drafter
        if config.drafter:
            self._compare_prompts(config.drafter)
        if self._supervisor is not None:
            self.model.metrics.restarts = self._supervisor.restarts
            self.model.metrics.link_events = self._supervisor.link.events
            self._supervisor.watch(self._drafter_is_back, self._fetch_answers)

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
            self._swap_refused = " ".join(str(error).split()) or type(error).__name__
            if self._supervisor is not None:
                self._supervisor.settle()
            log.error("the drafter was not swapped, %s stays: %s", self._serving.drafter, self._swap_refused)
            self.model.metrics.swapped("refused")
        else:
            log.info("the drafter is now %s", wanted.drafter)
            self._drafter_name, self._drafter_version, self._swap_refused = name, version, None
            self._serves(wanted)
            if self._supervisor is not None:
                self._supervisor.serve(drafter if isinstance(drafter, RemoteDrafter) else None, wanted.drafter)
            self.model.metrics.swapped("done")

    def _serves(self, live: LiveConfig) -> None:
        self._serving = live
        self.model.metrics.drafter_address = live.drafter

    def _load(self, path: str | None) -> tuple[Drafter | None, str | None]:
        """The drafter, here or in its actor, and its version."""
        if path is None:
            return None, None
        drafter: Drafter
        if self._supervisor is not None:
            drafter = self._supervisor.load(path)
        else:
            drafter = load_drafter_for(self._backend, local_checkpoint(path), self._target.path)
        self._compare_prompts(path)
        return drafter, _version(path)

    def _drafter_is_back(self, drafter: RemoteDrafter, old: RemoteDrafter | None) -> None:
        """The supervisor has replaced the drafter's actor. Raises if the engine cannot use what is there now."""
        version = _version(self._serving.drafter)  # the folder may hold another one by now

        def take_over(engine: Engine) -> None:
            if engine.drafter is old:  # else it was swapped meanwhile
                engine.set_drafter(drafter, version)
                self._drafter_name, self._drafter_version = engine.drafter_name, version

        self._engine.between_rounds(take_over).result(_SWAP_DEADLINE_S)

    def _fetch_answers(self) -> None:
        self._engine.between_rounds(Engine.fetch_answers).result(_SWAP_DEADLINE_S)

    def _open_traffic_log(self) -> TrafficLog | None:
        if self._config.traffic_log.uri is None:
            return None
        metadata = TrafficMetadata.of(self._config.target, self._target, self._template)
        return TrafficLog(self._config.traffic_log, metadata, writer=_replica_id())

    def _compare_prompts(self, path: str) -> None:
        """Say it if the drafter was trained on other prompts than it will meet: it drafts worse, and nothing else."""
        if differs := training_mismatch(read_provenance(local_checkpoint(path)), self._template):
            log.warning("drafter %s was %s: fewer drafts may be accepted", path, differs)

    def _describe_drafter(self) -> dict[str, Any]:
        """What `/v1/models` says about the drafter, and why the last swap was refused, if it was."""
        said: dict[str, Any] = {
            "name": self._drafter_name,
            "path": self._serving.drafter,
            "version": self._drafter_version,
            "placement": self._config.placement,
            "last_swap_refused": self._swap_refused,
        }
        if self._supervisor is not None:
            said |= {"away": self._supervisor.away, "restarts": dict(self._supervisor.restarts)}
        return said

    def memory(self) -> str:
        """What the engine takes, in one line."""
        return self._memory

    async def check_health(self) -> None:
        """Serve restarts the replica if this raises."""
        if self._engine.refusal is not None:
            raise RuntimeError(self._engine.refusal)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaling policy; Serve asks in the interval of its configuration."""
        return await load_figures(self._engine)

    def __del__(self) -> None:
        supervisor = getattr(self, "_supervisor", None)
        if supervisor is not None:
            supervisor.close()
        ended = self._engine.close(_CLOSE_DEADLINE_S) if hasattr(self, "_engine") else True
        if supervisor is not None and ended:
            supervisor.link.close()
        if hasattr(self, "model") and self.model.traffic is not None:
            self.model.traffic.close(_CLOSE_DEADLINE_S)


def _engine_of(config: ServeConfig, target_path: Path) -> Engine:
    """The engine, with its drafter if that is to work in this process."""
    drafter_path, taps = None, list(config.target_layer_ids or ())
    if config.drafter:
        drafter_path = local_checkpoint(config.drafter)
        taps += read_config(drafter_path).target_layer_ids
    apart = config.disaggregated or Disaggregation()
    return build_engine(
        target_path,
        dtype=config.dtype,
        backend=config.backend,
        device=config.device,
        num_slots=config.num_slots,
        memory_bytes=config.memory_bytes,
        max_len=config.max_len,
        drafter_path=drafter_path if config.disaggregated is None else None,
        target_layer_ids=taps,
        num_threads=config.threads,
        cuda_graphs=config.cuda_graphs,
        config=EngineConfig(
            num_draft_tokens=config.num_draft_tokens,
            tree_nodes=config.tree_nodes,
            adapt_draft_length=config.adapt_draft_length,
            max_prefill_stall_s=config.max_prefill_stall_s,
            sampled_drafts=config.sampled_drafts,
            keep_history=True,
            draft_deadline_s=apart.draft_deadline_s,
            overlap=apart.overlap,
        ),
    )


def _supervisor_of(config: ServeConfig, engine: Engine) -> DrafterSupervisor:
    assert config.disaggregated is not None
    settings = DrafterSettings(
        target=config.target,
        dtype=config.dtype,
        device=config.disaggregated.drafter_device or config.device,
        threads=config.disaggregated.drafter_threads,
        num_slots=engine.num_slots,
        max_len=engine.max_len,
    )
    return DrafterSupervisor(config.disaggregated, settings, ray.util.get_node_ip_address())


def _version(path: str | None) -> str | None:
    """What counters and the traffic log call the drafter."""
    return drafter_version(path, local_checkpoint(path)) if path else None


def _swap(engine: Engine, drafter: Drafter | None, version: str | None) -> str | None:
    engine.set_drafter(drafter, version)
    return engine.drafter_name


def _replica_id() -> str | None:
    """Serve's name for this replica; None outside of Serve."""
    try:
        return serve.get_replica_context().replica_id.unique_id
    except RayServeException:
        return None
