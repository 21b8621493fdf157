"""A toy model behind the app, in the process: what the tests of the endpoints ask, and how."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import torch

from drafters.target import load_model, load_target
from serving.detokenize import without_unfinished
from serving.engine.async_engine import AsyncEngine
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from serving.generation import ServedModel
from serving.metrics import RequestMetrics
from serving.openai_api import make_app
from serving.request_guards import ApiKeys
from tests.toy_target import AlwaysRight

DEADLINE_S = 60
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 24}
TEXT = {"model": "toy", "prompt": "hello", "temperature": 0, "max_tokens": 24}


class Served:
    """A toy model behind the app."""

    def __init__(self, folder, num_slots=2, max_waiting=8, make_drafter=AlwaysRight, api_keys=(), max_len=256):
        self.target = load_target(str(folder))
        rows, alone = (
            TorchRows(load_model(self.target.path, torch.float32), num_slots=n, max_len=max_len) for n in (num_slots, 1)
        )
        drafter = make_drafter(load_model(self.target.path, torch.float32)) if make_drafter else None
        eos = self.target.eos_token_ids
        self.inner = Engine(rows, drafter, config=EngineConfig(num_draft_tokens=3), eos_token_ids=eos)
        self.plain = Engine(alone, eos_token_ids=eos)
        self.engine = AsyncEngine(self.inner, max_waiting=max_waiting)
        self.model = ServedModel(
            self.engine,
            self.target,
            name="toy",
            max_len=self.inner.max_len,
            metrics=RequestMetrics("toy"),
            api_keys=ApiKeys(api_keys),
        )
        self.app = make_app(lambda: self.model)

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://toy", timeout=DEADLINE_S)

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url="http://toy/v1", api_key="none", http_client=self.http(), max_retries=0)

    def expected(self, prompt_ids: list[int], max_new_tokens: int = 24) -> list[int]:
        return self.plain.generate([prompt_ids], Sampling(max_new_tokens=max_new_tokens))[0].token_ids

    def text(self, ids: list[int]) -> str:
        return without_unfinished(self.target.tokenizer.decode(ids, skip_special_tokens=True))


def paced(engine: Engine, pause_s: float = 0.05) -> Engine:
    """Makes an engine's rounds slow, so that a test can act while they go on: 200 of them take ten seconds or more."""
    step = engine.step

    def slow_step():
        time.sleep(pause_s)
        return step()

    engine.step = slow_step
    return engine


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
