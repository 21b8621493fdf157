"""What a client sends: request models of the OpenAI wire format and our own extensions, described in /openapi.json.

A parameter that Draftloop does not know or does not support is refused by name; it is never ignored. Values that ask
for nothing (null, a penalty of 0, an empty list of tools) are taken as not given, since clients send them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from serving.api_errors import ApiError, error_of_validation

OPENAI_PARAMETERS = frozenset(ChatParams.__annotations__) | frozenset(TextParams.__annotations__) | {"stream"}
MAX_CHOICES = 128  # prompts * n of one request

# What leaves an answer as it is, of the parameters that are not supported.
NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
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
}


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("holds half a surrogate pair, which is no character") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]
# the first bad item is the error: a list of a million of them is not described item by item
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
FilledText = Annotated[str, Field(min_length=1), AfterValidator(_encodable)]
MetadataKey = Annotated[str, Field(max_length=64), AfterValidator(_encodable)]
MetadataText = Annotated[str, Field(max_length=512), AfterValidator(_encodable)]
Limit = Annotated[int, Field(ge=1, lt=2**31)]


def _equals(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _describe_what_asks_for_nothing(schema: dict[str, Any], model: type[WireModel]) -> None:
    """Null is taken for everything that is not required, and so are the neutral values."""
    properties = schema["properties"]
    for name in properties.keys() - set(schema.get("required", [])):
        was = properties[name]
        about = {key: was.pop(key) for key in ("title", "description", "default") if key in was}
        branches = was.get("anyOf", [was])
        properties[name] = about | {"anyOf": [*(b for b in branches if b != {"type": "null"}), {"type": "null"}]}
    for name, value in model.neutral.items():
        properties[name] = {"enum": [value, None], "description": "Not supported: taken where it asks for nothing."}
    schema["additionalProperties"] = {"type": "null"}


class WireModel(BaseModel):
    """JSON as it is: no strings for numbers, no unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra=_describe_what_asks_for_nothing,
    )
    neutral: ClassVar[Mapping[str, Any]] = {}  # values of unsupported keys that are taken as not given

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            name: value
            for name, value in values.items()
            if value is not None and not (name in cls.neutral and _equals(value, cls.neutral[name]))
        }


class StreamOptions(WireModel):
    neutral = {"include_obfuscation": False}

    include_usage: Annotated[bool, Field(description="One more chunk, after the last text, with the usage.")] = False
    include_tokens: Annotated[
        bool,
        Field(
            description="Draftloop's own. Every chunk has `tokens` beside `choices`, with id, text, origin, index: "
            "`text` is what the token added to the text shown, `origin` is `draft` (an accepted draft), `bonus` (the "
            "target's own token after a round's drafts) or `plain` (no drafts in the round, or the first token), "
            "`index` is that of the choice.",
        ),
    ] = False


class TextPart(WireModel):
    type: Literal["text"]
    text: Text


class Message(WireModel):
    neutral = {"tool_calls": [], "annotations": []}  # in messages that came out of an answer

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]

    def for_template(self) -> dict[str, str]:
        """As chat templates read it: one string; "developer" is OpenAI's newer word for "system"."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class GenerationRequest(WireModel):
    """What both endpoints take."""

    neutral = NEUTRAL

    model: Text
    temperature: Annotated[
        float | None, Field(ge=0, le=2, description="0: greedy; null: the target's own default.")
    ] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, description="Null: the target's own default.")] = None
    top_k: Annotated[
        int | None,
        Field(ge=-1, lt=2**31, description="Not OpenAI's. -1 or 0: all tokens; null: the target's own default."),
    ] = None
    seed: Annotated[
        int | None,
        Field(ge=-(2**63), lt=2**63, description="Same prompt, seed and parameters: same tokens, whatever else runs."),
    ] = None
    stop: FilledText | Annotated[list[FilledText], Field(max_length=16)] = []
    max_tokens: Limit | None = None
    max_completion_tokens: Annotated[Limit | None, Field(description="The newer name of max_tokens.")] = None
    n: Annotated[
        int, Field(ge=1, le=MAX_CHOICES, description=f"Choices per prompt; prompts * n is at most {MAX_CHOICES}.")
    ] = 1
    num_draft_tokens: Annotated[
        int | None,
        Field(
            ge=0,
            lt=2**31,
            description="Draftloop's own. Most drafts per round for this request, of a draft tree all its nodes; 0: it "
            "is decoded plainly; null: as many as the server drafts.",
        ),
    ] = None
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, Field(description="Only with stream: true.")] = None
    user: Annotated[Text | None, Field(description="Taken, and not used.")] = None
    store: Annotated[bool | None, Field(description="False keeps the request out of the traffic log.")] = None
    metadata: Annotated[
        dict[MetadataKey, MetadataText] | None, Field(max_length=16, description="Taken, and not used.")
    ] = None

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def include_tokens(self) -> bool:
        """Whether the chunks of a stream carry their tokens."""
        return self.stream_options is not None and self.stream_options.include_tokens

    @property
    def limit(self) -> int | None:
        """Tokens to emit at most; None: as many as the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_name(self) -> str:
        """The parameter that `limit` came from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """How many log-probabilities beside each token's own; None: none at all."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_what_belongs_together(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streams: set stream to true", param="stream_options")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens"
            )
        return self


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    logprobs: Annotated[
        bool, Field(description="The target's log-probability of every token, before sampling shapes it.")
    ] = False
    top_logprobs: Annotated[
        int | None, Field(ge=0, le=20, description="And of so many most probable ones, per token.")
    ] = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: set it to true", param="top_logprobs")
        return self


def _kind_of_prompt(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return "text"
    if not isinstance(prompt, list):
        return None
    if prompt and isinstance(prompt[0], str):
        return "texts"
    return "token lists" if prompt and isinstance(prompt[0], list) else "token ids"


class TextRequest(GenerationRequest):
    """`POST /v1/completions`. Prompts are texts or lists of token ids; a single one stands alone or in a list."""

    prompt: Annotated[
        Annotated[FilledText, Tag("text")]
        | Annotated[list[FilledText], Field(min_length=1, fail_fast=True), Tag("texts")]
        | Annotated[TokenIds, Tag("token ids")]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True), Tag("token lists")],
        Discriminator(
            _kind_of_prompt,
            custom_error_type="prompt_kind",
            custom_error_message="give a text, a list of texts, of token ids, or of lists of token ids",
        ),
    ]
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=5, description="The target's log-probability of every token and of so many most probable ones."),
    ] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: Any = [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
        return prompts

    @property
    def limit(self) -> int | None:
        """Tokens to emit at most; 16 by default, as at OpenAI."""
        return super().limit or 16

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def error_of_request(error: ValidationError | Any, body: Any) -> ApiError:
    """What pydantic (or FastAPI) found wrong with a body, as a 400 that names the parameter."""
    known = {*ChatRequest.model_fields, *TextRequest.model_fields}
    return error_of_validation(error.errors(), body, known, OPENAI_PARAMETERS | NEUTRAL.keys())
