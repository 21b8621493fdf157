"""A prompt as a user gives it, to token ids: messages in the target's chat template, or plain text.

The HTTP endpoints and the text engine both come here; `chat_options` says which template, and what it is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from drafters.target import Target
from serving.chat_options import ChatOptions, ChatTemplate


class PromptError(ValueError):
    """A prompt that the target's tokenizer or chat template cannot take; one line."""


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

    @property
    def has_chat_template(self) -> bool:
        return self._template.exists

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of the messages up to where the assistant's answer begins. Raises PromptError."""
        try:
            text = self._template.render(messages)
        except Exception as error:  # templates refuse with errors of their own, such as roles that do not alternate
            raise PromptError(f"the chat template refuses these messages: {' '.join(str(error).split())}") from error
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, text: str) -> list[int]:
        """Token ids of a plain text, with the special tokens that the tokenizer puts around it."""
        return self.tokenizer.encode(text).ids
