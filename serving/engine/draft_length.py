"""How many tokens to draft: the number, 0 included, that promises the most tokens per second for this batch now.

In: seconds of passes by rows and of drafts by (batch, number), and what was accepted, all as they are observed in
service. Out: `num_draft_tokens` of the next round. S = T_base * tau / (T_draft + T_verify), with tau expected from the
acceptance of every draft position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_DECAY = 0.1  # weight of a new timing against the running one
_OUTLIER = 3.0  # a timing counts at most so many times the running one: other processes make outliers
_MEMORY = 64.0  # rounds after which an observation of acceptance has faded to a third
_PRIOR_WEIGHT = 8.0  # rounds that a sequence's own acceptance must outweigh
_PRIOR_ACCEPTANCE = 0.6  # of a position nothing is known about
_FIRST_PROBES = 3  # rounds spent on each of: all, no, half the drafts and one, when a batch size is new
_PROBE_EVERY = 64  # rounds between trials of another number; doubled while drafting is off and stays worse
_PROBE_MOST = 1024
_PROBE_ROUNDS = 2  # rounds of a probe: in the first, a drafter that was off catches up, which is not timed


@dataclass
class PositionAcceptance:
    """Decayed acceptance by draft position: of the rounds that got to position j, the share that accepted it."""

    accepted: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)

    def record(self, asked: int, accepted: int) -> None:
        """One round that asked for `asked` drafts and kept the first `accepted`. Not offered is not accepted."""
        missing = asked - len(self.tried)
        self.accepted += [0.0] * missing
        self.tried += [0.0] * missing
        fade = 1 - 1 / _MEMORY
        for j in range(min(accepted + 1, asked)):
            self.tried[j] = self.tried[j] * fade + 1
            self.accepted[j] = self.accepted[j] * fade + (1 if j < accepted else 0)

    def rate(self, position: int, prior: float) -> float:
        """Estimated acceptance at a position, drawn towards `prior` while little is known."""
        if position >= len(self.tried):
            return prior
        return (self.accepted[position] + _PRIOR_WEIGHT * prior) / (self.tried[position] + _PRIOR_WEIGHT)


class _Curve:
    """Running seconds at whole-numbered points, with straight lines between and beyond them."""

    def __init__(self) -> None:
        self.points: dict[int, float] = {}

    def record(self, x: int, seconds: float) -> None:
        known = self.points.get(x)
        self.points[x] = seconds if known is None else known + _DECAY * (min(seconds, _OUTLIER * known) - known)

    def at(self, x: int) -> float | None:
        """Seconds at x; None before the first observation."""
        if x in self.points or not self.points:
            return self.points.get(x)
        below = max((p for p in self.points if p < x), default=None)
        above = min((p for p in self.points if p > x), default=None)
        if below is None or above is None:
            edge = min(self.points) if below is None else max(self.points)
            others = sorted(self.points, key=lambda p: abs(p - edge))[1:2]
            slope = abs(self.points[others[0]] - self.points[edge]) / abs(others[0] - edge) if others else 0.0
            return max(0.0, self.points[edge] + slope * (x - edge))
        share = (x - below) / (above - below)
        return self.points[below] + share * (self.points[above] - self.points[below])


class DraftLengthChooser:
    """Observes rounds and picks the next one's `num_draft_tokens`. Numbers are kept by batch size."""

    def __init__(self, max_draft_tokens: int):
        self.max_draft_tokens = max_draft_tokens
        self.acceptance = PositionAcceptance()  # over all sequences: the prior of each
        self.chosen: Counter[int] = Counter()  # rounds by the number that was chosen, for the stats
        self._steps = _Curve()  # by rows of the pass
        self._drafts: dict[int, _Curve] = {}  # by batch, then by number
        self._rounds: Counter[int] = Counter()  # by batch
        self._next_probe: dict[int, int] = {}
        self._probe_gap: dict[int, int] = {}
        self._probes: Counter[int] = Counter()  # by batch
        self._off: dict[int, bool] = {}  # by batch, whether the last choice was not to draft

    def choose(self, sequences: Sequence[PositionAcceptance], plain_rows: int = 0) -> int:
        """The number for a round of these sequences, each given by its own acceptance.

        `plain_rows` are rows of the same pass that belong to sequences without drafts.
        """
        batch = len(sequences)
        number = self._probe(batch)
        if number is None:
            number = self._best(sequences, plain_rows)
            self._off[batch] = number == 0
            if number > 0:
                self._probe_gap[batch] = _PROBE_EVERY
        self._rounds[batch] += 1
        self.chosen[number] += 1
        return number

    def observe_step(self, rows: int, seconds: float) -> None:
        """Seconds of a pass of `rows` rows, none of them of a prompt."""
        self._steps.record(rows, seconds)

    def observe_draft(self, batch: int, number: int, seconds: float) -> None:
        """Seconds of a draft of `number` tokens for `batch` sequences."""
        self._drafts.setdefault(batch, _Curve()).record(number, seconds)

    def observe_acceptance(self, sequence: PositionAcceptance, asked: int, accepted: int) -> None:
        """What one sequence's round brought."""
        sequence.record(asked, accepted)
        self.acceptance.record(asked, accepted)

    def tokens_per_s(self, sequences: Sequence[PositionAcceptance], number: int, plain_rows: int = 0) -> float | None:
        """Expected speed of a round with `number` drafts per sequence; None while a time is unknown."""
        batch = len(sequences)
        step = self._steps.at(batch * (number + 1) + plain_rows)
        draft = self._draft_seconds(batch, number)
        if step is None or draft is None or step + draft <= 0:
            return None
        return (plain_rows + sum(self._expected_tokens(s, number) for s in sequences)) / (step + draft)

    def _expected_tokens(self, sequence: PositionAcceptance, number: int) -> float:
        tokens, reach = 1.0, 1.0
        for j in range(number):
            reach *= sequence.rate(j, self.acceptance.rate(j, _PRIOR_ACCEPTANCE))
            tokens += reach
        return tokens

    def _draft_seconds(self, batch: int, number: int) -> float | None:
        if number == 0:
            return 0.0
        if not self._drafts:
            return None
        nearest = min(self._drafts, key=lambda known: abs(known - batch))
        return self._drafts[nearest].at(number)

    def _best(self, sequences: Sequence[PositionAcceptance], plain_rows: int) -> int:
        speeds = [(self.tokens_per_s(sequences, k, plain_rows) or 0.0, -k) for k in range(self.max_draft_tokens + 1)]
        return -max(speeds)[1]

    def _probe(self, batch: int) -> int | None:
        """A number to try now, if one is due: first a few of each kind, later one now and then."""
        most, done = self.max_draft_tokens, self._rounds[batch]
        first = [number for number in (most, 0, (most + 1) // 2, 1) for _ in range(_FIRST_PROBES)]
        if done < len(first):
            return first[done]
        due = self._next_probe.setdefault(batch, done + _PROBE_EVERY)
        if done < due:
            return None
        if done >= due + _PROBE_ROUNDS - 1:  # the last round of this probe
            gap = self._probe_gap.get(batch, _PROBE_EVERY)
            self._next_probe[batch] = done + gap
            self._probe_gap[batch] = min(2 * gap, _PROBE_MOST)
            self._probes[batch] += 1
        numbers = range(most, 0, -1) if self._off.get(batch) else range(most, -1, -1)  # off: that time is known already
        return numbers[self._probes[batch] % len(numbers)]
