"""A request's body as JSON, read strictly: what two readers could take for two things is refused in OpenAI's envelope.

`openai_api` routes its POST endpoints through `JsonRoute`; FastAPI then validates what it returns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from serving.api_errors import ApiError

MAX_KEYS = 256  # of one object: each unknown key is an error to describe
_MEND = "send a JSON object with Content-Type: application/json"


def parse_json(body: bytes) -> Any:
    """The value. Raises ApiError (400) for what is no JSON, no UTF-8, too deep, or has a key twice."""
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start}); {_MEND}") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}; {_MEND}") from None
    except RecursionError:
        raise ApiError(400, f"the body is nested too deeply; {_MEND}") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise ApiError(400, f"the body has a number with too many digits; {_MEND}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ApiError(400, f"the body has an object with {len(pairs)} keys; {MAX_KEYS} is the most")
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, f"{twice!a} is given twice; leave one out", param=_printable(twice))
    for name in found:
        if _printable(name) != name:
            raise ApiError(400, f"the key {name!a} holds half a surrogate pair, which is no character")
    return found


def _printable(name: str) -> str:
    return name.encode("utf-8", "replace").decode("utf-8")


class JsonRequest(Request):
    """A request whose JSON is read strictly."""

    async def json(self) -> Any:
        return parse_json(await self.body())


class JsonRoute(APIRoute):
    """A route that takes a JSON object and nothing else."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            # a browser sends other types to foreign servers unasked
            if request.method == "POST" and kind != "application/json":
                raise ApiError(415, f"the content type is {kind[:100] or 'missing'}; {_MEND}")
            return await handle(JsonRequest(request.scope, request.receive))

        return checked
