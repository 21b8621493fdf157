"""Folders on an object store: an address in, a copy on this machine out, made once for each version of its files."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drafters.atomic_files import AtomicFolder
from drafters.remote import patiently

VERSION_KEYS = ("ETag", "etag", "LastModified", "mtime", "created", "size")  # that an object store may tell of a file


class ReplacedError(OSError):
    """The folder's files changed while they were copied."""


def default_cache_dir(what: str) -> Path:
    """Where copies lie: $XDG_CACHE_HOME/draftloop/<what>, or ~/.cache/draftloop/<what>."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "draftloop" / what


def fetch_folder(folder: AtomicFolder, names: Sequence[str], cache_dir: Path) -> Path:
    """A copy of these files, whole or not at all. Raises FileNotFoundError, ReplacedError or the store's own errors."""
    before = _versions(folder, names)
    key = hashlib.sha256(json.dumps([folder.uri, before]).encode()).hexdigest()[:16]
    final = cache_dir / f"{folder.uri.rsplit('/', 1)[-1]}-{key}"
    if final.is_dir():
        return final
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=cache_dir) as work:
        copy = Path(work) / "copy"
        copy.mkdir()
        for name in names:
            patiently(partial(folder.fs.get_file, folder.path(name), str(copy / name)))
        if _versions(folder, names) != before:
            raise ReplacedError(f"{folder.uri} was replaced while it was read; try again")
        try:
            os.replace(copy, final)
        except OSError:
            if not final.is_dir():  # another process was faster
                raise
    return final


def _versions(folder: AtomicFolder, names: Sequence[str]) -> list[dict[str, str]]:
    """What tells one version of the files from another. Raises FileNotFoundError."""
    folder.fs.invalidate_cache()
    found = []
    for name in names:
        info: dict[str, Any] = patiently(partial(folder.fs.info, folder.path(name)))
        found.append({"name": name} | {key: str(info[key]) for key in VERSION_KEYS if key in info})
    return found
