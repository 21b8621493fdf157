"""How many tokens a text has at least, without tokenising it: a prompt that cannot fit is refused by its length.

In: a tokenizer. Out: a `TokenBound`, or None where the tokenizer may drop or join text in ways that allow none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from serving.token_bytes import byte_of_symbol

_NFC_JOINS = 4  # characters that composition makes one of, at most: a base and three marks


@dataclass(frozen=True)
class TokenBound:
    """A bound that holds for every text."""

    characters: int  # that one token stands for, at most
    dropped: bytes = b""  # bytes that the vocabulary lacks, and that leave no token

    def least(self, text: str) -> int:
        """Tokens of the text, at least."""
        characters = len(text)
        if self.dropped:
            data = text.encode()
            characters -= len(data) - len(data.translate(None, self.dropped))
        return -(-characters // self.characters)


def token_bound(tokenizer: Tokenizer) -> TokenBound | None:
    """None for tokenizers with a normaliser or splitter that may remove, a token that takes the spaces around it, or
    unknown characters that become one token."""
    parts = json.loads(tokenizer.to_str())
    normalisers, splitters = _flat(parts["normalizer"], "normalizers"), _flat(parts["pre_tokenizer"], "pretokenizers")
    composes = any(normaliser["type"] == "NFC" for normaliser in normalisers)
    model, vocabulary = parts["model"], tokenizer.get_vocab()
    dropped = b""
    if model["type"] == "BPE" and model.get("byte_fallback"):
        whole = vocabulary.keys() >= {f"<0x{i:02X}>" for i in range(256)}
    else:
        whole = model["type"] == "BPE" and not model.get("unk_token") and "ByteLevel" in {s["type"] for s in splitters}
        dropped = bytes(sorted(byte_of_symbol()[s] for s in set(ByteLevel.alphabet()) - vocabulary.keys()))
    if (
        not whole
        or (composes and dropped)
        or not all(_keeps_normalised(normaliser) for normaliser in normalisers)
        or not all(_keeps_split(splitter) for splitter in splitters)
        or any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    ):
        return None
    return TokenBound(max(map(len, vocabulary)) * (_NFC_JOINS if composes else 1), dropped)


def _flat(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [leaf for each in part[inner] for leaf in _flat(each, inner)] if part["type"] == "Sequence" else [part]


def _keeps_normalised(normaliser: dict[str, Any]) -> bool:
    pattern = normaliser.get("pattern", {}).get("String")
    replaces = normaliser["type"] == "Replace" and pattern and len(normaliser["content"]) >= len(pattern)
    return bool(normaliser["type"] in ("NFC", "Prepend") or replaces)


def _keeps_split(splitter: dict[str, Any]) -> bool:
    kind = splitter["type"]
    return kind in ("ByteLevel", "Metaspace", "Digits") or (kind == "Split" and splitter["behavior"] != "Removed")
