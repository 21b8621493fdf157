"""Token ids in, text out, while the tokens arrive: never half a character, and cut exactly at a stop string.

Used by `serving/generation.py` for every answer, streamed or not, so that both give the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one
_MOST_UNFINISHED_BYTES = 3  # of a character; some decoders write the sign for each of them
_MAX_PENDING_TOKENS = 64  # tokens without one clean character boundary after which the bytes are taken for broken


def without_unfinished(text: str) -> str:
    """A decoded text without a last character that never became whole."""
    signs = len(text) - len(text.rstrip(_UNFINISHED))
    return text[: len(text) - min(signs, _MOST_UNFINISHED_BYTES)]


class TextStream:
    """Text of a growing sequence of tokens.

    Decoders are not additive (a leading space is stripped, bytes join into characters), so a short window of tokens is
    decoded again with every token and only what is new is given out. The window moves on at character boundaries.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens whose text is out, kept because decoders look back
        self._pending: list[int] = []  # tokens since the last clean boundary
        self._shown = 0  # characters of the pending tokens' text that are out

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=True)
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=True)[len(before) :]

    def _take(self, text: str) -> str:
        fresh = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return fresh

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while it ends inside a character."""
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(_UNFINISHED) and len(self._pending) < _MAX_PENDING_TOKENS:
            return self._take(text.rstrip(_UNFINISHED))
        fresh = self._take(text)
        if text:  # a context without text, such as special tokens, would not keep a decoder from stripping
            self._context, self._pending, self._shown = self._pending, [], 0
        elif len(self._pending) >= _MAX_PENDING_TOKENS:
            self._pending = []
        return fresh

    def finish(self) -> str:
        """What was held back, without a last character that never became whole."""
        fresh = self._take(without_unfinished(self._new_text()))
        self._context, self._pending, self._shown = [], [], 0
        return fresh


class StopStrings:
    """Cuts text at the first stop string, and holds back the end of a text that may become one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """The part of all text so far that is new and safe to show; nothing more after a match."""
        if self.matched is not None or not text:
            return ""
        text = self._held + text
        # the one that is complete first, as if the text came character by character: the split must not matter
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.matched = min(hits)
            self._held = ""
            return text[:at]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

    def finish(self) -> str:
        """What was held back: the text ended before it became a stop string."""
        held, self._held = self._held, ""
        return held


class ShownToken(NamedTuple):
    """What one token brought to an answer."""

    text: str  # what it added to the text to show
    offset: int  # where in the answer its own text begins, which may be held back as the beginning of a stop string


class Detokenizer:
    """Text of one answer. `num_tokens` counts the tokens that the answer consists of."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self._text = TextStream(tokenizer)
        self._stops = StopStrings(stops)
        self._length = 0  # characters of all tokens' text, held back or not
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.matched is not None

    def push(self, token_ids: Iterable[int]) -> str:
        """The text to show for these tokens. Tokens past the one that completes a stop string are left out."""
        return "".join(token.text for token in self.push_each(token_ids))

    def push_each(self, token_ids: Iterable[int]) -> list[ShownToken]:
        """As `push`, token by token, so that an accepted block ends where plain decoding would have ended."""
        shown: list[ShownToken] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            offset, text = self._length, self._text.push(token_id)
            self._length += len(text)
            shown.append(ShownToken(self._stops.push(text), offset))
        return shown

    def finish(self) -> str:
        """What is still to show once no more tokens come."""
        if self.stopped:
            return ""
        return self._stops.push(self._text.finish()) + ("" if self.stopped else self._stops.finish())
