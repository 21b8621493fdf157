"""Bytes that this process may still take: of the machine and of the control groups that it runs in, or of a GPU."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

_NO_LIMIT = 1 << 60  # what version 1 of control groups says where there is none is a little less than 2^63


def available_bytes(device: str, *, root: Path = Path("/")) -> int:
    """Free memory of a CUDA device, or of the host as far as its control groups let this process take it."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_of_machine(root), *_of_groups(root)])


def _of_machine(root: Path) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_groups(root: Path) -> list[int]:
    """What is left in each group that has a limit; the files of a group that cannot be read count as none."""
    groups = root / "sys/fs/cgroup"
    path = ""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, found = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                path = found.strip("/")
    left = []
    inside = Path(path)
    for part in (inside, *inside.parents):  # a container often sees its own group as the root of them all
        for folder, limit, used in (
            (groups / part, "memory.max", "memory.current"),
            (groups / "memory" / part, "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with suppress(OSError, ValueError):  # "max" is no number
                bound = int((folder / limit).read_text())
                if bound < _NO_LIMIT:
                    left.append(max(0, bound - int((folder / used).read_text()) + _file_cache(folder)))
    return left


def _file_cache(folder: Path) -> int:
    """Bytes that count as used and are given back when needed, such as those of weight files once read."""
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(count)
    return 0
