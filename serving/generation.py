"""From a request to text and back: prompts -> token ids -> the engine's stream -> text, in pieces as they come.

`openai_api` calls it with validated requests; it knows no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from drafters.acceptance import Acceptance
from drafters.target import Target
from serving.api_errors import ApiError
from serving.api_schema import ChatRequest, GenerationRequest, TextRequest
from serving.chat_options import ChatOptions
from serving.detokenize import Detokenizer
from serving.engine.async_engine import AsyncEngine, EngineError, EngineRequest
from serving.engine.logprobs import TokenLogprobs
from serving.engine.sampling import Sampling
from serving.engine.sampling_defaults import SamplingDefaults
from serving.engine.sequence import Completion, Origin, Progress
from serving.metrics import RequestMetrics, RequestRecord
from serving.prompt_encoding import PromptEncoder, PromptError, PromptTooLongError
from serving.request_guards import ApiKeys
from serving.token_bytes import TokenBytes
from serving.traffic_log import TrafficLog
from serving.traffic_schema import TrafficRow

EndReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of the texts that a request asks for."""

    prompt_ids: list[int]
    sampling: Sampling
    first_of_prompt: bool = True  # the others of the same prompt do not count its tokens again


@dataclass(frozen=True, kw_only=True)
class AnswerToken:
    """A token of an answer."""

    id: int
    text: str  # what it added to the text to show; all of them joined are the answer
    offset: int  # characters of the answer before its own
    origin: Origin
    logprobs: TokenLogprobs | None


