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
from torch import Tensor

from drafters import config_keys as keys
from drafters import dflash_layout, gemma_assistant_layout
from drafters.dflash import DFlashConfig, DFlashModule
from drafters.dflash_drafter import DFlashDrafter
from drafters.drafter import Drafter
from drafters.drafter_module import DrafterModule
from drafters.gemma_assistant import GemmaAssistant, GemmaAssistantConfig
from drafters.gemma_assistant_drafter import GemmaAssistantDrafter
from drafters.mtp import IndependentHeads, Kind, MtpConfig, RecursiveHead, make_mtp
from drafters.mtp_drafter import IndependentDrafter, RecursiveDrafter
from drafters.own_mtp_drafter import OwnMtpDrafter
from drafters.own_mtp_module import ARCHITECTURE as OWN_MTP
from drafters.own_mtp_module import OwnMtpConfig, OwnMtpModule
from drafters.own_mtp_module import config_from_json as own_mtp_config
from drafters.target import load_target, shared_weights, target_fingerprint

MTP = "DraftloopMtpModel"
TRAINED = (MTP, *dflash_layout.ARCHITECTURES)
ARCHITECTURES = (*TRAINED, OWN_MTP, gemma_assistant_layout.ARCHITECTURE)

AnyConfig = MtpConfig | OwnMtpConfig | DFlashConfig | GemmaAssistantConfig
CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "provenance.json"


class CheckpointError(ValueError):
    """A drafter checkpoint that cannot be used; the message is one line and names the mend."""


def save_checkpoint(path: Path, module: DrafterModule, provenance: dict[str, Any]) -> None:
    """Write a checkpoint folder, replacing an older one whole. `provenance` must hold `target_fingerprint`."""
    if "target_fingerprint" not in provenance:
        raise ValueError("provenance lacks target_fingerprint; pass the target's fingerprint with the tapped layers")
    write_folder(path, *_contents(module), provenance)


def write_folder(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    provenance: dict[str, Any],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a folder of these three files whole, replacing an older one; `metadata` goes into the weights' header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        (work / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        saved = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(saved, work / WEIGHTS, metadata)
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


def _contents(module: DrafterModule) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors of a module."""
    if isinstance(module, DFlashModule):
        return dflash_layout.config_json(module.config), dflash_layout.saved_tensors(module)
    if isinstance(module, OwnMtpModule):
        return {"architectures": [OWN_MTP]} | module.config.to_json(), module.state_dict()
    if isinstance(module, GemmaAssistant):
        return gemma_assistant_layout.config_json(module.config), gemma_assistant_layout.saved_tensors(module)
    assert isinstance(module.config, MtpConfig)
    return {"architectures": [MTP]} | module.config.to_json(), module.state_dict()


def read_config(path: Path) -> AnyConfig:
    """The checkpoint's config. Raises CheckpointError, naming a key that is missing, unknown or of a wrong kind."""
    raw = _read_json(path, CONFIG)
    named = raw.pop("architectures", None)
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise CheckpointError(f"{path}/{CONFIG} names architecture {named}; give one of {', '.join(ARCHITECTURES)}")
    try:
        if named[0] == OWN_MTP:
            return own_mtp_config(raw)
        if named[0] == gemma_assistant_layout.ARCHITECTURE:
            return gemma_assistant_layout.config_from_json(raw)
        return _mtp_config(raw) if named[0] == MTP else dflash_layout.config_from_json(raw, named[0])
    except ValueError as error:
        mend = "train the drafter anew" if named[0] in TRAINED else "make it again with `draftloop import`"
        raise CheckpointError(f"{path}/{CONFIG} {error}; {mend}") from None


_MTP_CHECKS: dict[str, keys.Check] = {  # by a field's annotation
    "Kind": keys.is_one_of(*get_args(Kind)),
    "bool": keys.is_flag,
    "float": keys.is_number,
    "int": keys.is_count,
    "tuple[int, ...]": keys.is_list_of(keys.is_natural),
}


def _mtp_config(raw: dict[str, Any]) -> MtpConfig:
    """Raises ValueError, naming what is wrong."""
    raw = {"medusa_heads": False} | raw  # older checkpoints do not say it
    raw = keys.take_keys(raw, {field.name: _MTP_CHECKS[str(field.type)] for field in fields(MtpConfig)}, {})
    config = MtpConfig(**(raw | {"target_layer_ids": tuple(raw["target_layer_ids"])}))
    for wrong, what in (
        (config.num_attention_heads % config.num_key_value_heads, "heads that its KV heads do not divide"),
        (config.head_dim % 2, "an odd head_dim"),
    ):
        if wrong:
            raise ValueError(f"has {what}")
    return config


def is_drafter(path: Path) -> bool:
    """Whether the folder is a drafter of ours, of this version or another."""
    try:
        named = _read_json(path, CONFIG).get("architectures")
    except CheckpointError:
        return False
    return named in [[architecture] for architecture in ARCHITECTURES]


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
) -> DrafterModule:
    """The drafter of a checkpoint, bound to its target. Raises CheckpointError if it was made for another one."""
    config = read_config(path)
    expected = read_provenance(path).get("target_fingerprint")
    actual = target_fingerprint(target_path, config.target_layer_ids)
    if expected != actual:
        raise CheckpointError(
            f"drafter {path} was made for another target (fingerprint {expected}, not {actual}); "
            "give its own target or train a drafter for this one"
        )
    return load_unguarded(path, target_path, dtype=dtype, device=device)


