"""Drafter checkpoints: a folder with config.json, model.safetensors and provenance.json. Never pickle, nothing guessed.

In: a module and its provenance, or a folder and the target it should serve. Out: the folder, written whole or not at
all, or the module bound to the target's embedding and LM head.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafters.drafter import Drafter
from drafters.mtp import IndependentHeads, Kind, MtpConfig, RecursiveHead, make_mtp
from drafters.mtp_drafter import IndependentDrafter, RecursiveDrafter
from drafters.target import shared_weights, target_fingerprint

ARCHITECTURE = "DraftloopMtpModel"
CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "provenance.json"


class CheckpointError(ValueError):
    """A drafter checkpoint that cannot be used; the message is one line and names the mend."""


def save_checkpoint(path: Path, module: RecursiveHead | IndependentHeads, provenance: dict[str, Any]) -> None:
    """Write a checkpoint folder, replacing an older one whole. `provenance` must hold `target_fingerprint`."""
    if "target_fingerprint" not in provenance:
        raise ValueError("provenance lacks target_fingerprint; pass the target's fingerprint with the tapped layers")
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        config = {"architectures": [ARCHITECTURE]} | module.config.to_json()
        (work / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}, work / WEIGHTS
        )
        (work / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
        work.chmod(0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}-old-", dir=path.parent))
            os.replace(path, old / path.name)
            os.replace(work, path)
            shutil.rmtree(old)
        else:
            os.replace(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def read_config(path: Path) -> MtpConfig:
    """The checkpoint's config. Raises CheckpointError, naming a missing or unknown key."""
    raw = _read_json(path, CONFIG)
    architectures = raw.pop("architectures", None)
    if architectures != [ARCHITECTURE]:
        raise CheckpointError(
            f"{path}/{CONFIG} names architecture {architectures}, not {ARCHITECTURE}; give an MTP drafter"
        )
    known = {field.name for field in fields(MtpConfig)}
    for name, bad in (("lacks", known - set(raw)), ("has the unknown", set(raw) - known)):
        if bad:
            raise CheckpointError(f"{path}/{CONFIG} {name} key {sorted(bad)[0]!r}; train the drafter anew")
    types = {field.name: field.type for field in fields(MtpConfig)}
    for name, value in raw.items():
        if not _is_value(types[name], value):
            raise CheckpointError(f"{path}/{CONFIG} has {value!r} as {name!r}; train the drafter anew")
    config = MtpConfig(**(raw | {"target_layer_ids": tuple(raw["target_layer_ids"])}))
    for wrong, what in (
        (config.num_attention_heads % config.num_key_value_heads, "heads that its KV heads do not divide"),
        (config.head_dim % 2, "an odd head_dim"),
    ):
        if wrong:
            raise CheckpointError(f"{path}/{CONFIG} has {what}; train the drafter anew")
    return config


def _is_value(annotation: Any, value: Any) -> bool:
    """Whether a JSON value is what a field of MtpConfig, named by its annotation, may hold."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    if annotation == "Kind":
        return value in get_args(Kind)
    if annotation == "bool":
        return isinstance(value, bool)
    if annotation == "float":
        return number
    if annotation == "int":
        return number and isinstance(value, int) and value > 0
    return isinstance(value, list) and all(isinstance(item, int) and item >= 0 for item in value)


def is_drafter(path: Path) -> bool:
    """Whether the folder is a drafter of ours, of this version or another."""
    try:
        return _read_json(path, CONFIG).get("architectures") == [ARCHITECTURE]
    except CheckpointError:
        return False


def read_provenance(path: Path) -> dict[str, Any]:
    """Where the checkpoint comes from."""
    return _read_json(path, PROVENANCE)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"no drafter at {path}; give a folder that `draftloop train` wrote")
    try:
        value = json.loads((path / name).read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not a drafter: it lacks {name}; give a folder that `draftloop train` wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}/{name} cannot be read ({error}); train the drafter anew") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}/{name} is not a JSON object; train the drafter anew")
    return value


def load_module(
    path: Path,
    target_path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> RecursiveHead | IndependentHeads:
    """The drafter of a checkpoint, bound to its target. Raises CheckpointError if it was made for another one."""
    config = read_config(path)
    expected = read_provenance(path).get("target_fingerprint")
    actual = target_fingerprint(target_path, config.target_layer_ids)
    if expected != actual:
        raise CheckpointError(
            f"drafter {path} was made for another target (fingerprint {expected}, not {actual}); "
            "give its own target or train a drafter for this one"
        )
    module = make_mtp(config)
    try:
        state = load_file(path / WEIGHTS)
        module.load_state_dict(state)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}/{WEIGHTS} cannot be loaded ({reason}); train the drafter anew") from None
    if not 0 <= int(module.draft_vocab_ids.min()) <= int(module.draft_vocab_ids.max()) < config.vocab_size:
        raise CheckpointError(f"{path}/{WEIGHTS} drafts tokens outside the vocabulary; train the drafter anew")
    module.bind(shared_weights(target_path, dtype))
    return module.to(device=device, dtype=dtype).eval().requires_grad_(False)


def as_drafter(module: RecursiveHead | IndependentHeads) -> Drafter:
    """The serving side of a module."""
    return RecursiveDrafter(module) if isinstance(module, RecursiveHead) else IndependentDrafter(module)
