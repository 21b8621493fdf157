"""A foreign config.json: every key is asked for by name, and one that is missing, contradicted or unknown is refused.

In: the parsed object. Out: its values, and `facts`: what was taken for a key that is not there, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters import config_keys as keys

SAY_IT = "write into it what the drafter was trained with; its model card or training log says it"


class FormatError(ValueError):
    """A drafter that a layout cannot say, or a source that cannot be read; one line with the mend."""


class ForeignConfig:
    """One object of a foreign config.json. `inside` names the enclosing object in messages."""

    def __init__(self, source: Path, raw: Mapping[str, Any], inside: str = "", facts: dict[str, str] | None = None):
        self.source, self.inside = source, inside
        self.facts = {} if facts is None else facts
        self._raw = {key: value for key, value in raw.items() if not key.startswith("_")}
        self._asked: set[str] = set()

    def wrong(self, what: str, mend: str = SAY_IT) -> FormatError:
        """The error to raise: `what` goes on from the file's name."""
        return FormatError(f"{self.source}/config.json {what}; {mend}")

    def given(self, key: str, check: keys.Check) -> Any:
        """The key's value; None if it is not there or null."""
        self._asked.add(key)
        value = self._raw.get(key)
        if value is not None and not check(value):
            raise self.wrong(f"has {value!r} as {self.inside + key!r}")
        return value

    def need(self, key: str, check: keys.Check) -> Any:
        """The key's value, which must be there."""
        value = self.given(key, check)
        if value is None:
            raise self.wrong(f"lacks key {self.inside + key!r}")
        return value

    def only(self, key: str, *values: Any, mend: str) -> None:
        """Refuse any other value than these (and null): the drafter would compute something else."""
        self._asked.add(key)
        value = self._raw.get(key)
        if value is not None and not any(value == good and type(value) in _kinds(good) for good in values):
            raise self.wrong(f"has {value!r} as {self.inside + key!r}", mend)

    def inner(self, key: str) -> ForeignConfig:
        """An object inside this one, which must be there."""
        return ForeignConfig(self.source, self.need(key, keys.is_object), f"{self.inside}{key}.", self.facts)

    def ignore(self, *names: str) -> None:
        """Keys that change nothing in what a drafter computes."""
        self._asked |= set(names)

    def nothing_left(self) -> None:
        """Refuse keys that nobody asked for: what they change is unknown."""
        unknown = sorted(set(self._raw) - self._asked)
        if unknown:
            raise self.wrong(
                f"has the unknown key {self.inside + unknown[0]!r}", "take it out if the drafter computes the same"
            )


def _kinds(good: Any) -> tuple[type, ...]:
    """1 may stand for 1.0, but never for True."""
    return (int, float) if type(good) in (int, float) else (type(good),)


def agreed(key: str, check: keys.Check, *places: ForeignConfig) -> Any:
    """A value that several objects may say: at least one must, and all that do must say the same."""
    found = [(place, value) for place in places if (value := place.given(key, check)) is not None]
    if not found:
        return places[0].need(key, check)
    (first, value), *others = found
    for place, other in others:
        if other != value:
            raise first.wrong(
                f"contradicts itself: {first.inside + key!r} is {value!r}, {place.inside + key!r} is {other!r}",
                "keep the one that the drafter was trained with",
            )
    return value
