"""A fresh drafter for training: the options, the target's folder and the draft vocabulary in, a bound module out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from drafters.dflash import SLIDING, DFlashConfig, DFlashModule
from drafters.drafter_module import DrafterModule
from drafters.mtp import MtpConfig, make_mtp
from drafters.target import SharedWeights, shared_weights
from drafters.target_source import safetensors_header, weight_files
from pipelines.train_config import TrainConfig, TrainError
from pipelines.training_sequence import TrainingSequence


def fresh_drafter(
    config: TrainConfig,
    target_path: Path,
    target_layer_ids: tuple[int, ...],
    vocabulary: Tensor,
    mask_token_id: int | None = None,
) -> DrafterModule:
    """A drafter in the target's dimensions that drafts these tokens (ascending ids [W]). DFlash needs a mask token."""
    shared = shared_weights(target_path, torch.float32)
    common: dict[str, Any] = {
        "vocab_size": len(shared.embedding_VD),
        "target_layer_ids": target_layer_ids,
        "draft_vocab_size": len(vocabulary),
        "rms_eps": shared.rms_eps,
    }
    module: DrafterModule
    with torch.random.fork_rng():
        torch.manual_seed(config.steps.seed)
        if config.kind == "dflash":
            assert mask_token_id is not None
            module = _dflash(config, target_path, shared, common | {"mask_token_id": mask_token_id})
        else:
            kind: Any = config.kind
            options = asdict(config.independent)
            shape = common | _shape(shared) | {"num_draft_tokens": config.drafts()}
            module = make_mtp(MtpConfig(kind=kind, **shape, **options))
    module.draft_vocab_ids.copy_(vocabulary)
    module.bind(shared)
    module.start_from_target()
    return module


def scale_taps(module: DrafterModule, sequences: Sequence[TrainingSequence]) -> None:
    """Let a fresh drafter that asks for it read the scale of each tap off some training sequences."""
    if isinstance(module, DFlashModule):
        features = torch.cat([s.features for s in sequences]).float()
        module.scale_taps(features[torch.isfinite(features).all(dim=1)])


def _shape(shared: SharedWeights) -> dict[str, Any]:
    """Heads and widths of a drafter's layer that follow from the target's width."""
    width = shared.embedding_VD.shape[1]
    head_dim = 64 if width % 64 == 0 else 32 if width % 32 == 0 else 8
    heads = max(1, width // head_dim)
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": max(k for k in (1, 2, 3, 4) if heads % k == 0),
        "head_dim": head_dim,
        "intermediate_size": -(-8 * width // (3 * 32)) * 32,
    }


def _dflash(config: TrainConfig, target_path: Path, shared: SharedWeights, common: dict[str, Any]) -> DFlashModule:
    options = asdict(config.dflash)
    initialise = options.pop("init_from_target_layers")
    del options["mask_token_id"]  # as asked for; `common` has the one that is used
    target = _target_config(target_path)
    num_target_layers = int(target["num_hidden_layers"])
    shape = _shape(shared)
    if initialise:
        if config.dflash.num_hidden_layers > num_target_layers:
            raise TrainError(
                f"num_hidden_layers is {config.dflash.num_hidden_layers}; the target has {num_target_layers}"
            )
        shape |= _target_shape(target)
    if options["sliding_window"]:
        options["layer_types"] = (SLIDING,) * config.dflash.num_hidden_layers
    options["selector_top_k"] = min(options["selector_top_k"], common["draft_vocab_size"])
    module = DFlashModule(DFlashConfig(num_target_layers=num_target_layers, **common, **shape, **options))
    if initialise:
        layers = tuple(range(num_target_layers - config.dflash.num_hidden_layers, num_target_layers))
        try:
            module.initialise_from_target_layers(_layer_weights(target_path, layers), layers)
        except ValueError as error:
            raise TrainError(f"init_from_target_layers: {error}; leave it off for this target") from None
    return module


def _target_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config | config.get("text_config", {})


def _target_shape(target: dict[str, Any]) -> dict[str, Any]:
    """Heads, widths and rotary base of the target's own layers."""
    heads, width = int(target["num_attention_heads"]), int(target["hidden_size"])
    rope = target.get("rope_parameters") or {}
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": int(target.get("num_key_value_heads") or heads),
        "head_dim": int(target.get("head_dim") or width // heads),
        "intermediate_size": int(target["intermediate_size"]),
        "rope_theta": float(rope.get("rope_theta") or target.get("rope_theta") or 10000.0),
    }


def _layer_weights(path: Path, layers: tuple[int, ...]) -> dict[str, Tensor]:
    """The target's weights of some decoder layers, by name, in float32."""
    markers = tuple(f".layers.{layer}." for layer in layers)
    found: dict[str, Tensor] = {}
    for file in weight_files(path):
        names = [name for name in safetensors_header(file)[0] if any(m in f".{name}" for m in markers)]
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name).float() for name in names}
    return found
