"""Requests are taken or refused by name, and responses are what the `openai` package reads."""

from __future__ import annotations

import pytest
from openai.types.chat import ChatCompletion
from pydantic import ValidationError

from drafters.acceptance import Acceptance
from serving.api_schema import (
    NEUTRAL,
    OPENAI_PARAMETERS,
    ApiError,
    ChatRequest,
    ChatResponse,
    TextRequest,
    error_of_validation,
    metrics_of,
    usage_of,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def refusal(model: type, body) -> ApiError:
    with pytest.raises((ValidationError, ApiError)) as caught:
        model.model_validate(body)
    if isinstance(caught.value, ApiError):
        return caught.value
    return error_of_validation(caught.value.errors(), body)


def test_every_supported_parameter_is_taken():
    common = {
        **{"temperature": 1, "top_p": 0.9, "top_k": 5, "seed": -3, "stop": ["a", "b"], "max_tokens": 7, "n": 1},
        **{"stream": True, "stream_options": {"include_usage": True}, "user": "u", "store": False},
        "metadata": {"a": "b"},
    }
    chat = ChatRequest.model_validate(CHAT | common | {"max_completion_tokens": 3})
    assert (chat.limit, chat.stops, chat.include_usage, chat.temperature) == (3, ["a", "b"], True, 1.0)
    text = TextRequest.model_validate(TEXT | common | {"prompt": [1, 2], "stop": "x"})
    assert (text.limit, text.stops, text.prompt) == (7, ["x"], [1, 2])
    assert TextRequest.model_validate(TEXT).limit == 16
    assert ChatRequest.model_validate(CHAT).limit is None


def test_messages_as_strings_or_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "audio": None,
        "tool_calls": None,
        "annotations": [],
    }
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}, answer]
    request = ChatRequest.model_validate({"model": "m", "messages": messages})
    assert [m.for_template() for m in request.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "yes"},
    ]


@pytest.mark.parametrize("name", sorted(OPENAI_PARAMETERS))
def test_null_is_not_given(name):
    required = name in ("model", "messages", "prompt")
    for model, body in ((ChatRequest, CHAT), (TextRequest, TEXT)):
        if not (required and name in body):
            model.model_validate(body | {name: None})


@pytest.mark.parametrize(
    "name", sorted(OPENAI_PARAMETERS - ChatRequest.model_fields.keys() - TextRequest.model_fields.keys())
)
def test_what_is_not_supported_is_refused_by_name(name):
    for model, body in ((ChatRequest, CHAT), (TextRequest, TEXT)):
        error = refusal(model, body | {name: {"x": 1}})
        assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
        assert name in str(error)
        if name in NEUTRAL:
            model.model_validate(body | {name: NEUTRAL[name]})


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"n": 2}, "n"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"logprobs": 0}, "logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"model": 3}, "model"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_bad_values_are_refused_by_name(change, param):
    error = refusal(ChatRequest, CHAT | change)
    assert error.status == 400
    assert error.param == param
    assert error.envelope()["error"]["param"] == param
    assert error.envelope()["error"]["type"] == "invalid_request_error"
    assert "\n" not in str(error)


@pytest.mark.parametrize("prompt", ["", [], [-1], [1.5], ["a", "b"], [[1], [2]], {"a": 1}])
def test_bad_prompts_are_refused(prompt):
    assert refusal(TextRequest, TEXT | {"prompt": prompt}).param.startswith("prompt")


def test_an_unknown_name_gets_a_hint():
    assert "did you mean temperature?" in str(refusal(ChatRequest, CHAT | {"temprature": 1}))
    assert refusal(ChatRequest, {"messages": CHAT["messages"]}).param == "model"
    assert refusal(ChatRequest, ["no object"]).param is None


def test_a_response_is_what_the_openai_package_reads():
    acceptance = Acceptance()
    acceptance.record(3, 2)
    acceptance.record(3, 0)
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}
    response = ChatResponse(
        id="1", object="chat.completion", created=1, model="m", choices=[choice], usage=usage_of(3, 4),
        metrics=metrics_of(acceptance, "mtp"),
    )  # fmt: skip
    read = ChatCompletion.model_validate(response.model_dump(mode="json", exclude_unset=True))
    assert read.usage is not None
    assert read.usage.total_tokens == 7
    spec = read.metrics["speculative_decoding"]  # type: ignore[attr-defined]
    assert (spec["drafter"], spec["tau"], spec["rounds"]) == ("mtp", 2.0, 2)
    assert spec["acceptance_by_position"] == [0.5, 0.5, 0.0]
    assert metrics_of(Acceptance(), None).speculative_decoding.tau is None
