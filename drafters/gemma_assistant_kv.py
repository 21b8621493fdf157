"""Keys and values of the target's layers that a Gemma 4 assistant attends to, made anew from tapped hidden states.

What a layer keeps for a position follows from its input there alone, which is the output of the layer below it, a tap.
So no keys and values cross the boundary to the drafter: it recomputes them with the target's own frozen weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.target_source import quiet_transformers, safetensors_header, weight_files

_SUFFIXES = ("input_layernorm.weight", "self_attn.k_norm.weight", "self_attn.k_proj.weight")
_OPTIONAL = ("self_attn.v_proj.weight", "self_attn.k_proj.bias", "self_attn.v_proj.bias")


@dataclass(frozen=True, kw_only=True)
class SharedLayer:
    """The target's layer whose keys and values the assistant's layers of one type attend to."""

    layer: int  # from 0; at least 1, since its input must be another layer's output
    num_key_value_heads: int  # G
    head_dim: int


def shared_layers(text_config: Any) -> dict[str, SharedLayer]:
    """By layer type, what a Gemma 4 target offers: the last layer of each that has keys and values of its own."""
    own = text_config.num_hidden_layers - text_config.num_kv_shared_layers
    found = {}
    for layer, kind in enumerate(text_config.layer_types[:own]):
        shape = text_config.per_layer_config[layer]
        found[kind] = SharedLayer(layer=layer, num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim)
    return found


class ExactRotary:
    """Rotary angles by layer type. No module: a change to bfloat16 must not reach the frequencies."""

    def __init__(self, text_config: Any):
        """Of a Gemma 4 text config."""
        from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

        made = Gemma4TextRotaryEmbedding(text_config)
        self._frequency = {kind: getattr(made, f"{kind}_inv_freq").float() for kind in made.layer_types}
        self._scaling = {kind: float(getattr(made, f"{kind}_attention_scaling")) for kind in made.layer_types}

    def __call__(self, kind: str, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) [..., head_dim] at integer positions [...]."""
        frequency = self._frequency[kind] = self._frequency[kind].to(positions.device)
        half = positions[..., None].float() * frequency
        angle, scaling = torch.cat([half, half], dim=-1), self._scaling[kind]
        return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


class BorrowedKV(nn.Module):
    """Keys and values of one layer of the target. Its weights are the target's, frozen, and never saved."""

    input_norm_D: Tensor
    key_norm: Tensor  # [head_dim]
    key_OD: Tensor  # [G * head_dim, D]
    value_OD: Tensor | None  # None: the keys before their norm are the values
    key_bias_O: Tensor | None
    value_bias_O: Tensor | None

    def __init__(self, kind: str, shape: SharedLayer):
        super().__init__()
        self.kind, self.shape, self.eps = kind, shape, 1e-6
        self._rotary: ExactRotary | None = None
        for name in ("input_norm_D", "key_norm", "key_OD", "value_OD", "key_bias_O", "value_bias_O"):
            self.register_buffer(name, None, persistent=False)

    def borrow(self, tensors: dict[str, Tensor], rotary: ExactRotary, eps: float) -> None:
        """Take the layer's weights, by their names inside the layer. Raises ValueError if they do not fit."""
        missing = [name for name in _SUFFIXES if name not in tensors]
        if missing:
            raise ValueError(f"the target has no layers.{self.shape.layer}.{missing[0]}")
        self._rotary, self.eps = rotary, eps
        self.input_norm_D, self.key_norm = tensors["input_layernorm.weight"], tensors["self_attn.k_norm.weight"]
        self.key_OD = tensors["self_attn.k_proj.weight"]
        self.value_OD = tensors.get("self_attn.v_proj.weight")
        self.key_bias_O = tensors.get("self_attn.k_proj.bias")
        self.value_bias_O = tensors.get("self_attn.v_proj.bias")
        rows = self.shape.num_key_value_heads * self.shape.head_dim
        if len(self.key_OD) != rows or len(self.key_norm) != self.shape.head_dim:
            raise ValueError(
                f"layer {self.shape.layer} of the target has keys of {len(self.key_OD)} numbers in heads of "
                f"{len(self.key_norm)}, not {rows} in heads of {self.shape.head_dim}"
            )

    def forward(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values [..., G, head_dim] from the layer's inputs [..., D] at positions [...]."""
        assert self._rotary is not None, "call borrow first"
        normed = gemma_norm(hidden, self.input_norm_D, self.eps)
        key = F.linear(normed, self.key_OD, self.key_bias_O)
        value = key if self.value_OD is None else F.linear(normed, self.value_OD, self.value_bias_O)
        heads = (self.shape.num_key_value_heads, self.shape.head_dim)
        cos, sin = self._rotary(self.kind, positions, hidden.dtype)
        key = gemma_norm(key.unflatten(-1, heads), self.key_norm, self.eps)
        first, second = key.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        rotated = key * cos[..., None, :] + turned * sin[..., None, :]
        return rotated, gemma_norm(value.unflatten(-1, heads), None, self.eps)


def gemma_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Gemma 4's RMSNorm: in float32 to its end, the weight included; None: without one."""
    wide = x.float()
    normed = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return (normed if weight is None else normed * weight.float()).type_as(x)


def target_text_config(path: Path) -> Any:
    """The text config of the target in a folder, as transformers reads it."""
    from transformers import AutoConfig

    with quiet_transformers():
        return AutoConfig.from_pretrained(path).get_text_config()


def layer_tensors(path: Path, layer: int) -> dict[str, Tensor]:
    """What makes the keys and values of a decoder layer of the target, by name inside the layer."""
    from safetensors import safe_open

    pattern = re.compile(rf"((model|language_model)\.)*layers\.{layer}\.(.+)")
    found: dict[str, Tensor] = {}
    for file in weight_files(path):
        names = {name: match[3] for name in safetensors_header(file)[0] if (match := pattern.fullmatch(name))}
        wanted = {name: inside for name, inside in names.items() if inside in (*_SUFFIXES, *_OPTIONAL)}
        with safe_open(file, framework="pt") as opened:
            found |= {inside: opened.get_tensor(name) for name, inside in wanted.items()}
    return found
