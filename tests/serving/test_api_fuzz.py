"""No body whatever makes the endpoints fail or hang, and what /openapi.json allows is taken.

Bodies are drawn from the app's own schema, then broken. More examples: `python -m tests.serving.test_api_fuzz 5000`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.toy_endpoint import Served
from tests.toy_folder import save_toy_target

DEADLINE_S = 20  # of one request
PATHS = ["/v1/chat/completions", "/v1/completions"]
EXAMPLES = 40
# of a body that the schema allows: what depends on the model, its load or several parameters together
MEANINGS = {
    *["model", "prompt", "messages", "n", "max_tokens", "max_completion_tokens", "stream_options", "top_logprobs"],
    *[f"prompt[{i}]" for i in range(9)],
}
# most examples get past what they would mostly fail on
LIKELY: dict[str, st.SearchStrategy] = {
    "model": st.just("toy"),
    "max_tokens": st.integers(1, 4),
    "max_completion_tokens": st.none(),
    "n": st.integers(1, 3),
    "stream": st.just(True),
    "prompt": st.text(min_size=1, max_size=9) | st.lists(st.integers(0, 255), min_size=1, max_size=9),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def of_schema(schema: dict[str, Any], known: dict[str, Any]) -> st.SearchStrategy:
    """Values that a JSON schema allows: as much of the language as ours uses; anything else is a KeyError here."""
    if "$ref" in schema:
        return of_schema(known[schema["$ref"].rsplit("/", 1)[1]], known)
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return st.one_of([of_schema(branch, known) for branch in schema[union]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    return OF_TYPE[schema["type"]](schema, known)


def _number(schema: dict[str, Any], known: Any) -> st.SearchStrategy:
    low, high = schema.get("minimum"), schema["maximum"]
    above = schema.get("exclusiveMinimum")
    return st.floats(low if above is None else above, high, exclude_min=above is not None)


def _integer(schema: dict[str, Any], known: Any) -> st.SearchStrategy:
    high = schema.get("maximum", schema.get("exclusiveMaximum", 2) - 1 if "exclusiveMaximum" in schema else None)
    return st.integers(int(schema["minimum"]), None if high is None else int(high)).filter(
        lambda value: "exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"]
    )


def _object(schema: dict[str, Any], known: Any) -> st.SearchStrategy:
    if "properties" not in schema:
        names = st.text(max_size=schema["propertyNames"]["maxLength"])
        return st.dictionaries(names, of_schema(schema["additionalProperties"], known), max_size=3)
    required = set(schema.get("required", ()))
    parts = {
        name: of_schema(part, known)
        if name not in LIKELY or schema["title"] == "Message"
        else likely(name, part, known)
        for name, part in schema["properties"].items()
    }
    return st.fixed_dictionaries(
        {name: part for name, part in parts.items() if name in required},
        optional={name: part for name, part in parts.items() if name not in required},
    )


def likely(name: str, part: dict[str, Any], known: dict[str, Any]) -> st.SearchStrategy:
    usual, other = LIKELY[name], of_schema(part, known)
    return st.integers(0, 9).flatmap(lambda dice: other if dice == 0 else usual)


OF_TYPE = {
    "null": lambda schema, known: st.none(),
    "boolean": lambda schema, known: st.booleans(),
    "string": lambda schema, known: st.text(min_size=schema.get("minLength", 0), max_size=8),
    "number": _number,
    "integer": _integer,
    "array": lambda schema, known: st.lists(
        of_schema(schema["items"], known), min_size=schema.get("minItems", 0), max_size=3
    ),
    "object": _object,
}


def allowed(app, path: str) -> st.SearchStrategy:
    schema = app.openapi()
    body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    # without a limit an answer takes all of the context, which null still asks for
    return of_schema(body, schema["components"]["schemas"]).map(lambda found: {"max_tokens": 2} | found)


@st.composite
def broken(draw, bodies: st.SearchStrategy) -> bytes:
    """An allowed body, changed in one or two places, as bytes."""
    body: Any = draw(bodies)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from([*body, "other"]))
        if draw(st.booleans()):
            body = body | {name: draw(JSON)}
        else:
            body = {key: value for key, value in body.items() if key != name}
    data = json.dumps(body).encode()
    kind = draw(st.sampled_from(["as it is", "as it is", "cut", "twice", "bytes", "part"]))
    at = draw(st.integers(0, len(data)))
    if kind == "cut":
        return data[:at]
    if kind == "bytes":
        return data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at:]
    if kind == "twice":
        return data[:1] + b'"model": "toy", "model": "toy"' + (b"," if len(data) > 2 else b"") + data[1:]
    return json.dumps(draw(JSON)).encode() if kind == "part" else data


def answer(served: Served, path: str, body: bytes) -> httpx.Response:
    async def main() -> httpx.Response:
        async with served.http() as http:
            return await http.post(path, content=body, headers={"Content-Type": "application/json"})

    return asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def check(response: httpx.Response) -> dict[str, Any] | None:
    """The error, if it is one; what it must look like."""
    assert response.status_code in (200, 400, 404, 413, 415, 503), response.text
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in response.text
        else:
            assert response.json()["usage"]["completion_tokens"] > 0
        return None
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert response.status_code != 503 or "retry-after" in response.headers
    return error


def fuzz(served: Served, path: str, examples: int) -> Counter[str]:
    """Outcomes of allowed and broken bodies."""
    bodies, outcomes = allowed(served.app, path), Counter[str]()
    config = settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )

    @config
    @given(bodies)
    def allowed_ones(body: dict[str, Any]) -> None:
        response = answer(served, path, json.dumps(body).encode())
        error = check(response)
        outcomes[f"allowed {response.status_code}"] += 1
        assert error is None or error["param"] in MEANINGS, (body, error)

    @config
    @given(broken(bodies))
    def broken_ones(body: bytes) -> None:
        response = answer(served, path, body)
        check(response)
        outcomes[f"broken {response.status_code}"] += 1

    allowed_ones()
    broken_ones()
    return outcomes


@pytest.fixture(scope="module")
def served(toy_target_dir) -> Iterator[Served]:
    made = Served(toy_target_dir, max_len=64)
    yield made
    assert made.inner.free_slots == made.inner.num_slots
    assert made.engine.num_in_flight == 0
    assert made.engine.healthy
    assert made.engine.close(deadline_s=0)


@pytest.mark.parametrize("path", PATHS)
def test_bodies_from_the_schema_and_broken_ones(served, path):
    outcomes = fuzz(served, path, EXAMPLES)
    assert outcomes["allowed 200"] > EXAMPLES // 4
    assert outcomes["broken 400"] > EXAMPLES // 4


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        target = Served(save_toy_target(Path(folder) / "toy"), max_len=64)
        for each in PATHS:
            print(each, dict(fuzz(target, each, int(sys.argv[1]))))
        target.engine.close(deadline_s=0)
