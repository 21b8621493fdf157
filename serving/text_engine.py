"""The engine over text, for notebooks and scripts: prompts as text or messages in, text out. No Ray, no HTTP.

with TextEngine.load("smollm2", drafter="drafter") as engine:
    print(engine.generate("What is 7 * 12?")[0].text)
    async for piece in engine.stream("Tell me a story."): ...
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from drafters.target import Target, load_target
from serving.detokenize import Detokenizer
from serving.engine.async_engine import AsyncEngine
from serving.engine.build import build_engine
from serving.engine.drafting import TREE_DEPTH, TREE_NODES
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.sampling_defaults import SamplingDefaults
from serving.engine.sequence import Completion, FinishReason
from serving.prompt_encoding import PromptEncoder

MAX_WAITING = 1_000_000  # nobody is turned away within one process: whoever asks waits
CLOSE_DEADLINE_S = 5.0  # for the round that runs; requests are given up

Message = Mapping[str, Any]  # role and content
Prompt = str | Sequence[Message]  # a user's turn, or a conversation
T = TypeVar("T")


class TextEngineError(ValueError):
    """A prompt or a call that the text engine cannot take; one line with the mend."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the target wrote for one prompt."""

    text: str  # without special tokens
    token_ids: list[int]  # with the stop token that ended them, if any
    finish_reason: FinishReason  # "stop" or "length"
    tau: float | None  # tokens per verify round; None if nothing was drafted


