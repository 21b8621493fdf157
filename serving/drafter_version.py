"""What a drafter in service is called in metrics and in the traffic log: its address in, a version out."""

from __future__ import annotations

import hashlib
from pathlib import Path

from drafters.checkpoint import CONFIG, PROVENANCE


def drafter_version(address: str, folder: Path) -> str:
    """The last part of the address, and eight digits of what tells one training from another.

    A registry's version stays readable, and a folder that was trained anew under its old name gets another version.
    `folder` is where the drafter's files lie on this machine. Raises OSError.
    """
    content = hashlib.sha256()
    for name in (CONFIG, PROVENANCE):  # small; the weights follow from them
        content.update((folder / name).read_bytes())
    return f"{address.rstrip('/').rsplit('/', 1)[-1]}@{content.hexdigest()[:8]}"
