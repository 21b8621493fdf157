"""Errors as a client sees them: the status, and OpenAI's envelope that names the parameter."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from openai.types import ErrorObject
from pydantic import BaseModel


class ApiError(Exception):
    """An answer that is an error: the HTTP status and what goes into OpenAI's envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 0,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = (headers or {}) | ({"Retry-After": str(retry_after_s)} if retry_after_s else {})

    def envelope(self) -> dict[str, Any]:
        """The body: `{"error": {"message", "type", "param", "code"}}`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = ErrorObject(message=str(self), type=kind, param=self.param, code=self.code)
        return {"error": error.model_dump(exclude_unset=True)}


class ErrorResponse(BaseModel):
    """The body of every error."""

    error: ErrorObject


def _parameter_path(error: Any, body: Any) -> list[str]:
    """`["messages", "[0]", "content"]` from pydantic's location, which also names the branches of unions."""
    path: list[str] = []
    for part in error["loc"]:
        if isinstance(part, int):
            if isinstance(body, list) and part < len(body):
                path.append(f"[{part}]")
                body = body[part]
        elif isinstance(body, dict) and (part in body or error["type"] == "missing"):
            path.append(part)
            body = body.get(part)
    return path


def _most_telling(errors: Sequence[Any], body: Any) -> tuple[Any, list[str]]:
    """The error to show with its path: of a union's branches, the one that got furthest."""
    paths = [(error, _parameter_path(error, body)) for error in errors]
    same = [(error, path) for error, path in paths if path[:1] == paths[0][1][:1]]
    return max(same, key=lambda item: (len(item[1]), not item[0]["type"].endswith("_type")))


def error_of_validation(errors: Sequence[Any], body: Any, known: Iterable[str], unsupported: Iterable[str]) -> ApiError:
    """Pydantic's errors as a 400 that names the parameter.

    `known`: parameters that are taken, one of which may have been meant. `unsupported`: those of OpenAI that are not.
    """
    errors = [error | {"loc": [part for part in error["loc"] if part != "body"]} for error in errors]
    if not isinstance(body, dict):
        return ApiError(400, "the body must be a JSON object")
    error, path = _most_telling(errors, body)
    param = ".".join(path).replace(".[", "[") or None
    if error["type"] == "extra_forbidden":
        name = str(error["loc"][-1])
        if len(path) > 1 or name in unsupported:
            return ApiError(400, f"{param} is not supported; leave it out", param=param, code="unsupported_parameter")
        near = difflib.get_close_matches(name, list(known), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return ApiError(400, f"unknown parameter {name}{hint}", param=param, code="unknown_parameter")
    if error["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    return ApiError(400, f"{param}: {error['msg']}", param=param, code="invalid_value")
