"""What a replica that follows a registry starts with: the champion or, if that cannot be served, the best there is.

`serving/replica.py` asks before it builds the engine. A drafter is never a reason not to start.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from drafters.checkpoint import read_config
from drafters.registry import Change, Registry
from drafters.remote import first_line
from drafters.remote_checkpoint import local_checkpoint
from serving.rollout_guard import Guard, GuardAwayError
from serving.rollout_reports import NOTHING, Report, Taken
from serving.serve_config import RegistryFollowing

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Beginning:
    """What a replica starts with."""

    taken: Taken = NOTHING
    address: str | None = None  # None: it decodes plainly
    champion: Change | None = None
    refused: dict[int, str] = field(default_factory=dict)  # changes whose version cannot be served, and why
    layers: set[int] = field(default_factory=set)  # that versions tap which may soon be served

    def refuse(self, why: str) -> None:
        """What was chosen does not work after all: it decodes plainly."""
        self.refused[self.taken.number] = why
        self.taken, self.address = NOTHING, None


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A registry, and what a replica needs to follow it."""

    config: RegistryFollowing
    registry: Registry
    guard: Guard
    replica: str  # its name
    start: Beginning


def begin(registry: Registry, guard: Guard, replica: str, check: Callable[[str], object]) -> Beginning:
    """The champion, or what the guard says while a new one is tried; else the champion before; else plain decoding.

    `check` gets the address of a drafter and raises if it cannot be served. Never raises.
    """
    start = Beginning()
    try:
        start.champion = champion = registry.champion()
    except Exception as error:  # every file system has its own kinds
        log.warning("the registry is away, decoding plainly until it is back: %s", first_line(error))
        return start
    if champion is None:
        log.warning("registry %s has no champion yet, decoding plainly until one is promoted", registry.uri)
        start.layers = _layers(registry, [])
        return start
    wanted = [
        _chosen(guard, replica, champion),
        Taken(number=champion.number - 1, version=champion.previous),  # it was champion then
    ]
    start.layers = _layers(registry, [champion.version, *(each.version for each in wanted)])
    for taken in wanted:
        start.taken = taken
        if taken.version is None:
            break
        try:
            address = registry.version(taken.version).uri
            check(address)
        except Exception as error:
            log.error("the registry's %s cannot be served: %s", taken.version, first_line(error))
            start.refuse(first_line(error))
        else:
            start.address = address
            return start
    log.warning("no drafter of registry %s is served, decoding plainly", registry.uri)
    return start


def _chosen(guard: Guard, replica: str, champion: Change) -> Taken:
    """What the guard lets a replica start with; without a guard the champion."""
    with contextlib.suppress(GuardAwayError):
        told = guard.ask(Report(replica=replica, champion=champion), starting=True).take
        if told is not None:
            return told
    return Taken(number=champion.number, version=champion.version)


def _layers(registry: Registry, names: list[str | None]) -> set[int]:
    """The layers that these versions tap, or the newest one where none is named. What is not to be had is left out.

    A version that lies on an object store is fetched for that, which makes the way back to it a short one.
    """
    layers: set[int] = set()
    with contextlib.suppress(Exception):
        named = [registry.version(name) for name in dict.fromkeys(names) if name is not None]
        for version in named or registry.versions()[-1:]:
            with contextlib.suppress(Exception):
                layers |= set(read_config(local_checkpoint(version.uri)).target_layer_ids)
    return layers
