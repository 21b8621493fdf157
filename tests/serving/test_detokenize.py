"""Incremental text equals the text of the whole, and stop strings cut where they cut the whole."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from serving.detokenize import Detokenizer, StopStrings, TextStream, without_unfinished

CORPUS = [
    "the cat sat on the mat",
    "naïve café €5 €5 €5",
    "日本語日本語",
    "👩‍👩‍👧 👍👍👍 emoji",
    "Жили-были дед да баба",
    " a  b   c",
]
TEXTS = st.lists(st.sampled_from([*CORPUS, "x", " ", "€", "👍", "語", "\n", "ab"]), max_size=8).map("".join)


def byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace_with_byte_fallback() -> Tokenizer:
    """As Llama 2 has it: a leading space is stripped, and unknown characters are spelt in byte tokens."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcehmnostx", "▁the", "▁cat", "▁mat"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"byte-level": byte_level_bpe(), "metaspace": metaspace_with_byte_fallback()}


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    text = TextStream(tokenizer)
    return [*(text.push(i) for i in ids), text.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXTS)
def test_pieces_join_to_the_text_and_hold_no_half_character(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text).ids
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_each_character_is_shown_with_the_token_that_completes_it(kind):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("a€b").ids
    pieces = stream(tokenizer, ids)
    assert "".join(pieces[: len(ids)]) == "a€b"  # nothing is left for the end
    assert pieces[0] == ("a" if kind == "byte-level" else "")  # its first token is the space that is stripped


@given(ids=st.lists(st.integers(0, 256), max_size=200))
@settings(max_examples=200)
def test_any_bytes_whatever_give_the_text_of_the_whole(ids):
    tokenizer = TOKENIZERS["byte-level"]
    shown, whole = "".join(stream(tokenizer, ids)), tokenizer.decode(ids)
    assert shown in (whole, without_unfinished(whole))


def test_a_character_cut_off_by_the_limit_is_left_out():
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = {"byte-level": level.pre_tokenize_str("👍")[0][0], "metaspace": [f"<0x{b:02X}>" for b in "👍".encode()]}
    for kind, tokenizer in TOKENIZERS.items():  # the second writes a sign for each of the three bytes
        bytes_of = [tokenizer.token_to_id(letter) for letter in letters[kind]]
        assert "".join(stream(tokenizer, bytes_of[:3])) == ""
        assert "".join(stream(tokenizer, bytes_of)) == "👍"


def test_endless_broken_bytes_and_special_tokens_are_not_piled_up():
    tokenizer = TOKENIZERS["byte-level"]
    broken = tokenizer.token_to_id("ÿ")  # byte 0xFF, never part of a character
    text = TextStream(tokenizer)
    shown = "".join(text.push(broken) for _ in range(1000))
    assert set(shown) == {"\ufffd"}
    assert len(shown) > 900
    assert len(text._pending) < 64
    special = tokenizer.token_to_id("<|end|>")
    for _ in range(1000):
        text.push(special)
    assert len(text._pending) < 64
    assert text.finish() == ""


STOP_CASES = st.tuples(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4))


@given(case=STOP_CASES, cuts=st.lists(st.integers(0, 30), max_size=10))
def test_stop_strings_cut_alike_however_the_text_is_split(case, cuts):
    text, stops = case
    edges = sorted({0, len(text), *(c for c in cuts if c <= len(text))})
    checker = StopStrings(stops)
    shown = "".join(checker.push(text[a:b]) for a, b in itertools.pairwise(edges)) + checker.finish()
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert shown == (text[: min(ends)[1]] if ends else text)
    assert (checker.matched is not None) == bool(ends)


@given(case=STOP_CASES)
def test_nothing_that_begins_a_stop_string_is_shown_early(case):
    text, stops = case
    checker, shown = StopStrings(stops), ""
    for i, character in enumerate(text):
        shown += checker.push(character)
        if checker.matched is None:
            held = text[len(shown) : i + 1]
            assert all(
                not text[start : i + 1] or not s.startswith(text[start : i + 1])
                for s in stops
                for start in range(len(shown))
            )
            assert not held or any(s.startswith(held) for s in stops)


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("the cat sat", "cat", "the "),  # inside a token, across tokens
        ("the cat sat", " on", "the cat sat"),  # begins like a stop string, and is none
        ("the cat", "catnip", "the cat"),  # held back to the end, then shown
        ("naïve café €5", "é €", "naïve caf"),
    ],
)
def test_stop_strings_over_tokens(text, stop, shown):
    tokenizer = TOKENIZERS["byte-level"]
    for block in (1, 3, 100):  # tokens that arrive at once
        ids = tokenizer.encode(text).ids
        answer = Detokenizer(tokenizer, [stop])
        out = "".join(answer.push(ids[i : i + block]) for i in range(0, len(ids), block)) + answer.finish()
        assert out == shown
        assert answer.stopped == (stop in text)


def test_tokens_past_the_stop_string_are_not_counted():
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("xxx").ids
    assert len(ids) == 3
    answer = Detokenizer(tokenizer, ["xx"])
    assert answer.push(ids) + answer.finish() == ""
    assert answer.num_tokens == 2
