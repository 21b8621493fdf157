"""Streams over HTTP at a fixed concurrency: what a client sees of an endpoint. Used by the benchmarks of the service.

Chunks are only time-stamped while they come and parsed afterwards: the client shares its cores with the endpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from pipelines.prompts import PromptRow


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """One request as its client saw it."""

    text: str
    tokens: int  # emitted, as the usage says
    rounds: int  # verify rounds
    accepted: int  # drafts
    first_s: float  # from the request to the first text
    total_s: float
    longest_gap_s: float  # between two chunks
    error: str | None = None  # status or the API's message; the other fields are empty then

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first."""
        return (self.total_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


def bodies_of(model: str, rows: Sequence[PromptRow], tokens: int) -> list[dict[str, Any]]:
    """Requests for the rows' prompts, every other one sampled, each with a seed."""
    return [
        {"model": model, "prompt": row.prompt_ids, "max_tokens": tokens, "temperature": 0.8 * (n % 2), "seed": n}
        for n, row in enumerate(rows)
    ]


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> Streamed:
    """One streamed text completion."""
    begun = time.perf_counter()
    lines: list[tuple[float, str]] = []
    async with client.stream("POST", "completions", json=asking(body)) as answer:
        if answer.status_code != 200:
            said = (await answer.aread()).decode(errors="replace")
            return failed(f"{answer.status_code}: {said[:200]}", time.perf_counter() - begun)
        async for line in answer.aiter_lines():
            if line:
                lines.append((time.perf_counter() - begun, line))
    return parsed(lines, time.perf_counter() - begun)


def asking(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a stream with its usage."""
    return body | {"stream": True, "stream_options": {"include_usage": True}}


def failed(error: str, total_s: float) -> Streamed:
    """A request that brought nothing."""
    return Streamed(
        text="", tokens=0, rounds=0, accepted=0, first_s=0.0, total_s=total_s, longest_gap_s=0.0, error=error
    )


def parsed(lines: Sequence[tuple[float, str]], total_s: float) -> Streamed:
    """What the time-stamped lines of a stream say."""
    text, usage, metrics, stamps, error = "", {}, {}, [], None
    for at, line in lines:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            error = str(chunk["error"]["message"])
            continue
        stamps.append(at)
        text += "".join(choice["text"] for choice in chunk["choices"])
        usage, metrics = chunk.get("usage") or usage, chunk.get("metrics") or metrics
    if error is None and not usage:
        error = "the stream broke off"
    if error is not None:
        return failed(error, total_s)
    spec = metrics["speculative_decoding"]
    return Streamed(
        text=text,
        tokens=usage["completion_tokens"],
        rounds=spec["rounds"],
        accepted=spec["num_accepted_draft_tokens"],
        first_s=stamps[0],
        total_s=total_s,
        longest_gap_s=max((b - a for a, b in itertools.pairwise(stamps)), default=0.0),
    )


async def run_streams(
    base_url: str, bodies: Sequence[dict[str, Any]], concurrency: int
) -> tuple[list[Streamed], float]:
    """All bodies, so many at a time: the answers in their order, and the seconds in all."""
    limit = asyncio.Semaphore(concurrency)
    timeout = httpx.Timeout(600.0)
    async with httpx.AsyncClient(base_url=base_url.rstrip("/") + "/", timeout=timeout) as client:

        async def one(body: dict[str, Any]) -> Streamed:
            async with limit:
                try:
                    return await stream(client, body)
                except httpx.HTTPError as error:
                    return failed(f"{type(error).__name__}: {error}", 0.0)

        begun = time.perf_counter()
        found = await asyncio.gather(*(one(body) for body in bodies))
        return list(found), time.perf_counter() - begun


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which so large a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
