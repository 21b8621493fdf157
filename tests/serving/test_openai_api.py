"""The endpoints in the process, over the toy target: what the official client sends, gets, and is refused."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator

import httpx
import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafters.target import load_model, load_target
from serving.api_schema import OPENAI_PARAMETERS
from serving.engine.async_engine import AsyncEngine
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.sampling_defaults import SamplingDefaults
from serving.engine.torch_rows import TorchRows
from serving.generation import ServedModel
from serving.metrics import RequestMetrics
from serving.openai_api import MAX_BODY_BYTES, make_app
from tests.toy_target import AlwaysRight

DEADLINE_S = 60
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 24}
LONG = [{"role": "user", "content": "x" * 999}]
TEXT = {"model": "toy", "prompt": "hello", "temperature": 0, "max_tokens": 24}


class Served:
    """A toy model behind the app."""

    def __init__(self, folder, num_slots: int = 2, max_waiting: int = 8, drafted: bool = True):
        self.target = load_target(str(folder))
        rows, alone = (
            TorchRows(load_model(self.target.path, torch.float32), num_slots=n, max_len=256) for n in (num_slots, 1)
        )
        drafter = AlwaysRight(load_model(self.target.path, torch.float32)) if drafted else None
        eos = self.target.eos_token_ids
        self.inner = Engine(rows, drafter, config=EngineConfig(num_draft_tokens=3), eos_token_ids=eos)
        self.plain = Engine(alone, eos_token_ids=eos)
        self.engine = AsyncEngine(self.inner, max_waiting=max_waiting)
        self.model = ServedModel(
            self.engine, self.target, name="toy", max_len=self.inner.max_len, metrics=RequestMetrics("toy")
        )
        self.app = make_app(lambda: self.model)

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://toy", timeout=DEADLINE_S)

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url="http://toy/v1", api_key="none", http_client=self.http(), max_retries=0)

    def expected(self, prompt_ids: list[int], max_new_tokens: int = 24) -> list[int]:
        return self.plain.generate([prompt_ids], Sampling(max_new_tokens=max_new_tokens))[0].token_ids

    def text(self, ids: list[int]) -> str:
        return self.target.tokenizer.decode(ids, skip_special_tokens=True).removesuffix("\ufffd")


@pytest.fixture(scope="module")
def served(toy_target_dir) -> Iterator[Served]:
    made = Served(toy_target_dir)
    yield made
    assert made.inner.free_slots == made.inner.num_slots
    assert made.engine.num_in_flight == 0
    assert made.engine.close(deadline_s=0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def post(served: Served, path: str, body, **options) -> httpx.Response:
    async def main():
        async with served.http() as http:
            sent = {"json": body} if not isinstance(body, (str, bytes)) else {"content": body}
            return await http.post(path, **sent, **options)

    return run(main())


def chat_ids(served: Served, messages=CHAT["messages"]) -> list[int]:
    return served.target.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_chat_equals_plain_decoding_and_carries_usage_and_acceptance(served):
    answer = run(served.client().chat.completions.create(**CHAT))
    prompt = chat_ids(served)
    tokens = served.expected(prompt)
    assert answer.choices[0].message.content == served.text(tokens)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(tokens))
    spec = answer.metrics["speculative_decoding"]
    assert spec["drafter"] == "always-right"
    assert spec["tau"] == 4.0
    assert spec["acceptance_by_position"] == [1.0, 1.0, 1.0]
    assert spec["rounds"] >= 5


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_chat_stream_joins_to_the_whole(served, include_usage):
    options = {"stream_options": {"include_usage": True}} if include_usage else {}

    async def main():
        whole = await served.client().chat.completions.create(**CHAT)
        stream = await served.client().chat.completions.create(**CHAT, stream=True, **options)
        return whole, [chunk async for chunk in stream]

    whole, chunks = run(main())
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert len([t for t in texts if t]) > 2
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    assert chunks[-1].metrics["speculative_decoding"]["tau"] == 4.0
    assert [hasattr(c, "metrics") for c in chunks].count(True) == 1
    assert (chunks[-1].usage == whole.usage) if include_usage else all(c.usage is None for c in chunks)
    assert len({c.id for c in chunks}) == 1


def test_completions_take_text_and_token_ids(served):
    async def main():
        client = served.client().completions
        text = await client.create(**TEXT)
        ids = await client.create(**TEXT | {"prompt": list(b"hello")})
        stream = await client.create(**TEXT, stream=True, stream_options={"include_usage": True})
        return text, ids, [chunk async for chunk in stream]

    text, ids, chunks = run(main())
    tokens = served.expected(list(b"hello"))
    assert text.choices[0].text == ids.choices[0].text == served.text(tokens)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == text.choices[0].text
    assert chunks[-1].usage == text.usage
    assert text.usage.completion_tokens == len(tokens)
    assert text.metrics["speculative_decoding"]["tau"] == 4.0


def test_many_streams_at_once_give_what_they_give_alone(served):
    bodies = [
        CHAT | {"seed": i, "temperature": 0.8, "messages": [{"role": "user", "content": "x" * i}]} for i in range(1, 7)
    ]

    async def ask(body):
        stream = await served.client().chat.completions.create(**body, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def main():
        together = await asyncio.gather(*(ask(b) for b in bodies))
        return together, [await ask(b) for b in bodies]

    together, alone = run(main())
    assert together == alone
    assert len(set(alone)) == len(alone)


def test_a_stop_string_cuts_exactly_and_its_tokens_are_counted(served):
    tokens = served.expected(list(b"hello"), 64)
    whole = served.text(tokens)
    windows = {whole[i : i + n] for i in range(3, len(whole)) for n in (1, 2)}
    stops = (
        sorted(w for w in windows if w.isascii() and len(w) == 2)[:6] or sorted(w for w in windows if w.isascii())[:6]
    )
    assert len(stops) >= 3

    async def ask(stop):
        return await served.client().completions.create(**TEXT | {"max_tokens": 64}, stop=[stop, "never there"])

    async def main():
        return await asyncio.gather(*(ask(stop) for stop in stops))

    for stop, answer in zip(stops, run(main()), strict=True):
        assert answer.choices[0].text == whole[: whole.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == next(n for n in range(65) if stop in served.text(tokens[:n]))


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("chat/completions", CHAT | {"model": "other"}, 404, "model", "model_not_found"),
        ("chat/completions", CHAT | {"messages": []}, 400, "messages", "invalid_value"),
        ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools", "unsupported_parameter"),
        ("chat/completions", CHAT | {"max_tokens": 10**6}, 400, "max_tokens", "context_length_exceeded"),
        ("chat/completions", CHAT | {"messages": LONG}, 400, "messages", "context_length_exceeded"),
        ("completions", TEXT | {"prompt": [1] * 256}, 400, "prompt", "context_length_exceeded"),
        ("completions", TEXT | {"prompt": [9999]}, 400, "prompt", None),
        ("completions", TEXT | {"prompt": ""}, 400, "prompt", "invalid_value"),
        ("completions", TEXT | {"stream": True, "prompt": [9999]}, 400, "prompt", None),
        ("completions", {"prompt": "x"}, 400, "model", "missing_required_parameter"),
        ("completions", "{not json", 400, None, None),
        ("completions", [1], 400, None, None),
        ("completions", '{"model": "toy", "prompt": "\\ud800"}', 400, "prompt", "invalid_value"),
        ("completions", '{"model": "toy", "prompt": "x", "temperature": NaN}', 400, "temperature", "invalid_value"),
        ("completions", "[" * 100_000, 400, None, None),
        ("completions", "x" * (MAX_BODY_BYTES + 1), 413, None, None),
        ("nowhere", {}, 404, None, None),
    ],
)  # fmt: skip
def test_refusals_have_the_envelope(served, path, body, status, param, code):
    response = post(served, f"/v1/{path}", body, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"


def test_a_body_that_grows_too_large_is_refused(served):
    async def chunks():
        for _ in range(MAX_BODY_BYTES // 65536 + 2):
            yield b" " * 65536

    async def main():
        async with served.http() as http:
            return await http.post("/v1/completions", content=chunks(), headers={"Content-Type": "application/json"})

    response = run(main())
    assert response.status_code == 413
    assert "larger than" in response.json()["error"]["message"]


def test_the_clients_exceptions_carry_the_parameter(served):
    with pytest.raises(openai.BadRequestError) as caught:
        run(served.client().chat.completions.create(**CHAT, n=2))
    assert caught.value.param == "n"


def test_models_health_and_metrics(served):
    async def main():
        async with served.http() as http:
            paths = ("/v1/models", "/v1/models/toy", "/v1/models/no/such", "/health", "/metrics", "/openapi.json")
            return [await http.get(path) for path in paths], await served.client().models.list()

    (models, model, missing, health, metrics, schema), listed = run(main())
    assert models.json()["data"] == [model.json()]
    assert [m.id for m in listed.data] == ["toy"]
    assert model.json()["max_model_len"] == 256
    assert missing.status_code == 404
    assert health.json() == {"status": "ok"}
    assert "/v1/chat/completions" in schema.json()["paths"]
    figures = dict(line.rsplit(" ", 1) for line in metrics.text.splitlines() if not line.startswith("#"))
    drafted = 'drafter_version="always-right",model_name="toy",placement="colocated"'
    assert float(figures[f"spec_decode_num_drafts_total{{{drafted}}}"]) > 0
    lengths = [float(value) for name, value in figures.items() if name.startswith("spec_decode_draft_lengths_total{")]
    assert sum(lengths) > 0
    finished = drafted.replace("model_name", 'finished_reason="length",model_name')
    assert float(figures[f"request_total{{{finished}}}"]) > 0
    assert float(figures[f"generation_tokens_total{{{drafted}}}"]) > 0
    assert float(figures['num_requests_running{model_name="toy"}']) == 0


def test_defaults_come_from_the_generation_config(served):
    class Config:
        temperature, top_p, top_k, repetition_penalty = 0.6, None, 20, 1.1

    assert SamplingDefaults.of(Config()) == SamplingDefaults(temperature=0.6, top_p=1.0, top_k=20)
    assert SamplingDefaults.of(served.target.generation_config) == SamplingDefaults()
    without_seed = [
        run(served.client().completions.create(model="toy", prompt="hello")).choices[0].text for _ in range(4)
    ]
    assert len(set(without_seed)) > 1  # temperature 1, and a stream of random numbers of its own each time


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": JSON})
LIKELY = {
    "temperature": st.floats(0, 2), "top_p": st.floats(0.01, 1), "top_k": st.integers(-1, 9), "seed": st.integers(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3), "stream": st.booleans(),
    "messages": st.lists(MESSAGE, max_size=3),
    "prompt": st.text(max_size=9) | st.lists(st.integers(-1, 300), max_size=9), "max_tokens": st.integers(-1, 5),
}  # fmt: skip
NAMES = [*sorted(OPENAI_PARAMETERS - {"model"}), "top_k", "other"]
BODIES = st.fixed_dictionaries(
    {"model": st.just("toy")}, optional={name: LIKELY.get(name, JSON) | JSON for name in NAMES}
)


@given(path=st.sampled_from(["chat/completions", "completions"]), body=BODIES, valid=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_body_whatever_makes_the_server_fail_or_hang(served, path, body, valid):
    if valid:  # else hardly any body has what is required
        body = {"messages": CHAT["messages"]} | body if path.startswith("chat") else {"prompt": "x"} | body
        body = {k: v for k, v in body.items() if k in LIKELY or k == "model"}
        body.pop("prompt" if path.startswith("chat") else "messages", None)
    if body.get("max_tokens") is None:
        body["max_tokens"] = 2
    response = post(served, f"/v1/{path}", json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


async def raw_request(app, body: dict, hang_up_after: int, received: list[bytes]) -> None:
    """An ASGI request whose client hangs up once it has so many body messages."""
    gone, sent = asyncio.Event(), False
    if hang_up_after == 0:
        asyncio.get_running_loop().call_later(0.2, gone.set)

    async def receive():
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body":
            received.append(message.get("body", b""))
            if len(received) == hang_up_after:
                gone.set()

    headers = [(b"content-type", b"application/json"), (b"host", b"toy")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    await app(scope | {"scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"}}, receive, send)


@pytest.mark.parametrize(("stream", "hang_up_after"), [(True, 3), (True, 0), (False, 0)])
def test_a_client_that_leaves_frees_the_slot(toy_target_dir, stream, hang_up_after):
    served = Served(toy_target_dir, num_slots=1, drafted=False)

    async def main():
        received: list[bytes] = []
        body = CHAT | {"max_tokens": 200, "stream": stream}
        blocked = None
        if hang_up_after == 0:  # it leaves while it still waits for its first token
            blocked = served.engine.stream([1], Sampling(max_new_tokens=250))
            await anext(blocked)
            served.engine.between_rounds(lambda _: __import__("time").sleep(0.5))
        await raw_request(served.app, body, hang_up_after, received)
        if blocked is not None:
            await blocked.aclose()
            assert not any(received)
        await until(lambda: served.inner.free_slots == 1 and not served.inner.has_work)
        assert served.inner.stats.emitted_tokens < 200
        assert served.engine.num_in_flight == 0

    run(main())
    assert served.engine.close(deadline_s=0)


def test_a_full_queue_answers_503_before_the_first_byte(toy_target_dir):
    served = Served(toy_target_dir, num_slots=1, max_waiting=0)

    async def main():
        running = served.engine.stream([1], Sampling(max_new_tokens=250))
        await anext(running)
        async with served.http() as http:
            for stream in (False, True):
                response = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
                assert response.status_code == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert response.json()["error"]["code"] == "queue_full"
        await running.aclose()

    run(main())
    assert served.engine.close(deadline_s=0)


def test_an_engine_that_breaks_in_a_stream_says_so_there(toy_target_dir):
    served, seen = Served(toy_target_dir), []

    async def main():
        stream = await served.client().chat.completions.create(**CHAT | {"max_tokens": 200}, stream=True)
        with pytest.raises(openai.APIError, match="boom"):
            [seen.append(chunk) async for chunk in stream]
        assert len(seen) > 1
        async with served.http() as http:
            for _ in range(2):
                assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 503
            await until(lambda: not served.engine.healthy)
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/metrics")).status_code == 200

    step, steps = served.inner.step, itertools.count()

    def breaks():
        if next(steps) >= 5:
            raise RuntimeError("boom")
        return step()

    served.inner.step = breaks
    run(main())
    served.engine.close(deadline_s=0)
