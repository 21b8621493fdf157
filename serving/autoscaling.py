"""How many replicas the load wants: the settings, the policy as a pure function, and what makes Serve ask it.

In: what replicas report of their engines (`replica_load`) and what Serve counts. Out: a number and the reason for it.
`serving/colocated.py` hands `for_serve` to the deployment; the controller calls `ServePolicy` ten times a second.
"""

from __future__ import annotations

import asyncio
import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

    from serving.engine.async_engine import AsyncEngine
    from serving.engine.engine import Engine

_ENGINE_ANSWER_S = 5.0  # longest wait for a round to end; Serve gives up after 10 s
_SERVE_LOGGER = "ray.serve"  # what the controller writes to its log file

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class AutoscaleConfig(BaseModel):
    """Between which numbers of replicas, and by what. Every signal asks for a number; the largest is taken."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: Positive = 1
    max_replicas: Positive = 4  # those that find no room in the cluster wait for it
    target_ongoing_requests: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = (
        None  # running and waiting, per replica; None: num_slots
    )
    target_tokens_in_flight: Positive | None = None  # prompt and emitted, per replica; None: not looked at
    max_queue_s: Seconds | None = 5.0  # a request that waited longer asks for one more replica; None: not looked at
    spare_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2  # of the targets, free in those that stay, or none leaves
    upscale_delay_s: Delay = 3.0  # more replicas must be wanted for so long
    downscale_delay_s: Delay = 120.0  # fewer replicas must be wanted for so long
    look_back_s: Seconds = 10.0  # Serve's count of requests is a mean over so long
    metrics_interval_s: Seconds = 1.0  # between two reports of a replica or proxy
    drain_timeout_s: Seconds = 600.0  # a replica that leaves finishes its requests; longer ones are cut off

    @model_validator(mode="after")
    def _works(self) -> AutoscaleConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} exceeds max_replicas {self.max_replicas}; lower the one or raise "
                "the other"
            )
        if self.look_back_s <= self.metrics_interval_s:
            raise ValueError(
                f"look_back_s {self.look_back_s:g} holds no report, one comes every {self.metrics_interval_s:g} s; "
                "raise it above metrics_interval_s"
            )
        return self

    def check(self, *, num_slots: int, max_waiting: int, max_len: int, stall_timeout_s: float) -> None:
        """Refuse targets that no replica of this shape can reach. Raises ValueError, one line."""
        most = num_slots + max_waiting
        if self.target_ongoing_requests is not None and self.target_ongoing_requests > most:
            raise ValueError(
                f"target_ongoing_requests {self.target_ongoing_requests:g} is never exceeded, a replica takes {most} "
                f"(num_slots {num_slots} + max_waiting {max_waiting}); lower it"
            )
        if self.target_tokens_in_flight is not None and self.target_tokens_in_flight > most * max_len:
            raise ValueError(
                f"target_tokens_in_flight {self.target_tokens_in_flight} is never exceeded, a replica takes {most} "
                f"requests of {max_len} tokens; lower it"
            )
        if self.max_queue_s is not None and self.max_queue_s >= stall_timeout_s:
            raise ValueError(
                f"max_queue_s {self.max_queue_s:g} is never reached, a request is dropped after stall_timeout_s "
                f"{stall_timeout_s:g}; lower it"
            )

    def for_serve(self, num_slots: int) -> AutoscalingConfig:
        """The same as Serve wants it, with our policy inside."""
        from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

        limits = Limits(
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            num_slots=num_slots,
            ongoing=self.target_ongoing_requests,
            tokens=self.target_tokens_in_flight,
            queue_s=self.max_queue_s,
            spare_fraction=self.spare_fraction,
        )
        policy = AutoscalingPolicy(policy_function="serving.autoscaling:ServePolicy", policy_kwargs=asdict(limits))
        with warnings.catch_warnings():
            # what Serve names in place of metrics_interval_s are environment variables of the whole cluster
            warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
            return AutoscalingConfig(
                min_replicas=self.min_replicas,
                max_replicas=self.max_replicas,
                target_ongoing_requests=self.target_ongoing_requests or num_slots,
                upscale_delay_s=self.upscale_delay_s,
                downscale_delay_s=self.downscale_delay_s,
                look_back_period_s=self.look_back_s,
                metrics_interval_s=self.metrics_interval_s,
                policy=policy,
            )


# -- the replica's side -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """What one replica has to do."""

    running: int  # requests that hold a slot
    waiting: int  # requests that wait for one
    tokens_in_flight: int  # still to do for both, prompts and answers
    oldest_wait_s: float  # of those that wait; 0: none does
    num_slots: int = 0  # that it has, where a memory budget chose them; 0: as many as it was told


def replica_load(engine: Engine) -> ReplicaLoad:
    """Call it in the engine's thread."""
    load = engine.load()
    return ReplicaLoad(
        running=load.running,
        waiting=load.waiting,
        tokens_in_flight=load.tokens_in_flight,
        oldest_wait_s=load.oldest_wait_s,
        num_slots=engine.num_slots,
    )


async def load_figures(engine: AsyncEngine) -> dict[str, float]:
    """The fields of `ReplicaLoad` for Serve; nothing if the engine does not answer. Never raises."""
    try:
        future = asyncio.wrap_future(engine.between_rounds(replica_load))
        return asdict(await asyncio.wait_for(future, _ENGINE_ANSWER_S))
    except Exception:  # a replica that is broken or stuck is the health check's business
        return {}


