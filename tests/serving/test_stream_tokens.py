"""Our own extensions: a stream's tokens with their origin, and a request's own number of drafts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving.engine import native_build
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from tests.serving.test_draft_trees import TAPS, backend
from tests.toy_endpoint import CHAT, TEXT, Served, post, run
from tests.toy_mtp import toy_mtp
from tests.toy_target import AlwaysRight, HalfRight, RightInATree, toy_model, toy_prompts


@pytest.fixture(scope="module")
def served(toy_target_dir) -> Iterator[Served]:
    made = Served(toy_target_dir, make_drafter=HalfRight)
    yield made
    assert made.inner.free_slots == made.inner.num_slots
    assert made.engine.close(deadline_s=0)


def chunks_of(served: Served, path: str, body: dict) -> list:
    async def main():
        client = served.client()
        create = client.chat.completions.create if path == "chat" else client.completions.create
        return [chunk async for chunk in await create(**body, stream=True)]

    return run(main())


@pytest.mark.parametrize("path", ["chat", "text"])
@pytest.mark.parametrize("stop", [False, True])
def test_tokens_join_to_the_text_and_say_where_they_come_from(served, path, stop):
    body = (CHAT if path == "chat" else TEXT) | {"max_tokens": 48, "temperature": 0.7, "seed": 2, "n": 2}
    url = "/v1/chat/completions" if path == "chat" else "/v1/completions"
    key = (lambda c: c["message"]["content"]) if path == "chat" else (lambda c: c["text"])
    if stop:
        text = max((key(choice) for choice in post(served, url, body).json()["choices"]), key=len)
        pairs = [text[i : i + 2] for i in range(9, len(text) - 1)]
        body["stop"] = [next(pair for pair in pairs if pair.isascii())]
    whole = post(served, url, body).json()
    options = {"include_usage": True, "include_tokens": True}
    chunks = chunks_of(served, path, body | {"stream_options": options})
    assert all(isinstance(chunk.tokens, list) for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert len(tokens) == whole["usage"]["completion_tokens"] == chunks[-1].usage.completion_tokens
    for choice in whole["choices"]:
        mine = [token for token in tokens if token["index"] == choice["index"]]
        assert "".join(token["text"] for token in mine) == key(choice)
        assert mine[0]["origin"] == "plain"
        assert {"plain", "bonus"} <= {token["origin"] for token in mine} <= {"plain", "draft", "bonus"}
    assert any(token["origin"] == "draft" for token in tokens)
    for chunk in chunks:
        for choice in chunk.choices:
            shown = choice.text if path == "text" else choice.delta.content or ""
            assert "".join(token["text"] for token in chunk.tokens) == shown


def test_nobody_who_does_not_ask_gets_tokens(served):
    assert not any(hasattr(chunk, "tokens") for chunk in chunks_of(served, "chat", CHAT))
    chunks = chunks_of(served, "text", TEXT)
    assert not any(getattr(chunk, "tokens", None) for chunk in chunks)


def test_a_request_without_drafts_is_plain_and_says_so(served):
    body = TEXT | {"num_draft_tokens": 0}
    whole = post(served, "/v1/completions", body).json()
    spec = whole["metrics"]["speculative_decoding"]
    assert (spec["drafter"], spec["tau"], spec["rounds"]) == (None, None, 0)
    assert whole["choices"][0]["text"] == post(served, "/v1/completions", TEXT).json()["choices"][0]["text"]
    options = {"stream_options": {"include_tokens": True}, "extra_body": {"num_draft_tokens": 0}}
    tokens = [token for chunk in chunks_of(served, "text", TEXT | options) for token in chunk.tokens]
    assert {token["origin"] for token in tokens} == {"plain"}


class Listening(AlwaysRight):
    """Notes what it is asked."""

    def __init__(self, model):
        super().__init__(model)
        self.asked: list[tuple[list[int], int]] = []

    def draft(self, request):
        self.asked.append((request.slots, request.num_draft_tokens))
        return super().draft(request)


def test_the_drafter_never_hears_of_a_plain_request_and_others_keep_their_number():
    drafter = Listening(toy_model())
    engine = Engine(backend("torch"), drafter, config=EngineConfig(num_draft_tokens=4))
    prompts = toy_prompts(3, seed=2)
    wishes = [0, 2, None]
    params = [Sampling(max_new_tokens=20, num_draft_tokens=wish) for wish in wishes]
    completions = engine.generate(prompts, params)
    assert all(0 not in slots for slots, _ in drafter.asked)
    assert [c.acceptance.tau for c in completions] == [None, 3.0, 5.0]
    assert [c.drafter for c in completions] == [None, drafter.name, drafter.name]
    assert set(engine.stats.draft_lengths) >= {2, 4}
    plain = Engine(backend("torch")).generate(prompts, Sampling(max_new_tokens=20))
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    drafter.asked.clear()
    engine.generate(prompts, Sampling(max_new_tokens=20, num_draft_tokens=0))
    assert not drafter.asked


def test_of_a_tree_all_nodes_count():
    engine = Engine(backend("torch"), RightInATree(toy_model()), config=EngineConfig(num_draft_tokens=4, tree_nodes=12))
    (three,) = engine.generate(toy_prompts(1), Sampling(max_new_tokens=20, num_draft_tokens=3))
    assert three.acceptance.proposed <= 3 * three.acceptance.rounds
    assert three.acceptance.accepted == three.acceptance.rounds  # the second node is right, the fourth would be deeper


@pytest.mark.skipif(bool(native_build.unavailable_reason()), reason="no native library")
def test_a_plain_request_keeps_no_features_even_when_the_drafter_is_swapped():
    from drafters.checkpoint import as_drafter

    engine = Engine(backend("native"), as_drafter(toy_mtp(toy_model())))
    assert engine.target_layer_ids == TAPS
    engine.add([1, 2, 3], Sampling(max_new_tokens=30, num_draft_tokens=0), request_id="plain")
    with_features = []
    inner = engine.backend.forward
    engine.backend.forward = lambda rows: (with_features.append(rows.with_features), inner(rows))[1]
    for _ in range(5):
        engine.step()
    engine.set_drafter(Listening(toy_model()))
    while engine.has_work:
        engine.step()
    assert len(with_features) == 30
    assert not any(with_features)
    assert engine.drafter.asked == []
