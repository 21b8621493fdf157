"""Reads a drafter's config: every key of a JSON object must be known, there, and of its kind. Nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]


def is_natural(value: Any) -> bool:
    """0, 1, 2 ..."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_count(value: Any) -> bool:
    """1, 2, 3 ..."""
    return is_natural(value) and value > 0


def is_number(value: Any) -> bool:
    """Not negative."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_list_of(check: Check) -> Check:
    """A JSON array whose items all pass."""
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


def is_one_of(*choices: Any) -> Check:
    """Equal to one of the choices and of its type: 0 is not False."""
    return lambda value: any(type(value) is type(choice) and value == choice for choice in choices)


def take_keys(
    raw: Mapping[str, Any], checks: Mapping[str, Check], optional: Mapping[str, Check], inside: str = ""
) -> dict[str, Any]:
    """The values of `checks`' keys. Raises ValueError, naming a key that is missing, unknown, or not of its kind.

    `optional` keys may be there, must pass their check then, and are left out. `inside` names the enclosing object.
    """
    known = set(checks) | set(optional)
    for problem, keys in (("lacks", set(checks) - set(raw)), ("has the unknown", set(raw) - known)):
        if keys:
            raise ValueError(f"{problem} key {inside + min(keys)!r}")
    for key, value in raw.items():
        if not (checks.get(key) or optional[key])(value):
            raise ValueError(f"has {value!r} as {inside + key!r}")
    return {key: raw[key] for key in checks}
