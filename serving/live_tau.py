"""Live tau of a drafter in service: an engine's counters by version in, tallies that can be compared out.

`registry_follower` keeps a replica's tallies, `rollout` compares those of a new champion with the old one's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

# Standard errors that a fall must exceed, beyond the tolerance. Rounds of one answer are alike, so that the error of
# their mean is larger than that of as many independent ones, and the comparison is made again with every report.
NOISE = 4.0
SELDOM = 4  # a drafter that drafts in less than one of so many rounds is judged by all rounds
BEFORE = "before"  # where a tally of the old drafter comes from: the same replica, until the new one took over
# First drafts must be accepted less often by this factor at least, where a drafter that hardly drafts is judged by
# them: the rounds in which it still does are not those that an engine would choose.
FIRSTS = 0.75
_FEW = 30  # verify rounds that tell at least whether first drafts are accepted
_MOST_NOTES = 64  # of a window


@dataclass(frozen=True)
class Tally:
    """What was decoded under one drafter."""

    rounds: int = 0  # verify rounds of sequences
    accepted: int = 0  # drafts accepted in them
    squares: int = 0  # sum over these rounds of (accepted drafts)^2
    emitted: int = 0  # tokens, those of plain rounds too
    first: int = 0  # rounds whose first draft was accepted: unlike tau it does not depend on how many there were

    @classmethod
    def of(cls, counts: Mapping[tuple[str, str], float]) -> Tally:
        """From the counters of one version, as `Engine.counts_by_drafter` has them."""
        by_position = {
            int(part): int(value)
            for (name, part), value in counts.items()
            if name == "spec_decode_num_accepted_tokens_per_pos"
        }
        return cls(
            rounds=int(counts.get(("spec_decode_num_drafts", ""), 0)),
            accepted=int(counts.get(("spec_decode_num_accepted_tokens", ""), 0)),
            # a round that accepted n drafts is counted at positions 0 to n - 1, and 1 + 3 + ... + (2n - 1) = n^2
            squares=sum((2 * position + 1) * count for position, count in by_position.items()),
            emitted=int(counts.get(("engine_emitted_tokens", ""), 0)),
            first=by_position.get(0, 0),
        )

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.rounds + other.rounds,
            self.accepted + other.accepted,
            self.squares + other.squares,
            self.emitted + other.emitted,
            self.first + other.first,
        )

    def __sub__(self, other: Tally) -> Tally:
        return Tally(
            self.rounds - other.rounds,
            self.accepted - other.accepted,
            self.squares - other.squares,
            self.emitted - other.emitted,
            self.first - other.first,
        )

    @property
    def steps(self) -> int:
        """Rounds of sequences with and without drafts; up to the tokens that were cut off at a limit or a stop."""
        return max(self.rounds, self.emitted - self.accepted)

    @property
    def tau(self) -> float | None:
        """Mean of (accepted drafts + 1) over the verify rounds; None without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def share(self) -> float:
        """Of its rounds, those with drafts."""
        return self.rounds / self.steps if self.steps else 0.0

    def first_accepted(self) -> tuple[float, float]:
        """Share of the verify rounds whose first draft was accepted, and its error; drawn to a half while few."""
        share = (self.first + 1) / (self.rounds + 2)
        return share, math.sqrt(share * (1 - share) / (self.rounds + 2))

    def enough(self, min_rounds: int) -> bool:
        """Whether it can be judged: many verify rounds, or so many rounds that their lack says something."""
        return self.rounds >= min_rounds or self.steps >= SELDOM * min_rounds

    def mean(self, rounds: int) -> tuple[float, float]:
        """Tokens per round over so many rounds, of which those beyond `self.rounds` brought one, and its error."""
        share = self.accepted / rounds
        return 1 + share, math.sqrt(max(0.0, self.squares / rounds - share**2) / rounds)


NO_ROUNDS = Tally()


