"""Drafter checkpoints by address: a path or a URI in, a folder on this machine out."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from drafters.atomic_files import AtomicFolder
from drafters.checkpoint import CONFIG, PROVENANCE, WEIGHTS, CheckpointError
from drafters.remote import first_line, patiently

FILES = (CONFIG, WEIGHTS, PROVENANCE)
VERSION_KEYS = ("ETag", "etag", "LastModified", "mtime", "size")  # that an object store may tell of a file


def local_checkpoint(address: str, *, cache_dir: Path | None = None) -> Path:
    """The absolute folder of a checkpoint; one on an object store is fetched, once for each version of its files.

    Raises CheckpointError.
    """
    if "://" not in address:
        return Path(address).expanduser().absolute()
    try:
        folder = AtomicFolder(address)
        if folder.local is not None:
            return folder.local
        return _fetched(folder, cache_dir or default_cache_dir())
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(
            f"no drafter at {address} ({error}); give a folder that `draftloop train` wrote"
        ) from None
    except Exception as error:  # every remote file system has its own kinds
        reason = first_line(error)
        raise CheckpointError(f"drafter {address} cannot be read ({reason}); check address and access") from error


def default_cache_dir() -> Path:
    """Where fetched drafters lie: $XDG_CACHE_HOME/draftloop/drafters, or ~/.cache/draftloop/drafters."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "draftloop" / "drafters"


def _fetched(folder: AtomicFolder, cache_dir: Path) -> Path:
    before = _versions(folder)
    key = hashlib.sha256(json.dumps([folder.uri, before]).encode()).hexdigest()[:16]
    final = cache_dir / f"{folder.uri.rsplit('/', 1)[-1]}-{key}"
    if final.is_dir():
        return final
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=cache_dir) as work:
        fetched = Path(work) / "drafter"
        fetched.mkdir()
        for name in FILES:
            path, here = folder.path(name), str(fetched / name)
            patiently(lambda path=path, here=here: folder.fs.get_file(path, here))  # type: ignore[misc]
        if _versions(folder) != before:
            raise CheckpointError(f"drafter {folder.uri} was replaced while it was read; try again")
        try:
            os.replace(fetched, final)
        except OSError:
            if not final.is_dir():  # another process was faster
                raise
    return final


def _versions(folder: AtomicFolder) -> list[dict[str, str]]:
    """What tells one version of the files from another. Raises FileNotFoundError."""
    folder.fs.invalidate_cache()
    found = []
    for name in FILES:
        path = folder.path(name)
        info: dict[str, Any] = patiently(lambda path=path: folder.fs.info(path))  # type: ignore[misc]
        found.append({key: str(info[key]) for key in VERSION_KEYS if key in info})
    return found
