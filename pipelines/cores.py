"""How many cores there are to work with."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """CPU cores that this process may run on: under `taskset`, or in a container with a set of CPUs, not all there are.

    A container's quota of CPU time is not looked at.
    """
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
