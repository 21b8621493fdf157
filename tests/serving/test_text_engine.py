"""The engine over text: what goes in and comes out, on the toy target; nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafters.target import load_target
from serving.detokenize import without_unfinished
from serving.engine.async_engine import EngineError
from serving.engine.build import EngineBuildError, build_engine
from serving.engine.sampling import Sampling
from serving.engine.sampling_defaults import SamplingDefaults
from serving.prompt_encoding import PromptError
from serving.text_engine import TextEngine, TextEngineError
from tests.toy_folder import save_toy_target
from tests.toy_mtp import save_toy_drafter

DEADLINE_S = 60
TURNS = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "3"}]


def load(folder: Path, **options) -> TextEngine:
    return TextEngine.load(str(folder), backend="torch", num_slots=2, max_len=200, **options)


@pytest.fixture(scope="module")
def engine(toy_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextEngine]:
    drafter = save_toy_drafter(tmp_path_factory.mktemp("drafters") / "toy", toy_target_dir)
    with load(toy_target_dir, drafter=drafter, num_draft_tokens=3) as made:
        yield made


@pytest.fixture(scope="module")
def plain(toy_target_dir: Path):
    """Token ids by the bare engine, of text as a user turn, as raw text, or of messages."""
    target = load_target(str(toy_target_dir))
    inner = build_engine(target.path, backend="torch", num_slots=1, max_len=200)

    def expected(prompt, limit: int, raw: bool = False, **sampling) -> list[int]:
        if raw:
            ids = target.tokenizer(prompt)["input_ids"]
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return inner.generate([ids], Sampling(max_new_tokens=limit, **sampling))[0].token_ids

    return expected


def one_line(caught: pytest.ExceptionInfo[BaseException]) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_strings_messages_and_lists_of_them(engine, plain):
    alone = engine.generate("hello", max_new_tokens=12)
    assert [a.token_ids for a in alone] == [plain("hello", 12)], "greedy: the config asks for no sampling"
    assert alone[0].text == without_unfinished(engine._prompts.tokenizer.decode(alone[0].token_ids))
    assert alone[0].finish_reason == "length"
    assert alone[0].tau >= 1
    assert [a.token_ids for a in engine.generate(TURNS, max_new_tokens=12)] == [plain(TURNS, 12)]
    many = [*(f"prompt {i}" for i in range(9)), TURNS]
    assert [a.token_ids for a in engine.generate(many, max_new_tokens=6)] == [plain(p, 6) for p in many]
    raw = engine.generate(["hello", "bye"], max_new_tokens=12, raw=True)
    assert [a.token_ids for a in raw] == [plain(p, 12, raw=True) for p in ("hello", "bye")]
    assert engine.generate([]) == []


def test_seeds_make_sampling_repeatable(engine, plain):
    options = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9}
    answers = engine.generate(["same", "same"], seed=5, **options)
    assert [a.token_ids for a in answers] == [
        plain("same", 12, temperature=1.0, top_p=0.9, seed=seed) for seed in (5, 6)
    ]
    assert answers[0].token_ids != answers[1].token_ids
    assert engine.generate(["same", "same"], seed=5, **options) == answers
    options["max_new_tokens"] = 100  # long enough not to be alike by chance
    assert len({a.text for a in engine.generate(["same"] * 4, **options)}) > 1
    assert engine.generate("same", **options) != engine.generate("same", **options), "without a seed: a new one"


def test_pieces_of_a_stream_are_the_answer(engine):
    answer = engine.generate("hello", max_new_tokens=30)[0]

    async def main() -> list[str]:
        pieces = [piece async for piece in engine.stream("hello", max_new_tokens=30)]
        assert engine.generate("hello", max_new_tokens=30)[0] == answer, "a running event loop is no obstacle"
        return pieces

    pieces = asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert "".join(pieces) == answer.text
    assert len(pieces) > 1
    assert all(pieces)


@pytest.mark.parametrize("prompts", [[], ["one", "two"]])
def test_a_stream_is_of_one_prompt(engine, prompts):
    with pytest.raises(TextEngineError, match=f"stream takes one prompt, not {len(prompts)}"):
        asyncio.run(anext(engine.stream(prompts)))


def test_seeds_count_on_past_the_largest(engine):
    assert len(engine.generate(["a", "b"], seed=2**63 - 1, max_new_tokens=2)) == 2


def test_leaving_a_stream_cancels_it(engine):
    async def main() -> None:
        stream = engine.stream("hello", max_new_tokens=100)
        await anext(stream)
        assert engine._engine.num_in_flight == 1
        await stream.aclose()
        assert engine._engine.num_in_flight == 0

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


@pytest.mark.parametrize(
    ("prompts", "options", "error", "match"),
    [
        ([1, 2, 3], {}, TextEngineError, "a string or a list of messages"),
        ({"role": "user"}, {}, TextEngineError, "a string or a list of messages"),
        (TURNS, {"raw": True}, TextEngineError, "raw takes text"),
        ([["not a message"]], {}, PromptError, "chat template refuses"),
        ("hi", {"temperature": -1}, TextEngineError, "temperature is -1; give"),
        ("hi", {"max_tokens": 5}, TextEngineError, "no option max_tokens; options are max_new_tokens"),
        (["hi", "x" * 300], {}, TextEngineError, r"prompt 1 \(\d+ tokens\) and max_new_tokens \(128\) exceed"),
        (["hi", ""], {"raw": True}, TextEngineError, "prompt 1 has no tokens"),
    ],
)
def test_mistakes_are_told_in_one_line(engine, prompts, options, error, match):
    with pytest.raises(error, match=match) as caught:
        engine.generate(prompts, **options)
    one_line(caught)


def test_what_cannot_be_loaded_is_told_in_one_line(toy_target_dir, tmp_path):
    with pytest.raises(EngineBuildError, match="unknown dtype") as caught:
        load(toy_target_dir, dtype="int3")
    one_line(caught)
    with pytest.raises(ValueError, match="no drafter") as caught:
        load(toy_target_dir, drafter=tmp_path / "nothing")
    one_line(caught)
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="no-such-model") as caught:
        load(Path("./no-such-model"))
    one_line(caught)
    assert not set(threading.enumerate()) - before


def test_closed_means_closed_and_no_thread_stays(toy_target_dir):
    before = set(threading.enumerate())
    with load(toy_target_dir) as engine:
        assert engine.generate("hi", max_new_tokens=3)[0].tau is None, "nothing was drafted"
    engine.close()
    assert not set(threading.enumerate()) - before
    with pytest.raises(TextEngineError, match="is closed"):
        engine.generate("hi")


def test_closing_frees_whoever_waits_in_another_thread(toy_target_dir):
    engine = load(toy_target_dir)
    told: list[Exception] = []

    def ask() -> None:
        try:
            engine.generate(["hi"] * 400, max_new_tokens=150)
        except EngineError as error:
            told.append(error)

    waiting = threading.Thread(target=ask, daemon=True)
    waiting.start()
    deadline = time.monotonic() + DEADLINE_S
    while not engine._engine.num_in_flight:
        assert waiting.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    engine.close()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert len(told) == 1


def test_sampling_follows_the_targets_generation_config(tmp_path):
    folder = save_toy_target(tmp_path / "sampling")
    file = folder / "generation_config.json"
    asked = {"do_sample": True, "temperature": 0.8, "top_k": 5}
    file.write_text(json.dumps(json.loads(file.read_text()) | asked))
    with load(folder) as engine:
        assert engine._defaults == SamplingDefaults(temperature=0.8, top_k=5)
        ours = engine.generate("hello", max_new_tokens=12, seed=1)
        named = engine.generate("hello", max_new_tokens=12, seed=1, temperature=0.8, top_p=1.0, top_k=5)
        greedy = engine.generate("hello", max_new_tokens=12, seed=1, temperature=0.0)
    assert ours == named != greedy


def test_a_config_that_asks_for_no_sampling_is_greedy_here_and_temperature_1_over_http():
    class Config:
        do_sample, temperature, top_p, top_k = False, 0.6, 0.9, 20

    assert SamplingDefaults.of(Config(), obey_do_sample=True).temperature == 0
    assert SamplingDefaults.of(Config()) == SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20)
    Config.do_sample = True
    assert SamplingDefaults.of(Config(), obey_do_sample=True) == SamplingDefaults.of(Config())
    assert SamplingDefaults.of(object(), obey_do_sample=True).temperature == 0
    assert SamplingDefaults.of(object()).temperature == 1


def test_a_target_without_a_chat_template_takes_text_only(tmp_path):
    folder = save_toy_target(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    with load(folder) as engine:
        assert engine.generate("hello", max_new_tokens=8) == engine.generate("hello", max_new_tokens=8, raw=True)
        with pytest.raises(TextEngineError, match="target base has no chat template; give text") as caught:
            engine.generate(TURNS)
    one_line(caught)
