"""From a request to text and back: prompt -> token ids -> the engine's stream -> text, in pieces as they come.

`openai_api` calls it with validated requests; it knows no HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from drafters.acceptance import Acceptance
from drafters.target import Target
from serving.api_schema import ApiError, ChatRequest, GenerationRequest, TextRequest
from serving.chat_options import ChatOptions
from serving.detokenize import Detokenizer
from serving.engine.async_engine import AsyncEngine, EngineError
from serving.engine.sampling import Sampling
from serving.engine.sampling_defaults import SamplingDefaults
from serving.engine.sequence import Completion
from serving.metrics import RequestMetrics, RequestRecord
from serving.prompt_encoding import PromptEncoder, PromptError
from serving.traffic_log import TrafficLog
from serving.traffic_schema import TrafficRow


@dataclass(frozen=True, kw_only=True)
class End:
    """How an answer ended."""

    finish_reason: Literal["stop", "length"]
    num_tokens: int  # emitted, up to the one that completed a stop string
    acceptance: Acceptance
    drafter: str | None


@dataclass(frozen=True)
class Piece:
    """Text that is safe to show. The first piece comes with the first token, even if there is no text yet."""

    text: str
    end: End | None = None  # set in the last piece


class ServedModel:
    """A target behind its engine, as the endpoints see it."""

    def __init__(
        self,
        engine: AsyncEngine,
        target: Target,
        *,
        name: str,
        max_len: int,
        metrics: RequestMetrics,
        chat_options: ChatOptions | None = None,
        traffic: TrafficLog | None = None,
    ):
        self.engine = engine
        self.name = name
        self.max_len = max_len
        self.metrics = metrics
        self.traffic = traffic
        metrics.traffic = traffic.counts if traffic else None
        self.drafter: dict[str, str | None] = {"name": None, "path": None}  # what /v1/models reports
        self.defaults = SamplingDefaults.of(target.generation_config)
        self._prompts = PromptEncoder(target, chat_options)

    async def chat_prompt(self, request: ChatRequest) -> list[int]:
        """Token ids of the messages in the target's chat template."""
        if not self._prompts.has_chat_template:
            raise ApiError(400, "the model has no chat template; use /v1/completions", param="messages")
        messages = [message.for_template() for message in request.messages]
        try:
            return await asyncio.to_thread(self._prompts.chat, messages)  # takes a while, and streams go on meanwhile
        except PromptError as error:
            raise ApiError(400, str(error), param="messages") from error

    async def text_prompt(self, request: TextRequest) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer puts around a text."""
        if isinstance(request.prompt, list):
            return request.prompt
        return await asyncio.to_thread(self._prompts.text, request.prompt)

    def sampling(self, request: GenerationRequest, limit: int | None, prompt: Sequence[int], param: str) -> Sampling:
        """The engine's parameters. Raises ApiError if the prompt, or the prompt and the limit, exceed the context."""
        room = self.max_len - len(prompt)
        if room < 1 or (limit or 0) > room:
            asked = f" and {limit} of the answer" if limit else ""
            raise ApiError(
                400,
                f"the context holds {self.max_len} tokens, {len(prompt)} of the prompt{asked} do not fit; shorten them",
                param=param if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        chosen = self.defaults.chosen(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        return Sampling(max_new_tokens=limit or room, seed=seed, **chosen)

    async def answer(
        self, prompt: Sequence[int], sampling: Sampling, stops: Sequence[str], request_id: str, logged: bool = True
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of text, the last with the end. Leaving early cancels. `logged`: the traffic log may have it.

        Raises what `AsyncEngine.stream` raises.
        """
        text = Detokenizer(self._prompts.tokenizer, stops)
        cancelled = False
        with self.metrics.request() as record:
            async with aclosing(self.engine.stream(prompt, sampling, request_id)) as stream:
                async for progress in stream:
                    first = text.num_tokens == 0
                    shown = text.push(progress.token_ids)
                    record.progress(progress, len(prompt), text.num_tokens)
                    completion = progress.completion
                    if completion is not None:
                        shown += text.finish()
                        reason = "stop" if text.stopped else completion.finish_reason
                        if reason not in ("stop", "length"):
                            raise EngineError(f"the request was {reason} before it was done; send it again")
                        record.finished(reason)
                        if logged:
                            self._log(completion, sampling, reason, text.num_tokens, record)
                        yield Piece(
                            shown,
                            End(
                                finish_reason="stop" if reason == "stop" else "length",
                                num_tokens=text.num_tokens,
                                acceptance=completion.acceptance,
                                drafter=completion.drafter,
                            ),
                        )
                        return
                    if text.stopped and not cancelled:
                        cancelled = True
                        self.engine.cancel(request_id)
                    if shown or first:
                        yield Piece(shown)

    def _log(
        self, completion: Completion, sampling: Sampling, reason: str, num_tokens: int, record: RequestRecord
    ) -> None:
        """Hand an answered request to the traffic log."""
        if self.traffic is None or not self.traffic.wants(completion.request_id):
            return
        row = TrafficRow(
            request_id=completion.request_id,
            arrived_at=record.arrived_at,
            prompt_ids=completion.prompt_ids,
            response_ids=completion.token_ids[:num_tokens],  # what was decoded past a stop string was not sent
            finish_reason=reason,
            sampling=sampling,
            drafter_version=record.drafter_version,
            drafter_changed=record.drafter_changed,
            placement=self.metrics.placement_of(record.drafter_version),
            acceptance=completion.acceptance,
        )
        self.traffic.record(row)
