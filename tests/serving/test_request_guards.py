"""API keys, bodies that are no strict JSON, prompts that cannot fit, wrong paths and methods: one envelope for all."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from serving.json_body import MAX_KEYS
from serving.prompt_encoding import PromptEncoder, PromptTooLongError
from serving.request_guards import ApiKeyError, ApiKeys
from serving.token_bound import TokenBound, token_bound
from tests.serving.test_detokenize import TOKENIZERS
from tests.toy_endpoint import CHAT, TEXT, Served, post, run

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def served(toy_target_dir) -> Iterator[Served]:
    made = Served(toy_target_dir, api_keys=["first", "schlüssel"])
    yield made
    assert made.inner.stats.emitted_tokens > 0
    assert made.engine.close(deadline_s=0)


@pytest.fixture(scope="module")
def open_door(toy_target_dir) -> Iterator[Served]:
    made = Served(toy_target_dir)
    yield made
    assert made.engine.close(deadline_s=0)


def error_of(response) -> dict:
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.json()["error"]


@pytest.mark.parametrize(
    "header", [None, "first", "Bearer", "Bearer ", "Bearer firs", "Bearer first2", "Basic first", "Bearer FIRST"]
)
def test_without_a_key_nothing_is_answered_but_health(served, header):
    headers = {} if header is None else {"Authorization": header}

    async def main():
        async with served.http() as http:
            paths = ("/health", "/v1/models", "/v1/models/toy", "/metrics", "/v1/nowhere")
            got = [await http.get(path, headers=headers) for path in paths]
            return got, await http.post("/v1/completions", content=b"{no json", headers=headers | JSON)

    (health, *others), posted = run(main())
    assert health.status_code == 200
    for response in (*others, posted):
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert error_of(response)["code"] == "invalid_api_key"


def test_under_a_route_prefix_the_same_paths_are_open(served):
    async def main():
        mounted = httpx.ASGITransport(app=served.app, root_path="/models/toy")
        async with httpx.AsyncClient(transport=mounted, base_url="http://toy/models/toy") as http:
            return [(await http.get(path)).status_code for path in ("/health", "/", "/v1/models")]

    assert run(main()) == [200, 200, 401]


@pytest.mark.parametrize("key", ["first", "schlüssel"])
def test_any_of_the_keys_opens(served, key):
    authorized = {"Authorization": f"Bearer {key}".encode()}
    assert post(served, "/v1/completions", TEXT, headers=authorized).status_code == 200
    twice = [("Authorization", "Bearer first"), ("Authorization", "Bearer other"), *JSON.items()]
    assert post(served, "/v1/completions", b"{}", headers=twice).status_code == 401


def test_the_client_names_its_key(served):
    with pytest.raises(openai.AuthenticationError) as caught:
        run(served.client().models.list())
    assert caught.value.code == "invalid_api_key"


def test_keys_come_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\n\n one \ntwo\n")
    keys = ApiKeys.read(path)
    assert [keys.admit(f"Bearer {key}".encode()) for key in ("one", "two", "# ours", "")] == [True, True, False, False]
    path.write_text("# none yet\n")
    for bad in (path, tmp_path / "missing"):
        with pytest.raises(ApiKeyError, match=bad.name):
            ApiKeys.read(bad)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "JSON object"),
        (b"null", 400, "JSON object"),
        (b"{not json", 400, "not valid JSON"),
        (b'{"model": "toy", "prompt": "\xff"}', 400, "not UTF-8"),
        ('{"model": "toy", "prompt": "x"}'.encode("utf-16"), 400, "not UTF-8"),
        (b'\xef\xbb\xbf{"model": "toy", "prompt": "x"}', 400, "not valid JSON"),
        (b'{"model": "toy", "prompt": "x", "prompt": "y"}', 400, "twice"),
        (b'{"model": "toy", "prompt": "x", "metadata": {"a": "b", "a": "c"}}', 400, "twice"),
        (b'{"model": "toy", "prompt": "x", "\\ud800": 1}', 400, "surrogate"),
        (b'{"model": "\\ud800", "prompt": "x"}', 400, "surrogate"),
        (b'{"model": "toy", "prompt": "x", "stop": ["\\udfff"]}', 400, "stop[0]"),
        (b'{"model": "toy", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, "digits"),
        (b'{"model": "toy", "prompt": "x", "seed": ' + b"9" * 500 + b"}", 400, "seed"),
        (b'{"model": "toy", "prompt": "x", "temperature": ' + b"9" * 500 + b"}", 400, "temperature"),
        (b'{"model": "toy", "prompt": [' + b"9" * 500 + b"]}", 400, "prompt"),
        (b'{"model": "toy", "prompt": "x", "temperature": 1e999}', 400, "temperature"),
        (b'{"model": "toy", "prompt": "x", "top_p": -Infinity}', 400, "top_p"),
        (b'{"a":' * 100_000, 400, "nested"),
        (b'{"model": "toy", "prompt": ' + b"[" * 500 + b"1" + b"]" * 500 + b"}", 400, "prompt"),
        (("{" + ",".join(f'"{i}":1' for i in range(MAX_KEYS + 1)) + "}").encode(), 400, "keys"),
    ],
)  # fmt: skip
def test_bodies_that_are_no_strict_json(open_door, body, status, words):
    response = post(open_door, "/v1/completions", body, headers=JSON)
    assert response.status_code == status
    assert words in error_of(response)["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_other_content_types(open_door, kind):
    response = post(open_door, "/v1/completions", b'{"model": "toy", "prompt": "x"}', headers={"Content-Type": kind})
    assert response.status_code == 415
    assert "Content-Type: application/json" in error_of(response)["message"]
    body = b'{"model": "toy", "prompt": "x", "max_tokens": 1}'
    for taken in ("application/json", "Application/JSON; charset=utf-8"):
        assert post(open_door, "/v1/completions", body, headers={"Content-Type": taken}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *[("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("POST", "/health", 405)],
        *[("GET", "/v1", 404), ("POST", "/v1/embeddings", 404), ("GET", "/v1/models/", 404)],
        *[("POST", "/v1/chat/completions/", 404), ("GET", "/v1/models/%ff%00", 404)],
    ],
)
def test_wrong_paths_and_methods(open_door, method, path, status):
    async def main():
        async with open_door.http() as http:
            return await http.request(method, path, json={})

    response = run(main())
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_text_that_cannot_fit_is_not_tokenised(toy_target_dir, path):
    served, tokenised = Served(toy_target_dir), []
    inner = served.model._prompts.tokenizer

    class Watched:
        def encode(self, text, **options):
            tokenised.append(text)
            return inner.encode(text, **options)

    served.model._prompts.tokenizer = Watched()
    text = "x" * 4_000_000
    body = (
        TEXT | {"prompt": text} if path == "completions" else CHAT | {"messages": [{"role": "user", "content": text}]}
    )
    error = error_of(post(served, f"/v1/{path}", body))
    assert error["code"] == "context_length_exceeded"
    assert "at least" in error["message"]
    assert not tokenised
    assert served.engine.close(deadline_s=0)


def bpe(without: str = "") -> Tokenizer:
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without))
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_the_bound_of_a_token_is_only_taken_where_it_holds(open_door):
    plain, composing, stripping, unknown = bpe(), bpe(), bpe(), Tokenizer(models.BPE({"a": 0}, []))
    assert token_bound(plain) == TokenBound(1)
    composing.normalizer = normalizers.NFC()
    assert token_bound(composing) == TokenBound(4)
    stripping.normalizer = normalizers.Strip()
    assert token_bound(stripping) is None
    assert token_bound(unknown) is None
    assert token_bound(TOKENIZERS["metaspace"]) == TokenBound(len("<0x00>"))
    encoder = PromptEncoder(open_door.target)
    assert len(encoder.text("x" * 40, most=40)) == 40
    with pytest.raises(PromptTooLongError):
        encoder.text("x" * (40 * token_bound(encoder.tokenizer).characters + 1), most=40)


@given(st.text(st.sampled_from("ab \u0301é€\u0000\u0004👍"), max_size=40))
def test_no_text_has_fewer_tokens_than_the_bound(text):
    lacking = bpe(without="\u0100\u0104")  # the stand-ins of bytes 0 and 4
    assert sorted(token_bound(lacking).dropped) == [0, 4]
    composing = bpe()
    composing.normalizer = normalizers.NFC()
    for tokenizer in (lacking, composing, bpe(), TOKENIZERS["metaspace"]):
        assert len(tokenizer.encode(text).ids) >= token_bound(tokenizer).least(text)
