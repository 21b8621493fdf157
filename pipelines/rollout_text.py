"""Token ids of a rollout set in, text out, wherever the target's own tokenizer can be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafters.target import TargetError, resolve_target, tokenizer_hash
from drafters.target_source import SMOLLM2_NAMES, quiet_transformers, tokenizer_files

_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]  # of a Hugging Face id: no weights


def load_tokenizer(spec: str, wanted_hash: str, *, may_fetch: bool) -> Any:
    """The tokenizer of a target by name, id, folder or file. Raises TargetError if it cannot be had or is another.

    A Hugging Face id is looked for in the hub's own cache, and fetched only with `may_fetch`.
    """
    from transformers import AutoTokenizer

    folder = _tokenizer_folder(spec, may_fetch)
    if tokenizer_hash(folder) != wanted_hash:
        raise TargetError(f"{spec} has another tokenizer")
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises a dozen kinds for files that it cannot make sense of
        raise TargetError(f"the tokenizer of {spec} cannot be loaded ({type(error).__name__})") from error


def _tokenizer_folder(spec: str, may_fetch: bool) -> Path:
    path = Path(spec).expanduser()
    if path.is_dir() and tokenizer_files(path):  # the weights need not be there
        return path
    if path.exists() or spec.lower() in SMOLLM2_NAMES:
        return resolve_target(spec)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(spec, allow_patterns=_TOKENIZER_FILES, local_files_only=not may_fetch))
    except Exception as error:  # not a hub id at all, not cached, no network, no access
        where = "to be had from the Hugging Face hub" if may_fetch else "in the Hugging Face hub's cache"
        raise TargetError(f"{spec} is not here and not {where}") from error
