"""The engine behind an async stream: same tokens, slots given back, nobody left waiting whatever happens."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing

import pytest

from serving.engine.async_engine import AsyncEngine, EngineError, QueueFullError
from serving.engine.engine import Engine, EngineConfig, RequestError
from serving.engine.sampling import Sampling
from serving.engine.sequence import Progress
from serving.engine.torch_rows import TorchRows
from tests.toy_endpoint import paced
from tests.toy_target import AlwaysRight, toy_model, toy_prompts

DEADLINE_S = 60


def toy_engine(drafter=None, num_slots=2) -> Engine:
    rows = TorchRows(toy_model(), num_slots=num_slots, max_len=256)
    return Engine(rows, drafter, config=EngineConfig(num_draft_tokens=3))


@pytest.fixture
def served():
    """Makes AsyncEngines and closes them afterwards."""
    made: list[AsyncEngine] = []

    def make(engine: Engine | None = None, **options) -> AsyncEngine:
        made.append(AsyncEngine(engine or toy_engine(), **options))
        return made[-1]

    yield make
    for engine in made:
        assert engine.close(deadline_s=0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


async def collect(engine: AsyncEngine, prompt, sampling) -> list[Progress]:
    return [progress async for progress in engine.stream(prompt, sampling)]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_concurrent_streams_give_the_engines_tokens(served):
    prompts, sampling = toy_prompts(7), Sampling(max_new_tokens=20)
    expected = [c.token_ids for c in toy_engine().generate(prompts, sampling)]
    engine = served(toy_engine(AlwaysRight(toy_model())))

    async def main():
        return await asyncio.gather(*(collect(engine, p, sampling) for p in prompts))

    for progress, tokens in zip(run(main()), expected, strict=True):
        assert [t for p in progress for t in p.token_ids] == tokens
        assert progress[-1].completion.token_ids == tokens
        assert progress[-1].completion.acceptance.tau == 4.0
    assert engine.num_in_flight == 0


def test_leaving_a_stream_frees_its_slot_within_a_round(served):
    inner = paced(toy_engine(num_slots=1))
    engine = served(inner)

    async def main():
        async with aclosing(engine.stream([1, 2, 3], Sampling(max_new_tokens=200))) as stream:
            await anext(stream)
            assert inner.free_slots == 0
        passes = inner.stats.passes
        await until(lambda: inner.free_slots == 1)
        assert inner.stats.passes - passes <= 2  # the round that was running, and at most the one before it
        await until(lambda: not inner.has_work)

    run(main())


def test_cancel_ends_a_stream_with_a_completion(served):
    engine = served(paced(toy_engine()))

    async def main():
        stream = engine.stream([1, 2, 3], Sampling(max_new_tokens=200), request_id="mine")
        await anext(stream)
        engine.cancel("mine")
        last = [progress async for progress in stream][-1]
        assert last.completion.finish_reason == "cancelled"
        engine.cancel("mine")  # gone already: ignored

    run(main())


def test_what_the_engine_refuses_is_told_to_the_caller(served):
    engine = served()
    with pytest.raises(RequestError, match="context of 256"):
        run(collect(engine, [1] * 300, Sampling(max_new_tokens=5)))
    assert engine.num_in_flight == 0


def test_a_full_queue_refuses(served):
    engine = served(paced(toy_engine(num_slots=1)), max_waiting=1)

    async def main():
        first = engine.stream([1], Sampling(max_new_tokens=200))
        await anext(first)
        second = asyncio.create_task(collect(engine, [2], Sampling(max_new_tokens=2)))
        await until(lambda: engine.num_in_flight == 2)
        with pytest.raises(QueueFullError, match="2 requests"):
            await collect(engine, [3], Sampling())
        await first.aclose()
        assert len((await second)[-1].completion.token_ids) == 2

    run(main())


class FailingEngine(Engine):
    failures = 0

    def step(self):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("boom\nsecond line")
        return super().step()


def failing_engine(failures: int) -> FailingEngine:
    engine = FailingEngine(TorchRows(toy_model(), num_slots=2, max_len=256))
    engine.failures = failures
    return engine


def test_a_failed_round_fails_its_requests_and_not_the_next(served):
    inner = failing_engine(0)
    engine = served(paced(inner))

    async def main():
        streams = [engine.stream(p, Sampling(max_new_tokens=200)) for p in toy_prompts(3)]
        first = await anext(streams[0])
        assert first.token_ids
        rest = [asyncio.create_task(anext(s)) for s in streams[1:]]
        await asyncio.sleep(0)
        inner.failures = 1
        results = await asyncio.gather(*(collect_rest(s) for s in streams[:1]), *rest, return_exceptions=True)
        failed = [r for r in results if isinstance(r, EngineError)]
        assert failed
        assert all("RuntimeError: boom" in str(r) and "\n" not in str(r) for r in failed)
        for stream in streams:
            await stream.aclose()
        await until(lambda: not inner.has_work)
        assert inner.free_slots == 2
        assert len((await collect(engine, [1], Sampling(max_new_tokens=3)))[-1].completion.token_ids) == 3
        assert engine.healthy

    async def collect_rest(stream):
        return [progress async for progress in stream]

    run(main())


def test_an_engine_that_keeps_failing_is_unhealthy_and_says_so(served):
    engine = served(failing_engine(100))

    async def main():
        for _ in range(3):
            with pytest.raises(EngineError, match="boom"):
                await collect(engine, [1], Sampling())
        await until(lambda: not engine.healthy)
        with pytest.raises(EngineError, match=r"broken.*restart the replica"):
            await collect(engine, [1], Sampling())
        with pytest.raises(EngineError, match="broken"):
            engine.between_rounds(lambda inner: None)

    run(main())


def test_a_token_that_never_comes_ends_the_wait(served):
    inner, gate = toy_engine(), threading.Event()
    engine = served(inner, stall_timeout_s=0.1)
    engine.between_rounds(lambda _: gate.wait(DEADLINE_S))
    try:
        with pytest.raises(EngineError, match=r"no token came for 0\.1 s"):
            run(collect(engine, [1], Sampling()))
    finally:
        gate.set()


def test_closing_lets_running_requests_finish_and_takes_no_more(served):
    engine = served()

    async def main():
        stream = engine.stream([1, 2], Sampling(max_new_tokens=30))
        first = await anext(stream)
        closed = asyncio.create_task(asyncio.to_thread(engine.close, 30))
        await until(lambda: engine.refusal is not None)
        with pytest.raises(EngineError, match="shut"):
            await collect(engine, [1], Sampling())
        rest = [progress async for progress in stream]
        assert len(first.token_ids) + sum(len(p.token_ids) for p in rest) == 30
        assert await closed

    run(main())


def test_closing_at_once_fails_what_is_running(served):
    engine = served(paced(toy_engine()))

    async def main():
        stream = engine.stream([1, 2], Sampling(max_new_tokens=250))
        await anext(stream)
        assert await asyncio.to_thread(engine.close, 0)
        with pytest.raises(EngineError, match="shut down"):
            async for _ in stream:
                pass

    run(main())


def test_the_drafter_can_be_swapped_under_a_stream(served):
    expected = toy_engine().generate([[5, 6]], Sampling(max_new_tokens=60))[0].token_ids
    engine = served()

    async def main():
        tokens, swapped = [], False
        async for progress in engine.stream([5, 6], Sampling(max_new_tokens=60)):
            tokens += progress.token_ids
            if not swapped:
                swapped = True
                await asyncio.wrap_future(engine.between_rounds(lambda e: e.set_drafter(AlwaysRight(toy_model()))))
        assert tokens == expected
        assert await asyncio.wrap_future(engine.between_rounds(lambda e: e.drafter_name)) == "always-right"

    run(main())
    with pytest.raises(ZeroDivisionError):
        engine.between_rounds(lambda e: 1 // 0).result(DEADLINE_S)


def test_an_idle_engine_sleeps(served):
    inner = toy_engine()
    engine = served(inner)
    clocks = [engine.between_rounds(lambda e: time.thread_time()).result(DEADLINE_S)]
    time.sleep(0.5)
    clocks.append(engine.between_rounds(lambda e: time.thread_time()).result(DEADLINE_S))
    assert clocks[1] - clocks[0] < 0.05
    assert inner.stats.passes == 0
