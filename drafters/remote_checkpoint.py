"""Drafter checkpoints by address: a path or a URI in, a folder on this machine out."""

from __future__ import annotations

from pathlib import Path

from drafters.atomic_files import AtomicFolder
from drafters.checkpoint import CONFIG, PROVENANCE, WEIGHTS, CheckpointError
from drafters.remote import first_line
from drafters.remote_folder import ReplacedError, default_cache_dir, fetch_folder

FILES = (CONFIG, WEIGHTS, PROVENANCE)


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
        return fetch_folder(folder, FILES, cache_dir or default_cache_dir("drafters"))
    except ReplacedError as error:
        raise CheckpointError(f"drafter {error}") from None
    except FileNotFoundError as error:
        raise CheckpointError(
            f"no drafter at {address} ({error}); give a folder that `draftloop train` wrote"
        ) from None
    except Exception as error:  # every remote file system has its own kinds
        raise CheckpointError(
            f"drafter {address} cannot be read ({first_line(error)}); check address and access"
        ) from error
