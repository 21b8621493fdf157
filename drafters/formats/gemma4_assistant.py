"""A Gemma 4 assistant as its makers publish it: its folder and its target in, a drafter for that target out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from drafters import gemma_assistant_layout as layout
from drafters.checkpoint import CheckpointError
from drafters.formats.foreign_config import FormatError
from drafters.formats.foreign_folder import read_config_file, read_tensors
from drafters.gemma_assistant import MODEL_TYPE, GemmaAssistant, GemmaAssistantConfig, transformers_config
from drafters.gemma_assistant_kv import SharedLayer, shared_layers
from drafters.target import Target, shared_weights
from drafters.target_source import TargetError

NUM_DRAFT_TOKENS = 5  # where generation_config.json names no num_assistant_tokens
TARGETS = ("gemma4_text", "gemma4_unified_text")


def read(source: Path, target: Target) -> GemmaAssistant:
    """The assistant in a folder, bound to its target. Raises CheckpointError if one of the two cannot be used."""
    published = _published(source)
    try:
        module = GemmaAssistant(_config(source, published, target))
        module.load_state_dict(layout.loadable_tensors(module, read_tensors(source)))
        module.bind(shared_weights(target.path, torch.float32))
        module.bind_layers(target.path)
    except (CheckpointError, FormatError):
        raise
    except (ValueError, OSError, RuntimeError, TargetError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"assistant {source}: {reason}; give a whole one, with its own target") from None
    return module.float().eval().requires_grad_(False)


def _published(source: Path) -> dict[str, Any]:
    """config.json without the architecture."""
    raw = dict(read_config_file(source))
    named = raw.pop("architectures", None)
    if named != [layout.ARCHITECTURE] or raw.get("model_type") != MODEL_TYPE:
        raise CheckpointError(f"{source} is a {named} of type {raw.get('model_type')}, not a {layout.ARCHITECTURE}")
    raw.pop("draftloop", None)
    return raw


def _config(source: Path, published: dict[str, Any], target: Target) -> GemmaAssistantConfig:
    """What ties the assistant to the target. Raises CheckpointError if it was made for another one."""
    made: Any = transformers_config(published)
    text, theirs = made.get_text_config(), target.config.get_text_config()

    def fit(what: str, own: Any, needed: Any) -> None:
        if own != needed:
            raise CheckpointError(
                f"assistant {source} has {what} {own}, target {target.path} {needed}; give the target it was made for"
            )

    if theirs.model_type not in TARGETS:
        raise CheckpointError(f"target {target.path} is a {theirs.model_type}; Gemma 4 assistants need a Gemma 4")
    fit("backbone_hidden_size", made.backbone_hidden_size, target.width)
    fit("vocab_size", text.vocab_size, theirs.vocab_size)
    fit("tie_word_embeddings", bool(made.tie_word_embeddings), True)
    offered, used = shared_layers(theirs), {}
    for layer, kind in enumerate(text.layer_types):
        if kind not in offered:
            raise CheckpointError(f"assistant {source} has a layer of {kind}, target {target.path} has none to share")
        fit(f"head_dim of {kind}", text.per_layer_config[layer].head_dim, offered[kind].head_dim)
        used[kind] = _usable(source, target, kind, offered[kind], text.num_attention_heads)
    return GemmaAssistantConfig(
        published=published,
        hidden_size=made.backbone_hidden_size,
        vocab_size=text.vocab_size,
        num_target_layers=target.num_layers,
        shared_layers=used,
        num_draft_tokens=_num_draft_tokens(source),
    )


def _usable(source: Path, target: Target, kind: str, shared: SharedLayer, heads: int) -> SharedLayer:
    if heads % shared.num_key_value_heads:
        raise CheckpointError(
            f"assistant {source} has {heads} heads, which the {shared.num_key_value_heads} KV heads of {kind} in "
            f"target {target.path} do not divide; give the target it was made for"
        )
    if shared.layer == 0:
        raise CheckpointError(
            f"target {target.path} shares the keys and values of its first layer ({kind}), whose input no tap gives; "
            "such a target is not supported"
        )
    return shared


def _num_draft_tokens(source: Path) -> int:
    """What the makers recommend."""
    try:
        found = json.loads((source / "generation_config.json").read_text(encoding="utf-8")).get("num_assistant_tokens")
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, int) and found > 0 else NUM_DRAFT_TOKENS
