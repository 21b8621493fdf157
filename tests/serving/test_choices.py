"""Several prompts and choices in one request: their order, their seeds, their sums; all of them or none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from serving.engine.sampling import Sampling
from tests.toy_endpoint import CHAT, TEXT, Served, paced, post, raw_request, run, until
from tests.toy_target import RandomProposer

SAMPLED = {"temperature": 0.9, "seed": 11, "max_tokens": 16}
PROMPTS = ["hello", "good bye", "hello"]


@pytest.fixture(scope="module")
def served(toy_target_dir) -> Iterator[Served]:
    made = Served(toy_target_dir, num_slots=3, max_waiting=9)
    yield made
    assert made.inner.free_slots == made.inner.num_slots
    assert made.engine.num_in_flight == 0
    assert made.engine.close(deadline_s=0)


async def joined(stream) -> tuple[dict[int, str], list]:
    """The text of each choice of a stream, and its chunks."""
    texts: dict[int, str] = {}
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
    return texts, chunks


def test_choices_of_several_prompts_stand_in_order_and_are_what_each_is_alone(served):
    async def main():
        create = served.client().completions.create
        both = await create(**TEXT | SAMPLED | {"prompt": PROMPTS, "n": 3})
        alone = [await create(**TEXT | SAMPLED | {"prompt": prompt, "n": 3}) for prompt in PROMPTS]
        single = [await create(**TEXT | SAMPLED | {"prompt": prompt}) for prompt in PROMPTS]
        ids = await create(**TEXT | SAMPLED | {"prompt": [list(p.encode()) for p in PROMPTS], "n": 3})
        stream = await create(
            **TEXT | SAMPLED | {"prompt": PROMPTS, "n": 3}, stream=True, stream_options={"include_usage": True}
        )
        return both, alone, single, ids, await joined(stream)

    both, alone, single, ids, (streamed, chunks) = run(main())
    assert [choice.index for choice in both.choices] == list(range(9))
    texts = [choice.text for choice in both.choices]
    assert texts == [choice.text for answer in alone for choice in answer.choices]
    assert texts == [choice.text for choice in ids.choices]
    assert texts == [streamed[i] for i in range(9)]
    assert texts[::3] == [answer.choices[0].text for answer in single]
    assert len(set(texts[:3])) == 3
    assert both.usage.prompt_tokens == len("".join(PROMPTS))  # once per prompt, whatever n
    assert both.usage.completion_tokens == sum(answer.usage.completion_tokens for answer in alone)
    assert chunks[-1].usage == both.usage
    spec = both.metrics["speculative_decoding"]
    assert spec["rounds"] == sum(answer.metrics["speculative_decoding"]["rounds"] for answer in alone)
    assert [hasattr(chunk, "metrics") for chunk in chunks].count(True) == 1
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == list(range(9))


def test_greedy_choices_are_equal_and_without_a_seed_equal_prompts_part(served):
    greedy = post(served, "/v1/chat/completions", CHAT | {"n": 3}).json()
    assert len({choice["message"]["content"] for choice in greedy["choices"]}) == 1
    # long enough not to be alike by chance
    body = TEXT | {"prompt": ["hello"] * 4, "temperature": 1, "max_tokens": 100}
    free = post(served, "/v1/completions", body).json()
    assert len({choice["text"] for choice in free["choices"]}) == 4


def test_a_stream_of_choices_begins_each_with_its_role(served):
    async def main():
        return await joined(await served.client().chat.completions.create(**CHAT | SAMPLED, n=2, stream=True))

    texts, chunks = run(main())
    roles = [c.choices[0].index for c in chunks if c.choices[0].delta.role == "assistant"]
    assert sorted(roles) == [0, 1]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", TEXT | {"prompt": ["a"] * 7, "n": 2}, "n"),
        ("completions", TEXT | {"prompt": ["a"] * 13}, "prompt"),
        ("chat/completions", CHAT | {"n": 13}, "n"),
        ("completions", TEXT | {"prompt": ["a", "b" * 256]}, "prompt"),
        ("completions", TEXT | {"prompt": [[1], [9999]]}, "prompt"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(served, path, body, param):
    response = post(served, f"/v1/{path}", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    if response.json()["error"]["code"] == "too_many_choices":
        assert "12" in response.json()["error"]["message"]
    run(until(lambda: not served.inner.has_work))


def test_all_are_taken_or_none(toy_target_dir):
    served = Served(toy_target_dir, num_slots=2, max_waiting=1)

    async def main():
        running = served.engine.stream([1], Sampling(max_new_tokens=250))
        await anext(running)
        async with served.http() as http:
            for stream in (False, True):
                refused = await http.post("/v1/chat/completions", json=CHAT | {"n": 3, "stream": stream})
                assert refused.status_code == 503
                assert int(refused.headers["Retry-After"]) >= 1
                assert refused.json()["error"]["code"] == "queue_full"
            assert served.engine.num_in_flight == 1
            assert (await http.post("/v1/chat/completions", json=CHAT | {"n": 2})).status_code == 200
        await running.aclose()

    run(main())
    assert served.engine.close(deadline_s=0)


@pytest.mark.parametrize(("stream", "hang_up_after"), [(True, 4), (False, 0)])
def test_a_client_that_leaves_frees_every_slot(toy_target_dir, stream, hang_up_after):
    served = Served(toy_target_dir, num_slots=2, make_drafter=None)
    paced(served.inner)

    async def main():
        await raw_request(served.app, CHAT | {"max_tokens": 200, "n": 4, "stream": stream}, hang_up_after, [])
        await until(lambda: served.inner.free_slots == 2 and not served.inner.has_work)
        assert served.engine.num_in_flight == 0
        assert served.inner.stats.emitted_tokens < 800

    run(main())
    assert served.engine.close(deadline_s=0)


def test_one_that_fails_ends_the_others(toy_target_dir):
    """One of them is dropped by the engine: nobody asked for half an answer."""
    served = Served(toy_target_dir, num_slots=2)
    paced(served.inner)

    async def main():
        asked = asyncio.create_task(post_async(served, CHAT | {"max_tokens": 200, "n": 4}))
        await until(lambda: served.inner.free_slots == 0)
        name = served.engine.between_rounds(lambda engine: next(iter(engine._requests)))
        served.engine.cancel(await asyncio.wrap_future(name))
        response = await asked
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_error")
        await until(lambda: served.inner.free_slots == 2 and not served.inner.has_work)

    async def post_async(served, body):
        async with served.http() as http:
            return await http.post("/v1/chat/completions", json=body)

    run(main())
    assert served.engine.num_in_flight == 0
    assert served.engine.close(deadline_s=0)


@pytest.mark.parametrize("make_drafter", [None, RandomProposer])
def test_a_seed_gives_the_same_in_any_company(toy_target_dir, make_drafter):
    served = Served(toy_target_dir, num_slots=3, max_waiting=20, make_drafter=make_drafter)
    body = TEXT | SAMPLED | {"n": 2}

    async def main():
        create = served.client().completions.create
        alone = await create(**body)
        others = [create(**body | {"seed": seed, "n": 3, "prompt": "x" * seed}) for seed in range(1, 5)]
        together, *_ = await asyncio.gather(create(**body), *others)
        return alone, together

    alone, together = run(main())
    assert [choice.text for choice in together.choices] == [choice.text for choice in alone.choices]
    assert served.engine.close(deadline_s=0)


def test_a_stop_string_ends_its_own_choice(served):
    body = TEXT | SAMPLED | {"n": 3, "max_tokens": 48}
    plain = [choice["text"] for choice in post(served, "/v1/completions", body).json()["choices"]]
    stop = next(plain[1][i] for i in range(4, 40) if plain[1][i].isascii())
    answer = post(served, "/v1/completions", body | {"stop": stop}).json()
    assert [choice["text"] for choice in answer["choices"]] == [text.partition(stop)[0] for text in plain]
    assert answer["choices"][1]["finish_reason"] == "stop"