def load_unguarded(
    path: Path,
    target_path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DrafterModule:
    """The same for whichever target it was made: only for `draftloop diagnose`, which tells why. Nothing else drafts
    with it."""
    config = read_config(path)
    module = _bare_module(path, config, target_path)
    try:
        state = load_file(path / WEIGHTS)
        if isinstance(module, DFlashModule):
            state = dflash_layout.loadable_tensors(module, state)
        if isinstance(module, GemmaAssistant):
            state = gemma_assistant_layout.loadable_tensors(module, state)
        module.load_state_dict(state)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}/{WEIGHTS} cannot be loaded ({reason}); train the drafter anew") from None
    if not 0 <= int(module.draft_vocab_ids.min()) <= int(module.draft_vocab_ids.max()) < config.vocab_size:
        raise CheckpointError(f"{path}/{WEIGHTS} drafts tokens outside the vocabulary; train the drafter anew")
    if not bool((module.draft_vocab_ids.diff() > 0).all()):
        raise CheckpointError(f"{path}/{WEIGHTS} has draft_vocab_ids that do not ascend; train the drafter anew")
    module.bind(shared_weights(target_path, dtype))
    module.bind_layers(target_path)
    return module.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _bare_module(path: Path, config: AnyConfig, target_path: Path) -> DrafterModule:
    """A module of this config whose weights are still to be loaded."""
    if isinstance(config, DFlashConfig):
        return DFlashModule(config)
    if isinstance(config, MtpConfig):
        return make_mtp(config)
    if isinstance(config, OwnMtpConfig):
        return OwnMtpModule(config, load_target(str(target_path)).config)
    try:
        return GemmaAssistant(config)
    except ValueError as error:
        raise CheckpointError(f"{path}/{CONFIG} {error}") from None


def as_drafter(module: DrafterModule) -> Drafter:
    """The serving side of a module."""
    if isinstance(module, OwnMtpModule):
        return OwnMtpDrafter(module)
    if isinstance(module, DFlashModule):
        return DFlashDrafter(module)
    if isinstance(module, GemmaAssistant):
        return GemmaAssistantDrafter(module)
    if isinstance(module, RecursiveHead):
        return RecursiveDrafter(module)
    assert isinstance(module, IndependentHeads)
    return IndependentDrafter(module)
