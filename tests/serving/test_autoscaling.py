"""The scaling policy on figures alone: what asks for replicas, what keeps them, and what cannot be asked for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from serving.autoscaling import AutoscaleConfig, FleetLoad, Limits, ReplicaLoad, ServePolicy, decide, load_figures
from serving.colocated import build
from serving.engine.async_engine import AsyncEngine
from serving.engine.engine import Engine
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from serving.serve_config import ServeConfig
from tests.toy_endpoint import paced
from tests.toy_target import toy_model, toy_prompts

LIMITS = Limits(min_replicas=1, max_replicas=4, num_slots=8, ongoing=8, tokens=1000, queue_s=5.0, spare_fraction=0.25)


def report(running: int = 0, waiting: int = 0, tokens: int = 0, wait_s: float = 0.0) -> ReplicaLoad:
    return ReplicaLoad(running=running, waiting=waiting, tokens_in_flight=tokens, oldest_wait_s=wait_s)


FULL = report(7, 1, wait_s=6.0)  # the eighth slot is about to be given


@pytest.mark.parametrize(
    ("target", "up", "reports", "ongoing", "wanted", "reason"),
    [
        (1, 1, [report(8)], 8.0, 1, "8 ongoing requests, 8 per replica"),
        (1, 1, [report(8, 8)], 9.0, 2, "16 ongoing requests"),  # what the engine holds goes before Serve's mean
        (1, 1, [report()], 17.0, 3, "17 ongoing requests"),  # and what waits at a proxy counts too
        (1, 1, [report(2, tokens=1001)], 2.0, 2, "1001 tokens in flight, 1000 per replica"),
        (1, 1, [report(8, 92)], 100.0, 4, "max_replicas is 4"),
        (1, 1, [report(8, 8, tokens=2500)], 0.0, 3, "2500 tokens in flight"),  # the signal that asks for most
        # the queue: one more, but not while one starts, nor while another replica has room
        (1, 1, [FULL], 8.0, 2, "a request waits for 6.0 s"),
        (2, 1, [FULL], 8.0, 2, "a replica starts"),
        (2, 2, [report(8, 0), report(7, 1, wait_s=6.0)], 9.0, 3, "a request waits for 6.0 s"),
        (2, 2, [report(8, 1, wait_s=6.0), report(3)], 12.0, 2, "per replica"),
        # down: with spare room in those that stay, and never on missing figures
        (2, 2, [report(3), report(3)], 6.0, 1, "6 ongoing requests, 6 per replica"),
        (2, 2, [report(4), report(3)], 7.0, 2, "not enough spare for fewer"),
        (2, 2, [report(1)], 1.0, 2, "1 replicas have not reported"),
        (2, 2, [report(), report(3)], 6.5, 2, "not enough spare for fewer"),  # Serve's mean has not fallen yet
        (3, 1, [report(1)], 1.0, 1, "1 ongoing requests"),  # those that start may be called off
        (2, 2, [report(), report()], 0.0, 1, "min_replicas is 1"),
    ],
)
def test_what_is_wanted_and_why(target, up, reports, ongoing, wanted, reason):
    decision = decide(FleetLoad(target=target, up=up, reports=tuple(reports), ongoing=ongoing), LIMITS)
    assert decision.replicas == wanted
    assert reason in decision.reason


def test_waiting_requests_keep_the_slots_that_they_need():
    """A target above the slots: one replica would do by the count of requests, but two of them would have to wait."""
    limits = replace(LIMITS, ongoing=20)
    assert decide(FleetLoad(target=2, up=2, reports=(report(8, 2), report())), limits).replicas == 2
    assert decide(FleetLoad(target=1, up=1, reports=(report(8, 2),)), limits).replicas == 1


def test_going_down_never_makes_the_same_load_go_up_again():
    limits = replace(LIMITS, tokens=None, max_replicas=10)
    went_down = 0
    for target in range(2, 11):
        for requests in range(10 * limits.num_slots):
            fewer = decide(at(target, requests), limits).replicas
            if fewer < target:
                went_down += 1
                assert decide(at(fewer, requests * 1.2), limits).replicas == fewer
    assert went_down


def at(target: int, requests: float) -> FleetLoad:
    each = report(int(requests // target))
    return FleetLoad(target=target, up=target, reports=(each,) * target, ongoing=requests)


def test_slots_are_those_that_replicas_have_where_a_memory_budget_chose_them():
    limits = replace(LIMITS, num_slots=64, ongoing=None, tokens=None)
    small = replace(report(6), num_slots=6)
    busy = FleetLoad(target=3, up=3, reports=(small,) * 3, ongoing=18)
    assert decide(busy, limits).replicas == 3, "18 requests in slots of 6"
    waits = replace(report(6, 40, wait_s=6.0), num_slots=6)
    assert decide(FleetLoad(target=1, up=1, reports=(waits,), ongoing=46), limits).replicas == 4
    assert decide(FleetLoad(target=2, up=2, reports=(waits,) * 2, ongoing=8), replace(limits, ongoing=50)).replicas == 3


def test_serve_s_figures_become_a_load():
    """The last point of each replica counts; one that sent nothing lately, or not all of it, has not reported."""
    policy = ServePolicy(**asdict(replace(LIMITS, tokens=None)))
    fields = ("running", "waiting", "tokens_in_flight", "oldest_wait_s")

    def wanted(newest: float, names: tuple[str, ...] = fields) -> tuple[int, dict]:
        old, late = SimpleNamespace(timestamp=80.0, value=8), SimpleNamespace(timestamp=newest, value=0)
        now, slots = SimpleNamespace(timestamp=99.0, value=1), SimpleNamespace(timestamp=99.0, value=8)
        context = SimpleNamespace(
            deployment_name="Replica", current_time=100.0, policy_state={}, total_num_requests=1.0,
            config=SimpleNamespace(look_back_period_s=10.0, metrics_interval_s=1.0),
            target_num_replicas=2, current_num_replicas=2, running_replicas=["a", "b"],
            raw_metrics={name: {"a": [old, now]} | ({"b": [old, late]} if name in names else {}) for name in fields}
            | {"num_slots": {"a": [slots], "b": [slots]}},
        )  # fmt: skip
        return policy(context)

    assert wanted(newest=99.0)[0] == 1
    for replicas, state in (wanted(newest=88.0), wanted(99.0, fields[:3])):
        assert replicas == 2
        assert "1 replicas have not reported" in state["reason"]


def test_the_policy_works_where_serving_is_not_installed():
    """Serve's controller unpickles it, and need not have our packages."""
    config = AutoscaleConfig(max_replicas=3, target_tokens_in_flight=100).for_serve(num_slots=4)
    script = """
import pickle, sys
from types import SimpleNamespace
sys.modules["serving"] = sys.modules["drafters"] = None
policy = pickle.loads(sys.stdin.buffer.read())(**eval(sys.argv[1]))
context = SimpleNamespace(deployment_name="Replica", current_time=0.0, policy_state={}, total_num_requests=9.0,
    config=SimpleNamespace(look_back_period_s=10.0, metrics_interval_s=1.0), raw_metrics=None,
    target_num_replicas=1, current_num_replicas=1, running_replicas=["a"])
print(policy(context)[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, repr(config.policy.policy_kwargs)],
        input=config.policy.get_serialized_policy_def(), capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.decode().strip() == "3", done.stderr.decode()


def test_a_replica_reports_its_engine_and_never_raises():
    prompts, sampling = toy_prompts(3, low=5, high=5), Sampling(max_new_tokens=200)

    async def main():
        engine = AsyncEngine(paced(Engine(TorchRows(toy_model(), num_slots=1, max_len=256))))
        idle = await load_figures(engine)
        streams = [engine.stream(prompt, sampling) for prompt in prompts]
        others = [asyncio.create_task(anext(stream)) for stream in streams[1:]]
        emitted = len((await anext(streams[0])).token_ids)
        busy = await load_figures(engine)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert engine.close(0)
        return idle, emitted, busy, await load_figures(engine)

    idle, emitted, busy, closed = asyncio.run(asyncio.wait_for(main(), 60))
    assert idle == {
        "running": 0,
        "waiting": 0,
        "tokens_in_flight": 0,
        "oldest_wait_s": 0.0,
        "num_slots": 1,
    }
    assert (busy["running"], busy["waiting"]) == (1, 2)
    assert busy["tokens_in_flight"] >= 15 + emitted
    assert busy["oldest_wait_s"] > 0
    assert closed == {}


@pytest.mark.parametrize(
    ("autoscale", "message"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas 3 exceeds max_replicas 2"),
        ({"min_replicas": 0}, "greater than or equal to 1"),
        ({"look_back_s": 1.0, "metrics_interval_s": 1.0}, "holds no report"),
        ({"target_ongoing_requests": 13}, "a replica takes 12"),
        ({"target_tokens_in_flight": 1201}, "never exceeded"),
        ({"max_queue_s": 600.0}, "stall_timeout_s 600"),
        ({"max_replica": 2}, "Extra inputs"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(autoscale, message):
    shape = {"target": "t", "num_slots": 8, "max_waiting": 4, "max_len": 100}
    with pytest.raises(ValidationError, match=message) as caught:
        ServeConfig.model_validate(shape | {"autoscale": autoscale})
    assert "\n" not in caught.value.errors()[0]["msg"]
    with pytest.raises(ValidationError, match="exclude each other"):
        ServeConfig.model_validate(shape | {"autoscale": {}, "num_replicas": 2})


def test_the_deployment_scales_and_waits_for_its_requests():
    def options(**fields):
        app = build(ServeConfig(target="t", **fields))
        return app._bound_deployment._deployment_config

    scaled = options(num_slots=3, autoscale={"max_replicas": 5, "drain_timeout_s": 77})
    assert (scaled.autoscaling_config.min_replicas, scaled.autoscaling_config.max_replicas) == (1, 5)
    assert scaled.autoscaling_config.target_ongoing_requests == 3
    assert scaled.autoscaling_config.policy.policy_function == "serving.autoscaling:ServePolicy"
    assert scaled.graceful_shutdown_timeout_s == 77
    fixed = options(num_replicas=2, drain_timeout_s=5)
    assert (fixed.autoscaling_config, fixed.num_replicas, fixed.graceful_shutdown_timeout_s) == (None, 2, 5)
