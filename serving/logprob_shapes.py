"""Log-probabilities of an answer's tokens in the wire format's two shapes: chat's list and completions' columns."""

from __future__ import annotations

from collections.abc import Sequence

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs

from serving.generation import AnswerToken
from serving.token_bytes import TokenBytes


def _bytes(names: TokenBytes, token_id: int) -> list[int] | None:
    data = names.of(token_id)
    return None if data is None else list(data)


def chat_logprobs(tokens: Sequence[AnswerToken], names: TokenBytes) -> list[ChatCompletionTokenLogprob] | None:
    """One entry per token, with the most probable ones of its place; None if nobody asked for them."""
    entries = [
        ChatCompletionTokenLogprob(
            token=names.text(token.id),
            bytes=_bytes(names, token.id),
            logprob=token.logprobs.chosen,
            top_logprobs=[
                TopLogprob(token=names.text(other), bytes=_bytes(names, other), logprob=logprob)
                for other, logprob in token.logprobs.top
            ],
        )
        for token in tokens
        if token.logprobs is not None
    ]
    return entries or None


def text_logprobs(tokens: Sequence[AnswerToken], names: TokenBytes) -> Logprobs | None:
    """The same in columns. `text_offset` counts characters of the answer; the token itself is always among the top."""
    asked = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
    if not asked:
        return None
    top: list[dict[str, float]] = []
    for token, logprobs in asked:
        named: dict[str, float] = {}
        for other, logprob in [*logprobs.top, (token.id, logprobs.chosen)]:
            named.setdefault(names.text(other), logprob)  # tokens of one text: the most probable of them
        top.append(named)
    return Logprobs(
        tokens=[names.text(token.id) for token, _ in asked],
        token_logprobs=[logprobs.chosen for _, logprobs in asked],
        top_logprobs=top,
        text_offset=[token.offset for token, _ in asked],
    )
