"""What stands before the endpoints: the API keys that a request must carry one of, and the limits of its body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api_errors import ApiError
from serving.page_routes import PAGE_PATHS

MAX_BODY_BYTES = 4 * 1024 * 1024
BODY_DEADLINE_S = 60.0  # for all of it: a request takes a replica's place from its first byte on
OPEN_PATHS = PAGE_PATHS | {"/health", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}  # without a key


class ApiKeyError(ValueError):
    """A file of API keys that cannot be used; one line with the mend."""


class ApiKeys:
    """Keys as hashes, of equal length whatever a client sends. Without keys every request is let in."""

    def __init__(self, keys: Iterable[str] = ()):
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, path: str | Path) -> ApiKeys:
        """One key per line; blank lines and those that begin with # do not count. Raises ApiKeyError."""
        try:
            lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ApiKeyError(f"the API keys in {path} cannot be read ({error}); give a text file") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ApiKeyError(f"{path} has no API key; write one per line, or leave the option out")
        return cls(keys)

    def admit(self, authorization: bytes) -> bool:
        """Whether an Authorization header (empty: none) lets its request in. Its time does not tell how near it was."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        known = [hmac.compare_digest(digest, each) for each in self._digests]  # all of them, not up to the first
        return any(known) and scheme.lower() == b"bearer"


class KeyGuard:
    """Answers 401 to requests without a valid key, before anything of them is read."""

    def __init__(self, app: ASGIApp, *, get_keys: Callable[[], ApiKeys], refused: Callable[[ApiError], JSONResponse]):
        self._app, self._get_keys, self._refused = app, get_keys, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _path_in_app(scope) not in OPEN_PATHS:
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            if not self._get_keys().admit(given[0] if len(given) == 1 else b""):
                error = ApiError(
                    401,
                    "the API key is missing or wrong; send Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                return await self._refused(error)(scope, receive, send)
        await self._app(scope, receive, send)


def _path_in_app(scope: Scope) -> str:
    """The path without the prefix that the app is mounted under."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(prefix) if path.startswith(prefix + "/") else path


class BodyLimit:
    """Refuses bodies that are too large, by their announced length or as they come, and those that do not end."""

    def __init__(self, app: ASGIApp, *, refused: Callable[[ApiError], JSONResponse]):
        self._app, self._refused = app, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
            return await self._refused(_too_large())(scope, receive, send)
        await self._app(scope, _limited(receive), send)


def _limited(receive: Receive) -> Callable[[], Awaitable[Message]]:
    received, whole, deadline = 0, False, time.monotonic() + BODY_DEADLINE_S

    async def limited() -> Message:
        nonlocal received, whole
        if whole:  # then nothing but the client's leaving is waited for
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_DEADLINE_S:g} s; send it again") from None
        whole = not message.get("more_body", False)
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return limited


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes; send a shorter prompt")
