"""Acceptance, defined once: tau, acceptance rate, and both by position. Every table, log and metric counts here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Acceptance:
    """Counters over verify rounds.

    A verify round is one in which the drafter was asked for drafts, even if it offered none; a round with drafting
    switched off is plain decoding and does not count. Drafts are counted before clipping at a stop or a limit.
    """

    rounds: int = 0
    proposed_by_position: list[int] = field(default_factory=list)  # K, how often draft position j was verified
    accepted_by_position: list[int] = field(default_factory=list)  # K, how often it was accepted

    def record(self, proposed: int, accepted: int) -> None:
        """Count one round of one sequence: of `proposed` drafts the first `accepted` were kept."""
        if not 0 <= accepted <= proposed:
            raise ValueError(f"accepted must be between 0 and proposed, got {accepted} of {proposed}")
        self.rounds += 1
        self._grow(proposed)
        for j in range(proposed):
            self.proposed_by_position[j] += 1
        for j in range(accepted):
            self.accepted_by_position[j] += 1

    def add(self, other: Acceptance) -> None:
        """Add the counts of another set of rounds to this one."""
        self.rounds += other.rounds
        self._grow(len(other.proposed_by_position))
        for j, (proposed, accepted) in enumerate(
            zip(other.proposed_by_position, other.accepted_by_position, strict=True)
        ):
            self.proposed_by_position[j] += proposed
            self.accepted_by_position[j] += accepted

    def _grow(self, positions: int) -> None:
        missing = positions - len(self.proposed_by_position)
        self.proposed_by_position += [0] * missing
        self.accepted_by_position += [0] * missing

    @property
    def proposed(self) -> int:
        return sum(self.proposed_by_position)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def tau(self) -> float | None:
        """Acceptance length: mean of (accepted drafts + 1) over the verify rounds; None without rounds."""
        return self.accepted / self.rounds + 1 if self.rounds else None

    @property
    def rate(self) -> float | None:
        """Accepted / proposed drafts; None if none were proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def by_position(self) -> list[float]:
        """Share of rounds that verified draft position j in which it was accepted (with all before it)."""
        pairs = zip(self.accepted_by_position, self.proposed_by_position, strict=True)
        return [accepted / proposed if proposed else 0.0 for accepted, proposed in pairs]
