"""One replica follows a registry's champion: it watches the pointer, asks the roll-out's guard, and swaps its drafter.

Two threads, so that a registry that is away delays no order: one looks at the registry and reports to it, the other
talks to the guard. A registry or a guard that is away costs a count and a warning; what serves goes on serving.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

from drafters.remote import first_line
from serving.drafter_swap import DrafterSwap
from serving.engine.engine import Engine
from serving.live_tau import LiveTau, Tally
from serving.registry_figures import RegistryFigures
from serving.registry_start import Followed
from serving.rollout_guard import GuardAwayError
from serving.rollout_reports import Condemned, Order, Reason, Report, Taken

log = logging.getLogger(__name__)

JITTER = 0.2  # share by which polls are spread
_RETRY_S = 2.0  # until a guard that is away is asked again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0  # until a version that could not be loaded is tried again
_JOIN_S = 2.0


class RegistryFollower:
    """Follows from what serves now, until somebody else chooses the drafter (`pin`), and then again (`follow`)."""

    def __init__(self, followed: Followed, swap: DrafterSwap):
        self._config, self._registry, self._guard = followed.config, followed.registry, followed.guard
        self._replica, self._swap, start = followed.replica, swap, followed.start
        if start.address != swap.address:  # it could be read, but not be used
            start.refuse("it could not be used for this engine; see the replica's log")
        self.following = True
        self._turn = threading.Lock()  # over what follows: a step of the follower, or a change of `following`
        self._serves: Taken | None = start.taken
        self._before: Taken | None = None
        self._settled: Taken | None = None
        self._tau = LiveTau(self._config.max_observe_s)
        self._tau.took_over(time.monotonic(), Tally())
        self._condemned: dict[int, Condemned] = {}
        self._refused = dict(start.refused)  # number of the change -> why; never changed, but replaced
        self._retry: dict[int, tuple[float, float]] = {n: self._pause(0.0) for n in start.refused}
        self._untapped: int | None = None  # the change that was refused for layers that this engine does not tap
        self._restart = False  # whether it is this replica's turn to be started anew for them
        self._champion = start.champion
        self._says = "starting"
        self._heard = False
        self._counts: Counter[str] = Counter()
        self._rollbacks: Counter[str] = Counter()
        self._stopped, self._wake, self._look = threading.Event(), threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, name="draftloop-registry", daemon=True),
            threading.Thread(target=self._follow, name="draftloop-follower", daemon=True),
        ]

    def start(self) -> None:
        """Begin to watch and to follow."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop, and tell the guard that this is no loss."""
        self._stopped.set()
        self._wake.set()
        self._look.set()
        with contextlib.suppress(Exception):
            self._guard.leave(self._replica)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_JOIN_S)

    def pin(self) -> bool:
        """Follow no longer: somebody else chooses the drafter. Waits for a swap under way; whether it followed."""
        with self._turn:
            followed, self.following = self.following, False
        if followed:
            with contextlib.suppress(Exception):
                self._guard.leave(self._replica)
        return followed

    def follow(self, *, swapped: bool = True) -> None:
        """Follow again; not `swapped`: what serves is still what served when it followed last."""
        with self._turn:
            if self.following:
                return
            self.following = True
            if swapped:
                self._serves = self._before = None
        self._wake.set()

    # -- the registry --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        reported_at, reported = -self._config.report_s, self._version()
        while not self._stopped.is_set():
            version = self._version()
            due = version != reported or time.monotonic() - reported_at >= self._config.report_s
            if due and self._ask_registry(functools.partial(self._registry.report_serving, self._replica, version)):
                reported_at, reported = time.monotonic(), version
            self._look.wait(self._jittered())
            self._look.clear()
            if not self._stopped.is_set():
                self._ask_registry(self._poll)

    def _version(self) -> str | None:
        """The registry's version that serves, whoever chose it."""
        address, folder = self._swap.address, f"{self._registry.uri}/versions/"
        return address.removeprefix(folder).rstrip("/") if address and address.startswith(folder) else None

    def _poll(self) -> None:
        champion = self._registry.champion()
        known = self._champion.number if self._champion else 0
        if champion is not None and champion.number > known:
            log.info("the registry's champion is now %s (change %d)", champion.version, champion.number)
            self._champion = champion
            self._wake.set()

    def _ask_registry(self, operation: Callable[[], object]) -> bool:
        try:
            operation()
        except Exception as error:  # every file system has its own kinds
            log.warning("the registry is away, what serves goes on: %s", first_line(error))
            self._counts["failed"] += 1
            return False
        self._counts["ok"] += 1
        return True

    def _jittered(self) -> float:
        return self._config.poll_s * random.uniform(1 - JITTER, 1 + JITTER)

    # -- the guard -----------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._stopped.is_set():
            try:
                with self._turn:
                    pause_s = self._step() if self.following else self._jittered()
            except Exception as error:
                log.exception("a step of following the registry failed: %s", first_line(error))
                pause_s = self._jittered()
            self._wake.wait(pause_s)
            self._wake.clear()

    def _step(self) -> float:
        """One report and what it brings; returns the seconds until the next one."""
        now = time.monotonic()
        self._tau.note(now, self._swap.between_rounds(_counted))
        self._refused = {n: why for n, why in self._refused.items() if now < self._retry[n][0]}
        try:
            order = self._guard.ask(self._report(now))
        except GuardAwayError as error:
            log.warning("what serves goes on: %s", error)
            self._counts["guard away"] += 1
            self._says = str(error)
            return min(_RETRY_S, self._config.poll_s)
        self._hear(order)
        if order.take is not None and order.take != self._serves:
            self._take(order.take)
        return order.ask_again_s if order.ask_again_s is not None else self._jittered()

    def _report(self, now: float) -> Report:
        return Report(
            replica=self._replica,
            champion=self._champion,
            serves=self._serves,
            served_s=self._tau.served_s(now),
            now=self._tau.now,
            before=self._before,
            before_tally=self._tau.before,
            settled=self._settled,
            refused=frozenset(self._refused),
            untapped=self._untapped if self._swap.address is None else None,
            condemned=self._condemned,
        )

    def _hear(self, order: Order) -> None:
        new = [each for number, each in order.condemned.items() if number not in self._condemned]
        for condemned in new if self._heard else []:  # what is known from the beginning was counted by others
            log.error("version %s is rolled back: %s", condemned.change.version, condemned.why)
            self._rollbacks[condemned.reason] += 1
        asked, self._restart = self._restart, order.restart
        if self.asks_for_restart and not asked:
            log.warning("this replica asks to be started anew: %s", self.asks_for_restart)
        self._heard = True
        self._condemned, self._settled, self._says = dict(order.condemned), order.settled, order.says

    def _take(self, taken: Taken) -> None:
        """Under the lock."""
        old = self._serves
        if old is None or taken.version != old.version:
            if taken.number in self._refused:
                return
            refused = self._swap_to(taken.version)
            if refused is not None:
                self._refused = {**self._refused, taken.number: refused}  # anew: others read the old one
                self._untapped = taken.number if self._swap.untapped else None
                self._retry[taken.number] = self._pause(self._retry.get(taken.number, (0.0, 0.0))[1])
                return
            # one that had not proved itself is passed over: the next comparison is with the one before it
            unproved = old is not None and self._settled is not None and old.number > self._settled.number
            self._tau.took_over(time.monotonic(), self._swap.between_rounds(_counted), keep_before=unproved)
            self._before = self._before if unproved else old
        self._serves, self._untapped = taken, None
        self._look.set()

    def _swap_to(self, version: str | None) -> str | None:
        """Swap; why it was refused, or None."""
        try:
            address = None if version is None else self._registry.version(version).uri
        except Exception as error:  # the registry is away, or the version is gone
            return self._swap.refuse(error, "registry")
        return self._swap.take(address, "registry")

    @staticmethod
    def _pause(last_s: float) -> tuple[float, float]:
        """(when to try again, the pause until then)"""
        pause_s = min(max(_FIRST_PAUSE_S, 2 * last_s), _LONGEST_PAUSE_S)
        return time.monotonic() + pause_s, pause_s

    # -- what people see -----------------------------------------------------------------------------------------------

    @property
    def asks_for_restart(self) -> str | None:
        """Why the replica must be started anew to serve what it is to follow; None if it need not, or not yet."""
        if not (self._restart and self.following and self._swap.address is None):
            return None
        return "it decodes plainly, since the drafter it is to serve taps layers that this engine does not"

    def figures(self) -> RegistryFigures:
        """For `/metrics`."""
        return RegistryFigures(
            champion=self._champion.number if self._champion else 0,
            followed=self._serves.number if self._serves and self.following else 0,
            following=self.following,
            polls={"ok": self._counts["ok"], "failed": self._counts["failed"]},
            guard_away=self._counts["guard away"],
            rollbacks=dict.fromkeys(get_args(Reason), 0) | self._rollbacks,
        )

    def describe(self) -> dict[str, Any]:
        """For `/v1/models`."""
        champion, serves = self._champion, self._serves if self.following else None
        return {
            "uri": self._config.uri,
            "following": self.following,
            "champion": champion and {"change": champion.number, "version": champion.version},
            "serves": serves and {"change": serves.number, "version": serves.version},
            "rollout": self._says if self.following else "user_config pins the drafter",
            "refused": {str(number): why for number, why in self._refused.items()},
            "rolled_back": [
                {"change": number, "version": c.change.version, "back_to": c.back_to.version, "why": c.why}
                for number, c in sorted(self._condemned.items())
            ],
        }


def _counted(engine: Engine) -> Tally:
    """All that was ever decoded under the drafter at work."""
    return Tally.of(engine.counts_by_drafter().get(engine.drafter_version, {}))
