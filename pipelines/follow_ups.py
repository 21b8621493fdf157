"""The user's later turns: text and chat template in, the token ids that follow a reply out.

Nothing is tokenised again: the chat so far stays the ids that the target read and wrote, and what the template puts
between the end of a reply and the next opened reply is appended to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafters.target import Target
from pipelines.prompt_rows import BadRowError, Conversation
from serving.chat_options import ChatTemplate


@dataclass(frozen=True)
class FollowUp:
    """What the template puts after a reply, in two parts."""

    closing_ids: list[int]  # up to the end-of-turn token, with it; empty if the template ends replies with none
    opening_ids: list[int]  # the user's turn, and the opening of the next reply

    def after(self, reply_ids: Sequence[int]) -> list[int]:
        """What follows this reply: one that ended its turn itself is not closed a second time."""
        closed = bool(self.closing_ids) and reply_ids[-1] == self.closing_ids[-1]
        return list(self.opening_ids) if closed else self.closing_ids + self.opening_ids

    def __len__(self) -> int:
        """Most tokens that it adds."""
        return len(self.closing_ids) + len(self.opening_ids)


def follow_ups(row: Conversation, target: Target, template: ChatTemplate) -> list[FollowUp]:
    """What follows each reply of a row, in order. Raises BadRowError, and whatever the template raises."""
    history: list[dict[str, str]] = list(row.messages)
    name = "reply"
    while any(f"[{name} " in text for text in (*(m["content"] for m in history), *row.later_turns)):
        name += "-"
    found = []
    for number, text in enumerate(row.later_turns, start=1):
        reply = f"[{name} {number}]"  # stands for what the target will write
        history += [{"role": "assistant", "content": reply}, {"role": "user", "content": text}]
        rendered = template.render(history)
        if rendered.count(reply) != 1:
            raise BadRowError(
                "refused by the chat template", "the chat template does not show earlier replies as they are"
            )
        found.append(_divided(rendered.partition(reply)[2], text.strip(), target))
    return found


def _divided(between: str, user_text: str, target: Target) -> FollowUp:
    """The text after a reply as ids, cut behind the first end-of-turn token, if that comes before the user's text."""
    tokenizer: Any = target.tokenizer
    ids = [int(token) for token in tokenizer(between, add_special_tokens=False)["input_ids"]]
    end = next((place for place, token in enumerate(ids) if token in target.eos_token_ids), None)
    if end is not None:
        where = between.find(str(tokenizer.convert_ids_to_tokens(ids[end])))
        said = between.rfind(user_text)
        if 0 <= where < (said if said >= 0 else len(between)):
            return FollowUp(ids[: end + 1], ids[end + 1 :])
    return FollowUp([], ids)
