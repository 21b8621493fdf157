"""The Serve deployment: one replica loads target and drafter into an engine and answers the OpenAI endpoints.

`serving/colocated.py` and `disaggregated.py` configure and bind it. The drafter comes through `user_config` or from a
registry, can be swapped live, and works in this process or in an actor of its own.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, ValidationError
from ray import serve
from ray.serve.exceptions import RayServeException

from drafters.checkpoint import load_module, read_config, read_provenance
from drafters.drafter import Drafter
from drafters.registry import Registry
from drafters.remote import first_line
from drafters.remote_checkpoint import local_checkpoint
from drafters.target import NUM_TAPS, Target, load_target, mtp_target_layer_ids
from serving.autoscaling import load_figures
from serving.chat_options import ChatTemplate, training_mismatch
from serving.drafter_actor import DrafterSettings
from serving.drafter_supervisor import DrafterSupervisor
from serving.drafter_swap import DrafterSwap, version_of
from serving.engine.async_engine import AsyncEngine
from serving.engine.build import build_engine, load_drafter_for
from serving.engine.engine import Engine, EngineConfig
from serving.generation import ServedModel
from serving.metrics import RequestMetrics
from serving.node_metrics import NodeMetrics
from serving.openai_api import make_app
from serving.registry_follower import RegistryFollower
from serving.registry_start import Beginning, Followed, begin
from serving.request_guards import ApiKeys
from serving.rollout_guard import REGISTRY_PATIENCE_S, Guard, RemoteGuard, RolloutGuard
from serving.serve_config import FOLLOW, Disaggregation, ServeConfig
from serving.traffic_log import TrafficLog
from serving.traffic_schema import TrafficMetadata

log = logging.getLogger(__name__)

_CLOSE_DEADLINE_S = 5.0  # Serve has drained the replica by then


class LiveConfig(BaseModel):
    """`user_config`: what may change without a restart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # folder or URI of the drafter, which then stays; None: decode plainly; "registry": follow the configured registry,
    # as is done where the key is left out (a folder of that name: ./registry)
    drafter: str | None = None

    def follows(self, has_registry: bool) -> bool:
        """Whether the registry chooses."""
        return self.drafter == FOLLOW or (has_registry and "drafter" not in self.model_fields_set)


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
        followed = self._followed()
        engine, drafter = _first_engine(config, followed.start if followed else None, self._target)
        self._memory = engine.memory.describe() if engine.memory else ""
        self._backend = engine.backend
        self._supervisor: DrafterSupervisor | None = None
        if config.disaggregated is not None:
            self._supervisor = _supervisor_of(config, engine)
            drafter = self._begin_apart(engine, drafter, self._supervisor)
        engine.drafter_version = version_of(drafter)
        self._engine = AsyncEngine(engine, max_waiting=config.max_waiting, stall_timeout_s=config.stall_timeout_s)
        replica = _replica_id()
        metrics = RequestMetrics(config.served_name, placement=config.placement, replica=replica or "")
        self.model = ServedModel(
            self._engine,
            self._target,
            name=config.served_name,
            max_len=engine.max_len,
            metrics=metrics,
            chat_options=self._template.options,
            api_keys=api_keys,
            traffic=self._open_traffic_log(),
            page=config.page,
        )
        self._swap = DrafterSwap(self._engine, self._load, metrics, self._supervisor)
        self._swap.begin(drafter, engine.drafter_name, engine.drafter_version)
        self.model.describe_drafter = self._describe_drafter
        if drafter:
            self._compare_prompts(drafter)
        if self._supervisor is not None:
            metrics.restarts = self._supervisor.restarts
            metrics.link_events = self._supervisor.link.events
            self._supervisor.watch(self._swap.is_back, self._swap.fetch_answers)
        self._follower: RegistryFollower | None = None
        if followed is not None:
            self._follower = RegistryFollower(followed, self._swap)
            metrics.registry = self._follower.figures
            self._follower.start()
        self._node_metrics = NodeMetrics(self._engine, metrics)
        if replica is not None:
            self._node_metrics.start()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Swap the drafter between two rounds. Never raises, since Serve would kill the replica: it reports instead."""
        try:
            wanted = LiveConfig.model_validate(user_config or {})
        except ValidationError as error:
            self._swap.refuse(error, "user_config")
        else:
            await asyncio.to_thread(self._apply, wanted)

    def _apply(self, wanted: LiveConfig) -> None:
        follower = self._follower
        if wanted.follows(follower is not None):
            if follower is None:
                error = ValueError("no registry is configured; give one in args, or a drafter here")
                self._swap.refuse(error, "user_config")
            else:
                follower.follow()
            return
        followed = follower is not None and follower.pin()
        if wanted.drafter == self._swap.address:
            return
        if self._swap.take(wanted.drafter, "user_config") and follower is not None and followed:
            follower.follow(swapped=False)

    def _load(self, address: str) -> Drafter:
        """The drafter, here or in its actor."""
        drafter: Drafter
        if self._supervisor is not None:
            drafter = self._supervisor.load(address)
        else:
            drafter = load_drafter_for(self._backend, local_checkpoint(address), self._target.path)
        self._compare_prompts(address)
        return drafter

    def _followed(self) -> Followed | None:
        """The registry that is followed, and what to begin with."""
        config = self._config.registry
        if config is None:
            return None
        registry = Registry(config.uri, patience_s=REGISTRY_PATIENCE_S)
        name, app = _replica_id(), "draftloop"
        guard: Guard = RolloutGuard(config, app, registry)
        if name is not None and ray.is_initialized():
            guard = RemoteGuard(config, serve.get_replica_context().app_name)
        replica = name or uuid.uuid4().hex[:8]
        start = begin(registry, guard, replica, self._check_drafter)
        return Followed(config=config, registry=registry, guard=guard, replica=replica, start=start)

    def _check_drafter(self, address: str) -> None:
        """Raises if the drafter is none for this target."""
        load_module(local_checkpoint(address), self._target.path)

    def _begin_apart(self, engine: Engine, drafter: str | None, supervisor: DrafterSupervisor) -> str | None:
        """Load the first drafter into its actor; its address, or None where a registry's cannot be loaded."""
        if drafter is None:
            return None
        try:
            remote = supervisor.load(drafter)
            engine.set_drafter(remote, version_of(drafter))
        except Exception as error:
            if self._config.registry is None:
                raise
            log.error("decoding plainly, drafter %s cannot be loaded: %s", drafter, first_line(error))
            supervisor.settle()
            return None
        supervisor.serve(remote, drafter)
        self._memory += f"; apart from it {remote.memory}"
        return drafter

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
        """What `/v1/models` says about the drafter, the last swap, and the registry that is followed."""
        said = self._swap.describe()
        if self._follower is not None:
            said["registry"] = self._follower.describe()
        return said

    def memory(self) -> str:
        """What the engine takes, in one line."""
        return self._memory

    async def check_health(self) -> None:
        """Serve restarts the replica if this raises."""
        if self._engine.refusal is not None:
            raise RuntimeError(self._engine.refusal)
        if self._follower is not None and (why := self._follower.asks_for_restart):
            raise RuntimeError(why)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaling policy; Serve asks in the interval of its configuration."""
        return await load_figures(self._engine)

    def __del__(self) -> None:
        if hasattr(self, "_node_metrics"):
            self._node_metrics.close()
        follower = getattr(self, "_follower", None)
        if follower is not None:
            follower.close()
        supervisor = getattr(self, "_supervisor", None)
        if supervisor is not None:
            supervisor.close()
        ended = self._engine.close(_CLOSE_DEADLINE_S) if hasattr(self, "_engine") else True
        if supervisor is not None and ended:
            supervisor.link.close()
        if hasattr(self, "model") and self.model.traffic is not None:
            self.model.traffic.close(_CLOSE_DEADLINE_S)


def _first_engine(config: ServeConfig, start: Beginning | None, target: Target) -> tuple[Engine, str | None]:
    """The engine, and the address of the drafter it begins with. No registry's drafter makes it fail."""
    if start is None:
        return _engine_of(config, config.drafter, target.path), config.drafter
    layers = sorted(start.layers | set(config.target_layer_ids or ()))
    if not layers:
        layers = list(mtp_target_layer_ids(target.num_layers, NUM_TAPS))
        log.warning("no version says which layers to tap: tapping %s, those of `draftloop generate`", layers)
    config = config.model_copy(update={"target_layer_ids": layers})
    if start.address is not None:
        try:
            return _engine_of(config, start.address, target.path), start.address
        except Exception as error:  # if it was not the drafter's fault, it comes again
            log.error("decoding plainly, drafter %s cannot be used: %s", start.address, first_line(error))
    return _engine_of(config, None, target.path), None


def _engine_of(config: ServeConfig, drafter: str | None, target_path: Path) -> Engine:
    """The engine, with its drafter if that is to work in this process."""
    drafter_path, taps = None, list(config.target_layer_ids or ())
    if drafter:
        drafter_path = local_checkpoint(drafter)
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


def _replica_id() -> str | None:
    """Serve's name for this replica; None outside of Serve."""
    try:
        return serve.get_replica_context().replica_id.unique_id
    except RayServeException:
        return None
