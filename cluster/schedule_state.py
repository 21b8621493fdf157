"""What a schedule knows, in one file of `<work>/schedule/`: it outlives the schedule and its cluster.

`schedule` writes it, whole or not at all, before what it says is done; `schedule --status` shows it.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.tau_base import TauBase
from drafters.atomic_files import AtomicFolder

STATE, STOP = "state.json", "stop.json"
SAID = 50  # lines that are kept
BASES = 8  # versions whose live tau has a base here: one that is rolled back to has not lost its own


class ScheduleStateError(RuntimeError):
    """A state file that cannot be used; one line with cause and mend."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Run(_Record):
    """A window's run that is going on."""

    window: str
    until: datetime
    why: str
    started_at: datetime
    submission_id: str
    failures: int = 0  # tries that have been told of
    submit_at: datetime  # the next try, not before


class Outcome(_Record):
    """The run before."""

    window: str
    until: datetime
    submission_id: str
    result: Literal["succeeded", "given up"]
    started_at: datetime
    ended_at: datetime


class TauRuns(_Record):
    """Runs that the live tau of a champion started, and that it outlived."""

    champion: str
    runs: int
    told: bool = False  # that live tau rests longer now


class Said(_Record):
    at: datetime
    text: str


class ScheduleState(_Record):
    """Times are UTC."""

    cron: str  # expression and time zone that `cron_seen` belongs to
    cron_seen: datetime  # moments up to here are dealt with
    run: Run | None = None
    last: Outcome | None = None
    tau_runs: TauRuns | None = None  # of the latest version whose live tau started one
    bases: list[TauBase] = []  # of live tau, the present champion's last
    said: list[Said] = []

    def keep_base(self, base: TauBase) -> None:
        self.bases = [*(other for other in self.bases if other.version != base.version), base][-BASES:]

    def save(self, folder: AtomicFolder) -> None:
        folder.write(STATE, self.model_dump_json(indent=1).encode())


def schedule_folder(work: str) -> AtomicFolder:
    return AtomicFolder(f"{work.rstrip('/')}/schedule")


def load_state(folder: AtomicFolder) -> ScheduleState | None:
    """None if no schedule was ever there. Raises ScheduleStateError."""
    try:
        return ScheduleState.model_validate_json(folder.read(STATE))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        where, what = f"{folder.uri}/{STATE}", error.errors()[0]["msg"]
        raise ScheduleStateError(f"{where} is no schedule's state ({what}); move it away to begin anew") from None


def ask_to_stop(folder: AtomicFolder, token: str) -> None:
    """Ask the schedule that holds the lease of that token; later ones are not meant."""
    folder.write(STOP, json.dumps({"at": datetime.now(UTC).isoformat(), "token": token}).encode())


def asked_to_stop(folder: AtomicFolder) -> str | None:
    """The token of the lease whose holder was asked last; None if nobody was."""
    try:
        return str(json.loads(folder.read(STOP))["token"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # the latter three: no file of ours
        return None
