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
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from openai.types import Model
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from serving.answers import AnswerShape, ChatShape, TextShape
from serving.api_errors import ApiError, ErrorResponse
from serving.api_response import ChatResponse, TextResponse
from serving.api_schema import (
    MAX_CHOICES,
    ChatRequest,
    GenerationRequest,
    StreamOptions,
    TextRequest,
    error_of_request,
)
from serving.engine.async_engine import EngineError, QueueFullError
from serving.engine.engine import RequestError
from serving.generation import Piece, ServedModel
from serving.json_body import JsonRoute
from serving.metrics import CONTENT_TYPE, EngineSnapshot, engine_snapshot
from serving.page_routes import add_page
from serving.request_guards import BodyLimit, KeyGuard

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
_ENGINE_ANSWER_S = 5.0  # longest wait for the engine's counters
_CLIENT_GONE = Response(status_code=499)  # nobody reads it
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in (
        ("4XX", "The request cannot be taken; `param` names what is wrong."),
        (503, "All places are taken, or the engine fails: send it again after Retry-After seconds."),
    )
}

T = TypeVar("T")


def make_app(get_model: Callable[[], ServedModel]) -> FastAPI:
    """The app. `get_model` is asked with every request, since a replica builds its app before its model.

    Requests need one of the model's `api_keys`, if it has any. At / is a page for people, if the model wants one.
    """
    app = FastAPI(
        title="Draftloop",
        description="OpenAI-compatible endpoint with lossless speculative decoding.",
        redirect_slashes=False,  # an unknown path is an error in the envelope, not a detour
    )

    def refuse(error: ApiError) -> JSONResponse:
        get_model().metrics.refused(error.status)
        return _json(error.envelope(), error.status, error.headers)

    app.add_middleware(BodyLimit, refused=refuse)
    app.add_middleware(KeyGuard, get_keys=lambda: get_model().api_keys, refused=refuse)
    _add_error_handlers(app, refuse)
    _add_information(app, get_model)
    _add_generation(app, get_model)
    add_page(app, lambda: get_model().page)
    return app


def _add_generation(app: FastAPI, get_model: Callable[[], ServedModel]) -> None:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions", responses={200: {"model": ChatResponse}, **_ERRORS})
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        model = get_model()
        _check_takes(body, 1, model)
        shape = ChatShape(f"chatcmpl-{uuid.uuid4().hex}", model.name, model.token_bytes)
        return await _respond(request, model, body, shape, await model.chat_prompts(body), "messages")

    @router.post("/v1/completions", responses={200: {"model": TextResponse}, **_ERRORS})
    async def completions(body: TextRequest, request: Request) -> Response:
        model = get_model()
        _check_takes(body, len(body.prompts), model)
        shape = TextShape(f"cmpl-{uuid.uuid4().hex}", model.name, model.token_bytes)
        return await _respond(request, model, body, shape, await model.text_prompts(body), "prompt")

    app.include_router(router)


def _check_model(name: str, model: ServedModel) -> None:
    if name != model.name:
        raise ApiError(
            404, f"model {name!r} is not served here; ask for {model.name!r}", param="model", code="model_not_found"
        )


def _check_takes(body: GenerationRequest, num_prompts: int, model: ServedModel) -> None:
    """What can be refused before anything is tokenised."""
    _check_model(body.model, model)
    asked, most = num_prompts * body.n, min(MAX_CHOICES, model.engine.max_in_flight)
    if asked > most:
        raise ApiError(
            400,
            f"{num_prompts} prompts * n {body.n} are {asked} choices; this server takes {most} in one request",
            param="n" if num_prompts <= most else "prompt",
            code="too_many_choices",
        )


async def _respond(
    request: Request,
    model: ServedModel,
    body: GenerationRequest,
    shape: AnswerShape,
    prompts: list[list[int]],
    prompt_param: str,
) -> Response:
    choices = model.choices(body, prompts, prompt_param)
    every_token = body.include_tokens or body.num_logprobs is not None
    pieces = model.answer(choices, body.stops, shape.id, every_token=every_token, logged=body.store is not False)
    if body.stream:
        # the first piece is pulled before the status goes out: whatever is refused is refused with its own status
        first = await _unless_client_leaves(request, _with_status(anext(pieces), prompt_param))
        if first is None:
            return _CLIENT_GONE
        return _EventStream(_events(first, pieces, shape, body.stream_options or StreamOptions()), pieces)
    whole = await _unless_client_leaves(request, _with_status(_collect(pieces), prompt_param))
    if whole is None:
        return _CLIENT_GONE
    return _json(shape.whole(whole))


async def _collect(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    async with aclosing(pieces):
        return [piece async for piece in pieces]


async def _with_status(work: Any, prompt_param: str) -> Any:
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
    first: Piece, rest: AsyncIterator[Piece], shape: AnswerShape, options: StreamOptions
) -> AsyncGenerator[str, None]:
    """Server-sent events: chunks of text, the end, the usage if wanted, `[DONE]`."""
    try:
        for chunk in shape.chunks(first, options):
            yield _event(chunk)
        async for piece in rest:
            for chunk in shape.chunks(piece, options):
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


def _add_error_handlers(app: FastAPI, refuse: Callable[[ApiError], Response]) -> None:
    """Every error leaves in OpenAI's envelope."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return refuse(error)

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return refuse(error_of_request(error, error.body))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ApiError):  # raised while FastAPI read the body
            return refuse(error.__cause__)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return refuse(ApiError(error.status_code, message, headers=dict(error.headers or {})))

    async def unexpected(request: Request, error: Exception) -> Response:
        return refuse(ApiError(500, f"internal error ({type(error).__name__}); the server's log says more"))

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

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
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