@dataclass(kw_only=True)
class Totals:
    """Of all choices of a request together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0  # emitted, in each choice up to the one that completed a stop string
    acceptance: Acceptance = field(default_factory=Acceptance)
    drafter: str | None = None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one round brought to one choice: text that is safe to show, and the tokens."""

    index: int  # of the choice
    text: str = ""
    tokens: Sequence[AnswerToken] = ()
    first: bool = False  # it comes with the choice's first token, even if there is no text yet
    finish_reason: EndReason | None = None  # set in the choice's last piece
    totals: Totals | None = None  # set in the request's last piece


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
        api_keys: ApiKeys | None = None,
        traffic: TrafficLog | None = None,
        page: bool = True,
    ):
        self.engine = engine
        self.name = name
        self.max_len = max_len
        self.metrics = metrics
        self.describe_drafter: Callable[[], dict[str, Any]] = lambda: {"name": None, "path": None}
        self.api_keys = api_keys or ApiKeys()  # none: everybody is let in
        self.page = page  # whether people find one at /
        self.traffic = traffic
        metrics.traffic = traffic.counts if traffic else None
        self.defaults = SamplingDefaults.of(target.generation_config)
        self._prompts = PromptEncoder(target, chat_options)
        self.token_bytes = TokenBytes(self._prompts.tokenizer)

    @property
    def drafter(self) -> dict[str, Any]:
        """What /v1/models reports of the drafter."""
        return self.describe_drafter()

    async def chat_prompts(self, request: ChatRequest) -> list[list[int]]:
        """Token ids of the messages in the target's chat template, as the only prompt."""
        if not self._prompts.has_chat_template:
            raise ApiError(400, "the model has no chat template; use /v1/completions", param="messages")
        messages = [message.for_template() for message in request.messages]
        with self._refusals("messages"):
            # in a thread: it takes a while, and streams go on meanwhile
            return [await asyncio.to_thread(self._prompts.chat, messages, self.max_len)]

    async def text_prompts(self, request: TextRequest) -> list[list[int]]:
        """Token ids of plain prompts, with the special tokens that the tokenizer puts around a text."""
        encoded = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                with self._refusals("prompt"):
                    prompt = await asyncio.to_thread(self._prompts.text, prompt, self.max_len)
            encoded.append(prompt)
        return encoded

    @contextmanager
    def _refusals(self, param: str) -> Iterator[None]:
        try:
            yield
        except PromptTooLongError as error:
            raise self._does_not_fit(f"at least {error.least}", None, param) from error
        except PromptError as error:
            raise ApiError(400, str(error), param=param) from error

    def _does_not_fit(self, tokens: str, limit: int | None, param: str) -> ApiError:
        asked = f" and {limit} of the answer" if limit else ""
        return ApiError(
            400,
            f"the context holds {self.max_len} tokens, {tokens} of the prompt{asked} do not fit; shorten them",
            param=param,
            code="context_length_exceeded",
        )

    def choices(self, request: GenerationRequest, prompts: Sequence[list[int]], param: str) -> list[Choice]:
        """What to generate: `n` choices of each prompt, one prompt after another.

        Choice i of a prompt depends on the prompt, the request's seed and i alone; without a seed no two choices share
        one. Raises ApiError if a prompt, or a prompt and the limit, exceed the context.
        """
        sampled = self.defaults.chosen(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k)
        limit, found = request.limit, []
        for prompt in prompts:
            room = self.max_len - len(prompt)
            if room < 1 or (limit or 0) > room:
                raise self._does_not_fit(str(len(prompt)), limit, param if room < 1 else request.limit_name)
            seed = secrets.randbits(63) if request.seed is None else request.seed
            for i in range(request.n):
                sampling = Sampling(
                    max_new_tokens=limit or room,
                    seed=seed_of_choice(seed, i),
                    logprobs=request.num_logprobs,
                    num_draft_tokens=request.num_draft_tokens,
                    **sampled,
                )
                found.append(Choice(prompt_ids=prompt, sampling=sampling, first_of_prompt=i == 0))
        return found

    async def answer(
        self,
        choices: Sequence[Choice],
        stops: Sequence[str],
        request_id: str,
        *,
        every_token: bool = False,
        logged: bool = True,
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of all choices as they come. Leaving early cancels. Raises what `AsyncEngine.stream_all` raises.

        `every_token`: pieces come without text too, since somebody looks at their tokens. `logged`: the traffic log may
        have the choices.
        """
        requests = [
            EngineRequest(
                request_id=f"{request_id}-{i}" if i else request_id,
                prompt_ids=choice.prompt_ids,
                sampling=choice.sampling,
            )
            for i, choice in enumerate(choices)
        ]
        totals = Totals(prompt_tokens=sum(len(choice.prompt_ids) for choice in choices if choice.first_of_prompt))
        with ExitStack() as records:
            writing = {}
            for i, (request, choice) in enumerate(zip(requests, choices, strict=True)):
                record = records.enter_context(self.metrics.request())
                text = Detokenizer(self._prompts.tokenizer, stops)
                writing[request.request_id] = _Writing(i, choice, text, record)
            async with aclosing(self.engine.stream_all(requests)) as stream:
                async for progress in stream:
                    choice_text = writing[progress.request_id]
                    piece = choice_text.take(progress)
                    if progress.completion is None and choice_text.stopped_now:
                        self.engine.cancel(progress.request_id)
                    if progress.completion is not None:
                        del writing[progress.request_id]
                        piece = choice_text.end(piece, progress.completion, totals, last=not writing)
                        if logged:
                            self._log(choice_text.row(progress.completion, self.metrics))
                    if piece.text or piece.first or piece.finish_reason or (every_token and piece.tokens):
                        yield piece

    def _log(self, row: TrafficRow) -> None:
        """Hand an answered choice to the traffic log."""
        if self.traffic is not None and self.traffic.wants(row.request_id):
            self.traffic.record(row)


class _Writing:
    """One choice while its tokens arrive."""

    def __init__(self, index: int, choice: Choice, text: Detokenizer, record: RequestRecord):
        self._index, self._choice, self._text, self._record = index, choice, text, record
        self._prompt_tokens = len(choice.prompt_ids) if choice.first_of_prompt else 0
        self.stopped_now = False  # whether the last round completed a stop string

    def take(self, progress: Progress) -> Piece:
        first, stopped = self._text.num_tokens == 0, self._text.stopped
        shown = self._text.push_each(progress.token_ids)
        self._record.progress(progress, self._prompt_tokens, self._text.num_tokens)
        self.stopped_now = self._text.stopped and not stopped
        tokens = [
            AnswerToken(
                id=progress.token_ids[i],
                text=text,
                offset=offset,
                origin=origin,
                logprobs=progress.logprobs[i] if progress.logprobs else None,
            )
            for i, ((text, offset), origin) in enumerate(zip(shown, progress.origins, strict=False))
        ]
        return Piece(index=self._index, text="".join(text for text, _ in shown), tokens=tokens, first=first)

    def end(self, piece: Piece, completion: Completion, totals: Totals, last: bool) -> Piece:
        """The choice's last piece, with what was held back; the figures go into `totals`."""
        reason = "stop" if self._text.stopped else completion.finish_reason
        if reason not in ("stop", "length"):
            raise EngineError(f"the request was {reason} before it was done; send it again")
        rest, tokens = self._text.finish(), list(piece.tokens)
        if tokens:
            tokens[-1] = replace(tokens[-1], text=tokens[-1].text + rest)
        self._record.finished(reason)
        totals.completion_tokens += self._text.num_tokens
        totals.acceptance.add(completion.acceptance)
        totals.drafter = totals.drafter or completion.drafter
        return replace(
            piece,
            text=piece.text + rest,
            tokens=tokens,
            finish_reason="stop" if reason == "stop" else "length",
            totals=totals if last else None,
        )

    def row(self, completion: Completion, metrics: RequestMetrics) -> TrafficRow:
        """The choice as the traffic log keeps it, once it has ended."""
        record = self._record
        return TrafficRow(
            request_id=completion.request_id,
            arrived_at=record.arrived_at,
            prompt_ids=completion.prompt_ids,
            response_ids=completion.token_ids[: self._text.num_tokens],  # what was decoded past a stop was not sent
            finish_reason=record.outcome,
            sampling=self._choice.sampling,
            drafter_version=record.drafter_version,
            drafter_changed=record.drafter_changed,
            placement=metrics.placement_of(record.drafter_version),
            acceptance=completion.acceptance,
        )


def seed_of_choice(seed: int, i: int) -> int:
    """The seed of a prompt's choice i: the request's own for the first, unrelated ones for the others."""
    if i == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
