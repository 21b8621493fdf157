"""The gate's verdict: a line for each demand with both figures, for machines as JSON and for people as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.gate_config import GateError

PLAIN = "plain decoding"  # what a challenger is held against where there is no champion


@dataclass(frozen=True, kw_only=True)
class GateLine:
    """One demand and what became of it. Figures that were not measured are None."""

    name: str
    champion: float | None
    challenger: float | None
    threshold: float | None  # what the challenger's figure had to reach, in the same unit
    passed: bool
    says: str  # one line: both figures, what they were measured on, their noise, and what is wrong
    decided: bool = True  # False: the measurements cannot tell, and more of them might

    @property
    def verdict(self) -> str:
        return "passed" if self.passed else "failed"


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """What the gate found. It passes with all of its lines."""

    challenger: str  # where it was
    champion: str | None  # None: plain decoding
    lines: tuple[GateLine, ...]
    figures: dict[str, Any]  # beside the lines: tokens/s of each way, prompts, versions, what `gate_ancestors` compares
    config: dict[str, Any]  # the whole GateConfig

    @property
    def passed(self) -> bool:
        return bool(self.lines) and all(line.passed for line in self.lines)

    @property
    def decided(self) -> bool:
        """Whether it passes, or fails for something that is sure."""
        return self.passed or any(line.decided and not line.passed for line in self.lines)

    def reason(self) -> str:
        """One line: every failed demand with its figures; of a challenger that passed, the first one."""
        if self.passed:
            return f"passed all of {len(self.lines)}: {self.lines[0].name}: {self.lines[0].says}"
        failed = [f"{line.name}: {line.says}" for line in self.lines if not line.passed]
        return f"failed {len(failed)} of {len(self.lines)}: {'; '.join(failed)}"

    def as_json(self) -> dict[str, Any]:
        """Plain values; `passed` and `reason` are there for whoever reads the file alone."""
        values = asdict(self) | {"lines": [asdict(line) for line in self.lines]}
        return values | {"passed": self.passed, "reason": self.reason()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> GateReport:
        """Raises GateError if these are not a report's values."""
        try:
            rest = {key: value for key, value in values.items() if key not in ("passed", "reason", "lines")}
            return cls(lines=tuple(GateLine(**line) for line in values["lines"]), **rest)
        except (KeyError, TypeError) as error:
            raise GateError(f"this is no gate report ({error}); remove it, and the gate is held again") from None

    def table(self) -> str:
        """Text in columns: a demand's figures, and what it says below them."""
        heads = ("", "champion" if self.champion else PLAIN, "challenger", "threshold", "")
        rows = [heads] + [
            (line.name, *map(_figure, (line.champion, line.challenger, line.threshold)), line.verdict)
            for line in self.lines
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
        for place, line in reversed(list(enumerate(self.lines, start=2))):
            lines.insert(place, f"    {line.says}")
        return "\n".join(lines)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)  # whole numbers are counts
