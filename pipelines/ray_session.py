"""Joins the cluster that is there, or starts a quiet local one. Every command that uses Ray calls `start_ray` first."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from pipelines.cores import usable_cores

_ANSWER_S = 2.0  # that a cluster on this machine may take to accept a connection


def start_ray(num_cpus: int | None = None) -> None:
    """Connect to the cluster of RAY_ADDRESS (a job has it set) or one that `ray start` left here, else start one.

    Once per process.

    `num_cpus` are logical CPUs of a local cluster (None: the machine's, at least 4): an actor pool that takes every CPU
    would leave none for reading, so a machine of two cores still offers four.
    """
    if ray.is_initialized():
        return
    # Ray's C++ side warns of Ray Data's own actors, into the terminal; whoever looks into Ray sets another level.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not os.environ.get("RAY_ADDRESS"):
        options |= {"num_cpus": num_cpus or max(4, usable_cores()), "include_dashboard": False}
        if left_behind():
            options["address"] = "local"
    with _silent_stderr():
        try:
            ray.init(**options)
        except ValueError as error:
            if "existing cluster" not in str(error):
                raise
            os.environ["RAY_ADDRESS"] = "auto"  # for whoever asks whether this cluster was joined
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
    silence_ray_data()


def left_behind() -> bool:
    """Whether Ray has a note of a cluster on this machine that does not answer: it would wait for it for minutes."""
    try:
        host, _, port = note_of_cluster().read_text().strip().rpartition(":")
        number = int(port)
    except (OSError, ValueError):
        return False
    try:
        socket.create_connection((host.strip("[]"), number), timeout=_ANSWER_S).close()
    except OSError:
        return True
    return False


def note_of_cluster() -> Path:
    """Where Ray writes the address of the latest cluster of this machine; unlike Python it looks at no TEMP and TMP."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(folder) / "ray" / "ray_current_cluster"


def lacking_resource(need: Mapping[str, float]) -> tuple[str, float] | None:
    """The first resource of `need` that a local cluster will never have, and how much it has; None if it has them all.

    Ray waits for ever for what it lacks. A cluster that was joined may still grow, so nothing is lacking there.
    """
    if os.environ.get("RAY_ADDRESS"):
        return None
    have = ray.cluster_resources()
    return next(((name, have.get(name, 0)) for name, amount in need.items() if amount > have.get(name, 0)), None)


def silence_ray_data() -> None:
    """Keep Ray Data's own progress bars and logs off the terminal: commands show progress themselves."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.enable_operator_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what C++ code writes to the terminal. Errors of the start are raised, so none is lost."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
