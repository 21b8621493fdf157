"""Pieces of an answer in the shapes of the wire format: one response, or the chunks of a stream, for chat and for text.

Filled from the `openai` package's own types, so that a field that OpenAI renames fails here and not at a client.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from openai.types.chat.chat_completion import Choice as ChatChoice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_message import ChatCompletionMessage
from openai.types.completion_choice import CompletionChoice

from serving.api_schema import ChatChunk, ChatResponse, Metrics, TextResponse, metrics_of, usage_of
from serving.generation import End, Piece


class AnswerShape(Protocol):
    """How one endpoint writes its answers."""

    id: str

    def whole(self, piece: Piece, prompt_tokens: int) -> dict[str, Any]:
        """The response of a request that does not stream."""
        ...

    def chunks(
        self, piece: Piece, prompt_tokens: int, include_usage: bool, first: bool = False
    ) -> list[dict[str, Any]]:
        """The chunks that a piece makes. The last chunk of a stream has the metrics."""
        ...


def _metrics(end: End) -> Metrics:
    return metrics_of(end.acceptance, end.drafter)


class ChatShape:
    """`/v1/chat/completions`."""

    def __init__(self, answer_id: str, model: str):
        self.id = answer_id
        self._common: dict[str, Any] = {"id": answer_id, "model": model, "created": int(time.time())}

    def whole(self, piece: Piece, prompt_tokens: int) -> dict[str, Any]:
        assert piece.end is not None
        choice = ChatChoice(
            index=0,
            finish_reason=piece.end.finish_reason,
            logprobs=None,
            message=ChatCompletionMessage(role="assistant", content=piece.text, refusal=None),
        )
        return ChatResponse(
            **self._common,
            object="chat.completion",
            choices=[choice],
            usage=usage_of(prompt_tokens, piece.end.num_tokens),
            metrics=_metrics(piece.end),
        ).model_dump(mode="json", exclude_unset=True)

    def chunks(
        self, piece: Piece, prompt_tokens: int, include_usage: bool, first: bool = False
    ) -> list[dict[str, Any]]:
        chunks, end = [], piece.end
        if first:
            chunks.append(self._chunk(ChoiceDelta(role="assistant", content=""), None))
        if piece.text:
            chunks.append(self._chunk(ChoiceDelta(content=piece.text), None))
        if end is not None:
            chunks.append(self._chunk(ChoiceDelta(), end.finish_reason))
            if include_usage:
                usage = usage_of(prompt_tokens, end.num_tokens)
                chunks.append(ChatChunk(**self._common, object="chat.completion.chunk", choices=[], usage=usage))
            chunks[-1].metrics = _metrics(end)
        return [chunk.model_dump(mode="json", exclude_unset=True) for chunk in chunks]

    def _chunk(self, delta: ChoiceDelta, finish_reason: Any) -> ChatChunk:
        choice = ChunkChoice(index=0, delta=delta, finish_reason=finish_reason, logprobs=None)
        return ChatChunk(**self._common, object="chat.completion.chunk", choices=[choice])


class TextShape:
    """`/v1/completions`."""

    def __init__(self, answer_id: str, model: str):
        self.id = answer_id
        self._common: dict[str, Any] = {"id": answer_id, "model": model, "created": int(time.time())}

    def whole(self, piece: Piece, prompt_tokens: int) -> dict[str, Any]:
        assert piece.end is not None
        response = self._response(piece.text, piece.end.finish_reason)
        response.usage = usage_of(prompt_tokens, piece.end.num_tokens)
        response.metrics = _metrics(piece.end)
        return response.model_dump(mode="json", exclude_unset=True)

    def chunks(
        self, piece: Piece, prompt_tokens: int, include_usage: bool, first: bool = False
    ) -> list[dict[str, Any]]:
        chunks, end = [], piece.end
        if piece.text or end is not None:
            chunks.append(self._response(piece.text, end.finish_reason if end else None))
        if end is not None:
            if include_usage:
                usage = usage_of(prompt_tokens, end.num_tokens)
                chunks.append(TextResponse(**self._common, object="text_completion", choices=[], usage=usage))
            chunks[-1].metrics = _metrics(end)
        return [chunk.model_dump(mode="json", exclude_unset=True) for chunk in chunks]

    def _response(self, text: str, finish_reason: Any) -> TextResponse:
        # the type wants a finish reason, the wire format has null in all chunks but the last
        choice = CompletionChoice.model_construct(index=0, text=text, logprobs=None, finish_reason=finish_reason)
        return TextResponse.model_construct(**self._common, object="text_completion", choices=[choice])
