"""What a client gets back: the `openai` package's responses with how drafting went, and a stream's tokens."""

from __future__ import annotations

from typing import Literal

from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from drafters.acceptance import Acceptance


class SpeculativeDecoding(BaseModel):
    """How drafting went for one request, all its choices together. Beside our words, vLLM's names for the same."""

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


class StreamToken(BaseModel):
    """One token of a stream chunk, if `stream_options.include_tokens` asks for them."""

    id: int
    text: str  # what the token added to the text shown; those of a choice joined are its text
    origin: Literal["draft", "bonus", "plain"]  # an accepted draft; the target's own after drafts; without drafts
    index: int  # of the choice


class ChatResponse(ChatCompletion):
    """OpenAI's response, and how drafting went."""

    metrics: Metrics


class TextResponse(Completion):
    """OpenAI's response (a chunk of a stream has the same shape), and how drafting went; None in all but the last."""

    metrics: Metrics | None = None
    tokens: list[StreamToken] | None = None  # of a chunk, if they were asked for


class ChatChunk(ChatCompletionChunk):
    """OpenAI's chunk, and how drafting went; None in all but the last."""

    metrics: Metrics | None = None
    tokens: list[StreamToken] | None = None  # if they were asked for
