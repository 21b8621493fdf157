"""Replicas come under load and leave after it, and no request is lost: counted by the official client over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import openai
import pytest
import ray
from ray import serve

from benchmarks.serve_cluster import free_port
from drafters.target import load_target
from serving.autoscaling import AutoscaleConfig
from serving.detokenize import Detokenizer
from serving.engine.build import build_engine
from serving.engine.sampling import Sampling
from serving.serve_app import APP_NAME, run_app, shutdown
from serving.serve_config import ServeConfig
from tests.toy_folder import save_toy_target

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

LONG, SHORT = 8000, 150  # tokens: many seconds, and a fraction of one
PROMPTS = ("one", "two", "three", "four")
UP_DEADLINE_S, DOWN_DEADLINE_S = 90, 120  # of busy machines; a quiet one takes a tenth


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ServeConfig:
    folder = save_toy_target(tmp_path_factory.mktemp("scaled") / "toy", max_position_embeddings=8192, eos_token_id=None)
    tokenizer = load_target(str(folder)).tokenizer
    tokenizer.eos_token = None  # nothing ends an answer but its limit
    tokenizer.save_pretrained(folder)
    autoscale = AutoscaleConfig(
        max_replicas=2, target_ongoing_requests=4, max_queue_s=None, spare_fraction=0, upscale_delay_s=0.2,
        downscale_delay_s=0.5, look_back_s=0.6, metrics_interval_s=0.2, drain_timeout_s=DOWN_DEADLINE_S,
    )  # fmt: skip
    return ServeConfig(target=str(folder), port=free_port(), num_slots=4, max_len=8192, threads=1, autoscale=autoscale)


@pytest.fixture(scope="module")
def client(ray_cluster, config) -> Iterator[openai.OpenAI]:
    yield openai.OpenAI(base_url=run_app(config), api_key="none", timeout=DOWN_DEADLINE_S, max_retries=0)
    shutdown()


class Asker:
    """Sends requests, every other one as a stream, and keeps what came of each."""

    def __init__(self, client: openai.OpenAI):
        self._client = client
        self._lock = threading.Lock()  # over the count
        self.sent = 0
        self.answers: list[tuple[str, int, str]] = []  # prompt, tokens, text

    def ask(self, tokens: int, prompt: str | None = None) -> None:
        with self._lock:
            number = self.sent
            self.sent += 1
        prompt = prompt or PROMPTS[number // 2 % len(PROMPTS)]
        options = {"model": "toy", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        if number % 2:
            text = "".join(c.choices[0].text for c in self._client.completions.create(**options, stream=True))
        else:
            text = self._client.completions.create(**options).choices[0].text
        self.answers.append((prompt, tokens, text))

    def ask_until(self, done: threading.Event) -> None:
        while not done.is_set():
            self.ask(SHORT)


def states() -> dict[str, int]:
    """Replicas by state."""
    found = serve.status().applications[APP_NAME].deployments["Replica"].replica_states
    return {str(getattr(state, "value", state)): count for state, count in found.items() if count}


def busy() -> list[int]:
    """Requests at each replica that has any, those that are stopping included."""
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if "#Replica#" in actor["name"]]
    replicas = [ray.get_actor(name, namespace="serve") for name in names]
    counts = ray.get([replica.get_num_ongoing_requests.remote() for replica in replicas], timeout=60)
    return [count for count in counts if count]


def wait_for(condition: Callable[[], bool], deadline_s: float, running: list[Future], what: str) -> None:
    """Poll, and fail at once when a client has failed."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        for future in running:
            if future.done():
                future.result()
        assert time.monotonic() < deadline, f"{what}: {states()}"
        time.sleep(0.05)


def expected_answers(config: ServeConfig) -> dict[str, str]:
    """The short answer to each prompt, from an engine of our own."""
    target = load_target(config.target)
    engine = build_engine(target.path, num_slots=len(PROMPTS), max_len=512, num_threads=1)
    prompts = [target.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    answers = {}
    for prompt, completion in zip(PROMPTS, engine.generate(prompts, Sampling(max_new_tokens=SHORT)), strict=True):
        text = Detokenizer(target.tokenizer, ())
        answers[prompt] = text.push(completion.token_ids) + text.finish()
    return answers


def test_replicas_follow_the_load_and_no_request_is_lost(client, config):
    asker, relaxed, over = Asker(client), threading.Event(), threading.Event()
    with ThreadPoolExecutor(9) as pool:
        try:
            load = [pool.submit(asker.ask_until, relaxed) for _ in range(5)]
            wait_for(lambda: len(busy()) == 2, UP_DEADLINE_S, load, "no second replica came to answer")
            relaxed.set()
            for future in load:
                future.result(DOWN_DEADLINE_S)

            # a long answer on each replica (where Serve sends them is not ours to choose), and short ones all the while
            long = []
            while len(busy()) < 2:
                assert len(long) < 3, "Serve sent three requests to the same of two replicas"
                long.append(pool.submit(asker.ask, LONG, PROMPTS[0]))
                wait_for(lambda: sum(busy()) == len(long), DOWN_DEADLINE_S, long, "a request did not get to a replica")
            short = pool.submit(asker.ask_until, over)
            wait_for(lambda: "STOPPING" in states(), DOWN_DEADLINE_S, [short], "no replica leaves")
            assert not any(future.done() for future in long), "give longer answers: none was left to drain"
            wait_for(lambda: states() == {"RUNNING": 1}, DOWN_DEADLINE_S, [short], "the replica does not stop")
            assert any(future.done() for future in long)  # the one that the replica waited for
        finally:
            relaxed.set()
            over.set()
        for future in [*long, short]:
            future.result(DOWN_DEADLINE_S)
    expected = expected_answers(config)
    assert len(asker.answers) == asker.sent
    assert {(prompt, text) for prompt, tokens, text in asker.answers if tokens == SHORT} == set(expected.items())
    whole = {text for _, tokens, text in asker.answers if tokens == LONG}
    assert len(whole) == 1  # of two replicas, one of which was leaving
    assert whole.pop().startswith(expected[PROMPTS[0]].rstrip("\ufffd"))
