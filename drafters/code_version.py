"""Which version of the project wrote a file: rollouts and traffic logs name it in their metadata."""

from __future__ import annotations

import importlib.metadata


def code_version() -> str:
    """The installed project's version; "unknown" in a bare checkout."""
    try:
        return importlib.metadata.version("draftloop")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
