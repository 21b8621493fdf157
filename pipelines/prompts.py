"""Prompt sets: files of rows (or a shipped set's name) in, token ids per row and the rejected rows out.

Rows are `{id?, category?, messages | prompt | turns}`; `generate --prompts` and `evaluate --prompts` read them.
A bad row never stops a run and never vanishes: accepted + rejected = non-blank lines (of Parquet: rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from drafters.remote import first_line
from drafters.target import Target
from pipelines.follow_ups import FollowUp, follow_ups
from pipelines.prompt_files import Fields, PromptError, PromptFile, find_prompts, prompt_files, set_sha256
from pipelines.prompt_rows import BadRowError, Conversation, RejectKind, conversation, row_category, row_id
from serving.chat_options import ChatOptions, ChatTemplate

__all__ = ["PromptError", "PromptRow", "PromptSet", "RejectedRow", "find_prompts", "read_prompts"]


@dataclass(frozen=True)
class PromptRow:
    """One prompt as the target reads it."""

    id: str  # unique within the set
    prompt_ids: list[int]  # at least one token
    category: str  # "" if the row has none
    row_number: int  # line in its file (Parquet: row), from 1
    file: str = field(default="", compare=False)  # as the rejects name it
    follow_ups: list[FollowUp] = field(default_factory=list)  # what comes after each reply but the last

    def most_tokens(self, max_new_tokens: int) -> int:
        """Tokens of the whole sequence if every reply is as long as it may be."""
        turns = len(self.follow_ups) + 1
        return len(self.prompt_ids) + sum(map(len, self.follow_ups)) + turns * max_new_tokens

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PromptRow:
        return cls(**{**values, "follow_ups": [FollowUp(**item) for item in values["follow_ups"]]})


@dataclass(frozen=True)
class RejectedRow:
    """One row that cannot be used, and why."""

    file: str
    line: int  # from 1; of Parquet, the row
    reason: str


@dataclass(frozen=True)
class PromptSet:
    """The accepted and rejected rows of a set's files."""

    file: str  # the set as it was asked for
    sha256: str  # over the bytes of all its files
    rows: list[PromptRow]
    rejected: list[RejectedRow]
    kinds: list[RejectKind]  # what each rejected row is counted under
    files: list[str]  # in the order in which they were read


def read_prompts(
    spec: str,
    target: Target,
    *,
    max_prompt_tokens: int | None = None,
    chat: bool = False,
    limit: int | None = None,
    options: ChatOptions | None = None,
) -> PromptSet:
    """Read and tokenise a prompt set: a shipped set's name, a file, or a pattern of files (path or URI).

    `messages` and `turns` go through the target's chat template, with the turn of the assistant opened and `options`
    applied. `prompt` is a raw completion prompt, control tokens included, unless `chat` wraps it into a user turn.
    Elsewhere text that spells one of the target's control tokens is rejected. `limit` ends the reading after that many
    accepted rows; files behind them count for the checksum alone. Only the first prompt of `turns` must fit into
    `max_prompt_tokens`. Raises PromptError if a file is missing or unreadable or no row is usable, and
    ChatOptionsError.
    """
    reader = _RowReader(target, ChatTemplate(target, options), max_prompt_tokens or target.max_len, chat)
    read = PromptSet(spec, "", [], [], [], [])
    checksums: list[tuple[str, str]] = []
    for file in prompt_files(spec):
        read.files.append(file.name)
        checksums.append((file.label, file.sha256))
        if limit is None or len(read.rows) < limit:
            _read_file(reader, file, limit, read)
    if not read.rows:
        raise _none_usable(spec, read)
    return replace(read, sha256=set_sha256(checksums))


def _read_file(reader: _RowReader, file: PromptFile, limit: int | None, read: PromptSet) -> None:
    """Append the file's rows to the accepted and the rejected ones."""
    for number, fields in file.rows():
        if limit is not None and len(read.rows) >= limit:
            return
        try:
            read.rows.append(reader.read(fields, file, number))
        except BadRowError as error:
            read.rejected.append(RejectedRow(file.name, number, str(error)))
            read.kinds.append(error.kind)


def _none_usable(spec: str, read: PromptSet) -> PromptError:
    several = len(read.files) > 1
    if not read.rejected:
        what = f"all {len(read.files)} files are" if several else "the file is"
        return PromptError(f"prompts {spec}: {what} empty; give one row per prompt, such as a JSON object per line")
    first = read.rejected[0]
    where = f"{first.file}, line" if several else "line"
    return PromptError(
        f"prompts {spec}: none of its {len(read.rejected)} rows can be used ({where} {first.line}: {first.reason})"
    )


class _RowReader:
    """Turns one row into a PromptRow, or raises BadRowError with the reason."""

    def __init__(self, target: Target, template: ChatTemplate, max_prompt_tokens: int, chat: bool):
        self.target, self.template = target, template
        self.max_prompt_tokens, self.chat = max_prompt_tokens, chat
        added = target.tokenizer.added_tokens_decoder.values()
        self.control_tokens = sorted(token.content for token in added if token.special)
        self.places: dict[str, tuple[str, int]] = {}  # of the ids so far: file and line
        template.check()
        for token in self.control_tokens:
            if token in (template.options.system or ""):
                raise PromptError(f"the system turn holds the target's control token {token}; leave that out")

    def read(self, fields: Fields | BadRowError, file: PromptFile, number: int) -> PromptRow:
        if isinstance(fields, BadRowError):
            raise fields
        category = row_category(fields.get("category"))
        name = row_id(fields.get("id"), file.place(number))
        try:
            prompt_ids, following = self._ids(conversation(fields))
        except UnicodeEncodeError:
            reason = "the text holds half of a surrogate pair, which is no character"
            raise BadRowError("half a character", reason) from None
        if len(prompt_ids) > self.max_prompt_tokens:
            raise BadRowError("too long", f"the prompt has {len(prompt_ids)} tokens, {self.max_prompt_tokens} fit")
        if not prompt_ids:
            raise BadRowError("no tokens", "the text gives no tokens")
        if name in self.places:
            where = "{1}" if self.places[name][0] == file.name else "{1} of {0}"
            raise BadRowError("duplicate id", f"id {name!r} is already that of line {where.format(*self.places[name])}")
        self.places[name] = file.name, number
        return PromptRow(name, prompt_ids, category, number, file.name, following)

    def _ids(self, row: Conversation) -> tuple[list[int], list[FollowUp]]:
        """The first prompt, and what follows each reply."""
        if row.prompt is not None and not self.chat:
            row.prompt.encode()
            return [int(i) for i in self.target.tokenizer(row.prompt)["input_ids"]], []
        if row.prompt is not None:
            row = Conversation(messages=({"role": "user", "content": row.prompt},))
        for text in (*(message["content"] for message in row.messages), *row.later_turns):
            text.encode()
            for token in self.control_tokens:
                if token in text:
                    raise BadRowError("control token", f"the text holds the target's control token {token}")
        if not self.template.exists:
            raise BadRowError("no chat template", "the target has no chat template; give `prompt` rows without --chat")
        try:
            text = self.template.render(row.messages)
            following = follow_ups(row, self.target, self.template)
        except BadRowError:
            raise
        except Exception as error:  # templates raise errors of their own, such as for a system turn
            reason = first_line(error)
            raise BadRowError("refused by the chat template", f"the chat template refuses it ({reason})") from None
        return [int(i) for i in self.target.tokenizer(text, add_special_tokens=False)["input_ids"]], following
