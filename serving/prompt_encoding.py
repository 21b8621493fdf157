"""A prompt as a user gives it, to token ids: messages in the target's chat template, or plain text.

The HTTP endpoints and the text engine both come here; `chat_options` says which template, and what it is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from drafters.target import Target
from serving.chat_options import ChatOptions, ChatTemplate
from serving.token_bound import token_bound


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
        self._bound = token_bound(tokenizer)

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
        if most is None or self._bound is None:
            return
        if (least := self._bound.least(text)) > most:
            raise PromptTooLongError(least)
