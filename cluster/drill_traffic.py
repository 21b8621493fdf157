"""Clients of the drill: streams that are kept busy with a phase's prompts, and a note of every answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drafters.acceptance import Acceptance

TIMEOUT_S = 120.0  # longest silence of the endpoint


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One streamed answer as its client saw it."""

    at_s: float  # when it ended, from the drill's beginning
    phase: str
    tokens: int
    rounds: int  # verify rounds
    proposed: int  # drafts
    accepted: int  # of them
    seconds: float
    longest_gap_s: float  # between two chunks, the first counted from the request
    error: str | None = None


def acceptance_of(replies: Sequence[Reply]) -> Acceptance:
    """Of all of them together; what a client is told has no positions."""
    accepted, proposed = sum(reply.accepted for reply in replies), sum(reply.proposed for reply in replies)
    return Acceptance(
        rounds=sum(reply.rounds for reply in replies),
        proposed=proposed,
        proposed_by_position=[proposed],
        accepted_by_position=[accepted],
    )


class Traffic:
    """`concurrency` clients that ask one question after another, from `shift` to `close`."""

    def __init__(self, base_url: str, model: str, *, concurrency: int, max_tokens: int, started: float):
        self._base_url, self._model, self._max_tokens, self._started = base_url, model, max_tokens, started
        self._lock = threading.Lock()
        self._replies: list[Reply] = []
        self._phase = ""
        self._prompts: Iterator[list[dict[str, Any]]] = iter(())
        self.pause_s = 0.0  # of a client between two questions
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._keep_asking, daemon=True) for _ in range(concurrency)]

    def shift(self, phase: str, prompts: Sequence[list[dict[str, Any]]]) -> None:
        """From now on these chats are asked, again from the first after the last."""
        with self._lock:
            self._phase, self._prompts = phase, itertools.cycle(prompts)
        for thread in self._threads:
            if not thread.is_alive():
                thread.start()

    @property
    def replies(self) -> list[Reply]:
        with self._lock:
            return list(self._replies)

    def close(self) -> None:
        """Let the streams that run end."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=TIMEOUT_S)

    def _keep_asking(self) -> None:
        from openai import OpenAI, OpenAIError

        client = OpenAI(base_url=self._base_url, api_key="none", timeout=TIMEOUT_S, max_retries=0)
        while not self._over.is_set():
            with self._lock:
                phase, messages = self._phase, next(self._prompts)
            begun = time.monotonic()
            try:
                reply = self._ask(client, phase, messages)
            except OpenAIError as error:
                reply = Reply(
                    at_s=time.monotonic() - self._started, phase=phase, tokens=0, rounds=0, proposed=0,
                    accepted=0, seconds=time.monotonic() - begun, longest_gap_s=0.0, error=str(error),
                )  # fmt: skip
                self._over.wait(0.5)  # an endpoint that is gone is not asked a thousand times
            with self._lock:
                self._replies.append(reply)
            self._over.wait(self.pause_s)

    def _ask(self, client: Any, phase: str, messages: list[dict[str, Any]]) -> Reply:
        begun = last = time.monotonic()
        gap, tokens = 0.0, 0
        spec: dict[str, Any] = {}
        stream = client.chat.completions.create(
            model=self._model, messages=messages, temperature=0, max_tokens=self._max_tokens, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        for chunk in stream:
            now = time.monotonic()
            gap, last = max(gap, now - last), now
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            spec = (getattr(chunk, "metrics", None) or {}).get("speculative_decoding", spec)
        return Reply(
            at_s=last - self._started, phase=phase, tokens=tokens, rounds=spec.get("rounds", 0),
            proposed=spec.get("num_draft_tokens", 0), accepted=spec.get("num_accepted_draft_tokens", 0),
            seconds=last - begun, longest_gap_s=gap, error=None if tokens else "the stream broke off",
        )  # fmt: skip
