"""A prompt as a user gives it, to token ids: messages in the target's chat template, or plain text.

The HTTP endpoints and the text engine both come here; `chat_options` says which template, and what it is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from drafters.target import Target
from serving.chat_options import ChatOptions, ChatTemplate

# Characters that composition makes one of, at most: a base and three marks.
_NFC_SHRINKS = 4


class PromptError(ValueError):
    """A prompt that the target's tokenizer or chat template cannot take; one line."""


class PromptTooLongError(PromptError):
    """A text that must have more tokens than fit, and was not tokenised. `least`: so many at least."""

    def __init__(self, least: int):
        super().__init__(f"the prompt has at least {least} tokens")
        self.least = least


class PromptEncoder:
    """The tokenizer of a target. `tokenizer` is shared with whoever turns tokens back into text."""

    def __init__(self, target: Target, options: ChatOptions | None = None):
        self._template = ChatTemplate(target, options)
        tokenizer = getattr(target.tokenizer, "backend_tokenizer", None)
        if not isinstance(tokenizer, Tokenizer):
            raise ValueError(f"the tokenizer of {target.path} has no tokenizer.json; convert it with save_pretrained")
        self.tokenizer = tokenizer
        self.tokenizer.no_truncation()  # a tokenizer file may ask for it, and would cut prompts silently
        self.tokenizer.no_padding()
        self._characters_per_token = most_characters_per_token(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self._template.exists

    def chat(self, messages: Sequence[Mapping[str, Any]], most: int | None = None) -> list[int]:
        """Token ids of the messages up to where the assistant's answer begins. Raises PromptError.

        `most`: a text that must have more tokens than that is refused (PromptTooLongError) before it is tokenised.
        """
        try:
            text = self._template.render(messages)
        except Exception as error:  # templates refuse with errors of their own, such as roles that do not alternate
            raise PromptError(f"the chat template refuses these messages: {' '.join(str(error).split())}") from error
        self._check_length(text, most)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of a plain text, with the special tokens that the tokenizer puts around it. `most` as in `chat`."""
        self._check_length(text, most)
        return self.tokenizer.encode(text).ids

    def _check_length(self, text: str, most: int | None) -> None:
        if most is None or self._characters_per_token is None:
            return
        least = -(-len(text) // self._characters_per_token)
        if least > most:
            raise PromptTooLongError(least)


def most_characters_per_token(tokenizer: Tokenizer) -> int | None:
    """How many characters of a text one token can stand for; None if there may be no such bound.

    There is none where the tokenizer may drop or join text: a normaliser or splitter that removes, a token that takes
    the spaces around it, unknown characters that become one token.
    """
    parts = json.loads(tokenizer.to_str())
    shrinks = 1
    for normaliser in _flat(parts["normalizer"], "normalizers"):
        if normaliser["type"] == "NFC":
            shrinks = _NFC_SHRINKS
        elif not (normaliser["type"] == "Prepend" or _replaces_by_as_much(normaliser)):
            return None
    model, vocabulary = parts["model"], tokenizer.get_vocab()
    bytes_of_any_text = [f"<0x{i:02X}>" for i in range(256)] if model.get("byte_fallback") else ByteLevel.alphabet()
    if model["type"] != "BPE" or not vocabulary.keys() >= set(bytes_of_any_text):
        return None
    splitters = _flat(parts["pre_tokenizer"], "pretokenizers")
    keeps = {"ByteLevel", "Metaspace", "Digits"}
    if any(s["type"] not in keeps and not (s["type"] == "Split" and s["behavior"] != "Removed") for s in splitters):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]):
        return None
    return shrinks * max(map(len, vocabulary))


def _flat(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [leaf for each in part[inner] for leaf in _flat(each, inner)] if part["type"] == "Sequence" else [part]


def _replaces_by_as_much(normaliser: dict[str, Any]) -> bool:
    pattern = normaliser.get("pattern", {}).get("String")
    return normaliser["type"] == "Replace" and pattern is not None and len(normaliser["content"]) >= len(pattern)
