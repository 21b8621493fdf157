"""Ask a running endpoint once, as any client would: with the `openai` package, streaming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 60.0  # longest silence of the endpoint


class AskError(RuntimeError):
    """The endpoint did not answer; one line."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A streamed answer and how it was decoded."""

    text: str
    completion_tokens: int
    acceptance: dict[str, Any]  # metrics.speculative_decoding of the last chunk


def ask(base_url: str, model: str, question: str, max_tokens: int, on_text: Callable[[str], None]) -> Answer:
    """Stream one greedy answer. Raises AskError."""
    from openai import OpenAIError

    try:
        return _stream(base_url, model, question, max_tokens, on_text)
    except OpenAIError as error:
        raise AskError(f"{base_url} did not answer ({error}); see Ray's serve logs, then run again") from error


def _stream(base_url: str, model: str, question: str, max_tokens: int, on_text: Callable[[str], None]) -> Answer:
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none", timeout=TIMEOUT_S, max_retries=0)
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts: list[str] = []
    tokens, acceptance = 0, {}
    for chunk in stream:
        for choice in chunk.choices:
            if choice.delta.content:
                parts.append(choice.delta.content)
                on_text(choice.delta.content)
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        metrics = getattr(chunk, "metrics", None)
        if metrics:
            acceptance = metrics["speculative_decoding"]
    return Answer(text="".join(parts), completion_tokens=tokens, acceptance=acceptance)
