"""The prompts of a diagnosis, as they are made in service and otherwise: another template, a system turn, thinking.

The target answers other prompts otherwise, so that acceptance on them is compared prompt by prompt, not place by place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from drafters.target import Target, chat_template_hash
from pipelines.diagnose_files import AS_TRAINED, OTHER_PROMPTS, DrafterFiles
from pipelines.diagnose_measure import Measured, Measuring, result_of
from pipelines.diagnose_report import TrialResult
from pipelines.diagnose_trials import Trial
from pipelines.diagnose_verdict import LITTLE_TAU
from pipelines.paired_bootstrap import PromptRounds
from pipelines.prompts import PromptRow, read_prompts
from serving.chat_options import ChatOptions, ChatOptionsError, ChatTemplate, Thinking

MOST_READ = 2000  # rows of a prompt set, over which the prompts are spread
RAW = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class PromptOptions(Protocol):
    """What of a diagnosis' options says which prompts are read."""

    @property
    def limit(self) -> int: ...
    @property
    def chat(self) -> bool: ...
    @property
    def max_new_tokens(self) -> int: ...


def read_rows(prompts: str, target: Target, chat_options: ChatOptions, wanted: PromptOptions) -> list[PromptRow]:
    """Prompts spread over the set, so that every kind of text in it is met. Raises PromptError."""
    room = target.max_len - wanted.max_new_tokens
    found = read_prompts(
        prompts, target, max_prompt_tokens=max(1, room), chat=wanted.chat, limit=MOST_READ, options=chat_options
    ).rows
    count = min(wanted.limit, len(found))
    return [found[i * len(found) // count] for i in range(count)]


@dataclass(frozen=True)
class PromptsTrial:
    """The drafter on prompts that are made with other options."""

    trial: Trial
    options: ChatOptions

    def result(self, now: Measuring, there: Measuring) -> TrialResult | None:
        """Acceptance on both kinds of prompts, of the rows that have both; None: there are no such rows."""
        other = {answer.prompt_id: answer for answer in there.answers}
        pairs = [
            (PromptRounds.of(now.acceptance([a])), PromptRounds.of(there.acceptance([other[a.prompt_id]])))
            for a in now.answers
            if a.prompt_id in other
        ]
        return result_of(Measured(self.trial, pairs), confirmed=True) if pairs else None


def other_prompts(files: DrafterFiles, target: Target, options: ChatOptions, tau: float | None) -> list[PromptsTrial]:
    """What to try: the prompts of the training, if they are known and other ones; if nothing is known of them and
    little is accepted, thinking on and off, and prompts without a template."""
    if any(check.name == "chat template" and check.grade == "ok" for check in files.checks):
        return []
    trained = _trained_options(files, target)
    if trained is not None:
        candidates = [("prompts of its training", trained)]
    elif "chat_template_hash" in files.provenance or tau is None or tau >= LITTLE_TAU:
        return []  # a template whose text is not known
    else:
        ways: tuple[Thinking, ...] = ("on", "off")
        thinking = [(f"thinking {way}", replace(options, thinking=way)) for way in ways]
        candidates = [*thinking, ("prompts without a template", ChatOptions(template=RAW))]
    return [
        PromptsTrial(Trial(cause="template", says=OTHER_PROMPTS, name=name, mend=AS_TRAINED), other)
        for name, other in candidates
        if other != options and _fits(target, other)
    ]


def _trained_options(files: DrafterFiles, target: Target) -> ChatOptions | None:
    """The options of the training, if they give its prompts again."""
    try:
        options = ChatOptions.from_json(files.provenance["chat_options"])
    except (KeyError, TypeError, ChatOptionsError):
        return None
    recorded = files.provenance.get("chat_template_hash")
    own = options.template is not None or recorded in (None, chat_template_hash(target.path))
    return options if own else None


def _fits(target: Target, options: ChatOptions) -> bool:
    try:
        ChatTemplate(target, options).check()
    except ChatOptionsError:
        return False
    return True
