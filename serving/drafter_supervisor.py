"""Keeps a replica's drafter actor alive: makes it, loads drafters into it, and replaces it when it dies or hangs.

Whatever happens to it, the replica goes on without drafts: the engine is told by `away`, and by a new drafter later.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from drafters.remote import first_line
from serving.draft_link import DrafterInfo, DraftLink, RemoteDrafter
from serving.drafter_actor import DrafterActor, DrafterSettings
from serving.serve_config import Disaggregation

log = logging.getLogger(__name__)

_WATCH_EVERY_S = 0.5
_PING_TIMEOUT_S = 2.0
_LONGEST_PAUSE_S = 10.0  # between attempts to replace a drafter
_CALLS_AT_ONCE = 4  # a ping is answered while a drafter is loaded
_DRAFTER_BUNDLE = 1  # of the replica's placement group; the target's is 0


class _ActorDiedError(RuntimeError):
    """The drafter's process is gone; another one may load it."""


class DrafterSupervisor:
    """One replica's drafter actor. Loads come from the replica's threads, replacements from a thread of its own.

    A swap is `load`, then either `serve` or `settle`; in between the actor is not replaced, since the engine may have
    taken the new drafter already.
    """

    def __init__(self, plan: Disaggregation, settings: DrafterSettings, host: str):
        self._plan, self._settings = plan, settings
        self.link = DraftLink(host)
        self.restarts: Counter[str] = Counter()  # replaced actors, by reason
        self._lock = threading.Lock()  # over the following; nobody waits for an actor while holding it
        self._actor: Any = None
        self._peer = b""
        self._answered: float | None = None  # when the actor last showed that it lives; None: it is starting
        self._swapping = False
        self._address: str | None = None  # of the drafter at work
        self._drafter: RemoteDrafter | None = None
        self._on_drafter: Callable[[RemoteDrafter, RemoteDrafter | None], None] = lambda _new, _old: None
        self._fetch_answers: Callable[[], None] = lambda: None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def away(self) -> str | None:
        """Why there are no drafts at present, in a word; None: there are, or none are wanted."""
        drafter = self._drafter
        return drafter.away if drafter is not None else None

    def load(self, address: str) -> RemoteDrafter:
        """A drafter that the actor has loaded and answers for; begins a swap.

        Raises CheckpointError, TargetError, DrafterMemoryError or RuntimeError.
        """
        actor, peer = self._begin_swap()
        try:
            return self._load(actor, peer, address)
        except _ActorDiedError:  # perhaps before it was asked, and nobody had noticed
            actor, peer = self._begin_swap(dead=actor)
            return self._load(actor, peer, address)

    def _begin_swap(self, dead: Any = None) -> tuple[Any, bytes]:
        """The actor that loads, in place of one that is `dead`, and its name on the link."""
        with self._lock:
            self._swapping = True
            if dead is not None and self._actor is dead:
                self.restarts["dead"] += 1
                if self._drafter is not None and self._drafter.away is None:
                    self._drafter.away = "dead"
                self._end_actor()
            if self._actor is None:
                self._start_actor()
            return self._actor, self._peer

    def serve(self, drafter: RemoteDrafter | None, address: str | None) -> None:
        """This one is at work from now on, and after a replacement its address is loaded again. Ends a swap."""
        with self._lock:
            self._drafter, self._address = drafter, address
        self.settle()

    def settle(self) -> None:
        """Ends a swap, done or not: the actor lets go of all drafters but the one at work."""
        with self._lock:
            self._swapping = False
            actor, drafter = self._actor, self._drafter
        if actor is not None:
            actor.keep.remote(drafter.session if drafter is not None else None)

    def watch(
        self,
        on_drafter: Callable[[RemoteDrafter, RemoteDrafter | None], None],
        fetch_answers: Callable[[], None],
    ) -> None:
        """Start to watch the actor in a thread.

        `on_drafter` gets a new drafter and the one that it replaces, and may raise; `fetch_answers` lets the engine
        read what has come.
        """
        self._on_drafter, self._fetch_answers = on_drafter, fetch_answers
        self._thread = threading.Thread(target=self._watch, name="draftloop-supervisor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching and end the actor. The link is closed once the engine's thread has ended: by the caller."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=_PING_TIMEOUT_S + 5.0)
        with self._lock:
            self._end_actor()

    # -- the actor -----------------------------------------------------------------------------------------------------

    def _start_actor(self) -> None:
        """Under the lock."""
        plan = self._plan
        self._peer, self._answered = secrets.token_hex(8).encode(), None
        strategy = None
        group = ray.util.get_current_placement_group()
        if group is not None:
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=_DRAFTER_BUNDLE)
        actor_class = ray.remote(DrafterActor).options(
            num_cpus=plan.drafter_cpus,
            num_gpus=1 if self._settings.device.startswith("cuda") else 0,
            resources=plan.drafter_resources,
            scheduling_strategy=strategy,
            max_restarts=0,  # a new one gets a new name on the link and a new session instead
            max_concurrency=_CALLS_AT_ONCE,
        )
        self._actor = actor_class.remote(self.link.keys, self._peer, self._settings)

    def _load(self, actor: Any, peer: bytes, address: str) -> RemoteDrafter:
        session = secrets.token_hex(8)
        try:
            info: DrafterInfo = ray.get(actor.load.remote(session, address), timeout=self._plan.load_timeout_s)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, ValueError) else RuntimeError(first_line(error)) from error
        except GetTimeoutError:
            raise RuntimeError(f"the drafter was not loaded within {self._plan.load_timeout_s:g} s") from None
        except RayActorError as error:
            raise _ActorDiedError(f"the drafter's process ended while it loaded: {first_line(error)}") from error
        return RemoteDrafter(self.link, peer, session, info)

    def _end_actor(self) -> None:
        """Under the lock."""
        actor, self._actor = self._actor, None
        if actor is not None:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)

    # -- watching ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        pause = _WATCH_EVERY_S
        while not self._stopped.wait(pause):
            try:
                reason = self._trouble()
                if reason is not None:
                    self._replace(reason)
                pause = _WATCH_EVERY_S
            except Exception as error:
                log.warning("the drafter is not back yet: %s", first_line(error))
                pause = min(2 * pause + 1.0, _LONGEST_PAUSE_S)

    def _trouble(self) -> str | None:
        """Why the actor must be replaced; None if it is well or none is wanted."""
        with self._lock:
            actor, drafter, swapping = self._actor, self._drafter, self._swapping
            replaced = drafter is not None and drafter.peer != self._peer
        if actor is None or (replaced and not swapping):
            return "dead" if drafter is not None and not swapping else None
        try:
            ray.get(actor.ping.remote(), timeout=_PING_TIMEOUT_S)
            self._answered = time.monotonic()
        except GetTimeoutError:
            pass
        except RayActorError:
            return "dead"
        silent_s = 0.0 if self._answered is None else time.monotonic() - self._answered
        limit_s = self._plan.hang_timeout_s
        if drafter is not None and (drafter.oldest_ask() or 0.0) > limit_s:
            self._fetch_answers()  # an engine without work has not looked
            silent_s = max(silent_s, drafter.oldest_ask() or 0.0)
        return "hung" if silent_s > limit_s else None

    def _replace(self, reason: str) -> None:
        """End the actor, and put another one into its place. In the middle of a swap only the former: it then fails."""
        with self._lock:
            if self._drafter is not None and self._drafter.away is None:
                self._drafter.away = reason
            if self._actor is not None:
                log.warning("the drafter is %s and gets replaced", reason)
                self.restarts[reason] += 1
                self._end_actor()
            if self._address is None or self._swapping:
                return
            self._start_actor()
            actor, peer, address, old = self._actor, self._peer, self._address, self._drafter
        try:
            drafter = self._load(actor, peer, address)
            self._on_drafter(drafter, old)
        except BaseException:
            with self._lock:
                if self._actor is actor and not self._swapping:
                    self._end_actor()
            raise
        with self._lock:
            if self._drafter is old:  # else a swap came first
                self._drafter, self._answered = drafter, time.monotonic()
