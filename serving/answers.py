"""Pieces of an answer in the shapes of the wire format: one response, or the chunks of a stream, for chat and for text.

Filled from the `openai` package's own types, so that a field that OpenAI renames fails here and not at a client.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from openai.types.chat.chat_completion import Choice as ChatChoice
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message import ChatCompletionMessage
from openai.types.completion_choice import CompletionChoice

from serving.api_response import ChatChunk, ChatResponse, Metrics, StreamToken, TextResponse, metrics_of, usage_of
from serving.api_schema import StreamOptions
from serving.generation import Piece, Totals
from serving.logprob_shapes import chat_logprobs, text_logprobs
from serving.token_bytes import TokenBytes


class AnswerShape(Protocol):
    """How one endpoint writes its answers."""

    id: str

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The response of a request that does not stream, from all of its pieces."""
        ...

    def chunks(self, piece: Piece, options: StreamOptions) -> list[dict[str, Any]]:
        """The chunks that a piece makes. The last chunk of a stream has the metrics."""
        ...


def _joined(pieces: Sequence[Piece]) -> tuple[list[Piece], Totals]:
    """One piece per choice, in the order of their indices, and the figures of all."""
    by_index: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    choices = [
        replace(
            parts[-1],
            text="".join(part.text for part in parts),
            tokens=[token for part in parts for token in part.tokens],
        )
        for _, parts in sorted(by_index.items())
    ]
    totals = pieces[-1].totals
    assert totals is not None, "the last piece has the totals"
    return choices, totals


def _metrics(totals: Totals) -> Metrics:
    return metrics_of(totals.acceptance, totals.drafter)


def _written(
    chunks: Sequence[ChatChunk | TextResponse], piece: Piece, options: StreamOptions, carrier: int | None
) -> list[dict[str, Any]]:
    """Chunks as JSON; the one at `carrier` has the piece's tokens, if they are wanted."""
    if piece.totals is not None:
        chunks[-1].metrics = _metrics(piece.totals)
    if options.include_tokens:
        for i, chunk in enumerate(chunks):
            chunk.tokens = [
                StreamToken(id=token.id, text=token.text, origin=token.origin, index=piece.index)
                for token in (piece.tokens if i == carrier else ())
            ]
    return [chunk.model_dump(mode="json", exclude_unset=True) for chunk in chunks]


class ChatShape:
    """`/v1/chat/completions`."""

    def __init__(self, answer_id: str, model: str, names: TokenBytes):
        self.id = answer_id
        self._names = names
        self._common: dict[str, Any] = {"id": answer_id, "model": model, "created": int(time.time())}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        choices, totals = _joined(pieces)
        return ChatResponse(
            **self._common,
            object="chat.completion",
            choices=[self._choice(piece) for piece in choices],
            usage=usage_of(totals.prompt_tokens, totals.completion_tokens),
            metrics=_metrics(totals),
        ).model_dump(mode="json", exclude_unset=True)

    def _choice(self, piece: Piece) -> ChatChoice:
        assert piece.finish_reason is not None, "a choice's last piece has its end"
        logprobs = chat_logprobs(piece.tokens, self._names)
        return ChatChoice(
            index=piece.index,
            finish_reason=piece.finish_reason,
            logprobs=ChoiceLogprobs(content=logprobs, refusal=None) if logprobs else None,
            message=ChatCompletionMessage(role="assistant", content=piece.text, refusal=None),
        )

    def chunks(self, piece: Piece, options: StreamOptions) -> list[dict[str, Any]]:
        chunks: list[ChatChunk] = []
        carrier = None
        logprobs = chat_logprobs(piece.tokens, self._names)
        if piece.first:
            chunks.append(self._chunk(piece, ChoiceDelta(role="assistant", content="")))
        if piece.text or logprobs or (options.include_tokens and piece.tokens):
            carrier = len(chunks)
            chunks.append(self._chunk(piece, ChoiceDelta(content=piece.text)))
            if logprobs:
                chunks[-1].choices[0].logprobs = ChunkLogprobs(content=logprobs, refusal=None)
        if piece.finish_reason is not None:
            chunks.append(self._chunk(piece, ChoiceDelta(), piece.finish_reason))
        if piece.totals is not None and options.include_usage:
            usage = usage_of(piece.totals.prompt_tokens, piece.totals.completion_tokens)
            chunks.append(ChatChunk(**self._common, object="chat.completion.chunk", choices=[], usage=usage))
        return _written(chunks, piece, options, carrier)

    def _chunk(self, piece: Piece, delta: ChoiceDelta, finish_reason: Any = None) -> ChatChunk:
        choice = ChunkChoice(index=piece.index, delta=delta, finish_reason=finish_reason, logprobs=None)
        return ChatChunk(**self._common, object="chat.completion.chunk", choices=[choice])


class TextShape:
    """`/v1/completions`."""

    def __init__(self, answer_id: str, model: str, names: TokenBytes):
        self.id = answer_id
        self._names = names
        self._common: dict[str, Any] = {"id": answer_id, "model": model, "created": int(time.time())}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        choices, totals = _joined(pieces)
        response = self._response([self._choice(piece) for piece in choices])
        response.usage = usage_of(totals.prompt_tokens, totals.completion_tokens)
        response.metrics = _metrics(totals)
        return response.model_dump(mode="json", exclude_unset=True)

    def _choice(self, piece: Piece) -> CompletionChoice:
        # the type wants a finish reason, the wire format has null in all chunks but a choice's last
        return CompletionChoice.model_construct(
            index=piece.index,
            text=piece.text,
            logprobs=text_logprobs(piece.tokens, self._names),
            finish_reason=piece.finish_reason,
        )

    def _response(self, choices: list[CompletionChoice]) -> TextResponse:
        return TextResponse.model_construct(**self._common, object="text_completion", choices=choices)

    def chunks(self, piece: Piece, options: StreamOptions) -> list[dict[str, Any]]:
        chunks = []
        asked = options.include_tokens or any(token.logprobs for token in piece.tokens)
        if piece.text or piece.finish_reason is not None or (asked and piece.tokens):
            chunks.append(self._response([self._choice(piece)]))
        if piece.totals is not None and options.include_usage:
            usage = usage_of(piece.totals.prompt_tokens, piece.totals.completion_tokens)
            chunks.append(TextResponse(**self._common, object="text_completion", choices=[], usage=usage))
        return _written(chunks, piece, options, carrier=0)
