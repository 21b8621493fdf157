"""DFlash configs as JSON, in the layout that other servers load, and names of the tensors that are saved.

Three architectures: the published layouts of DFlash and of DFlash 2 (selector and convolutions, both), and our own for
what those cannot say (`draftloop` keys, or only one of the two parts), so that no other server loads it wrongly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafters import config_keys as keys
from drafters.dflash import FULL, SLIDING, DFlashConfig, DFlashModule

PLAIN, SECOND, OWN = "DFlashDraftModel", "DFlash2DraftModel", "DraftloopDFlashModel"
ARCHITECTURES = (PLAIN, SECOND, OWN)

# Key of config.json -> its check. Fields of DFlashConfig have the same name but for those in _RENAMED.
_SIZES: dict[str, keys.Check] = {
    "hidden_size": keys.is_count,
    "vocab_size": keys.is_count,
    "num_target_layers": keys.is_count,
    "block_size": keys.is_count,
    "num_hidden_layers": keys.is_count,
    "num_attention_heads": keys.is_count,
    "num_key_value_heads": keys.is_count,
    "head_dim": keys.is_count,
    "intermediate_size": keys.is_count,
    "rope_theta": keys.is_number,
    "rms_norm_eps": keys.is_number,
    "layer_types": keys.is_list_of(keys.is_one_of(FULL, SLIDING)),
    "sliding_window": lambda value: value is None or keys.is_count(value),
}
_RENAMED = {"rms_norm_eps": "rms_eps"}
_FIXED: dict[str, Any] = {  # what the drafter computes cannot be changed by these
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_scaling": None,
}
_UNUSED = (  # what others write beside it and no drafter reads
    *("attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range"),
    *("max_position_embeddings", "max_window_layers", "pad_token_id", "tie_word_embeddings", "torch_dtype"),
    *("transformers_version", "use_cache"),
)
# Where there are sliding layers these must be written, since what others take for granted differs: windows that are
# switched off, and causal attention inside the block.
_SLIDING = {"use_sliding_window": True, "is_causal": False}
_BLOCK: dict[str, keys.Check] = {"mask_token_id": keys.is_natural, "target_layer_ids": keys.is_list_of(keys.is_natural)}
_PARTS = ("selector_top_k", "selector_rank", "conv_kernel_size", "conv_group_size")  # of DFlash 2
_OURS: dict[str, keys.Check] = {
    "draft_vocab_size": keys.is_count,
    "confidence_head": keys.is_flag,
    "slot_context": keys.is_flag,
}


def architecture(config: DFlashConfig) -> str:
    """The layout that can say all of the config."""
    has_selector, has_conv = config.selector_top_k > 0, config.conv_kernel_size > 0
    whole = config.draft_vocab_size == config.vocab_size
    if not whole or config.confidence_head or config.slot_context or has_selector != has_conv:
        return OWN
    return SECOND if has_selector else PLAIN


def config_json(config: DFlashConfig) -> dict[str, Any]:
    """The config as config.json has it."""
    kind = architecture(config)
    block: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if kind != PLAIN:
        block |= {name: getattr(config, name) for name in _PARTS}
    sizes = {key: getattr(config, _RENAMED.get(key, key)) for key in _SIZES}
    sizes["layer_types"] = list(config.layer_types)
    sizes["sliding_window"] = config.sliding_window or None
    raw = {"architectures": [kind]} | _FIXED | sizes | {"dflash_config": block}
    if config.sliding_window:
        raw |= _SLIDING
    if kind == OWN:
        raw["draftloop"] = {name: getattr(config, name) for name in _OURS}
    return raw


def config_from_json(raw: dict[str, Any], kind: str) -> DFlashConfig:
    """The config of an architecture's JSON, `architectures` taken out. Raises ValueError, naming what is wrong."""
    checks = _SIZES | {"dflash_config": keys.is_object}
    optional = {key: keys.is_one_of(value) for key, value in _FIXED.items()}
    optional |= {key: lambda _: True for key in _UNUSED}
    types = raw.get("layer_types")
    if isinstance(types, list) and SLIDING in types:
        checks |= {key: keys.is_one_of(value) for key, value in _SLIDING.items()}
    else:
        optional |= {key: keys.is_one_of(False, None) for key in _SLIDING}
    block_checks = _BLOCK | (dict.fromkeys(_PARTS, keys.is_count) if kind != PLAIN else {})
    if kind == OWN:
        checks |= {"draftloop": keys.is_object}
        block_checks |= dict.fromkeys(("selector_top_k", "conv_kernel_size"), keys.is_natural)  # 0: without
    values = keys.take_keys(raw, checks, optional)
    block = keys.take_keys(values["dflash_config"], block_checks, {}, "dflash_config.")
    ours = {"draft_vocab_size": values["vocab_size"]}
    if kind == OWN:
        ours = keys.take_keys(values["draftloop"], _OURS, {}, "draftloop.")
    fields = {_RENAMED.get(key, key): values[key] for key in _SIZES} | block | ours
    fields |= {name: tuple(fields[name]) for name in ("target_layer_ids", "layer_types")}
    return DFlashConfig(**(fields | {"sliding_window": fields["sliding_window"] or 0}))


def saved_tensors(module: DFlashModule) -> dict[str, Tensor]:
    """What model.safetensors holds: the scales of the taps in fc, and no draft vocabulary in the published layouts."""
    state = module.state_dict()
    state["fc.weight"] = state["fc.weight"] * state.pop("tap_scale").repeat_interleave(module.config.hidden_size)
    if architecture(module.config) != OWN:
        del state["draft_vocab_ids"]
    return state


def loadable_tensors(module: DFlashModule, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `saved_tensors`. Raises RuntimeError, as `load_state_dict` does, if there is a tensor too many."""
    added = {"tap_scale": torch.ones(len(module.config.target_layer_ids))}
    if architecture(module.config) != OWN:
        added["draft_vocab_ids"] = module.draft_vocab_ids
    for name in added:
        if name in saved:
            raise RuntimeError(f"{name} is no tensor of this architecture")
    return added | saved
