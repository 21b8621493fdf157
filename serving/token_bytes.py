"""The bytes that a token stands for by itself: a token may be a part of a character, which text cannot show.

In: a tokenizer. Out: bytes per token id, and a printable form of them, for the log-probabilities of an answer.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Byte-level BPE and SentencePiece with byte fallback exactly; other tokenizers by decoding the token alone."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoders = _flat(json.loads(tokenizer.to_str())["decoder"])
        self._added = {i: (token.content, token.special) for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.of = functools.lru_cache(maxsize=65536)(self._of)  # a few megabytes at most

    def text(self, token_id: int) -> str:
        r"""The token as a string, with `\xNN` for bytes that are no whole character; a special token by its name."""
        data = self.of(token_id)
        if data is None:
            return self._added.get(token_id, ("", True))[0]
        return data.decode("utf-8", "backslashreplace")

    def _of(self, token_id: int) -> bytes | None:
        """The bytes of a token; None for special tokens and ids without a token, which stand for no text."""
        if token_id in self._added:
            content, special = self._added[token_id]
            return None if special else content.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        kinds = {decoder["type"] for decoder in self._decoders}
        if "ByteLevel" in kinds:
            return _byte_level(token)
        if "ByteFallback" in kinds and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if kinds & {"ByteFallback", "Metaspace"}:
            for decoder in self._decoders:
                token = _with_spaces(token, decoder)
            return token.encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [inner for part in decoder["decoders"] for inner in _flat(part)]
    return [decoder]


def _with_spaces(token: str, decoder: dict[str, Any]) -> str:
    if decoder["type"] == "Metaspace":
        return token.replace(decoder["replacement"], " ")
    if decoder["type"] == "Replace" and "String" in decoder["pattern"]:
        return token.replace(decoder["pattern"]["String"], decoder["content"])
    return token


@functools.cache
def byte_of_symbol() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _byte_level(token: str) -> bytes:
    symbols = byte_of_symbol()
    if all(symbol in symbols for symbol in token):
        return bytes(symbols[symbol] for symbol in token)
    return token.encode()  # the decoder leaves such a token as it is
