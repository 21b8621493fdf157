"""Drafts that the target refused though they spell its own text: "gr"+"avity" where it said "grav"+"ity".

In: the refused drafts of some rounds with what the target said there, and a decoder of tokens. Out: the share of them
that only took another path of tokens through the same text. A drafter that learned from text which was tokenised anew,
or with another tokenizer, drafts like that. `draftloop diagnose` and `draftloop compare` show the share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from serving.token_bytes import TokenBytes

Decode = Callable[[Sequence[int]], str]
_UNFINISHED = "\ufffd"  # what decoders write for a part of a character


@dataclass(frozen=True)
class Rejection:
    """The end of a round's drafts, from the first one that the target refused, and what it said from there on."""

    drafted: tuple[int, ...]  # token ids, at least one
    said: tuple[int, ...]  # token ids, at least one; as many as are known


def share_of_path_mismatches(rejections: Sequence[Rejection], decode: Decode) -> float | None:
    """Share of the rejections in which text and target agree and the tokens do not; None without any rejection.

    They agree if both spell the refused draft and the target's token, whichever is longer, the same way; where the
    drafts (or what the target said) end before that, as far as they go. `decode` must keep spaces at the beginning and
    tell parts of characters apart, as `token_text` does; a trailing U+FFFD counts as unknown.
    """
    if not rejections:
        return None
    return sum(is_path_mismatch(rejection, decode) for rejection in rejections) / len(rejections)


def is_path_mismatch(rejection: Rejection, decode: Decode) -> bool:
    """Whether the refused drafts spell what the target said in other tokens."""
    if rejection.drafted[0] == rejection.said[0]:
        return False
    drafted, said = (decode(tokens).rstrip(_UNFINISHED) for tokens in (rejection.drafted, rejection.said))
    tokens = (decode(tokens[:1]).rstrip(_UNFINISHED) for tokens in (rejection.drafted, rejection.said))
    needed = max(1, *map(len, tokens))
    reach = min(needed, len(drafted), len(said))
    # a space begins any word: it agrees with a longer token only where the drafts go on with that one's text
    told = reach == needed or bool(drafted[:reach].strip())
    return reach > 0 and told and drafted[:reach] == said[:reach]


def retokenised(rejections: Sequence[Rejection], tokenizer: Any) -> tuple[int, int]:
    """(drafts that are the token with which the tokenizer begins the text that the target said there, places where the
    target said it in other tokens than that). All drafts against few places: it learned from text tokenised anew."""
    anew, elsewhere = 0, 0
    for rejection in rejections:
        text = tokenizer.decode(list(rejection.said))
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokens and tokens[0] != rejection.said[0]:
            elsewhere += 1
            anew += tokens[0] == rejection.drafted[0]
    return anew, elsewhere


def token_text(tokenizer: Any) -> Decode:
    """A decoder for a tokenizer of transformers in which every token has all of its own text.

    Text comes as one character per byte, so that parts of characters are told apart; special tokens by their names.
    Slow tokenizers, which have no bytes to show, decode as they do.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return lambda tokens: str(tokenizer.decode(list(tokens)))
    token_bytes = TokenBytes(fast)

    def text(token: int) -> str:
        data = token_bytes.of(token)
        return token_bytes.text(token) if data is None else data.decode("latin-1")

    return lambda tokens: "".join(map(text, tokens))