class TextEngine:
    """A target, its drafter and its tokenizer. `close` it, or use it in a `with`, to give threads and memory back."""

    def __init__(self, engine: Engine, target: Target):
        """Take over an engine that `build_engine` made for `target`; `load` does both."""
        self._defaults = SamplingDefaults.of(target.generation_config, obey_do_sample=True)
        self._prompts = PromptEncoder(target)
        self._max_len, self._name = engine.max_len, target.path.name
        self._in_flight = 2 * engine.num_slots  # prompts of one `generate` at a time, so that no slot waits
        self._engine: AsyncEngine | None = AsyncEngine(engine, max_waiting=MAX_WAITING)
        self._lock = threading.Lock()  # nothing is submitted to a loop that is about to end
        # `generate` waits for a loop of its own: notebooks already run one in the calling thread
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="draftloop-text", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        target: str = "smollm2",
        *,
        drafter: str | Path | None = None,
        dtype: str = "float32",
        backend: str = "auto",
        device: str = "cpu",
        num_slots: int = 8,
        max_len: int = 2048,
        num_draft_tokens: int = TREE_DEPTH,
        tree_nodes: int = TREE_NODES,
    ) -> TextEngine:
        """Load a target as `--target` names it, with the drafter in a folder. Raises what `build_engine` raises."""
        found = load_target(target)
        engine = build_engine(
            found.path,
            dtype=dtype,
            backend=backend,
            device=device,
            num_slots=num_slots,
            max_len=max_len,
            drafter_path=Path(drafter) if drafter is not None else None,
            config=EngineConfig(num_draft_tokens=num_draft_tokens, tree_nodes=tree_nodes),
        )
        return cls(engine, found)

    def __enter__(self) -> TextEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is running, end the threads, let go of the weights. Closing twice does nothing."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.close(0 if engine.num_in_flight else CLOSE_DEADLINE_S)
        with suppress(TimeoutError):  # a `generate` in another thread is told before its loop ends
            asyncio.run_coroutine_threadsafe(_end_others(), self._loop).result(2 * CLOSE_DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_DEADLINE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, seed: int | None = None, raw: bool = False, **sampling: Any
    ) -> list[Answer]:
        """One answer per prompt, in their order, decoded together.

        A string becomes one user turn of the chat template, if the target has one and `raw` is off; a list of messages
        is a conversation. `sampling`: max_new_tokens (128), temperature, top_p, top_k; the last three follow the
        target's generation config where they are left out. Prompt i samples with `seed` + i (None: a new seed).
        Raises TextEngineError, RequestError, PromptError or EngineError.
        """
        requests = []
        first_seed = secrets.randbits(62) if seed is None else seed
        for i, prompt in enumerate(_listed(prompts)):
            requests.append((self._encode(prompt, raw), self._sampling(_wrapped(first_seed + i), sampling)))
        for number, (ids, params) in enumerate(requests):
            self._check_room(ids, params, f"prompt {number}")
        return self._wait_for(self._answer_all(requests))

    async def stream(
        self, prompt: Prompt, *, seed: int | None = None, raw: bool = False, **sampling: Any
    ) -> AsyncGenerator[str, None]:
        """Pieces of the answer's text as they come; see `generate`. Leaving early cancels the request."""
        prompts = _listed(prompt)
        if len(prompts) != 1:
            raise TextEngineError(f"stream takes one prompt, not {len(prompts)}; use generate for more")
        ids = self._encode(prompts[0], raw)
        params = self._sampling(secrets.randbits(62) if seed is None else seed, sampling)
        self._check_room(ids, params, "the prompt")
        async with aclosing(self._pieces(ids, params)) as pieces:
            async for text, _ in pieces:
                if text:
                    yield text

    # -- from a prompt to the engine and back --------------------------------------------------------------------------

    def _encode(self, prompt: Prompt, raw: bool) -> list[int]:
        if isinstance(prompt, str):
            if raw or not self._prompts.has_chat_template:
                return self._prompts.text(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if raw:
            raise TextEngineError("raw takes text, not messages; leave raw off or give a string")
        if not self._prompts.has_chat_template:
            raise TextEngineError(f"target {self._name} has no chat template; give text instead of messages")
        return self._prompts.chat(list(prompt))

    def _sampling(self, seed: int, given: dict[str, Any]) -> Sampling:
        known = ("max_new_tokens", "temperature", "top_p", "top_k")
        for name in given:
            if name not in known:
                raise TextEngineError(f"there is no option {name}; options are {', '.join(known)}, seed and raw")
        limit = given.get("max_new_tokens")
        chosen = self._defaults.chosen(**{name: given.get(name) for name in known[1:]})
        try:
            return Sampling(**chosen, seed=seed, **({} if limit is None else {"max_new_tokens": limit}))
        except ValueError as error:
            raise TextEngineError(str(error)) from None

    def _check_room(self, ids: list[int], sampling: Sampling, what: str) -> None:
        """Refuse before anything runs what the engine would refuse halfway through a batch."""
        asked = len(ids) + sampling.max_new_tokens
        if not ids:
            raise TextEngineError(f"{what} has no tokens; give some text")
        if asked > self._max_len:
            raise TextEngineError(
                f"{what} ({len(ids)} tokens) and max_new_tokens ({sampling.max_new_tokens}) exceed the context of "
                f"{self._max_len} tokens; shorten one or load with a larger max_len"
            )

    async def _answer_all(self, requests: list[tuple[list[int], Sampling]]) -> list[Answer]:
        turns = asyncio.Semaphore(self._in_flight)

        async def answer(ids: list[int], sampling: Sampling) -> Answer:
            async with turns:
                return await self._answer(ids, sampling)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(*request)) for request in requests]
        except BaseExceptionGroup as failed:  # the others are cancelled by then
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _answer(self, ids: list[int], sampling: Sampling) -> Answer:
        shown, done = "", None
        async with aclosing(self._pieces(ids, sampling)) as pieces:
            async for text, completion in pieces:
                shown, done = shown + text, completion
        assert done is not None, "the engine's last progress has the completion"
        tau = done.acceptance.tau
        return Answer(text=shown, token_ids=done.token_ids, finish_reason=done.finish_reason, tau=tau)

    async def _pieces(self, ids: list[int], sampling: Sampling) -> AsyncGenerator[tuple[str, Completion | None], None]:
        """Text as it becomes whole, the last with the completion. Raises what `AsyncEngine.stream` raises."""
        text = Detokenizer(self._prompts.tokenizer)
        async with aclosing(self._running().stream(ids, sampling)) as stream:
            async for progress in stream:
                shown = text.push(progress.token_ids)
                yield shown + (text.finish() if progress.completion else ""), progress.completion

    def _running(self) -> AsyncEngine:
        if self._engine is None:
            raise TextEngineError("the text engine is closed; load it again")
        return self._engine

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._engine is None:
                work.close()
                self._running()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()  # the stall timeout of AsyncEngine.stream bounds every token of it
        except BaseException:
            future.cancel()  # Ctrl-C: nobody waits for these tokens any more
            raise


async def _end_others() -> None:
    """Wait until no other task of the running loop is left; what is still there at the deadline is cancelled."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        _, left = await asyncio.wait(others, timeout=CLOSE_DEADLINE_S)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CLOSE_DEADLINE_S)


def _wrapped(seed: int) -> int:
    """A seed that counted past the largest goes on from the smallest."""
    return (seed + 2**63) % 2**64 - 2**63


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list: a list of messages is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], Mapping):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Sequence) or not all(isinstance(prompt, Sequence) for prompt in prompts):
        raise TextEngineError("a prompt is a string or a list of messages; give one of them or a list of them")
    return cast(list[Prompt], list(prompts))
