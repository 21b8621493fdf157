"""The prompts of the gate: what it decodes, what it leaves out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from drafters.target import Target
from pipelines.prompts import read_prompts
from serving.chat_options import ChatOptions


@dataclass(frozen=True)
class GatePrompt:
    """One prompt as the target reads it."""

    prompt_ids: list[int]
    category: str = ""  # "" where it has none


@dataclass(frozen=True)
class UsablePrompts:
    """Those that can be decoded, each once, in their order."""

    prompts: list[GatePrompt]
    left_out: dict[str, int]  # prompts by reason

    def __str__(self) -> str:
        left = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        return f"{len(self.prompts)} prompts" + (f" (left out: {left})" if left else "")


def usable_prompts(prompts: Sequence[GatePrompt], most_tokens: int, vocab_size: int) -> UsablePrompts:
    """Prompts of 1 to `most_tokens` tokens of the target's, without repetitions: the same prompt twice is one
    measurement, and would pass for two."""
    kept: list[GatePrompt] = []
    left, seen = Counter[str](), set[tuple[int, ...]]()
    for prompt in prompts:
        ids = tuple(prompt.prompt_ids)
        if not ids:
            left["empty"] += 1
        elif len(ids) > most_tokens:
            left[f"longer than {most_tokens} tokens"] += 1
        elif not 0 <= min(ids) <= max(ids) < vocab_size:
            left["with tokens that are not the target's"] += 1
        elif ids in seen:
            left["repeated"] += 1
        else:
            kept.append(prompt)
            seen.add(ids)
    return UsablePrompts(kept, dict(left))


def regression_prompts(
    spec: str,
    target: Target,
    *,
    per_category: int | None = None,
    max_prompt_tokens: int | None = None,
    chat: bool = False,
    options: ChatOptions | None = None,
) -> list[GatePrompt]:
    """A regression set from a prompt set (see `read_prompts`), with the rows' categories; of `turns` the first prompt.

    `per_category` takes so many prompts of each category, the first ones of the files: the set stays the same as long
    as the files do. Raises PromptError.
    """
    rows = read_prompts(spec, target, max_prompt_tokens=max_prompt_tokens, chat=chat, options=options).rows
    taken = Counter[str]()
    chosen = []
    for row in rows:
        if per_category is None or taken[row.category] < per_category:
            taken[row.category] += 1
            chosen.append(GatePrompt(row.prompt_ids, row.category))
    return chosen
