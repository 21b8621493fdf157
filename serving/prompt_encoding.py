"""A prompt as a user gives it, to token ids: messages in the target's chat template, or plain text.

Chat templates are applied here and nowhere else in serving: the HTTP endpoints and the text engine both come here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from drafters.target import Target


class PromptError(ValueError):
    """A prompt that the target's tokenizer or chat template cannot take; one line."""


class PromptEncoder:
    """The tokenizer of a target. `tokenizer` is shared with whoever turns tokens back into text."""

    def __init__(self, target: Target):
        self._template = target.tokenizer
        tokenizer = getattr(target.tokenizer, "backend_tokenizer", None)
        if not isinstance(tokenizer, Tokenizer):
            raise ValueError(f"the tokenizer of {target.path} has no tokenizer.json; convert it with save_pretrained")
        self.tokenizer = tokenizer
        self.tokenizer.no_truncation()  # a tokenizer file may ask for it, and would cut prompts silently
        self.tokenizer.no_padding()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template.chat_template)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of the messages up to where the assistant's answer begins. Raises PromptError."""
        try:
            text = self._template.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates refuse with errors of their own, such as roles that do not alternate
            raise PromptError(f"the chat template refuses these messages: {' '.join(str(error).split())}") from error
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, text: str) -> list[int]:
        """Token ids of a plain text, with the special tokens that the tokenizer puts around it."""
        return self.tokenizer.encode(text).ids
