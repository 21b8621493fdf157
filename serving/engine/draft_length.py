"""How many tokens to draft, sequence by sequence: what promises the most tokens per second for this batch now.

In: seconds of passes by rows and of drafts by (batch, number), and what was accepted, all as they are observed in
service. Out: the next round's `num_draft_tokens` of every sequence, 0 included. A row pays while the chance that its
draft is reached and accepted outweighs its part of the pass: S = T_base * tau / (T_draft + T_verify), row by row.

Where a drafter tells how sure it is of each draft, the same rule is applied once more to what it has drafted: its
likeliest drafts over all sequences are verified, as many as pay. Of a tree, the likeliest few are a chain if that is
what is likeliest: so chain, tree and off are one decision, made by the rows that are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.engine.confidence import Calibration

_FASTER, _SLOWER = 0.3, 0.06  # weight of a timing below or above the running one: other processes only ever add time
_OUTLIER = 3.0  # a timing counts at most so many times the running one
_SURE = 3  # timings of which the least counts, before there is a running one
_MEMORY = 64.0  # rounds after which an observation of acceptance has faded to a third
_PRIOR_WEIGHT = 8.0  # rounds that a sequence's own acceptance must outweigh
_PRIOR_ACCEPTANCE = 0.6  # of a position nothing is known about
_FIRST_PROBES = (1, 1, 1, 0, 0, 0)  # drafts of the first rounds of all; more are tried as soon as they look faster
_NEXT_PROBES = (
    1,
    1,
    1,
)  # of another batch size's first rounds: only its draft time is new, passes are known by rows
_PROBE_SOON, _PROBE_EVERY, _PROBE_OFF = 8, 64, 256  # rounds between trials: at first, later, while drafting is off
_PROBE_ROUNDS = 2  # rounds of a probe: in the first, a drafter that was off catches up, which is not timed
_SHIFT, _DRIFT = 0.5, 0.1  # weight of a tree's confidence beside the running mean: in a probe while off, else
_EQUAL_COUNTS = (0, 1, 3, 7, 15, 31, 63)  # drafts to verify where every sequence must bring as many
_PROMISING = 0.8  # of the best choice's speed: what a number must be thought to reach to be tried


@dataclass
class PositionAcceptance:
    """Decayed acceptance by draft position: of the rounds that got to position j, the share that accepted it."""

    accepted: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)

    def record(self, asked: int, accepted: int, *, forget: bool = True) -> None:
        """One round that asked for `asked` drafts and kept the first `accepted`. Not offered is not accepted.

        With `forget`, what was known of positions that were not asked for fades, so that they are judged like
        everybody's again.
        """
        missing = asked - len(self.tried)
        self.accepted += [0.0] * missing
        self.tried += [0.0] * missing
        fade = 1 - 1 / _MEMORY
        reached = min(accepted + 1, asked)
        for j in (*range(reached), *range(asked, len(self.tried) if forget else asked)):
            self.tried[j] *= fade
            self.accepted[j] *= fade
        for j in range(reached):
            self.tried[j] += 1
            self.accepted[j] += 1 if j < accepted else 0

    def rates(self, prior: Sequence[float]) -> list[float]:
        """Estimated acceptance at each position of `prior`, drawn towards it while little is known."""
        known = len(self.tried)
        return [
            (self.accepted[j] + _PRIOR_WEIGHT * p) / (self.tried[j] + _PRIOR_WEIGHT) if j < known else p
            for j, p in enumerate(prior)
        ]


class _Curve:
    """Running seconds at whole-numbered points, with straight lines between and beyond them."""

    def __init__(self) -> None:
        self.points: dict[int, float] = {}
        self._counts: Counter[int] = Counter()

    def record(self, x: int, seconds: float) -> None:
        known = self.points.setdefault(x, seconds)
        self._counts[x] += 1
        if self._counts[x] <= _SURE:
            self.points[x] = min(known, seconds)
            return
        weight = _FASTER if seconds < known else _SLOWER
        self.points[x] = known + weight * (min(seconds, _OUTLIER * known) - known)

    def at(self, x: np.ndarray) -> np.ndarray | None:
        """Seconds at each x; None before the first observation."""
        if not self.points:
            return None
        known = np.array(sorted(self.points.items()))
        seconds = np.interp(x, known[:, 0], known[:, 1])
        if len(known) > 1:
            below, above = known[0, 0] - x, x - known[-1, 0]
            seconds += np.maximum(below, 0) * _slope(known[0], known[1])
            seconds += np.maximum(above, 0) * _slope(known[-2], known[-1])
        return np.maximum(seconds, 0.0)


def _slope(first: np.ndarray, second: np.ndarray) -> float:
    """Seconds per step between two points, without a sign: noise must not make more work look cheaper."""
    return float(abs(second[1] - first[1]) / (second[0] - first[0]))


@dataclass
class _Trial:
    """A round that tries a number while drafting is off, and what it brings."""

    batch: int
    number: int
    observed: int = 0  # sequences
    accepted: int = 0  # drafts, of all of them


@dataclass(frozen=True)
class _Choice:
    """What a round may do, and the tokens per second that are expected of it."""

    tokens_per_s: float
    lengths: list[int]


class DraftLengthChooser:
    """Observes rounds and picks the next one's `num_draft_tokens` of every sequence."""

    def __init__(self, max_draft_tokens: int, *, equal_lengths: bool = False, trees: bool = False):
        self.max_draft_tokens = max_draft_tokens  # may change between rounds
        self._equal_lengths = equal_lengths  # one number for all sequences of a round
        self._trees = trees  # a number is a tree's depth, and its nodes are chosen by `worth_verifying`
        self._calibration = Calibration()
        self._probed: int | None = None  # the number that this round tries
        self._trial: _Trial | None = None  # the same while drafting is off, with what came of it
        self._profiles: dict[int, np.ndarray] = {}  # by depth, running mean of the confidence in a tree's nodes
        self._depth = 0  # of the trees that were asked for
        self.acceptance = PositionAcceptance()  # over all sequences: the prior of each
        self._steps = _Curve()  # by rows of the pass
        self._drafts: dict[int, _Curve] = {}  # by batch, then by number
        self._rounds: Counter[int] = Counter()  # by batch
        self._next_probe: dict[int, int] = {}
        self._probe_gap: dict[int, int] = {}
        self._probes: Counter[int] = Counter()  # by batch
        self._probing: dict[int, int] = {}  # by batch, the number on trial
        self._firsts: dict[int, tuple[int, ...]] = {}  # by batch, the numbers of its first rounds

    def choose(self, sequences: Sequence[PositionAcceptance], plain_rows: int = 0) -> list[int]:
        """The numbers for a round of these sequences, each given by its own acceptance.

        `plain_rows` are rows of the same pass that belong to sequences without drafts.
        """
        batch = len(sequences)
        self._weigh_trial()
        best = self._best(sequences, plain_rows)
        number = self._probe(batch, sequences, plain_rows, best)
        self._rounds[batch] += 1
        self._probed, self._depth = number, max(best.lengths, default=0) if number is None else number
        if number is not None:
            self._trial = _Trial(batch, number) if number and not any(best.lengths) else None
            return [number] * batch
        if any(best.lengths):
            self._probe_gap[batch] = min(self._probe_gap.get(batch, _PROBE_SOON), _PROBE_EVERY)
        return best.lengths

    def worth_verifying(self, confidence: Sequence[Sequence[float]], plain_rows: int, draft_s: float) -> list[int]:
        """How many of each sequence's drafts to verify, by their falling confidence and the seconds spent so far."""
        chances_B = [self._calibration.chances(drafts) for drafts in confidence]
        counts = [len(c) for c in chances_B]
        if self._trees and counts:
            self._note_profile(confidence)
        if self._probed is not None:  # the rows that it was to show the cost of
            return [min(n, self._probed) for n in counts]
        base = plain_rows + len(counts)
        if self._equal_lengths:
            return self._equal_counts(chances_B, base, draft_s)
        chances = np.concatenate([np.empty(0), *chances_B])
        order = np.argsort(-chances, kind="stable")
        speeds = self._speeds(chances[order], base, draft_s)
        if speeds is None or not len(chances):
            return counts
        best = int(speeds.argmax())
        for near in (best - 1, best + 1):  # a cost between two known ones may be a step, not a slope
            if 0 < near <= len(chances) and base + near not in self._steps.points:
                best = near
                break
        owner = np.repeat(np.arange(len(counts)), counts)
        return np.bincount(owner[order[:best]], minlength=len(counts)).tolist()

    def _equal_counts(self, chances_B: list[np.ndarray], base_rows: int, draft_s: float) -> list[int]:
        """The same number for all, out of few: every other layout of a pass would need a graph of its own."""
        batch, longest = len(chances_B), max(len(c) for c in chances_B)
        found, fastest = longest, 0.0
        for number in sorted({*_EQUAL_COUNTS, longest}):
            step = self._steps.at(np.array([base_rows + batch * number]))
            if number > longest or step is None:
                continue
            tokens = base_rows + sum(float(c[:number].sum()) for c in chances_B)
            speed = tokens / max(float(step[0]) + draft_s, 1e-9)
            if speed > fastest:
                found, fastest = number, speed
        return [min(found, len(c)) for c in chances_B]

    def _note_profile(self, confidence: Sequence[Sequence[float]]) -> None:
        known = self._profiles.get(self._depth)
        length = max(0 if known is None else len(known), *(len(drafts) for drafts in confidence))
        mean = np.mean([np.pad(np.asarray(d), (0, length - len(d))) for d in confidence], axis=0)
        if known is not None:
            known = np.pad(known, (0, length - len(known)))
            mean = known + (_DRIFT if self._trial is None else _SHIFT) * (mean - known)
        self._profiles[self._depth] = mean

    def _speeds(self, chances: np.ndarray, base_rows: int, draft_s: float) -> np.ndarray | None:
        """Tokens per second with the first 0, 1, ... of the drafts, by their chances; None while times are unknown."""
        step = self._steps.at(base_rows + np.arange(len(chances) + 1))
        if step is None:
            return None
        tokens = base_rows + np.concatenate([[0.0], chances.cumsum()])
        return np.asarray(tokens / np.maximum(step + draft_s, 1e-9))

    def observe_confidence(self, confidence: Sequence[float], path: Sequence[int]) -> None:
        """The drafts of one sequence that were verified, and which of them were kept."""
        self._calibration.observe(confidence, path)

    def observe_step(self, rows: int, seconds: float) -> None:
        """Seconds of a pass of `rows` rows, none of them of a prompt."""
        self._steps.record(rows, seconds)

    def observe_draft(self, batch: int, number: int, seconds: float) -> None:
        """Seconds of a draft of `number` tokens for `batch` sequences."""
        self._drafts.setdefault(batch, _Curve()).record(number, seconds)

    def observe_acceptance(self, sequence: PositionAcceptance, asked: int, accepted: int) -> None:
        """What one sequence's round brought."""
        if self._trial is not None:
            self._trial.observed += 1
            self._trial.accepted += accepted
        sequence.record(asked, accepted)
        self.acceptance.record(asked, accepted, forget=False)

    def tokens_per_s(self, sequences: Sequence[PositionAcceptance], number: int, plain_rows: int = 0) -> float | None:
        """Expected speed of a round with `number` drafts for everybody; None while a time is unknown."""
        batch = len(sequences)
        draft = self._draft_seconds(batch)
        if draft is None and number:
            return None
        draft_s = float(draft[number]) if draft is not None else 0.0
        if self._trees and number and self._profiles:
            nearest = min(self._profiles, key=lambda depth: (abs(depth - number), depth))
            chances = np.repeat(self._calibration.chances(self._profiles[nearest]), batch)
            speeds = self._speeds(chances, plain_rows + batch, draft_s)
            return None if speeds is None else float(speeds.max())
        step = self._steps.at(np.array([plain_rows + batch * (number + 1)]))
        if step is None:
            return None
        tokens = plain_rows + batch + self._reach(sequences)[:, :number].sum()
        return float(tokens / max(step[0] + draft_s, 1e-9))

    def _reach(self, sequences: Sequence[PositionAcceptance]) -> np.ndarray:
        """[B, most]: the chance that a sequence's draft j and all before it are accepted."""
        prior = self.acceptance.rates([_PRIOR_ACCEPTANCE] * self.max_draft_tokens)
        return np.array([s.rates(prior) for s in sequences]).reshape(len(sequences), -1).cumprod(axis=1)

    def _best(self, sequences: Sequence[PositionAcceptance], plain_rows: int) -> _Choice:
        """For every longest draft: rows in order of their chance, cut where the tokens per second are highest."""
        batch, most = len(sequences), self.max_draft_tokens
        step = self._steps.at(plain_rows + batch + np.arange(batch * most + 1))
        draft = self._draft_seconds(batch)
        if step is None:
            return _Choice(0.0, [0] * batch)
        found = _Choice((plain_rows + batch) / max(step[0], 1e-9), [0] * batch)
        if draft is None:
            return found
        reach_BK = self._reach(sequences)
        if self._trees:
            for depth in range(1, most + 1):
                tokens_per_s = self.tokens_per_s(sequences, depth, plain_rows) or 0.0
                if tokens_per_s > found.tokens_per_s:
                    found = _Choice(tokens_per_s, [depth] * batch)
            return found
        for longest in range(1, most + 1):
            chances = reach_BK[:, :longest].T.ravel()  # position by position: of equal chances the earlier one first
            order = np.argsort(-chances, kind="stable")
            tokens = plain_rows + batch + chances[order].cumsum()
            speeds = tokens / np.maximum(step[1 : len(tokens) + 1] + draft[longest], 1e-9)
            if self._equal_lengths:
                speeds[:-1] = 0.0  # all rows up to this longest draft, or another one
            rows = int(speeds.argmax())
            if speeds[rows] > found.tokens_per_s:
                lengths = np.bincount(order[: rows + 1] % batch, minlength=batch)
                found = _Choice(float(speeds[rows]), lengths.tolist())
        return found

    def _draft_seconds(self, batch: int) -> np.ndarray | None:
        """Seconds of a draft of 0, 1, .. tokens for so many sequences; None before the first."""
        if not self._drafts:
            return None
        nearest = min(self._drafts, key=lambda known: abs(known - batch))
        seconds = self._drafts[nearest].at(np.arange(self.max_draft_tokens + 1))
        assert seconds is not None
        seconds[0] = 0.0
        return seconds

    def _probe(self, batch: int, sequences: Sequence[PositionAcceptance], plain_rows: int, best: _Choice) -> int | None:
        """A number to try now, if one is due: a few at first, later one now and then."""
        done = self._rounds[batch]
        firsts = self._firsts.setdefault(batch, _NEXT_PROBES if self._firsts else _FIRST_PROBES)
        if done < len(firsts):
            return firsts[done]
        due = self._next_probe.setdefault(batch, done + _PROBE_SOON)
        if done < due:
            return None
        if done == due:
            self._probing[batch] = self._promising(sequences, plain_rows, best)
        if done >= due + _PROBE_ROUNDS - 1:  # the last round of this probe
            gap = self._probe_gap.get(batch, _PROBE_SOON)
            self._next_probe[batch] = done + gap
            self._probe_gap[batch] = min(2 * gap, _PROBE_OFF)
            self._probes[batch] += 1
        return self._probing[batch]

    def _weigh_trial(self) -> None:
        """A probe that was faster than plain decoding, while drafting is off, is made again soon: it may be luck, or
        other traffic, and only more of them tell."""
        trial, self._trial = self._trial, None
        if trial is None or not trial.observed:
            return
        step = self._steps.at(trial.batch * np.array([1, 1 + trial.number]))
        draft = self._draft_seconds(trial.batch)
        if step is None or draft is None or trial.batch not in self._next_probe:
            return
        if (1 + trial.accepted / trial.observed) * step[0] > step[1] + draft[trial.number]:
            self._probe_gap[trial.batch] = _PROBE_SOON
            soon = self._rounds[trial.batch] + _PROBE_SOON
            self._next_probe[trial.batch] = min(self._next_probe[trial.batch], soon)

    def _promising(self, sequences: Sequence[PositionAcceptance], plain_rows: int, best: _Choice) -> int:
        """The number whose turn it is among those thought nearly as fast as the best; while drafting, no draft too."""
        speeds = {n: self.tokens_per_s(sequences, n, plain_rows) or 0.0 for n in range(self.max_draft_tokens + 1)}
        promising = [n for n in speeds if n and speeds[n] >= _PROMISING * best.tokens_per_s] or [1]
        untried = [n for n in promising if n not in self._profiles] if self._trees else []
        if untried:  # what a deeper tree brings is not known from a flatter one
            self._probe_gap[len(sequences)] = _PROBE_SOON
            return untried[0]
        candidates = [0, *promising] if any(best.lengths) else promising
        return candidates[self._probes[len(sequences)] % len(candidates)]
