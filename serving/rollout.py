"""How a new champion comes into service, replica by replica: their reports in, orders for them out. No Ray, no clock.

One replica takes a promoted version first. It is observed for `observe_s` and `min_rounds` verify rounds, or for
`max_observe_s` where there is too little traffic; then the others take it one after another, and it is observed for
another `observe_s`. Its live tau (of all replicas that have it) is compared with the old version's on the same
replicas before, and on the other replicas meanwhile: `live_tau.fall` has the rule. If it fell, or if replicas were lost
under it, all go back to the old version at once, and the registry is to be told: `pending`. Changes that are
roll-backs are followed at once, and so is a champion that serves already. Replicas whose engines lack layers that the
version taps are started anew, one at a time in the same order.

Whatever is known here comes from the reports, so that a machine that is made anew goes on where the last one was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.live_tau import BEFORE, NO_ROUNDS, Tally, fall, may_be_the_load
from serving.rollout_reports import NOTHING, Condemned, Order, Reason, Report, Taken

if TYPE_CHECKING:
    from drafters.registry import Change
    from serving.serve_config import RegistryFollowing

_BUSY_S = 1.0  # between two reports of a replica while a version is rolled out
_LOAD_S = 600.0  # a replica may take so long to load a version
_MOST_LOST = 3  # replicas that may be lost under a new version, before it is taken for the cause
_PATIENCE_S = 10.0  # beyond a few polls, until a replica that says nothing is taken for lost
_UNASKED_POLLS = 1.5  # without a question of any replica, after which nobody could ask


@dataclass(kw_only=True)
class _Trial:
    """A promoted version on its way into service."""

    change: Change
    new: Taken
    old: Taken
    takers: set[str] = field(default_factory=set)  # replicas that have it
    granted: tuple[str, float] | None = None  # the replica that may take it now, since when
    passed_at: float | None = None  # when the first replica had been observed
    full_at: float | None = None  # when all had it
    lost: int = 0
    beside: Tally = NO_ROUNDS  # of the others since the first replica has it
    others: dict[str, Tally] = field(default_factory=dict)  # what they last reported


class Rollout:
    """The state of one app's roll-out. Times are seconds of one clock that never goes back."""

    def __init__(self, config: RegistryFollowing, now: float):
        self._config, self._born, self._asked_at = config, now, now
        self._reports: dict[str, tuple[float, Report]] = {}
        self._champion: Change | None = None
        self._settled: Taken | None = None
        self._trial: _Trial | None = None
        self._told: set[int] = set()  # condemned changes that the registry knows of
        self._restarting: tuple[str, float] | None = None  # the replica that is started anew, since when
        self.condemned: dict[int, Condemned] = {}
        self.news: list[str] = []  # for the log

    # -- what goes in and out ------------------------------------------------------------------------------------------

    def report(self, report: Report, now: float) -> Order:
        """Take note of a replica's report and say what it is to do."""
        self._forgive_silence(now)
        _, known = self._reports.get(report.replica, (now, None))
        if report.serves is not None and (known is None or known.serves is None):
            self._restarting = None  # one has started
        self._reports[report.replica] = now, report
        self.condemned = dict(report.condemned) | self.condemned
        self._see(report.champion)
        self._forget_silent(now)
        self._advance(now)
        return self._order(report, now)

    def leave(self, replica: str) -> None:
        """The replica stops, or follows no longer."""
        self._reports.pop(replica, None)
        if self._trial is not None:
            self._trial.takers.discard(replica)
            if self._trial.granted and self._trial.granted[0] == replica:
                self._trial.granted = None

    @property
    def pending(self) -> Condemned | None:
        """The champion that is to be rolled back in the registry."""
        number = self._champion.number if self._champion else 0
        return None if number in self._told else self.condemned.get(number)

    def rolled_back(self, condemned: Condemned, change: Change | None) -> None:
        """The registry knows now; `change` None: it had another champion already."""
        self._told.add(condemned.change.number)
        self._see(change)

    # -- what happens --------------------------------------------------------------------------------------------------

    def _see(self, change: Change | None) -> None:
        if change is not None and (self._champion is None or change.number > self._champion.number):
            self._champion = change

    def _forgive_silence(self, now: float) -> None:
        """While nobody could reach this machine, silence says nothing of a replica."""
        unasked_s = now - self._asked_at - _UNASKED_POLLS * self._config.poll_s
        self._asked_at = now
        if unasked_s > 0:
            self._reports = {name: (at + unasked_s, report) for name, (at, report) in self._reports.items()}

    def _forget_silent(self, now: float) -> None:
        trial, limit_s = self._trial, 3 * self._config.poll_s + _PATIENCE_S
        for name, (at, _) in list(self._reports.items()):
            loads = trial is not None and trial.granted is not None and trial.granted[0] == name
            if now - at > (limit_s + _LOAD_S if loads else limit_s):
                del self._reports[name]
                if trial is not None and (loads or name in trial.takers):
                    trial.takers.discard(name)
                    trial.granted = None if loads else trial.granted
                    trial.lost += 1
                    self.news.append(f"replica {name} was lost with {_name(trial.new.version)}")

    def _advance(self, now: float) -> None:
        if self._settled is None:
            if now - self._born < 1.5 * self._config.poll_s:
                return  # not all have reported
            self._settled = self._found()
        change = self._champion
        if change is None or change.number <= self._settled.number:
            return
        if change.number in self.condemned:
            self._trial = None
        elif change.action == "rollback" or change.version == self._settled.version:
            self._settled, self._trial = _taken(change), None
        else:
            if self._trial is None or self._trial.new.number != change.number:
                self._trial = _Trial(change=change, new=_taken(change), old=self._settled)
                self.news.append(f"{_name(change.version)} (change {change.number}) begins its roll-out")
            self._run(self._trial, now)

    def _found(self) -> Taken:
        """What had proved itself before this machine was made."""
        reports = [report for _, report in self._reports.values()]
        if told := [report.settled for report in reports if report.settled is not None]:
            return max(told, key=lambda each: each.number)
        champion = self._to_start_with()
        others = [r.serves for r in reports if r.serves is not None and r.serves.version != champion.version]
        return max(others, key=lambda each: each.number) if others else champion

    def _run(self, trial: _Trial, now: float) -> None:
        self._note_takers(trial)
        config = self._config
        worse = fall(self._new(trial), self._old(trial), tolerance=config.tolerance, min_rounds=config.min_rounds)
        if worse is not None:
            self._condemn(trial, "tau", worse)
        elif trial.lost >= _MOST_LOST:
            self._condemn(trial, "lost", f"{trial.lost} replicas were lost while they served it")
        elif trial.passed_at is None:
            if len(trial.takers) > 1 or self._passed(trial):  # several: another machine let it pass
                trial.passed_at = now
                self.news.append(f"{_name(trial.new.version)} goes on to all replicas: {self._figures(trial)}")
        elif trial.takers >= set(self._reports):
            trial.full_at = now if trial.full_at is None else trial.full_at
            if now - trial.full_at >= config.observe_s:
                self.news.append(f"{_name(trial.new.version)} serves: {self._figures(trial)}")
                self._settled, self._trial = trial.new, None
        else:
            trial.full_at = None

    def _note_takers(self, trial: _Trial) -> None:
        takers = {name for name, (_, r) in self._reports.items() if r.serves and r.serves.number == trial.new.number}
        if trial.granted is not None and trial.granted[0] in takers:
            trial.granted = None
        trial.takers = takers
        others = {n: r for n, (_, r) in self._reports.items() if r.serves and r.serves.version == trial.old.version}
        for name, report in others.items():
            more = report.now - trial.others.get(name, report.now)
            trial.beside += more if more.emitted >= 0 else NO_ROUNDS  # less: it was swapped, and counts anew
        trial.others = {name: report.now for name, report in others.items()}
        if not takers:
            trial.beside = NO_ROUNDS  # the comparison begins with the next one

    def _condemn(self, trial: _Trial, reason: Reason, why: str) -> None:
        number = trial.new.number
        self.condemned[number] = Condemned(change=trial.change, back_to=trial.old, reason=reason, why=why)
        self._trial = None
        self.news.append(f"{_name(trial.new.version)} (change {number}) is rolled back: {why}")

    # -- figures -------------------------------------------------------------------------------------------------------

    def _new(self, trial: _Trial) -> Tally:
        return sum((self._reports[name][1].now for name in trial.takers), NO_ROUNDS)

    def _old(self, trial: _Trial) -> dict[str, Tally]:
        """Of the old version, by where it was counted; none if there was no drafter."""
        version = trial.old.version
        if version is None:
            return {}
        before = NO_ROUNDS
        for name in trial.takers:
            report = self._reports[name][1]
            if report.before is not None and report.before.version == version:
                before += report.before_tally
        return {BEFORE: before, "on other replicas": trial.beside}

    def _passed(self, trial: _Trial) -> bool:
        """Whether the first replica was observed for long enough."""
        if not trial.takers:
            return False
        config, new, old = self._config, self._new(trial), self._old(trial)
        served_s = max(self._reports[name][1].served_s for name in trial.takers)
        known = any(tally.enough(config.min_rounds) for tally in old.values()) and new.enough(config.min_rounds)
        unsure = may_be_the_load(new, old, tolerance=config.tolerance, min_rounds=config.min_rounds)
        enough = not old or (known and not unsure)
        return served_s >= (config.observe_s if enough else config.max_observe_s)

    def _figures(self, trial: _Trial) -> str:
        new, old = self._new(trial), self._old(trial)
        said = [f"{tally.tau:.2f} {where}" for where, tally in old.items() if tally.tau is not None]
        tau = "no live tau yet" if new.tau is None else f"live tau {new.tau:.2f} in {new.rounds} rounds"
        return f"{tau} against {' and '.join(said) or 'nothing to compare with'}"

    # -- orders --------------------------------------------------------------------------------------------------------

    def _order(self, report: Report, now: float) -> Order:
        take = self._wanted_of(report, now)
        busy = self._trial is not None or take is not None
        return Order(
            take=take,
            settled=self._settled or report.settled,
            condemned=dict(self.condemned),
            ask_again_s=min(_BUSY_S, self._config.poll_s) if busy else None,
            says=self._says(),
            restart=self._may_restart(report, now),
        )

    def _wanted_of(self, report: Report, now: float) -> Taken | None:
        if self._settled is None:  # one that starts does not wait until all others are known
            return self._to_start_with() if report.serves is None else None
        trial = self._trial
        if trial is not None and report.replica in trial.takers:
            return None
        if trial is not None and self._may_take(trial, report):
            trial.granted = report.replica, now
            return trial.new
        return None if report.serves == self._settled else self._settled

    def _to_start_with(self) -> Taken:
        """The champion, as long as nothing is known against it."""
        number = self._champion.number if self._champion else 0
        return self.condemned[number].back_to if number in self.condemned else _taken(self._champion)

    def _may_take(self, trial: _Trial, report: Report) -> bool:
        """Whether it is this replica's turn; one at a time, the first alone."""
        if report.serves is None or trial.new.number in (*report.refused, report.untapped):
            if trial.granted is not None and trial.granted[0] == report.replica:
                trial.granted = None
            return False
        if trial.granted is not None:
            return trial.granted[0] == report.replica
        return not trial.takers or trial.passed_at is not None

    def _may_restart(self, report: Report, now: float) -> bool:
        """Whether it is this replica's turn to be started anew; one at a time, as with `_may_take`."""
        trial = self._trial
        wanted = self._settled if trial is None else trial.new
        if wanted is None or report.untapped != wanted.number:
            return False
        if self._restarting is not None and now - self._restarting[1] < _LOAD_S:
            return self._restarting[0] == report.replica
        if trial is not None and (trial.granted is not None or (trial.takers and trial.passed_at is None)):
            return False
        self._restarting = report.replica, now
        return True

    def _says(self) -> str:
        trial = self._trial
        if trial is not None:
            of = f"{len(trial.takers)} of {len(self._reports)} replicas"
            return f"rolling out {_name(trial.new.version)}, {of}: {self._figures(trial)}"
        if self.pending is not None:
            return f"{_name(self.pending.change.version)} is rolled back, the registry is not told yet"
        return "steady" if self._settled is not None else "waiting for the reports of all replicas"


def _taken(change: Change | None) -> Taken:
    return NOTHING if change is None else Taken(number=change.number, version=change.version)


def _name(version: str | None) -> str:
    return version or "plain decoding"
