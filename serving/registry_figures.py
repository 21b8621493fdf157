"""What a replica that follows a registry counts: `registry_follower` fills it, `/metrics` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RegistryFigures:
    """At one moment."""

    champion: int  # number of the latest change that was seen; 0: none yet
    followed: int  # of the change that is served; 0: none
    following: bool  # False while user_config pins a drafter
    polls: Mapping[str, int]  # of the registry, by result
    guard_away: int  # questions to the roll-out's guard that got no answer
    rollbacks: Mapping[str, int]  # of versions that did badly in service, by reason
