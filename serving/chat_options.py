"""How a conversation becomes a prompt: the options beside a target's chat template, and the template with them applied.

generate, evaluate and serve share them; rollouts and a drafter's provenance record them, since a drafter that was
trained on other prompts than it meets in service drafts worse. No Ray.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from drafters.remote import first_line, open_filesystem, patiently
from drafters.target import Target, chat_template_hash

Thinking = Literal["default", "on", "off"]
THINKING_VARIABLE = "enable_thinking"
PROBE = "What is 7 * 12?"


class ChatOptionsError(ValueError):
    """Options that cannot be used, or not with this target; one line with cause and mend."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What is said to the chat template beside the messages."""

    template: str | None = None  # Jinja text in place of the target's own chat template
    system: str | None = None  # a system turn before conversations that have none
    thinking: Thinking = "default"  # handed to the template as enable_thinking; default: it is not mentioned

    def __post_init__(self) -> None:
        if self.thinking not in get_args(Thinking):
            raise ChatOptionsError(f"thinking is {self.thinking!r}; give one of {', '.join(get_args(Thinking))}")
        for name, value in (("chat template", self.template), ("system turn", self.system)):
            if value is not None and not value.strip():
                raise ChatOptionsError(f"the {name} is empty; give text, or leave the option out")
            try:
                (value or "").encode()
            except UnicodeEncodeError:
                raise ChatOptionsError(f"the {name} is not UTF-8; save or type it as UTF-8") from None

    @classmethod
    def read(
        cls, template_file: str | None = None, system: str | None = None, thinking: Thinking = "default"
    ) -> ChatOptions:
        """The options with the template's text from a file (path or URI). Raises ChatOptionsError."""
        template = None
        if template_file is not None:
            try:
                fs, path = open_filesystem(template_file)
                template = bytes(patiently(lambda: fs.cat_file(path))).decode("utf-8")
            except UnicodeDecodeError:
                raise ChatOptionsError(f"chat template {template_file} is not UTF-8; save it as UTF-8") from None
            except Exception as error:  # every remote file system has its own kinds
                reason = first_line(error)
                raise ChatOptionsError(
                    f"chat template {template_file} cannot be read ({reason}); give a Jinja file"
                ) from error
        return cls(template=template, system=system, thinking=thinking)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ChatOptions:
        """Options that are not named have their defaults."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


class ChatTemplate:
    """A target's chat template, or the one that stands in for it, with the options applied."""

    def __init__(self, target: Target, options: ChatOptions | None = None):
        self.options = options or ChatOptions()
        self._path, self._tokenizer = target.path, target.tokenizer
        self._arguments: dict[str, Any] = {}
        if self.options.template is not None:
            self._arguments["chat_template"] = self.options.template
        if self.options.thinking != "default":
            self._arguments[THINKING_VARIABLE] = self.options.thinking == "on"

    @property
    def exists(self) -> bool:
        return bool(self.options.template or self._tokenizer.chat_template)

    @property
    def hash(self) -> str:
        """As `chat_template_hash`, of the template in use."""
        if self.options.template is None:
            return chat_template_hash(self._path)
        return hashlib.sha256(self.options.template.encode()).hexdigest()[:32]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text up to where the assistant's answer begins. Raises whatever the template raises."""
        system = self.options.system
        if system is not None and all(message.get("role") not in ("system", "developer") for message in messages):
            messages = [{"role": "system", "content": system}, *messages]
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False, **self._arguments
            )
        )

    def check(self) -> None:
        """Raise ChatOptionsError if the options do not fit the template."""
        own = self.options.template or self._tokenizer.chat_template or ""
        source = own.get("default", "") if isinstance(own, dict) else own  # some targets have several by name
        if self.options.thinking != "default" and not _mentions(source, THINKING_VARIABLE):
            raise ChatOptionsError(
                f"thinking is {self.options.thinking}, but the chat template has no variable {THINKING_VARIABLE}; "
                "leave thinking at default, or give a chat template that has it"
            )
        if self.options.template is not None:
            self._check_shows_messages()

    def _check_shows_messages(self) -> None:
        """A file that is no template would give every row the same prompt, without a word."""
        from jinja2 import TemplateSyntaxError

        try:
            shown = self.render([{"role": "user", "content": PROBE}])
        except TemplateSyntaxError as error:
            raise ChatOptionsError(
                f"the chat template is not Jinja ({error.message}, line {error.lineno}); mend the file"
            ) from None
        except Exception:  # it refuses this conversation, perhaps for its system turn; each row will say so
            return
        if PROBE not in shown:
            raise ChatOptionsError("the chat template does not show the user's messages; give a Jinja chat template")


def _mentions(template: str, variable: str) -> bool:
    code = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
    return re.search(rf"\b{variable}\b", code) is not None


def training_mismatch(provenance: Mapping[str, Any], served: ChatTemplate) -> str | None:
    """In what a drafter's training and its service differ, in words; None if they agree or nothing is known."""
    trained_with: dict[str, Any] = {}
    options = provenance.get("chat_options")
    if isinstance(options, Mapping):
        trained_with = {name: options[name] for name in ("system", "thinking") if name in options}
    pairs = [(name, value, getattr(served.options, name)) for name, value in trained_with.items()]
    trained_hash = provenance.get("chat_template_hash")
    if trained_hash:
        pairs.insert(0, ("chat template", trained_hash, served.hash))
    differing = [(name, trained, now) for name, trained, now in pairs if trained != now]
    if not differing:
        return None
    trained_words, served_words = (
        ", ".join(f"{name} {_in_words(pair[side])}" for name, *pair in differing) for side in (0, 1)
    )
    return f"trained with {trained_words}; used with {served_words}"


def _in_words(value: Any) -> str:
    if value is None:
        return "none"
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else text[:40] + "..."
