"""Log-probabilities are the target's own, whatever drafted, and come with the right token, bytes and place."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from serving.engine import native_build
from serving.engine.engine import Engine, EngineConfig
from serving.engine.logprobs import LEAST, token_logprobs
from serving.engine.native_rows import NativeRows
from serving.engine.rows import make_rows
from serving.engine.sampling import Sampling
from serving.engine.sequence import Progress
from serving.engine.torch_rows import TorchRows
from serving.token_bytes import TokenBytes
from tests.serving.test_detokenize import TOKENIZERS
from tests.toy_endpoint import CHAT, TEXT, Served, chat_ids, post, run
from tests.toy_target import HalfRight, RandomProposer, RightInATree, SampledTrees, toy_model, toy_prompts

NATIVE = pytest.mark.skipif(bool(native_build.unavailable_reason()), reason="no native library")
BACKENDS = [
    "torch",
    pytest.param("native float32", marks=NATIVE),
    pytest.param("native bfloat16", marks=NATIVE),
]
DRAFTERS = {
    "none": lambda: None,
    "chain": lambda: HalfRight(toy_model()),
    "sampled chain": lambda: RandomProposer(toy_model()),
    "tree": lambda: RightInATree(toy_model()),
    "sampled tree": lambda: SampledTrees(toy_model(), candidates=6),
}


def backend(name: str):
    if name == "torch":
        return TorchRows(toy_model(), num_slots=3, max_len=128)
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    return NativeRows(toy_model(), dtype=dtype, num_slots=3, max_len=128, num_threads=1)


def decode(engine: Engine, prompts: list[list[int]], params: list[Sampling]) -> list[list[Progress]]:
    for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        engine.add(prompt, sampling, request_id=str(i))
    found: list[list[Progress]] = [[] for _ in prompts]
    while engine.has_work:
        for progress in engine.step():
            found[int(progress.request_id)].append(progress)
    return found


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", BACKENDS)
def test_they_are_the_targets_own_whoever_drafted(name, drafter):
    prompts = toy_prompts(4, seed=5)
    params = [
        Sampling(max_new_tokens=17, logprobs=3),
        Sampling(max_new_tokens=17, logprobs=0, temperature=0.8, seed=3),
        Sampling(max_new_tokens=17, logprobs=2, temperature=1.3, top_k=9, top_p=0.9, seed=4),
        Sampling(max_new_tokens=17),
    ]
    made = DRAFTERS[drafter]()
    engine = Engine(backend(name), made, config=EngineConfig(num_draft_tokens=3, tree_nodes=7))
    alone = backend(name)
    for prompt, sampling, steps in zip(prompts, params, decode(engine, prompts, params), strict=True):
        tokens = [token for step in steps for token in step.token_ids]
        if sampling.logprobs is None:
            assert all(step.logprobs is None for step in steps)
            continue
        found = [entry for step in steps for entry in step.logprobs]
        # every token once more, as the next one of all that came before it, in one pass
        rows = make_rows([(0, 0, prompt + tokens[:-1])], list(range(len(prompt) - 1, len(prompt) + len(tokens) - 1)))
        logits = alone.forward(rows).logits_NV
        expected = token_logprobs(logits, tokens, sampling.logprobs)
        assert len(found) == len(tokens) == 17
        if name == "torch":
            assert [e.chosen for e in found] == pytest.approx([e.chosen for e in expected], abs=1e-5)
            assert [[i for i, _ in e.top] for e in found] == [[i for i, _ in e.top] for e in expected]
        else:
            assert found == expected
        softmax = torch.log_softmax(logits.double(), dim=-1)
        assert [e.chosen for e in expected] == pytest.approx(softmax[range(17), tokens].tolist(), abs=1e-9)
        best = softmax.topk(sampling.logprobs).values.numpy()
        np.testing.assert_allclose([[p for _, p in e.top] for e in expected], best, atol=1e-9)


def test_nothing_is_computed_for_who_does_not_ask(monkeypatch):
    monkeypatch.setattr("serving.engine.verification.token_logprobs", lambda *_: pytest.fail("nobody asked"))
    engine = Engine(backend("torch"), HalfRight(toy_model()))
    assert len(engine.generate(toy_prompts(2), Sampling(max_new_tokens=9))) == 2


def test_ties_and_what_json_cannot_hold():
    logits = torch.tensor([[1.0, 2.0, 2.0, -math.inf], [math.nan] * 4])
    (tied, broken) = token_logprobs(logits, [3, 0], 2)
    assert [i for i, _ in tied.top] == [1, 2]
    assert tied.chosen == broken.chosen == LEAST
    assert len(token_logprobs(logits[:1], [0], 20)[0].top) == 4


def test_more_tokens_than_a_stop_leaves_have_no_figures():
    prompt = toy_prompts(1)[0]
    plain = Engine(backend("torch")).generate([prompt], Sampling(max_new_tokens=9))[0].token_ids
    stop = next(token for i, token in enumerate(plain) if i >= 2 and token not in plain[:i])
    engine = Engine(backend("torch"), RightInATree(toy_model()), config=EngineConfig(num_draft_tokens=4, tree_nodes=12))
    (steps,) = decode(engine, [prompt], [Sampling(max_new_tokens=9, logprobs=1, stop_token_ids=(stop,))])
    assert [len(step.logprobs) for step in steps] == [len(step.token_ids) for step in steps]
    assert sum(len(step.logprobs) for step in steps) == plain.index(stop) + 1


@pytest.fixture(scope="module")
def served(toy_target_dir) -> Iterator[Served]:
    made = Served(toy_target_dir)
    yield made
    assert made.inner.free_slots == made.inner.num_slots
    assert made.engine.close(deadline_s=0)


def answers(served: Served, path: str, body: dict) -> tuple[dict, list[dict]]:
    """The whole answer's choice, and the choices of a stream's chunks."""

    async def main():
        client = served.client()
        create = client.chat.completions.create if path == "chat" else client.completions.create
        whole = await create(**body)
        chunks = [chunk async for chunk in await create(**body, stream=True)]
        return whole, [choice for chunk in chunks for choice in chunk.choices]

    return run(main())


def stop_in(served: Served, prompt: list[int], num_tokens: int) -> list[str]:
    """A stop string of two characters somewhere in the target's answer."""
    text = served.text(served.expected(prompt, num_tokens))
    pairs = [text[i : i + 2] for i in range(6, len(text) - 1)]
    return [next(pair for pair in pairs if pair.isascii())]


