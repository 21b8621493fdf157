"""One actor for all replicas of an app: it lets them take a new champion in turn, and rolls it back if it does badly.

`rollout.Rollout` decides; here are Ray, the clock, and the registry that is told of a roll-back. The actor keeps
nothing that matters: one that died is made anew by whichever replica asks next, and learns all from their reports.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import time
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from drafters.registry import PLAIN, ChampionChangedError, Change, Registry, RegistryError
from drafters.remote import first_line
from serving.rollout import Rollout
from serving.rollout_reports import Condemned, Order, Report
from serving.serve_config import RegistryFollowing

log = logging.getLogger(__name__)

NAMESPACE = "draftloop"
REGISTRY_PATIENCE_S = 10.0  # with an object store that is away; whoever asks asks again
_ANSWER_S = 5.0  # a replica waits so long for the guard
_MOST_SILENT, _MOST_SILENT_AT_START = 3, 12  # waits in a row after which it is taken for hung and replaced
# A guard that nobody asks for so long ends itself. Far longer than a replica may take to start: where the only one dies
# under a version again and again, nobody else remembers how often.
_LONELY_S = 3600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # between attempts to tell the registry


class GuardAwayError(RuntimeError):
    """The guard cannot be asked now; one line."""


class Guard(Protocol):
    """Whom a replica asks before it takes another version."""

    def ask(self, report: Report, *, starting: bool = False) -> Order:
        """What the replica is to do. Raises GuardAwayError.

        A replica that is `starting` does not wait for a guard that nobody else has made.
        """
        ...

    def leave(self, replica: str) -> None:
        """The replica stops, or follows no longer."""
        ...


class RolloutGuard:
    """The guard in this process: what the actor is made of, and what a replica without Serve asks."""

    def __init__(self, config: RegistryFollowing, app: str, registry: Registry | None = None):
        self._config, self._app = config, app
        self._registry = registry
        self._lock = threading.Lock()
        self._rollout = Rollout(config, time.monotonic())
        self._teller: threading.Thread | None = None  # at work on a roll-back
        self._asked_at = time.monotonic()

    def ask(self, report: Report, *, starting: bool = False) -> Order:
        """What the replica is to do."""
        with self._lock:
            self._asked_at = time.monotonic()
            order = self._rollout.report(report, self._asked_at)
            news, self._rollout.news = self._rollout.news, []
            if self._rollout.pending is not None and (self._teller is None or not self._teller.is_alive()):
                self._teller = threading.Thread(target=self._tell, name="draftloop-rollback", daemon=True)
                self._teller.start()
        for line in news:
            log.warning("roll-out of %s: %s", self._app, line)
        return order

    def leave(self, replica: str) -> None:
        """The replica stops, or follows no longer."""
        with self._lock:
            self._rollout.leave(replica)

    def end_when_lonely(self) -> None:
        """For an actor: end its process once all replicas are gone."""
        actor = ray.get_runtime_context().current_actor

        def watch() -> None:
            limit_s = max(_LONELY_S, 10 * self._config.poll_s)
            while time.monotonic() - self._asked_at < limit_s:
                time.sleep(_FIRST_PAUSE_S)
            ray.kill(actor)

        threading.Thread(target=watch, name="draftloop-lonely", daemon=True).start()

    def _tell(self) -> None:
        """Roll back in the registry. While it is away the replicas are back at the old version already."""
        pause_s = _FIRST_PAUSE_S
        while (condemned := self._pending()) is not None:
            try:
                change = self._roll_back(condemned)
            except ChampionChangedError as error:
                log.warning("the roll-back of change %d came late: %s", condemned.change.number, error)
                change = None
            except Exception as error:
                log.warning("the registry is not told of a roll-back yet: %s", first_line(error))
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            with self._lock:
                self._rollout.rolled_back(condemned, change)

    def _pending(self) -> Condemned | None:
        with self._lock:
            return self._rollout.pending

    def _roll_back(self, condemned: Condemned) -> Change:
        if self._registry is None:
            self._registry = Registry(self._config.uri, patience_s=REGISTRY_PATIENCE_S)
        change, back_to = condemned.change, condemned.back_to.version
        roll_back = functools.partial(
            self._registry.rollback, by=f"draftloop serve, app {self._app}", why=condemned.why, expected=change
        )
        # by itself the registry goes back to the champion before, which may not have proved itself either
        to = None if back_to == change.previous else back_to or PLAIN
        try:
            return roll_back(to=to)
        except ChampionChangedError:
            raise
        except RegistryError as error:  # it will not go away: the version may have been pruned
            if to == PLAIN:
                raise
            log.error("rolling back to plain decoding, since %s cannot be champion: %s", back_to, first_line(error))
            return roll_back(to=PLAIN)


class RemoteGuard:
    """The actor of an app, as its replicas reach it: found by its name, made where there is none."""

    def __init__(self, config: RegistryFollowing, app: str):
        self._config, self._app = config, app
        settings = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:8]  # replicas of one deployment
        self.name = f"draftloop-rollout-{app}-{settings}"
        self._actor: Any = None
        self._silent, self._most_silent = 0, _MOST_SILENT_AT_START

    def ask(self, report: Report, *, starting: bool = False) -> Order:
        """As `Guard.ask`."""
        try:
            if self._actor is None:
                self._actor = self._find() if starting else self._find_or_make()
            order: Order = ray.get(self._actor.ask.remote(report), timeout=_ANSWER_S)
        except GetTimeoutError:
            self._silent += 1
            if self._silent >= self._most_silent:
                self._replace()
            raise GuardAwayError(f"the roll-out guard did not answer within {_ANSWER_S:g} s") from None
        except Exception as error:  # it died, cannot be made, or there is none: Ray has many kinds
            if isinstance(error, RayActorError):
                log.warning("the roll-out guard is gone and is made anew: %s", first_line(error))
            self._actor = None
            raise GuardAwayError(f"the roll-out guard is away ({first_line(error)})") from error
        self._silent, self._most_silent = 0, _MOST_SILENT
        return order

    def leave(self, replica: str) -> None:
        """The replica stops, or follows no longer."""
        if self._actor is not None:
            self._actor.leave.remote(replica)

    def _find(self) -> Any:
        return ray.get_actor(self.name, namespace=NAMESPACE)

    def _find_or_make(self) -> Any:
        actor_class = ray.remote(_GuardActor).options(
            name=self.name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",  # it outlives the replica that made it, and ends itself when all are gone
            num_cpus=0,
            max_restarts=0,
        )
        return actor_class.remote(self._config, self._app)

    def _replace(self) -> None:
        """One that hangs is ended; the next question makes another one."""
        log.warning("the roll-out guard hangs and is replaced")
        actor, self._actor = self._actor, None
        self._silent, self._most_silent = 0, _MOST_SILENT_AT_START
        ray.kill(actor)


class _GuardActor(RolloutGuard):
    """The guard in a process of its own."""

    def __init__(self, config: RegistryFollowing, app: str):
        super().__init__(config, app)
        self.end_when_lonely()
