"""What each layer of a target keeps of a token: key and value widths, and the layers that keep nothing of their own.

In: a target's text config. Out: a `LayerKv` per layer, by which the `torch` backend makes its slots and the memory
plan counts them. Sources: transformers' DeepSeek V3 (latent attention, kept expanded) and Gemma 4 (wider heads in full
layers, last layers that attend to what an earlier one kept).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class UnsupportedTargetError(ValueError):
    """The target keeps state that slots cannot roll back, or attends in a way that rows cannot express."""


class LayerKv(NamedTuple):
    """Of one layer."""

    kv_heads: int
    key_dim: int  # per head
    value_dim: int
    source: int  # the layer whose keys and values it attends to; its own index where it keeps them itself

    @property
    def numbers(self) -> int:
        """Kept for each token, whoever keeps them."""
        return self.kv_heads * (self.key_dim + self.value_dim)


def kv_layout(config: Any) -> list[LayerKv]:
    """By layer."""
    return [_layer(config, layer, source) for layer, source in enumerate(_sources(config))]


def kv_numbers(config: Any) -> int:
    """Numbers that all layers keep of one token."""
    return sum(kv.numbers for layer, kv in enumerate(kv_layout(config)) if kv.source == layer)


def _sources(config: Any) -> list[int]:
    layers = range(config.num_hidden_layers)
    if not getattr(config, "num_kv_shared_layers", 0):
        return list(layers)
    if config.num_kv_shared_layers >= config.num_hidden_layers:
        raise UnsupportedTargetError(
            f"{config.model_type} keeps no keys and values of its own: it is an assistant, which drafts for another "
            "target; choose that one, and `draftloop import` this"
        )
    modes, types = config.kv_sharing_modes, config.layer_types
    stores = {types[layer]: layer for layer in layers if modes[layer] == "store"}
    return [stores[types[layer]] if modes[layer] == "reuse" else layer for layer in layers]


def _layer(config: Any, layer: int, source: int) -> LayerKv:
    if getattr(config, "kv_lora_rank", None):  # latent attention: every head has a key and a value, of two widths
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return LayerKv(config.num_attention_heads, key_dim, config.v_head_dim, source)
    own = config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config
    kv_heads = getattr(own, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(own, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return LayerKv(kv_heads, head_dim, getattr(own, "v_head_dim", None) or head_dim, source)
