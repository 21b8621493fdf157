"""Prompt sets: a JSONL file (or a shipped set's name) in, token ids per row and the rejected rows out.

Rows are `{id?, category?, messages | prompt | turns}`; `generate --prompts` and `evaluate --prompts` read them.
A bad row never stops a run and never vanishes: accepted + rejected = non-blank lines.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec

from drafters.target import Target
from pipelines.data import SHIPPED, shipped

ROLES = ("system", "user", "assistant")
UTF8_BOM = b"\xef\xbb\xbf"


class PromptError(ValueError):
    """A prompt set that cannot be used at all; the message is one line with cause and mend."""


@dataclass(frozen=True)
class PromptRow:
    """One prompt as the target reads it."""

    id: str  # unique within the set
    prompt_ids: list[int]  # at least one token
    category: str  # "" if the row has none
    row_number: int  # line in the file, from 1


@dataclass(frozen=True)
class RejectedRow:
    """One line that cannot be used, and why."""

    file: str
    line: int  # from 1
    reason: str


@dataclass(frozen=True)
class PromptSet:
    """The accepted and rejected rows of one file."""

    file: str
    sha256: str  # of the file's bytes
    rows: list[PromptRow]
    rejected: list[RejectedRow]


class _BadRowError(Exception):
    """Why a row is rejected."""


def find_prompts(spec: str) -> str:
    """The path or URI of a prompt set that is given by a shipped set's name, a path, or a URI."""
    return str(shipped(spec)) if spec in SHIPPED else spec


def read_prompts(
    spec: str, target: Target, *, max_prompt_tokens: int | None = None, chat: bool = False, limit: int | None = None
) -> PromptSet:
    """Read and tokenise a prompt set.

    `messages` (and one-element `turns`) go through the target's chat template, with the turn of the assistant opened.
    `prompt` is a raw completion prompt, control tokens included, unless `chat` wraps it into a user turn. Elsewhere
    text that spells one of the target's control tokens is rejected. `limit` ends the reading after that many accepted
    rows. Raises PromptError if the file is missing, unreadable, or has no usable row.
    """
    file = find_prompts(spec)
    data = _read_bytes(file, spec)
    reader = _RowReader(target, max_prompt_tokens or target.max_len, chat)
    rows: list[PromptRow] = []
    rejected: list[RejectedRow] = []
    first_lines: dict[str, int] = {}
    for number, line in _lines(data):
        if limit is not None and len(rows) >= limit:
            break
        try:
            row = reader.read(line, number)
            if row.id in first_lines:
                raise _BadRowError(f"id {row.id!r} is already that of line {first_lines[row.id]}")
        except _BadRowError as error:
            rejected.append(RejectedRow(spec, number, str(error)))
            continue
        first_lines[row.id] = number
        rows.append(row)
    if not rows and not rejected:
        raise PromptError(f"prompts {spec}: the file is empty; give one JSON object per line")
    if not rows:
        first = rejected[0]
        raise PromptError(
            f"prompts {spec}: none of its {len(rejected)} rows can be used (line {first.line}: {first.reason})"
        )
    return PromptSet(spec, hashlib.sha256(data).hexdigest(), rows, rejected)


