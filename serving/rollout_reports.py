"""What a replica and the machine of a roll-out tell each other: reports in, orders out. They cross processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from serving.live_tau import NO_ROUNDS, Tally

if TYPE_CHECKING:
    from drafters.registry import Change

Reason = Literal["tau", "lost"]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a replica serves: a version, by the change of the registry that made it champion."""

    number: int  # of the change; 0: there was none yet
    version: str | None  # None: it decodes plainly


NOTHING = Taken(number=0, version=None)


@dataclass(frozen=True, kw_only=True)
class Condemned:
    """A change that did not do well in service."""

    change: Change
    back_to: Taken
    reason: Reason  # what counts it: live tau, or lost replicas
    why: str  # one line for people


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one replica says of itself, and all it was told: a new machine learns from it."""

    replica: str
    champion: Change | None  # the latest that it has seen
    serves: Taken | None = None  # None: nothing yet, or nothing of the registry's
    served_s: float = 0.0  # for how long
    now: Tally = NO_ROUNDS  # under what it serves
    before: Taken | None = None  # what had proved itself and served before
    before_tally: Tally = NO_ROUNDS  # in the last `max_observe_s` of that
    settled: Taken | None = None  # as the latest order had it
    refused: frozenset[int] = frozenset()  # changes whose version it could not load and will not try soon
    untapped: int | None = None  # it decodes plainly, and its engine lacks layers that this change's version taps
    condemned: Mapping[int, Condemned] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a replica is to do."""

    take: Taken | None  # None: stay
    settled: Taken | None  # the version that has proved itself
    condemned: Mapping[int, Condemned]  # by number of the change
    ask_again_s: float | None  # None: when it next looks at the registry
    says: str  # what is going on, for people
    restart: bool = False  # to be started anew, so that its engine taps the layers that it lacks