# -- the policy: no Ray, no clock -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the policy goes by, per replica where it is not said otherwise."""

    min_replicas: int  # of all
    max_replicas: int  # of all
    num_slots: int  # the most that one may have
    ongoing: float | None  # None: as many as it has slots
    tokens: int | None
    queue_s: float | None
    spare_fraction: float


@dataclass(frozen=True, kw_only=True)
class FleetLoad:
    """What is known of all replicas."""

    target: int  # replicas that Serve is to run now, those that start included
    up: int  # replicas that take requests
    reports: tuple[ReplicaLoad, ...]  # of those that have reported lately
    ongoing: float = 0.0  # requests as Serve counts them, those that wait at a proxy included

    def slots(self, limits: Limits) -> int:
        """Slots of the smallest replica."""
        return min((report.num_slots for report in self.reports if report.num_slots), default=limits.num_slots)


@dataclass(frozen=True)
class Decision:
    """Wanted replicas, and why."""

    replicas: int
    reason: str


def decide(load: FleetLoad, limits: Limits) -> Decision:
    """The most that a signal asks for, or what there is where going down would not be safe."""
    wanted = _asked(load, limits, usable=1.0)
    if wanted.replicas < load.target:
        wanted = _fewer(load, limits)
    bounded = min(max(wanted.replicas, limits.min_replicas), limits.max_replicas)
    if bounded != wanted.replicas:
        bound = "min" if bounded > wanted.replicas else "max"
        return Decision(bounded, f"{wanted.reason}; {bound}_replicas is {bounded}")
    return wanted


def _asked(load: FleetLoad, limits: Limits, usable: float) -> Decision:
    """What the signals ask for, where a replica may be filled to `usable` of its targets."""
    ongoing = max(load.ongoing, sum(report.running + report.waiting for report in load.reports))
    each = limits.ongoing or load.slots(limits)
    asked = [_enough(ongoing, each * usable, "ongoing requests")]
    if limits.tokens is not None:
        tokens = sum(report.tokens_in_flight for report in load.reports)
        asked.append(_enough(tokens, limits.tokens * usable, "tokens in flight"))
    if limits.queue_s is not None:
        asked.append(_queue(load, limits.queue_s, load.slots(limits)))
    return max(asked, key=lambda decision: decision.replicas)


def _enough(amount: float, each: float, what: str) -> Decision:
    replicas = math.ceil(round(amount / each, 6))  # a mean of 8.0000001 is 8
    return Decision(replicas, f"{amount:.4g} {what}, {each:.4g} per replica")


def _queue(load: FleetLoad, queue_s: float, num_slots: int) -> Decision:
    """One more while a request waits too long. A slot that is free, now or soon, is another replica already."""
    longest = max((report.oldest_wait_s for report in load.reports), default=0.0)
    if longest <= queue_s:
        return Decision(0, "")
    why = f"a request waits for {longest:.1f} s, longer than {queue_s:g}"
    room = any(report.running + report.waiting < num_slots for report in load.reports)
    if room or len(load.reports) < load.target:
        return Decision(load.target, f"{why}; a slot is free or a replica starts")
    return Decision(load.target + 1, why)


def _fewer(load: FleetLoad, limits: Limits) -> Decision:
    """How far down is safe: whoever stays has spare room, and slots for all that is there."""
    unknown = load.up - len(load.reports)
    if unknown > 0:
        return Decision(load.target, f"{unknown} replicas have not reported, and may be busy")
    asked = _asked(load, limits, usable=1.0 - limits.spare_fraction)
    here = sum(report.running + report.waiting for report in load.reports)
    slots = _enough(here, load.slots(limits), "requests need a slot")
    fewer = max(asked, slots, key=lambda decision: decision.replicas)
    if fewer.replicas < load.target:
        return fewer
    return Decision(load.target, f"not enough spare for fewer: {fewer.reason}")


# -- Serve's side -----------------------------------------------------------------------------------------------------


class ServePolicy:
    """What the controller calls. Serve adds the delays and the bounds.

    Serve copies this module's classes into the controller, where `serving` may not be installed: nothing that is
    called from here may come from another module of ours.
    """

    def __init__(self, **limits: Any):
        self._limits = Limits(**limits)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        decision = decide(fleet_load_of(context), self._limits)
        if decision.replicas not in (context.policy_state.get("wanted"), context.target_num_replicas):
            logging.getLogger(_SERVE_LOGGER).info(
                "%s: %d replicas, wanted %d: %s",
                context.deployment_name, context.target_num_replicas, decision.replicas, decision.reason,
            )  # fmt: skip
        return decision.replicas, {"wanted": decision.replicas, "reason": decision.reason}


def fleet_load_of(context: AutoscalingContext) -> FleetLoad:
    """The latest figures of every replica, and Serve's mean of ongoing requests."""
    config: Any = context.config
    oldest = (context.current_time or 0.0) - config.look_back_period_s - config.metrics_interval_s
    reports = (_report(replica, context.raw_metrics or {}, oldest) for replica in context.running_replicas)
    return FleetLoad(
        target=context.target_num_replicas,
        up=context.current_num_replicas,
        reports=tuple(report for report in reports if report is not None),
        ongoing=context.total_num_requests,
    )


def _report(replica: Any, metrics: Mapping[str, Mapping[Any, Any]], oldest: float) -> ReplicaLoad | None:
    """A replica's last figures; None if it has sent none since `oldest`."""
    latest: dict[str, Any] = {}
    for name in ReplicaLoad.__dataclass_fields__:
        points = metrics.get(name, {}).get(replica)
        if not points or points[-1].timestamp < oldest:
            return None
        latest[name] = points[-1].value
    return ReplicaLoad(**latest)
