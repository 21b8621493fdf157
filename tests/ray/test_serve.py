"""The app on a local cluster, asked by the official client: chat, streams, usage, errors, clients that leave."""

from __future__ import annotations

import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import ray

from benchmarks.serve_cluster import free_port
from drafters.target import load_target
from serving.detokenize import without_unfinished
from serving.engine.build import build_engine
from serving.engine.sampling import Sampling
from serving.serve_app import ServeError, build, memory_line, run_app, shutdown
from serving.serve_config import ServeConfig
from serving.traffic_log import TrafficLogConfig
from serving.traffic_shards import read_traffic
from tests.serving.test_replica import save_untrained_drafter
from tests.toy_folder import save_toy_target

pytestmark = pytest.mark.ray

CHAT = {"model": "long", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 32}
LONG = 8000  # tokens that take the toy target many seconds


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ServeConfig:
    folder = tmp_path_factory.mktemp("serve")
    target = save_toy_target(folder / "long", max_position_embeddings=8192, eos_token_id=None)
    drafter = save_untrained_drafter(folder / "drafter", target)
    return ServeConfig(
        target=str(target), drafter=str(drafter), port=free_port(), num_slots=2, max_len=8192, max_waiting=1, threads=1,
        traffic_log=TrafficLogConfig(uri=str(folder / "traffic")),
    )  # fmt: skip


@pytest.fixture(scope="module")
def base_url(ray_cluster, config) -> Iterator[str]:
    url = run_app(config)
    try:
        yield url
        finished = sum(metric(url, "request_total", f'finished_reason="{reason}"') for reason in ("stop", "length"))
    finally:
        shutdown()
    assert config.traffic_log.flush_interval_s >= 60, "rows would not wait for the end"
    assert sum(table.num_rows for table in read_traffic(config.traffic_log.uri)) == finished


@pytest.fixture(scope="module")
def client(base_url) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", timeout=60, max_retries=0)


def metric(base_url: str, start: str, label: str = "") -> float:
    with urllib.request.urlopen(base_url.removesuffix("/v1") + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start) and label in line)


def wait_for_free_slots(base_url: str, deadline_s: float = 60.0) -> None:
    deadline = time.monotonic() + deadline_s
    while metric(base_url, "num_requests_running"):
        assert time.monotonic() < deadline, "the slot was not given back"
        time.sleep(0.05)


def text_of(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_a_failed_start_says_why_in_one_line_and_leaves_nothing(ray_cluster, config):
    """First in the file: the tests after it start the app in the same Ray."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServeError, match="cannot listen on"):
            run_app(config.model_copy(update={"port": taken.getsockname()[1]}))
    with pytest.raises(ServeError, match="unknown backend 'abacus'") as caught:  # only the replica finds out
        run_app(config.model_copy(update={"backend": "abacus"}))
    assert "\n" not in str(caught.value)


def test_chat_equals_plain_decoding(client, config):
    answer = client.chat.completions.create(**CHAT)
    target = load_target(config.target)
    prompt = target.tokenizer.apply_chat_template(CHAT["messages"], add_generation_prompt=True)["input_ids"]
    engine = build_engine(target.path, num_slots=1, max_len=256)
    tokens = engine.generate([prompt], Sampling(max_new_tokens=32))[0].token_ids
    text = target.tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer.choices[0].message.content == without_unfinished(text)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(tokens))
    spec = answer.metrics["speculative_decoding"]
    assert spec["drafter"] is not None
    assert spec["tau"] >= 1.0
    assert spec["rounds"] > 0


def test_a_replica_tells_what_it_takes(base_url):
    assert "KV 2 slots x 8192 tokens" in memory_line()


def test_streams_and_completions(client):
    whole = client.chat.completions.create(**CHAT)
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].metrics["speculative_decoding"]["rounds"] > 0
    text = client.completions.create(model="long", prompt="hello", max_tokens=8, temperature=0)
    pieces = client.completions.create(model="long", prompt="hello", max_tokens=8, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text
    assert [m.id for m in client.models.list().data] == ["long"]
    assert client.models.retrieve("long").metadata["drafter"]["path"].endswith("drafter")


def test_errors_name_the_parameter(client):
    for change, kind, param in (
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"n": 4}, openai.BadRequestError, "n"),  # two slots and one place in the queue
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
    ):
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                client.chat.completions.create(**CHAT | change, stream=stream)
            assert caught.value.param == param


def test_two_streams_at_once_give_what_they_give_alone(client):
    def ask(seed: int) -> str:
        return text_of(client.chat.completions.create(**CHAT | {"temperature": 0.9, "seed": seed}, stream=True))

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(ask, [1, 2]))
    assert together == [ask(1), ask(2)]
    assert together[0] != together[1]


def test_a_client_that_leaves_a_stream_frees_the_slot(client, base_url):
    stream = client.chat.completions.create(**CHAT | {"max_tokens": LONG}, stream=True)
    for _ in range(3):
        next(iter(stream))
    assert metric(base_url, "num_requests_running") == 1
    stream.close()
    wait_for_free_slots(base_url)
    assert metric(base_url, "request_total", 'finished_reason="abort"') == 1


def test_a_client_that_gives_up_waiting_frees_the_slot(client, base_url):
    aborted = metric(base_url, "request_total", 'finished_reason="abort"')
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).chat.completions.create(**CHAT | {"max_tokens": LONG})
    wait_for_free_slots(base_url)
    assert metric(base_url, "request_total", 'finished_reason="abort"') == aborted + 1


def refusal(client: openai.OpenAI) -> openai.APIStatusError:
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(**CHAT, stream=True)
    return caught.value


def test_a_full_queue_answers_503_and_the_client_may_retry(client, base_url):
    streams = [client.chat.completions.create(**CHAT | {"max_tokens": LONG}, stream=True) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: client.with_options(timeout=60).chat.completions.create(**CHAT))
        deadline = time.monotonic() + 60
        while metric(base_url, "num_requests_waiting") < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with ThreadPoolExecutor(20) as many:  # more than Serve lets through at once
            refused = list(many.map(lambda _: refusal(client), range(20)))
        for error in refused:
            assert (error.status_code, error.code) == (503, "queue_full")
            assert int(error.response.headers["Retry-After"]) >= 1
        for stream in streams:
            stream.close()
        assert waiting.result(60).usage.completion_tokens == 32
    wait_for_free_slots(base_url)


def test_the_node_s_metrics_port_has_what_the_replica_counts(base_url):
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted, deadline = metric(base_url, "generation_tokens_total"), time.monotonic() + 60
    assert wanted > 0
    while True:
        with urllib.request.urlopen(address, timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if "draftloop_generation_tokens" in line]
        found = [line for line in lines if re.search(r'[{,]replica="\w+"', line)]
        if sum(float(line.rsplit(" ", 1)[1]) for line in found) == wanted:
            return
        assert time.monotonic() < deadline, lines
        time.sleep(0.5)


def test_what_cannot_start_says_why_in_one_line(base_url, config, toy_target_dir, tmp_path):
    assert build(config) is not None  # building runs nothing
    foreign = save_untrained_drafter(tmp_path / "foreign", toy_target_dir, fingerprint="of another target")
    cases = [
        (config, "Ray Serve runs in this cluster already"),
        (config.model_copy(update={"target": str(tmp_path / "none")}), "none"),
        (config.model_copy(update={"drafter": str(tmp_path / "none")}), "no drafter at"),
        (config.model_copy(update={"drafter": str(foreign)}), "another target"),
    ]
    for bad, message in cases:
        with pytest.raises(ServeError, match=message) as caught:
            run_app(bad)
        assert "\n" not in str(caught.value)
