"""Two replicas on a local cluster follow a registry: a swap under streams, a dead guard, a roll-back by live tau."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import ray

from benchmarks.serve_cluster import free_port
from drafters.registry import Registry
from serving.rollout_guard import NAMESPACE, RemoteGuard
from serving.serve_app import APP_NAME, run_app, shutdown
from serving.serve_config import ServeConfig
from tests.toy_echo import save_echo_target, save_one_token_drafter

pytestmark = pytest.mark.ray

TOKENS, STREAMS, DEADLINE_S = 150, 4, 90.0


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.fixture
def following(ray_cluster, tmp_path):
    """A registry with a champion, and a service of two replicas that follows it."""
    target = save_echo_target(tmp_path / "echo")
    registry = Registry(str(tmp_path / "registry"))

    def promote(name: str, token: str) -> None:
        registry.publish(save_one_token_drafter(tmp_path / name, target, token), name=name, evaluation={"tau": 4.0})
        registry.promote(name, by="a test", why="it looks good", expected=registry.champion())

    promote("first", "o")
    settings = {"registry": {"uri": registry.uri, "poll_s": 0.3, "observe_s": 1.0, "min_rounds": 30}, "num_replicas": 2}
    sizes = {"num_slots": 2, "max_len": 512, "threads": 1, "num_draft_tokens": 3, "tree_nodes": 0}
    config = ServeConfig(target=str(target), port=free_port(), adapt_draft_length=False, **settings, **sizes)
    yield run_app(config), registry, promote, RemoteGuard(config.registry, APP_NAME).name
    shutdown()


def test_a_service_takes_what_is_promoted_and_takes_back_what_does_badly(following):
    base_url, registry, promote, guard = following
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=DEADLINE_S, max_retries=0)
    over = threading.Event()

    def keep_asking() -> int:
        answers = 0
        while not over.is_set():
            stream = client.completions.create(
                model="echo", prompt="hello", max_tokens=TOKENS, temperature=0, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in stream) == "o" * TOKENS
            answers += 1
        return answers

    def all_serve(version: str) -> bool:
        served = [said.version for said in registry.serving().values()]
        return served == [version] * 2

    def card() -> dict:
        return client.models.list().data[0].model_dump()["metadata"]["drafter"]["registry"]

    def rolled_back() -> list[str]:
        return [entry["version"] for entry in card()["rolled_back"]]

    wait(lambda: all_serve("first"), "the replicas do not report")
    with ThreadPoolExecutor(STREAMS) as pool:
        asking = [pool.submit(keep_asking) for _ in range(STREAMS)]
        try:
            promote("second", "o")
            wait(lambda: "second" in {said.version for said in registry.serving().values()}, "nobody took it")
            ray.kill(ray.get_actor(guard, namespace=NAMESPACE))
            wait(lambda: all_serve("second"), "the roll-out does not go on after its guard has died")
            wait(lambda: card()["rollout"] == "steady", "the roll-out does not end")
            promote("third", "x")
            wait(lambda: registry.champion().action == "rollback", "nobody rolled it back")
            wait(lambda: all_serve("second") and rolled_back() == ["third"], "they did not go back")
        finally:
            over.set()
        assert all(future.result(DEADLINE_S) for future in asking)
    last = registry.champion()
    assert (last.version, last.previous, last.by) == ("second", "third", f"draftloop serve, app {APP_NAME}")
    assert last.why.startswith("live tau 1.00 against 4.00 ")