def fall(new: Tally, old: Mapping[str, Tally], *, tolerance: float, min_rounds: int) -> str | None:
    """Why the new drafter is worse than the old one, in a line; None if it is not, or if little is known.

    `old` are tallies of the old one by where they come from. Traffic changes, too: the new one must lie below every
    one of them that has enough rounds, by more than `tolerance` (a share of the old figure) and `NOISE` errors. Where
    the new one hardly drafts although there is traffic, tokens per round over all rounds take the place of tau, unless
    `may_be_the_load`; or first drafts, which are accepted as often whatever the load: an old one that hardly drafted
    either, for its traffic, had nothing to lose in tokens per round.

    What remains: with "before" alone a change of the traffic looks like one of the drafter. Harder prompts lower tau,
    and a rise of load does too, since the engine then asks for shorter drafts. Other replicas meanwhile tell them
    apart; a service of one replica has none.
    """
    if not new.enough(min_rounds):
        return None
    if new.rounds >= min_rounds:
        known = {where: tally.mean(tally.rounds) for where, tally in old.items() if tally.rounds >= min_rounds}
        return _lower("live tau", new.mean(new.rounds), known, new.rounds, tolerance)
    why = None
    if not may_be_the_load(new, old, tolerance=tolerance, min_rounds=min_rounds):
        known = {where: tally.mean(tally.steps) for where, tally in old.items() if tally.steps >= min_rounds}
        what = "live tokens per round (it hardly drafts)"
        why = _lower(what, new.mean(new.steps), known, new.steps, tolerance)
    if why is None and new.rounds >= _FEW:
        known = {where: tally.first_accepted() for where, tally in old.items() if tally.rounds >= _FEW}
        what = "first drafts accepted (it hardly drafts)"
        why = _lower(what, new.first_accepted(), known, new.rounds, max(tolerance, 1 - FIRSTS))
    return why


def _lower(
    what: str, new: tuple[float, float], old: Mapping[str, tuple[float, float]], rounds: int, tolerance: float
) -> str | None:
    """That a figure (mean, error) is lower than all old ones by more than tolerance and noise, in a line, or None."""
    mean, error = new
    if not old or any(
        mean + NOISE * math.hypot(error, noise) >= (1 - tolerance) * before for before, noise in old.values()
    ):
        return None
    said = " and ".join(f"{before:.2f} {where}" for where, (before, _) in old.items())
    return f"{what} {mean:.2f} against {said}, {rounds} rounds, tolerance {tolerance:.0%}"


def may_be_the_load(new: Tally, old: Mapping[str, Tally], *, tolerance: float, min_rounds: int) -> bool:
    """Whether it may be the load, and not the new drafter, that it hardly drafts: full slots switch drafting off.

    Then only "before" is known, and the old one drafted in a larger share of its rounds than the tolerance allows; in
    an equal share, equal tau cannot make a fall. First drafts that are accepted less often in the few rounds with
    drafts speak against the drafter, whatever the load.
    """
    known = {where for where, tally in old.items() if tally.steps >= min_rounds}
    before = old.get(BEFORE, NO_ROUNDS)
    if new.rounds >= min_rounds or known != {BEFORE} or new.share >= (1 - tolerance) * before.share:
        return False
    share, error = new.first_accepted()
    share_before, noise = before.first_accepted()
    worse = share + NOISE * math.hypot(error, noise) < (1 - tolerance) * share_before
    return not (worse and new.rounds >= _FEW)


class LiveTau:
    """One replica's tallies: of the drafter at work since it took over, of the one before it in the window before that.

    Times are seconds of one clock that never goes back.
    """

    def __init__(self, window_s: float):
        self._window_s = window_s
        self.before = NO_ROUNDS  # of the drafter before, in the last `window_s` of its time
        self._first = self._latest = NO_ROUNDS  # as counted when it took over, and now
        self._since = 0.0
        self._notes: deque[tuple[float, Tally]] = deque()

    @property
    def now(self) -> Tally:
        """Of the drafter at work."""
        return self._latest - self._first

    def served_s(self, at: float) -> float:
        """For how long the drafter at work has been."""
        return at - self._since

    def note(self, at: float, counted: Tally) -> None:
        """All that was ever counted under the drafter at work."""
        self._latest = counted
        if not self._notes or at - self._notes[-1][0] >= self._window_s / _MOST_NOTES:
            self._notes.append((at, counted))
        while len(self._notes) > 1 and self._notes[1][0] <= at - self._window_s:
            self._notes.popleft()

    def took_over(self, at: float, counted: Tally, keep_before: bool = False) -> None:
        """Another drafter is at work; `counted` is what was counted under it in an earlier time.

        With `keep_before` the one that leaves is passed over: what came before it stays `before`.
        """
        if not keep_before:
            self.before = self._latest - self._notes[0][1] if self._notes else NO_ROUNDS
        self._first = counted
        self._since = at
        self._notes.clear()
        self.note(at, counted)
