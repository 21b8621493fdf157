"""The endpoints of the OpenAI wire format as a FastAPI app, over whatever `ServedModel` the caller gives.

`serving/replica.py` mounts it in a Ray Serve replica; tests run it in the process. No Ray here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from openai.types import Model
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.answers import AnswerShape, ChatShape, TextShape
from serving.api_schema import ApiError, ChatRequest, GenerationRequest, TextRequest, error_of_validation
from serving.engine.async_engine import EngineError, QueueFullError
from serving.engine.engine import RequestError
from serving.generation import Piece, ServedModel
from serving.metrics import CONTENT_TYPE, EngineSnapshot, engine_snapshot

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 1024 * 1024
RETRY_AFTER_S = 1
_ENGINE_ANSWER_S = 5.0  # longest wait for the engine's counters
_CLIENT_GONE = Response(status_code=499)  # nobody reads it

T = TypeVar("T")


def make_app(get_model: Callable[[], ServedModel]) -> FastAPI:
    """The app. `get_model` is asked with every request, since a replica builds its app before its model."""
    app = FastAPI(title="Draftloop", description="OpenAI-compatible endpoint with lossless speculative decoding.")
    app.add_middleware(_BodyLimit)
    _add_error_handlers(app, get_model)
    _add_information(app, get_model)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        model = get_model()
        _check_model(body.model, model)
        shape = ChatShape(f"chatcmpl-{uuid.uuid4().hex}", model.name)
        return await _respond(request, model, body, body.limit, shape, model.chat_prompt(body), "messages")

    @app.post("/v1/completions")
    async def completions(body: TextRequest, request: Request) -> Response:
        model = get_model()
        _check_model(body.model, model)
        shape = TextShape(f"cmpl-{uuid.uuid4().hex}", model.name)
        return await _respond(request, model, body, body.limit, shape, model.text_prompt(body), "prompt")

    return app


def _check_model(name: str, model: ServedModel) -> None:
    if name != model.name:
        raise ApiError(
            404, f"model {name!r} is not served here; ask for {model.name!r}", param="model", code="model_not_found"
        )


async def _respond(
    request: Request,
    model: ServedModel,
    body: GenerationRequest,
    limit: int | None,
    shape: AnswerShape,
    encode: Coroutine[Any, Any, list[int]],
    prompt_param: str,
) -> Response:
    prompt = await encode
    sampling = model.sampling(body, limit, prompt, prompt_param)
    pieces = model.answer(prompt, sampling, body.stops, shape.id, logged=body.store is not False)
    if body.stream:
        # the first piece is pulled before the status goes out: whatever is refused is refused with its own status
        first = await _unless_client_leaves(request, _with_status(anext(pieces), prompt_param))
        if first is None:
            return _CLIENT_GONE
        return _EventStream(_events(first, pieces, shape, len(prompt), body.include_usage), pieces)
    whole = await _unless_client_leaves(request, _with_status(_collect(pieces), prompt_param))
    if whole is None:
        return _CLIENT_GONE
    return _json(shape.whole(whole, len(prompt)))


async def _collect(pieces: AsyncIterator[Piece]) -> Piece:
    text, end = "", None
    async for piece in pieces:
        text += piece.text
        end = piece.end
    return Piece(text, end)


async def _with_status(work: Any, prompt_param: str) -> Piece:
    """The engine's errors as the statuses that a client understands."""
    try:
        return await work
    except RequestError as error:
        raise ApiError(400, str(error), param=prompt_param) from error
    except QueueFullError as error:
        raise ApiError(503, str(error), code="queue_full", retry_after_s=RETRY_AFTER_S) from error
    except EngineError as error:
        raise ApiError(503, str(error), code="engine_error", retry_after_s=RETRY_AFTER_S) from error


async def _unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result; None, and the work is cancelled, if the client hangs up first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)  # the engine's stream has the deadline
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    first: Piece, rest: AsyncIterator[Piece], shape: AnswerShape, prompt_tokens: int, include_usage: bool
) -> AsyncGenerator[str, None]:
    """Server-sent events: chunks of text, the end, the usage if wanted, `[DONE]`."""
    try:
        for chunk in shape.chunks(first, prompt_tokens, include_usage, first=True):
            yield _event(chunk)
        async for piece in rest:
            for chunk in shape.chunks(piece, prompt_tokens, include_usage):
                yield _event(chunk)
    except EngineError as error:  # the status is out already: the client's library raises on this event
        yield _event(ApiError(500, str(error), code="engine_error").envelope())
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


class _EventStream(StreamingResponse):
    """A stream that cancels its request as soon as it ends, however it ends."""

    def __init__(self, events: AsyncGenerator[str, None], pieces: AsyncGenerator[Piece, None]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._sources: tuple[AsyncGenerator[Any, None], ...] = (events, pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for source in self._sources:
                await source.aclose()


def _json(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(content, status_code=status, headers=headers)


class _BodyLimit:
    """Refuses bodies that are too large, by their announced length or as they come."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
            error = _too_large()
            return await _json(error.envelope(), error.status)(scope, receive, send)
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise _too_large()
            return message

        await self._app(scope, limited, send)


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes; send a shorter prompt")


def _add_error_handlers(app: FastAPI, get_model: Callable[[], ServedModel]) -> None:
    """Every error leaves in OpenAI's envelope."""

    def answer(error: ApiError) -> Response:
        get_model().metrics.refused(error.status)
        return _json(error.envelope(), error.status, error.headers)

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(error)

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(error_of_validation(error.errors(), error.body))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ApiError):  # raised while FastAPI read the body
            return answer(error.__cause__)
        return answer(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))

    async def unexpected(request: Request, error: Exception) -> Response:
        return answer(ApiError(500, f"internal error ({type(error).__name__}); the server's log says more"))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)


def _add_information(app: FastAPI, get_model: Callable[[], ServedModel]) -> None:
    """What is served, whether it is well, and its counters."""
    started = int(time.time())

    def card() -> dict[str, Any]:
        model = get_model()
        known = Model(id=model.name, created=started, object="model", owned_by="draftloop")
        return known.model_dump() | {"max_model_len": model.max_len, "metadata": {"drafter": model.drafter}}

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        _check_model(name, get_model())
        return _json(card())

    @app.get("/health")
    async def health() -> Response:
        refusal = get_model().engine.refusal
        return _json({"status": refusal or "ok"}, 503 if refusal else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(get_model().metrics.render(await _snapshot(get_model())), media_type=CONTENT_TYPE)


async def _snapshot(model: ServedModel) -> EngineSnapshot | None:
    try:
        return await asyncio.wait_for(
            asyncio.wrap_future(model.engine.between_rounds(engine_snapshot)), _ENGINE_ANSWER_S
        )
    except (EngineError, TimeoutError):
        return None
