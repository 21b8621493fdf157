"""How many cores there are to work with."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """CPU cores that this process may run on: fewer than the machine's in a container or under `taskset`."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
