"""One row of a prompt set: its fields in; its id, category and conversation out, or why it cannot be used.

Rows are `{id?, category?, messages | prompt | turns}`, from a line of JSON or a row of Parquet. No tokens yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ROLES = ("system", "user", "assistant")
FORMS = ("messages", "prompt", "turns")  # of a row's text
COLUMNS = ("id", "category", *FORMS)

RejectKind = Literal[
    "not UTF-8",
    "not JSON",
    "not an object",
    "no text",
    "several texts",
    "wrong type",
    "unknown role",
    "last message not the user's",
    "duplicate id",
    "control token",
    "half a character",
    "too long",
    "no tokens",
    "no chat template",
    "refused by the chat template",
    "generation failed",
    "hidden states not finite",
]


class BadRowError(Exception):
    """Why a row is rejected."""

    def __init__(self, kind: RejectKind, reason: str):
        super().__init__(reason)
        self.kind: RejectKind = kind


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A row's text: a raw prompt, or the messages that end with the user's, and what the user says after the reply."""

    prompt: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    later_turns: tuple[str, ...] = ()  # the user's, each after one more reply


def conversation(fields: dict[str, Any]) -> Conversation:
    """The text of a row, whichever form it has. Raises BadRowError."""
    given = [key for key in FORMS if fields.get(key) is not None]
    if not given:
        raise BadRowError("no text", "no text")
    if len(given) > 1:
        raise BadRowError("several texts", f"has both {' and '.join(given)}; give one of them")
    value = fields[given[0]]
    if given[0] == "prompt":
        return Conversation(prompt=_text(value, "prompt"))
    if given[0] == "messages":
        return Conversation(messages=_messages(value))
    if not isinstance(value, list):
        raise BadRowError("wrong type", f"turns is {in_words(value)}; give a list of strings")
    if not value:
        raise BadRowError("no text", f"turns is {in_words(value)}; give a list of strings")
    first, *later = (_text(turn, f"turns[{i}]") for i, turn in enumerate(value))
    return Conversation(messages=({"role": "user", "content": first},), later_turns=tuple(later))


def row_id(value: Any, place: str) -> str:
    """The row's own id, or else `place`. Raises BadRowError."""
    if value is None:
        return place
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise BadRowError("wrong type", f"id is {in_words(value)}; give a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRowError("half a character", "id holds half of a surrogate pair, which is no character") from None
    return value


def row_category(value: Any) -> str:
    """The row's category, "" if it has none. Raises BadRowError."""
    if value is not None and not isinstance(value, str):
        raise BadRowError("wrong type", f"category is {in_words(value)}; give a string")
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise BadRowError(
            "half a character", "category holds half of a surrogate pair, which is no character"
        ) from None
    return value or ""


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list):
        raise BadRowError("wrong type", f"messages is {in_words(value)}; give a list of {{role, content}}")
    if not value:
        raise BadRowError("no text", "no text")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadRowError("wrong type", f"messages[{i}] is {in_words(message)}; give {{role, content}}")
        role = message.get("role")
        if role not in ROLES:
            known = ", ".join(ROLES)
            raise BadRowError("unknown role", f"messages[{i}].role is {str(role)[:40]!r}; give one of {known}")
        messages.append({"role": role, "content": _text(message.get("content"), f"messages[{i}].content")})
    if (last := messages[-1]["role"]) != "user":
        raise BadRowError("last message not the user's", f"the last message is of the {last}; end with one of the user")
    return tuple(messages)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRowError("wrong type", f"{where} is {in_words(value)}; give a string")
    if not value.strip():
        raise BadRowError("no text", f"{where} has no text")
    return value


def in_words(value: Any) -> str:
    """What a value of JSON or Parquet is."""
    kinds: dict[type, str] = {
        dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null",
        int: "a number", float: "a number", bytes: "bytes",
    }  # fmt: skip
    kind = kinds.get(type(value)) or f"of type {type(value).__name__}"
    return f"{kind} without entries" if value in ("", [], {}) else kind
