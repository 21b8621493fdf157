"""The endpoints in the process, over the toy target: what the official client sends, gets, and is refused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import openai
import pytest

from serving import request_guards
from serving.engine.sampling import Sampling
from serving.engine.sampling_defaults import SamplingDefaults
from serving.request_guards import MAX_BODY_BYTES
from tests.toy_endpoint import CHAT, TEXT, Served, chat_ids, paced, post, raw_request, run, until

LONG = [{"role": "user", "content": "x" * 999}]


@pytest.fixture(scope="module")
def served(toy_target_dir) -> Iterator[Served]:
    made = Served(toy_target_dir)
    yield made
    assert made.inner.free_slots == made.inner.num_slots
    assert made.engine.num_in_flight == 0
    assert made.engine.close(deadline_s=0)


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


def test_a_body_that_does_not_end_is_refused_and_an_answer_may_take_longer(served, monkeypatch):
    monkeypatch.setattr(request_guards, "BODY_DEADLINE_S", 0.3)
    never = asyncio.Event()

    async def chunks():
        yield b'{"model": '
        await never.wait()

    async def main():
        async with served.http() as http:
            headers = {"Content-Type": "application/json"}
            half = await asyncio.wait_for(http.post("/v1/completions", content=chunks(), headers=headers), 30)
            return half, await http.post("/v1/completions", json=TEXT | {"max_tokens": 200})

    half, whole = run(main())
    assert half.status_code == 408
    assert "send it again" in half.json()["error"]["message"]
    assert whole.status_code == 200


def test_the_clients_exceptions_carry_the_parameter(served):
    with pytest.raises(openai.BadRequestError) as caught:
        run(served.client().chat.completions.create(**CHAT, n=0))
    assert caught.value.param == "n"


def test_models_health_and_metrics(served):
    async def main():
        await served.client().chat.completions.create(**CHAT)  # something to count
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
    drafted = 'drafter_version="always-right",model_name="toy",placement="colocated",replica=""'
    assert float(figures[f"spec_decode_num_drafts_total{{{drafted}}}"]) > 0
    lengths = [float(value) for name, value in figures.items() if name.startswith("spec_decode_draft_lengths_total{")]
    assert sum(lengths) > 0
    finished = drafted.replace("model_name", 'finished_reason="length",model_name')
    assert float(figures[f"request_total{{{finished}}}"]) > 0
    assert float(figures[f"generation_tokens_total{{{drafted}}}"]) > 0
    assert float(figures['num_requests_running{model_name="toy",replica=""}']) == 0


def test_defaults_come_from_the_generation_config(served):
    class Config:
        temperature, top_p, top_k, repetition_penalty = 0.6, None, 20, 1.1

    assert SamplingDefaults.of(Config()) == SamplingDefaults(temperature=0.6, top_p=1.0, top_k=20)
    assert SamplingDefaults.of(served.target.generation_config) == SamplingDefaults()
    body = {"model": "toy", "prompt": "hello", "max_tokens": 100}
    without_seed = [run(served.client().completions.create(**body)).choices[0].text for _ in range(4)]
    assert len(set(without_seed)) > 1  # temperature 1, and a stream of random numbers of its own each time


@pytest.mark.parametrize(("stream", "hang_up_after"), [(True, 3), (True, 0), (False, 0)])
def test_a_client_that_leaves_frees_the_slot(toy_target_dir, stream, hang_up_after):
    served = Served(toy_target_dir, num_slots=1, make_drafter=None)
    paced(served.inner)

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
