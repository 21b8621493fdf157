"""The endpoint as the official `openai` client sees it: every documented parameter, once as meant and once wrong.

python benchmarks/api_table.py http://127.0.0.1:8000/v1 smollm2 [--api-key KEY]

Prints a markdown table and exits with 1 if a row is not as it should be. Then two clients stream at once, and the sums
of what they were told must be those of what they got.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import openai

REQUESTS_PER_STREAM = 50
TIMEOUT_S = 120

Check = Callable[[Any], object]  # of an answer or of a list of chunks: true if it is as it should be


@dataclass
class Table:
    """The rows as they are found."""

    client: openai.OpenAI
    model: str
    failed: int = 0
    rows: list[str] = field(default_factory=list)

    def row(self, parameter: str, case: str, result: str, ok: bool) -> None:
        self.failed += not ok
        print(
            f"| {parameter} | {case} | {result.replace('|', '/')[:110]} | {'ok' if ok else '**NOT OK**'} |", flush=True
        )

    def ask(self, kind: str, **body: Any) -> Any:
        """One answer, or the chunks of a stream. What the client does not know goes into the body as it is."""
        common = {"model": self.model, "max_tokens": 8, "temperature": 0}
        if "max_completion_tokens" in body:
            del common["max_tokens"]
        unknown = {"top_k", "num_draft_tokens", "other"} | ({"max_completion_tokens"} if kind == "text" else set())
        common["extra_body"] = {name: body.pop(name) for name in unknown & body.keys()} or None
        if kind == "chat":
            common["messages"] = [{"role": "user", "content": "What is 7 * 12?"}]
            answer = self.client.chat.completions.create(**common | body)
        else:
            common["prompt"] = "Once upon a time"
            answer = self.client.completions.create(**common | body)
        return list(answer) if body.get("stream") else answer

    def good(self, kind: str, parameter: str, check: Check, case: str = "", **body: Any) -> None:
        """A request that must be answered, by an answer that the check takes."""
        case = case or ", ".join(f"{name}={value!r}" for name, value in body.items())
        try:
            answer = self.ask(kind, **body)
            result, ok = said(answer), bool(check(answer))
        except Exception as error:  # whatever it is, the row is not ok
            result, ok = f"{type(error).__name__}: {error}", False
        self.row(f"{kind} {parameter}", case, result, ok)

    def bad(self, kind: str, param: str | None, status: int = 400, **body: Any) -> None:
        """A request that must be refused with this status and parameter."""
        case = ", ".join(f"{name}={str(value)[:40]!r}" for name, value in body.items())
        try:
            result, ok = said(self.ask(kind, **body)), False
        except openai.APIStatusError as error:
            result = f"{error.status_code} {error.body.get('message') if isinstance(error.body, dict) else error}"
            ok = (error.status_code, error.param) == (status, param)
        except Exception as error:
            result, ok = f"{type(error).__name__}: {error}", False
        self.row(f"{kind} {(param or '').split('[')[0] or next(iter(body))}", case, result, ok)


def said(answer: Any) -> str:
    if isinstance(answer, list):
        return f"{len(answer)} chunks, {streamed(answer)!r}"
    return f"{len(answer.choices)} choices, {text_of(answer.choices[0])!r}"


def text_of(choice: Any) -> str:
    return choice.text if hasattr(choice, "text") else choice.message.content


def streamed(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.text if hasattr(choice, "text") else choice.delta.content or "" for choice in choices)


def texts(answer: Any) -> list[str]:
    return [text_of(choice) for choice in answer.choices]


def spec(answer: Any) -> dict[str, Any]:
    return answer.metrics["speculative_decoding"]


def both_endpoints(table: Table, kind: str) -> None:
    """What chat and text have in common."""
    plain = table.ask(kind)
    greedy = texts(plain)
    good, bad = table.good, table.bad

    def same(answer: Any) -> bool:
        return texts(answer) == greedy

    good(kind, "(nothing else)", lambda a: a.usage.completion_tokens <= 8 and spec(a)["rounds"] >= 0)
    good(kind, "temperature", lambda a: texts(a)[0], temperature=1.5)
    bad(kind, "temperature", temperature=2.5)
    good(kind, "top_p", same, top_p=0.5)
    bad(kind, "top_p", top_p=0)
    good(kind, "top_k", lambda a: same(a), top_k=1, temperature=1)
    bad(kind, "top_k", top_k=-2)
    good(kind, "max_tokens", lambda a: a.usage.completion_tokens == 3, max_tokens=3)
    bad(kind, "max_tokens", max_tokens=0)
    bad(kind, "max_tokens", max_tokens=10**7)
    good(kind, "max_completion_tokens", lambda a: a.usage.completion_tokens == 3, max_completion_tokens=3)
    bad(kind, "max_completion_tokens", max_completion_tokens=3, max_tokens=4)
    seeded = {"temperature": 1, "seed": 7, "n": 3}
    first = table.ask(kind, **seeded)
    good(kind, "seed", lambda a: texts(a) == texts(first), **seeded)
    bad(kind, "seed", seed=2**63)
    good(kind, "n", lambda a: texts(a)[0] == texts(first)[0], n=1, seed=7, temperature=1)
    good(kind, "n", lambda a: texts(a) == greedy * 3 and [c.index for c in a.choices] == [0, 1, 2], n=3)
    bad(kind, "n", n=0)
    bad(kind, "n", n=129)
    cut = greedy[0][2:4]
    good(kind, "stop", lambda a: texts(a)[0] == greedy[0].partition(cut)[0], stop=[cut, "never there"])
    bad(kind, "stop[0]", stop=[""])
    good(kind, "stream", lambda c: streamed(c) == greedy[0] and len(c) > 1, stream=True)
    bad(kind, "stream", stream="yes")
    usage = {"stream_options": {"include_usage": True}}
    good(kind, "include_usage", lambda c: c[-1].usage == plain.usage and not c[-1].choices, stream=True, **usage)
    bad(kind, "stream_options", **usage)
    tokens = {"stream_options": {"include_tokens": True}}

    def tokens_join(chunks: list[Any]) -> bool:
        found = [token for chunk in chunks for token in chunk.tokens]
        kinds = {token["origin"] for token in found}
        return "".join(token["text"] for token in found) == greedy[0] and kinds <= {"draft", "bonus", "plain"}

    good(kind, "include_tokens", tokens_join, stream=True, **tokens)
    bad(kind, "stream_options.include_tokens", stream=True, stream_options={"include_tokens": 1})
    good(kind, "num_draft_tokens", lambda a: same(a) and spec(a)["rounds"] == 0, num_draft_tokens=0)
    bad(kind, "num_draft_tokens", num_draft_tokens=-1)
    good(kind, "user, store, metadata", same, user="me", **({} if kind == "text" else {"store": False, "metadata": {}}))
    bad(kind, "user", user=1)
    bad(kind, "model", status=404, model="another")
    bad(kind, "other", other=1)
    bad(kind, "presence_penalty", presence_penalty=1)
    good(kind, "presence_penalty", same, presence_penalty=0)


def chat_only(table: Table) -> None:
    greedy = texts(table.ask("chat"))

    def entries(answer: Any) -> bool:
        found = answer.choices[0].logprobs.content
        joined = b"".join(bytes(entry.bytes) for entry in found if entry.bytes is not None).decode(errors="ignore")
        best = all(entry.top_logprobs[0].logprob == entry.logprob <= 0 for entry in found)
        return joined.startswith(greedy[0]) and best and all(len(entry.top_logprobs) == 3 for entry in found)

    table.good("chat", "logprobs", entries, logprobs=True, top_logprobs=3)
    table.bad("chat", "top_logprobs", logprobs=True, top_logprobs=21)
    table.bad("chat", "top_logprobs", top_logprobs=2)
    table.bad("chat", "messages", messages=[])
    table.bad("chat", "messages[0].role", messages=[{"role": "nobody", "content": "x"}])
    table.bad("chat", "messages", messages=[{"role": "user", "content": "x " * 500_000}])
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is 7 * "}, {"type": "text", "text": "12?"}]}]
    table.good("chat", "messages", lambda a: texts(a) == greedy, messages=parts)
    table.bad("chat", "tools", tools=[{"type": "function", "function": {"name": "f"}}])


def text_only(table: Table) -> None:
    greedy = texts(table.ask("text"))
    two = ["Once upon a time", "The capital of France is"]
    singles = [texts(table.ask("text", prompt=prompt))[0] for prompt in two]
    table.good("text", "prompt", lambda a: texts(a) == singles, prompt=two)
    table.good("text", "prompt, n", lambda a: texts(a) == [t for t in singles for _ in range(2)], prompt=two, n=2)
    table.good("text", "prompt", lambda a: a.usage.prompt_tokens == 3, prompt=[5, 6, 7])
    table.good("text", "prompt", lambda a: a.usage.prompt_tokens == 4 and len(a.choices) == 2, prompt=[[5, 6, 7], [8]])
    table.bad("text", "prompt", prompt="")
    table.bad("text", "prompt", prompt=[10**8])
    table.bad("text", "prompt[1]", prompt=["a", ""])
    table.bad("text", "prompt", prompt="x " * 500_000)

    def columns(answer: Any) -> bool:
        found = answer.choices[0].logprobs
        lengths = {len(found.tokens), len(found.token_logprobs), len(found.top_logprobs), len(found.text_offset)}
        return "".join(found.tokens).startswith(greedy[0]) and lengths == {answer.usage.completion_tokens}

    table.good("text", "logprobs", columns, logprobs=2)
    table.bad("text", "logprobs", logprobs=6)


def two_streams(table: Table) -> None:
    """Two clients at once, each with a row of streams: their usage adds up to the tokens that they saw."""
    lock, told, seen = threading.Lock(), [0], [0]

    def client(number: int) -> None:
        for i in range(REQUESTS_PER_STREAM):
            options = {"include_usage": True, "include_tokens": True}
            chunks = table.ask("chat", stream=True, stream_options=options, temperature=1, seed=i, n=1 + number)
            with lock:
                told[0] += chunks[-1].usage.completion_tokens
                seen[0] += sum(len(chunk.tokens) for chunk in chunks)

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(client, number) for number in range(2)]
    failed = [str(future.exception()) for future in done if future.exception()]
    result = failed[0] if failed else f"{told[0]} tokens in the usage, {seen[0]} in the chunks"
    table.row("2 streams", f"{REQUESTS_PER_STREAM} requests each", result, not failed and told == seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base_url", help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("model")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key=args.api_key, timeout=TIMEOUT_S, max_retries=0)
    table = Table(client, args.model)
    print("| parameter | case | result | ok |\n|---|---|---|---|")
    table.row("models", "list", ", ".join(m.id for m in client.models.list()), True)
    for kind in ("chat", "text"):
        both_endpoints(table, kind)
    chat_only(table)
    text_only(table)
    two_streams(table)
    print(f"\n{table.failed} rows are not ok" if table.failed else "\nall rows are ok")
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