@pytest.mark.parametrize("stopped", [False, True])
def test_chat_streamed_and_whole(served, stopped):
    prompt = chat_ids(served)
    body = CHAT | {"max_tokens": 40, "logprobs": True, "top_logprobs": 3}
    if stopped:
        body["stop"] = stop_in(served, prompt, 40)
    whole, chunks = answers(served, "chat", body)
    entries = whole.choices[0].logprobs.content
    assert [e for c in chunks if c.logprobs for e in c.logprobs.content] == entries
    assert len(entries) == whole.usage.completion_tokens
    assert (len(entries) < 40) == stopped
    tokens = served.expected(prompt, 40)[: len(entries)]
    assert [bytes(e.bytes) for e in entries] == [bytes([token]) for token in tokens]  # the toy's tokens are bytes
    text = bytes(tokens).decode(errors="replace")
    assert text.startswith(whole.choices[0].message.content)
    model = served.inner.backend
    logits = TorchRows(model.model, num_slots=1, max_len=256).forward(make_rows([(0, 0, prompt + tokens)])).logits_NV
    expected = torch.log_softmax(logits.double(), dim=-1)[len(prompt) - 1 : -1]
    assert [e.logprob for e in entries] == pytest.approx(expected[range(len(tokens)), tokens].tolist(), abs=1e-4)
    for entry, row in zip(entries, expected, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert entry.top_logprobs[0].token == entry.token  # greedy


@pytest.mark.parametrize("stopped", [False, True])
def test_completions_streamed_and_whole(served, stopped):
    body = TEXT | {"max_tokens": 40, "logprobs": 2, "temperature": 1, "seed": 5}
    if stopped:
        text = post(served, "/v1/completions", body).json()["choices"][0]["text"]
        body["stop"] = [next(text[i : i + 2] for i in range(9, len(text)) if text[i : i + 2].isascii())]
    whole, chunks = answers(served, "text", body)
    found = whole.choices[0].logprobs
    for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [item for c in chunks if c.logprobs for item in getattr(c.logprobs, column)]
        assert streamed == getattr(found, column)
        assert len(streamed) == whole.usage.completion_tokens
    text = whole.choices[0].text
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        rest = text[offset:].lstrip("\ufffd")  # bytes that are no character are shown with the token after them
        if "\\x" not in token and rest:  # a whole character stands where it says
            assert rest.startswith(token)
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob
        assert len(top) in (2, 3)  # its own beside the two most probable ones
    assert any(len(top) == 3 for top in found.top_logprobs)


def test_without_a_wish_there_are_none(served):
    whole, chunks = answers(served, "chat", CHAT)
    assert whole.choices[0].logprobs is None
    assert all(c.logprobs is None for c in chunks)
    whole, chunks = answers(served, "text", TEXT)
    assert whole.choices[0].logprobs is None


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_bytes_of_tokens_join_to_the_text(kind):
    tokenizer = TOKENIZERS[kind]
    names = TokenBytes(tokenizer)
    for text in ("the cat, naïve €5 👍", " a  b", "日本語"):
        parts = [names.of(i) for i in tokenizer.encode(text).ids]
        joined = b"".join(parts).decode()
        assert joined.removeprefix(" ") == text.removeprefix(" ")  # SentencePiece puts one in front


def test_parts_of_characters_and_special_tokens_have_names():
    tokenizer = TOKENIZERS["metaspace"]
    names = TokenBytes(tokenizer)
    euro = tokenizer.encode("€").ids[-3:]
    assert [names.text(i) for i in euro] == ["\\xe2", "\\x82", "\\xac"]
    assert [names.of(i) for i in euro] == [b"\xe2", b"\x82", b"\xac"]
    tokenizer = TOKENIZERS["byte-level"]
    names = TokenBytes(tokenizer)
    special = tokenizer.token_to_id("<|end|>")
    assert (names.text(special), names.of(special)) == ("<|end|>", None)
    assert (names.text(10**6), names.of(10**6)) == ("", None)  # a row of the head that no token has
