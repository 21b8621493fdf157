"""The page's files over HTTP, without a browser: types, headers, what is open, and what the files must not hold."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from serving.openai_api import make_app
from serving.page_routes import FOLDER, PAGE_PATHS, add_page
from serving.request_guards import ApiKeys
from tests.toy_endpoint import run

FILES = sorted(file.name for file in FOLDER.iterdir())


class KeyedModel:
    """As much of a model as the guards ask for."""

    metrics = SimpleNamespace(refused=lambda status: None)
    api_keys = ApiKeys(["secret"])
    page = True


def get(app: FastAPI, path: str, method: str = "GET") -> httpx.Response:
    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://toy") as http:
            return await http.request(method, path)

    return run(main())


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return make_app(KeyedModel)


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_open_typed_and_locked_down(app, name):
    path = "/" if name == "index.html" else f"/page/{name}"
    response = get(app, path)
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert response.headers["content-type"].startswith(kinds[Path(name).suffix])
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    policy = dict(part.split(maxsplit=1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert policy.keys() >= {"base-uri", "frame-ancestors", "require-trusted-types-for"}
    head = get(app, path, "HEAD")
    assert (head.status_code, head.content) == (200, b"")


def test_the_api_beside_the_open_files_wants_its_key(app):
    for path in ("/v1/models", "/metrics", "/page", "/page/", "/page/../v1/models", "/page/page_routes.py"):
        assert get(app, path).status_code == 401, path
    assert get(app, "/", "POST").status_code == 405
    assert not PAGE_PATHS & set(app.openapi()["paths"])


def test_the_page_can_be_left_out():
    class Pageless(KeyedModel):
        page = False

    answer = get(make_app(Pageless), "/")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "GET /: the page is switched off")
    assert get(make_app(Pageless), "/page/page.js").status_code == 404


@pytest.mark.parametrize("name", FILES)
def test_files_load_nothing_from_elsewhere_and_make_no_markup_of_text(name):
    text = (FOLDER / name).read_text("utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert "localStorage" not in text
    assert "document.cookie" not in text
    if name.endswith(".html"):
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", text)  # the policy refuses them


def test_an_installed_wheel_has_the_files():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["serving"]
    packed = {file.name for pattern in patterns for file in FOLDER.parent.glob(pattern)}
    assert packed >= set(FILES)


def test_a_package_without_the_files_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("serving.page_routes.FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"index\.html"):
        add_page(FastAPI(), lambda: True)
