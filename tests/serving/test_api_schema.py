"""Requests are taken or refused by name, and responses are what the `openai` package reads."""

from __future__ import annotations

import pytest
from openai.types.chat import ChatCompletion
from pydantic import ValidationError

from drafters.acceptance import Acceptance
from serving.api_errors import ApiError
from serving.api_response import ChatResponse, metrics_of, usage_of
from serving.api_schema import NEUTRAL, OPENAI_PARAMETERS, ChatRequest, TextRequest, error_of_request

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def refusal(model: type, body) -> ApiError:
    with pytest.raises((ValidationError, ApiError)) as caught:
        model.model_validate(body)
    if isinstance(caught.value, ApiError):
        return caught.value
    return error_of_request(caught.value, body)


def test_every_supported_parameter_is_taken():
    common = {
        **{"temperature": 1, "top_p": 0.9, "top_k": 5, "seed": -3, "stop": ["a", "b"], "max_tokens": 7, "n": 4},
        **{"stream": True, "stream_options": {"include_usage": True, "include_tokens": True}, "user": "u"},
        **{"store": False, "metadata": {"a": "b"}, "num_draft_tokens": 0},
    }
    chat = ChatRequest.model_validate(CHAT | common | {"logprobs": True, "top_logprobs": 20})
    assert (chat.limit, chat.stops, chat.include_usage, chat.include_tokens) == (7, ["a", "b"], True, True)
    assert (chat.temperature, chat.n, chat.num_draft_tokens, chat.num_logprobs) == (1.0, 4, 0, 20)
    text = TextRequest.model_validate(TEXT | common | {"stop": "x", "logprobs": 0})
    assert (text.limit, text.stops, text.num_logprobs) == (7, ["x"], 0)
    assert TextRequest.model_validate(TEXT).limit == 16
    assert TextRequest.model_validate(TEXT).num_logprobs is None
    assert (ChatRequest.model_validate(CHAT).limit, ChatRequest.model_validate(CHAT).num_logprobs) == (None, None)
    assert ChatRequest.model_validate(CHAT | {"logprobs": True}).num_logprobs == 0
    newer = ChatRequest.model_validate(CHAT | {"max_completion_tokens": 3, "max_tokens": 3})
    assert (newer.limit, newer.limit_name) == (3, "max_completion_tokens")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_a_prompt_alone_and_prompts_in_a_list(prompt, prompts):
    assert TextRequest.model_validate(TEXT | {"prompt": prompt}).prompts == prompts


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
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
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
        ({"metadata": dict.fromkeys("abcdefghijklmnopq", "x")}, "metadata"),
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


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        *[("", "prompt"), ([], "prompt"), ({"a": 1}, "prompt"), (1, "prompt"), ([-1], "prompt[0]")],
        *[([1, 1.5], "prompt[1]"), (["a", ""], "prompt[1]"), (["a", 1], "prompt[1]"), ([[1], []], "prompt[1]")],
        *[([[1], [2, True]], "prompt[1][1]"), ([None], "prompt[0]"), (["\ud800"], "prompt[0]")],
    ],
)
def test_bad_prompts_are_refused(prompt, param):
    assert refusal(TextRequest, TEXT | {"prompt": prompt}).param == param


def test_of_a_million_bad_items_the_first_is_described():
    for model, body in (
        (TextRequest, TEXT | {"prompt": [-1] * 10**6}),
        (ChatRequest, CHAT | {"messages": [1] * 10**6}),
    ):
        with pytest.raises(ValidationError) as caught:
            model.model_validate(body)
        assert caught.value.error_count() == 1
    assert refusal(TextRequest, TEXT | {"logprobs": 6}).param == "logprobs"


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
