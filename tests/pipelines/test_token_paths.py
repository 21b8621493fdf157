"""Token paths: the same text in other tokens, told from other text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pipelines.token_paths import Rejection, retokenised, share_of_path_mismatches, token_text
from tests.toy_folder import toy_tokenizer

WORDS = ["gr", "avity", "grav", "ity", " is", " of", "een", "gravity", " ", " grav", "\ufffd", "п", ""]


def decode(tokens) -> str:
    return "".join(WORDS[token] for token in tokens)


def rejection(drafted: list[str], said: list[str]) -> Rejection:
    return Rejection(*(tuple(WORDS.index(word) for word in words) for words in (drafted, said)))


@pytest.mark.parametrize(
    ("drafted", "said", "mismatch"),
    [
        (["gr", "avity"], ["grav", "ity"], True),
        (["grav", "ity"], ["gr", "avity", " is"], True),
        (["gr", "avity", " of"], ["gravity", " is"], True),  # the text agrees at the refused draft
        (["gravity"], ["gr", "avity"], True),
        (["gr"], ["grav", "ity"], True),  # as far as it goes
        (["gr", "een"], ["grav", "ity"], False),
        (["grav"], ["gr", "een"], False),
        ([" ", " grav"], [" grav", "ity"], False),
        ([" is"], [" of"], False),
        ([" "], [" grav", "ity"], False),  # a space begins any word
        (["gr", "avity"], ["gr", "een"], False),  # the refused draft is the first: equal tokens are no rejection
        (["\ufffd"], ["п"], False),  # a part of a character may be any
        (["\ufffd", "\ufffd"], ["\ufffd", " is"], False),
        ([""], ["gr"], False),
    ],
)
def test_paths(drafted, said, mismatch):
    assert share_of_path_mismatches([rejection(drafted, said)], decode) == float(mismatch)


def test_share_of_all_rejections():
    same, other = rejection(["gr", "avity"], ["grav", "ity"]), rejection([" is"], [" of"])
    assert share_of_path_mismatches([same, other, other, other], decode) == 0.25
    assert share_of_path_mismatches([], decode) is None


def test_parts_of_characters_are_told_apart():
    tokenizer = toy_tokenizer()  # a token per byte
    text = token_text(tokenizer)
    assert text(list("п".encode())[1:]) != text(list("о".encode())[1:])
    assert text(list("п".encode())[:1]) == text(list("о".encode())[:1])  # both begin with the same byte
    assert text([257]) == "<|im_end|>"


def test_text_tokenised_anew():
    vocabulary = {"g": 0, "r": 1, "gr": 2, "a": 3}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[("g", "r")])))
    anew, other, usual = Rejection((2,), (0, 1)), Rejection((3,), (0, 1)), Rejection((3,), (2, 3))
    assert retokenised([anew, other, usual], tokenizer) == (1, 2)
