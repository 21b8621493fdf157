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
    proposed: int = 0  # drafts verified; of a tree every node
    proposed_by_position: list[int] = field(default_factory=list)  # K, rounds with a draft at position (or depth) j
    accepted_by_position: list[int] = field(default_factory=list)  # K, how often it was accepted

    def record(self, depth: int, accepted: int, nodes: int | None = None) -> None:
        """Count one round of one sequence: of `depth` drafts in a row the first `accepted` were kept.

        A tree of `nodes` drafts counts by the depth of its deepest node.
        """
        if not 0 <= accepted <= depth:
            raise ValueError(f"accepted must be between 0 and depth, got {accepted} of {depth}")
        self.rounds += 1
        self.proposed += depth if nodes is None else nodes
        self._grow(depth)
        for j in range(depth):
            self.proposed_by_position[j] += 1
        for j in range(accepted):
            self.accepted_by_position[j] += 1

    def add(self, other: Acceptance) -> None:
        """Add the counts of another set of rounds to this one."""
        self.rounds += other.rounds
        self.proposed += other.proposed
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
