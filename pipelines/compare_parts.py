"""What a comparison has finished, kept in its folder: a run that was stopped goes on, and one more drafter costs only
its own share. A part counts as long as all that its figures depend on is the same."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from drafters.atomic_files import AtomicFolder

PARTS = "parts"


class Parts:
    """JSON files {key, values} below the output folder."""

    def __init__(self, folder: AtomicFolder):
        self.folder = folder

    def load(self, name: str, key: dict[str, Any]) -> dict[str, Any] | None:
        """The values that were saved under this name and with an equal key."""
        try:
            found = json.loads(self.folder.read(self._file(name)))
        except (FileNotFoundError, ValueError):  # none yet, or not ours
            return None
        if not isinstance(found, dict) or found.get("key") != _plain(key):
            return None
        values = found.get("values")
        return values if isinstance(values, dict) else None

    def save(self, name: str, key: dict[str, Any], values: dict[str, Any]) -> None:
        self.folder.write(self._file(name), (json.dumps({"key": key, "values": values}, indent=1) + "\n").encode())

    @staticmethod
    def _file(name: str) -> str:
        plain, digest = re.sub(r"[^\w.-]+", "-", name), hashlib.sha256(name.encode()).hexdigest()[:6]
        return f"{PARTS}/{plain}-{digest}.json"  # two names may look alike without their odd characters


def _plain(key: dict[str, Any]) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(key))
