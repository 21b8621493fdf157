"""Checkpoints of Gemma 4 assistants: the published layout, so that other servers load them, and one key of ours.

config.json is the assistant's own with `draftloop` added: what ties it to its target. Tensors have the published names;
the LM head is saved as the embedding that it is tied to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from drafters import config_keys as keys
from drafters.gemma_assistant import MODEL_TYPE, GemmaAssistant, GemmaAssistantConfig
from drafters.gemma_assistant_kv import SharedLayer

ARCHITECTURE = "Gemma4AssistantForCausalLM"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OURS: dict[str, keys.Check] = {
    "hidden_size": keys.is_count,
    "vocab_size": keys.is_count,
    "num_target_layers": keys.is_count,
    "num_draft_tokens": keys.is_count,
    "shared_layers": keys.is_object,
}
_SHARED: dict[str, keys.Check] = {
    "layer": keys.is_count,
    "num_key_value_heads": keys.is_count,
    "head_dim": keys.is_count,
}


def config_json(config: GemmaAssistantConfig) -> dict[str, Any]:
    """The config as config.json has it."""
    ours = {name: getattr(config, name) for name in _OURS}
    ours["shared_layers"] = {kind: asdict(shared) for kind, shared in config.shared_layers.items()}
    return dict(config.published) | {"architectures": [ARCHITECTURE], "draftloop": ours}


def config_from_json(raw: Mapping[str, Any]) -> GemmaAssistantConfig:
    """The config of a checkpoint's JSON, `architectures` taken out. Raises ValueError, naming what is wrong."""
    published = dict(raw)
    if "draftloop" not in published:
        raise ValueError("lacks key 'draftloop': this is an assistant as published, `draftloop import` it first")
    ours = keys.take_keys(published.pop("draftloop"), _OURS, {}, "draftloop.")
    if published.get("model_type") != MODEL_TYPE:
        raise ValueError(f"has {published.get('model_type')!r} as 'model_type'")
    shared = {}
    for kind, values in ours["shared_layers"].items():
        inside = f"draftloop.shared_layers.{kind}"
        if not isinstance(values, dict):
            raise ValueError(f"has {values!r} as {inside!r}")
        shared[kind] = SharedLayer(**keys.take_keys(values, _SHARED, {}, f"{inside}."))
    return GemmaAssistantConfig(**(ours | {"published": published, "shared_layers": shared}))


def saved_tensors(module: GemmaAssistant) -> dict[str, Tensor]:
    """What model.safetensors holds: all tokens can be drafted, and nobody else knows a draft vocabulary."""
    state = module.state_dict()
    del state["draft_vocab_ids"]
    state[_EMBEDDING] = state.pop(_HEAD)
    return state


def loadable_tensors(module: GemmaAssistant, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `saved_tensors`. Raises RuntimeError for clusters that are no partition of the tokens.

    What makes keys and values, which a published file may hold, is used by nobody: it is dropped.
    """
    unused = tuple(f"self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm", "v_norm"))
    state = {name: tensor for name, tensor in saved.items() if not name.endswith(unused) and name != _HEAD}
    order = state.get("masked_embedding.token_ordering")
    if order is not None and not torch.equal(order.long().sort().values, torch.arange(len(order))):
        raise RuntimeError("masked_embedding.token_ordering does not name every token once")
    if _EMBEDDING in state:
        state[_HEAD] = state.pop(_EMBEDDING)
    return state | {"draft_vocab_ids": module.draft_vocab_ids}
