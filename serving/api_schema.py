"""What a client sends and gets back: request models of the OpenAI wire format, its errors, responses with metrics.

A parameter that Draftloop does not know or does not support is refused by name; it is never ignored. Values that ask
for nothing (null, a penalty of 0, an empty list of tools) are taken as not given, since clients send them.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from openai.types import Completion, CompletionUsage, ErrorObject
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from drafters.acceptance import Acceptance

OPENAI_PARAMETERS = frozenset(ChatParams.__annotations__) | frozenset(TextParams.__annotations__) | {"stream"}

# What leaves an answer as it is, of the parameters that are not supported.
NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "tools": [],
    "functions": [],
    "tool_choice": "none",
    "function_call": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "service_tier": "auto",
    "min_p": 0,
    "repetition_penalty": 1,
    # in messages that came out of an answer
    "tool_calls": [],
    "annotations": [],
}


class ApiError(Exception):
    """An answer that is an error: the HTTP status and what goes into OpenAI's envelope."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}

    def envelope(self) -> dict[str, Any]:
        """The body: `{"error": {"message", "type", "param", "code"}}`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = ErrorObject(message=str(self), type=kind, param=self.param, code=self.code)
        return {"error": error.model_dump(exclude_unset=True)}


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("holds half a surrogate pair, which is no character") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[Text, Field(min_length=1)]


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None:
        return True
    neutral = NEUTRAL.get(name)
    return neutral is not None and value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class WireModel(BaseModel):
    """JSON as it is: no strings for numbers, no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if not _asks_for_nothing(k, v)}


class StreamOptions(WireModel):
    include_usage: bool = False  # one more chunk, after the last text, with the usage


class TextPart(WireModel):
    type: Literal["text"]
    text: Text


class Message(WireModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]

    def for_template(self) -> dict[str, str]:
        """As chat templates read it: one string; "developer" is OpenAI's newer word for "system"."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class GenerationRequest(WireModel):
    """What both endpoints take."""

    model: Text
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None  # None: the target's own default
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None  # None: the target's own default
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # -1 or 0: all tokens; None: the target's own default
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] = []
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Text | None = None  # taken, and not used
    store: bool | None = None  # False keeps the request out of the traffic log
    metadata: dict[Text, Text] | None = None  # taken, and not used

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streams: set stream to true", param="stream_options")
        return self


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # the newer name of max_tokens

    @property
    def limit(self) -> int | None:
        """Tokens to emit at most; None: as many as the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TextRequest(GenerationRequest):
    """`POST /v1/completions`. One prompt per request: text, or token ids."""

    prompt: Annotated[Text, Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)]

    @property
    def limit(self) -> int | None:
        """Tokens to emit at most; 16 by default, as at OpenAI."""
        return 16 if self.max_tokens is None else self.max_tokens


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


def error_of_validation(errors: Sequence[Any], body: Any) -> ApiError:
    """Pydantic's errors as a 400 that names the parameter."""
    errors = [error | {"loc": [part for part in error["loc"] if part != "body"]} for error in errors]
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {errors[0].get('ctx', {}).get('error', errors[0]['msg'])}")
    if not isinstance(body, dict):
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    error, path = _most_telling(errors, body)
    param = ".".join(path).replace(".[", "[") or None
    if error["type"] == "extra_forbidden":
        name = str(error["loc"][-1])
        if len(path) > 1 or name in OPENAI_PARAMETERS or name in NEUTRAL:
            return ApiError(400, f"{param} is not supported; leave it out", param=param, code="unsupported_parameter")
        near = difflib.get_close_matches(name, [*ChatRequest.model_fields, *TextRequest.model_fields], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return ApiError(400, f"unknown parameter {name}{hint}", param=param, code="unknown_parameter")
    if error["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    return ApiError(400, f"{param}: {error['msg']}", param=param, code="invalid_value")


class SpeculativeDecoding(BaseModel):
    """How drafting went for one request. Beside our words, vLLM's names for the same figures, which tools read."""

    drafter: str | None  # None: decoded plainly
    tau: float | None  # mean of (accepted drafts + 1) over the rounds; None without rounds
    rounds: int
    acceptance_by_position: list[float]
    mean_acceptance_length: float | None  # tau
    num_spec_steps: int  # rounds
    draft_acceptance_rate: float | None
    num_draft_tokens: int  # proposed in all rounds together
    num_accepted_draft_tokens: int


class Metrics(BaseModel):
    speculative_decoding: SpeculativeDecoding


def metrics_of(acceptance: Acceptance, drafter: str | None) -> Metrics:
    """The `metrics` of a response."""
    return Metrics(
        speculative_decoding=SpeculativeDecoding(
            drafter=drafter,
            tau=acceptance.tau,
            rounds=acceptance.rounds,
            acceptance_by_position=acceptance.by_position,
            mean_acceptance_length=acceptance.tau,
            num_spec_steps=acceptance.rounds,
            draft_acceptance_rate=acceptance.rate,
            num_draft_tokens=acceptance.proposed,
            num_accepted_draft_tokens=acceptance.accepted,
        )
    )


def usage_of(prompt_tokens: int, completion_tokens: int) -> CompletionUsage:
    """Token counts of a response: of the answer, those that were emitted."""
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


class ChatResponse(ChatCompletion):
    """OpenAI's response, and how drafting went."""

    metrics: Metrics


class TextResponse(Completion):
    """OpenAI's response (a chunk of a stream has the same shape), and how drafting went; None in all but the last."""

    metrics: Metrics | None = None


class ChatChunk(ChatCompletionChunk):
    """OpenAI's chunk, and how drafting went; None in all but the last."""

    metrics: Metrics | None = None
