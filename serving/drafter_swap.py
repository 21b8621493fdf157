"""The drafter of one replica: which one is at work, and the one way in which another takes its place.

`user_config` and the registry both come through here. The drafter works in this process or in an actor of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from drafters.drafter import Drafter
from drafters.remote_checkpoint import local_checkpoint
from serving.draft_link import RemoteDrafter
from serving.drafter_supervisor import DrafterSupervisor
from serving.drafter_version import drafter_version
from serving.engine.async_engine import AsyncEngine
from serving.engine.drafting import UntappedLayersError
from serving.engine.engine import Engine
from serving.metrics import RequestMetrics

log = logging.getLogger(__name__)
T = TypeVar("T")

Source = Literal["user_config", "registry"]  # who asked for a swap
SWAP_DEADLINE_S = 60.0  # longest wait for the round that a swap comes after


class DrafterSwap:
    """Swaps come one after another, from any thread but the engine's.

    `load` makes the drafter of an address ready, here or in its actor, and raises if it cannot.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        load: Callable[[str], Drafter],
        metrics: RequestMetrics,
        supervisor: DrafterSupervisor | None = None,
    ):
        self._engine, self._load, self._metrics, self._supervisor = engine, load, metrics, supervisor
        self._lock = threading.Lock()  # one swap at a time
        self.address: str | None = None  # of the drafter at work; None: it decodes plainly
        self._name: str | None = None
        self._version: str | None = None
        self._refused: str | None = None  # why the latest swap failed; None: it did not
        self.untapped = False  # whether only because the engine does not tap the layers of that drafter

    def begin(self, address: str | None, name: str | None, version: str | None) -> None:
        """The drafter that the engine was built with."""
        self._serves(address, name, version)

    def take(self, address: str | None, source: Source) -> str | None:
        """Swap the drafter between two rounds; None decodes plainly. Returns why it was refused, or None. Never raises.

        Running streams go on; where it is refused, the old drafter does too.
        """
        with self._lock:
            try:
                drafter = self._load(address) if address is not None else None
                version = version_of(address)
                name = self.between_rounds(lambda engine: _set(engine, drafter, version))
            except Exception as error:
                if self._supervisor is not None:
                    self._supervisor.settle()
                return self.refuse(error, source)
            log.info("the drafter is now %s", address)
            self._serves(address, name, version)
            self._refused = None
            if self._supervisor is not None:
                self._supervisor.serve(drafter if isinstance(drafter, RemoteDrafter) else None, address)
            self._metrics.swapped("done", source)
            return None

    def refuse(self, error: Exception, source: Source) -> str:
        """A swap fails; says so everywhere, and returns why in one line."""
        self._refused = " ".join(str(error).split()) or type(error).__name__
        self.untapped = isinstance(error, UntappedLayersError)
        log.error("the drafter was not swapped, %s stays: %s", self.address, self._refused)
        self._metrics.swapped("refused", source)
        return self._refused

    def is_back(self, drafter: RemoteDrafter, old: RemoteDrafter | None) -> None:
        """The supervisor has replaced the drafter's actor. Raises if the engine cannot use what is there now."""
        version = version_of(self.address)  # the folder may hold another one by now

        def take_over(engine: Engine) -> None:
            if engine.drafter is old:  # else it was swapped meanwhile
                engine.set_drafter(drafter, version)
                self._name, self._version = engine.drafter_name, version

        self.between_rounds(take_over)

    def fetch_answers(self) -> None:
        """Let an engine without work read what its drafter has answered."""
        self.between_rounds(Engine.fetch_answers)

    def between_rounds(self, function: Callable[[Engine], T]) -> T:
        """The function's result, from the engine's thread. Raises TimeoutError; then it was not called."""
        future = self._engine.between_rounds(function)
        try:
            return future.result(SWAP_DEADLINE_S)
        except TimeoutError:
            if future.cancel():
                raise TimeoutError(f"the engine was in one round for {SWAP_DEADLINE_S:g} s") from None
            return future.result()  # it has begun

    def describe(self) -> dict[str, Any]:
        """What `/v1/models` says about the drafter, and why the last swap was refused, if it was."""
        said: dict[str, Any] = {
            "name": self._name,
            "path": self.address,
            "version": self._version,
            "placement": self._metrics.placement,
            "last_swap_refused": self._refused,
        }
        if self._supervisor is not None:
            said |= {"away": self._supervisor.away, "restarts": dict(self._supervisor.restarts)}
        return said

    def _serves(self, address: str | None, name: str | None, version: str | None) -> None:
        self.address, self._name, self._version = address, name, version
        self._metrics.drafter_address = address


def version_of(address: str | None) -> str | None:
    """What counters and the traffic log call the drafter."""
    return drafter_version(address, local_checkpoint(address)) if address else None


def _set(engine: Engine, drafter: Drafter | None, version: str | None) -> str | None:
    engine.set_drafter(drafter, version)
    return engine.drafter_name