def _read_bytes(file: str, spec: str) -> bytes:
    """The file's bytes, decompressed if its name ends in .gz."""
    if file.endswith(".parquet"):
        raise PromptError(f"prompts {spec}: Parquet is not read here; give .jsonl or .jsonl.gz")
    try:
        with fsspec.open(file, "rb") as stream:
            data = bytes(stream.read())
        data = gzip.decompress(data) if file.endswith(".gz") else data
    except FileNotFoundError:
        names = ", ".join(SHIPPED)
        raise PromptError(f"prompts {spec} do not exist; give a file, a URI, or a shipped set ({names})") from None
    except IsADirectoryError:
        raise PromptError(f"prompts {spec} is a folder; give one .jsonl file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise PromptError(f"prompts {spec}: the gzip data is damaged; write the file again") from None
    except Exception as error:  # every remote file system has its own kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PromptError(f"prompts {spec} cannot be read ({reason}); check the path and its permissions") from error
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise PromptError(f"prompts {spec} are UTF-16; save the file as UTF-8")
    return data.removeprefix(UTF8_BOM)


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of every non-blank line; a carriage return before the line feed is dropped."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        if stripped := line.strip():
            yield number, stripped


class _RowReader:
    """Turns one line into a PromptRow, or raises _BadRowError with the reason."""

    def __init__(self, target: Target, max_prompt_tokens: int, chat: bool):
        self.tokenizer, self.max_prompt_tokens, self.chat = target.tokenizer, max_prompt_tokens, chat
        added = target.tokenizer.added_tokens_decoder.values()
        self.control_tokens = sorted(token.content for token in added if token.special)

    def read(self, line: bytes, number: int) -> PromptRow:
        row = _parse(line)
        category = row.get("category")
        if category is not None and not isinstance(category, str):
            raise _BadRowError(f"category is {_kind(category)}; give a string")
        row_id = _row_id(row.get("id"), number)
        try:
            ids = self._prompt_ids(row)
        except UnicodeEncodeError:
            raise _BadRowError("the text holds half of a surrogate pair, which is no character") from None
        if len(ids) > self.max_prompt_tokens:
            raise _BadRowError(f"the prompt has {len(ids)} tokens, {self.max_prompt_tokens} fit")
        if not ids:
            raise _BadRowError("the text gives no tokens")
        return PromptRow(row_id, ids, category or "", number)

    def _prompt_ids(self, row: dict[str, Any]) -> list[int]:
        given = [key for key in ("messages", "prompt", "turns") if row.get(key) is not None]
        if len(given) != 1:
            raise _BadRowError("no text" if not given else f"has both {' and '.join(given)}; give one of them")
        value = row[given[0]]
        if given[0] == "messages":
            return self._chat_ids(_messages(value))
        if given[0] == "prompt":
            text = _text(value, "prompt")
            return self._chat_ids([{"role": "user", "content": text}]) if self.chat else self._raw_ids(text)
        if not isinstance(value, list) or not value:
            raise _BadRowError(f"turns is {_kind(value)}; give a list with one string")
        if len(value) > 1:
            raise _BadRowError(f"turns has {len(value)} entries; rows of several turns are not continued yet")
        return self._chat_ids([{"role": "user", "content": _text(value[0], "turns[0]")}])

    def _raw_ids(self, text: str) -> list[int]:
        text.encode()
        return [int(i) for i in self.tokenizer(text)["input_ids"]]

    def _chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        for message in messages:
            message["content"].encode()
            for token in self.control_tokens:
                if token in message["content"]:
                    raise _BadRowError(f"the text holds the target's control token {token}")
        if not self.tokenizer.chat_template:
            raise _BadRowError("the target has no chat template; give `prompt` rows without --chat")
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise errors of their own, such as for a system turn
            raise _BadRowError(f"the chat template refuses it ({str(error).splitlines()[0]})") from None
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRowError(f"not UTF-8 (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise _BadRowError(f"not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError):
        raise _BadRowError("not JSON that can be read") from None
    if not isinstance(row, dict):
        raise _BadRowError(f"the line is {_kind(row)}; give a JSON object")
    return row


def _row_id(value: Any, number: int) -> str:
    """The row's own id, or one made from its line number."""
    if value is None:
        return f"line-{number:06d}"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise _BadRowError(f"id is {_kind(value)}; give a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _BadRowError("id holds half of a surrogate pair, which is no character") from None
    return value


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise _BadRowError(f"messages is {_kind(value)}; give a list of {{role, content}}")
    if not value:
        raise _BadRowError("no text")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise _BadRowError(f"messages[{i}] is {_kind(message)}; give {{role, content}}")
        role = message.get("role")
        if role not in ROLES:
            raise _BadRowError(f"messages[{i}].role is {str(role)[:40]!r}; give one of {', '.join(ROLES)}")
        messages.append({"role": role, "content": _text(message.get("content"), f"messages[{i}].content")})
    if messages[-1]["role"] != "user":
        raise _BadRowError(f"the last message is of the {messages[-1]['role']}; end with one of the user")
    return messages


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _BadRowError(f"{where} is {_kind(value)}; give a string")
    if not value.strip():
        raise _BadRowError(f"{where} has no text")
    return value


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    kind = kinds.get(type(value), "a number")
    return f"{kind} without entries" if value in ("", [], {}) else kind
