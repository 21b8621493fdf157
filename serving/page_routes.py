"""The page for people at `/`: the files of `serving/page/`, as they are. The page asks the endpoints beside it.

`make_app` mounts it. The files hold nothing secret, so they need no API key; what the page asks does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
_CONTENT_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "pane.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
    # Only files of this server, no inline script, no markup from strings (trusted types), and in nobody's frame: even
    # if a model's text became markup by mistake, it could neither run nor send anything away.
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/page/{name}"


PAGE_PATHS = frozenset(map(_path_of, _CONTENT_TYPES))


def add_page(app: FastAPI, wanted: Callable[[], bool]) -> None:
    """Serve the page's files from memory, 404 while it is not wanted.

    Raises FileNotFoundError where the package was installed without the files.
    """
    for name, content_type in _CONTENT_TYPES.items():
        headers = {"Content-Type": content_type} | _HEADERS
        _add_file(app, _path_of(name), (FOLDER / name).read_bytes(), headers, wanted)


def _add_file(app: FastAPI, path: str, content: bytes, headers: dict[str, str], wanted: Callable[[], bool]) -> None:
    async def file(request: Request) -> Response:
        if not wanted():
            raise HTTPException(404, "the page is switched off")
        return Response(content, headers=headers)

    app.add_route(path, file, methods=["GET"], include_in_schema=False)
