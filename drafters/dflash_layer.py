"""One transformer layer of the DFlash drafter: Qwen3's, with the target's context injected into keys and values alone.

In: a block's states, the context features (the same for all layers). Out: the block's states. Whoever calls says how to
attend: over all anchors of a training batch at once (`attend_blocks`), or over keys and values cached in service.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (queries [..., S, heads, head_dim], the block's own keys and values [..., S, kv_heads, head_dim]) -> like the queries
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def inverse_frequency(rope_theta: float, head_dim: int) -> Tensor:
    """Rotary frequencies [head_dim / 2], always in float32: in bfloat16 far positions would turn by a wrong angle."""
    return rope_theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def rotary_angles(positions: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 1, head_dim / 2] at integer positions [...], the same for all heads."""
    angle = (positions[..., None].float() * frequency)[..., None, :]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [..., heads, head_dim]; the halves of a head are paired."""
    cos, sin = angles[0].to(x.dtype), angles[1].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class BlockAttention(nn.Module):
    """Queries from the block, keys and values from [context ; block], each head's normalised before rotation."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, rms_eps: float):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=rms_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=rms_eps)

    def keys_values(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (normalised, rotated) and values [..., kv_heads, head_dim] of context features or block states [..., D].

        Context features come as they are; block states have gone through the layer's norm.
        """
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(key, angles), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[..., S, D] -> [..., S, D]."""
        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), angles)
        return self.o_proj(attend(query, *self.keys_values(x, angles)).flatten(-2))


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class BlockConvolution(nn.Module):
    """A causal depthwise convolution along the block, before a part of the layer and again after it (DFlash 2).

    Each of its taps multiplies a channel by a learned base kernel plus a kernel that is predicted from the part's input
    per group of channels. It starts as the identity.
    """

    def __init__(self, width: int, kernel_size: int, group_size: int):
        super().__init__()
        self.kernel_size, self.group_size = kernel_size, group_size
        base_2KD = torch.zeros(2, kernel_size, width)
        base_2KD[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base_2KD)
        self.kernel_projection = nn.Linear(width, 2 * kernel_size * (width // group_size), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def around(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """convolve(part(convolve(x))) of [..., S, D]; both kernels are predicted from x."""
        before, after = self.kernel_projection(x).unflatten(-1, (2, self.kernel_size, -1)).unbind(dim=-3)
        return self._convolve(part(self._convolve(x, before, 0)), after, 1)

    def _convolve(self, x: Tensor, predicted: Tensor, which: int) -> Tensor:
        """Tap t multiplies what lies t slots earlier; `predicted` is [..., S, taps, groups]."""
        groups = x.unflatten(-1, (-1, self.group_size))
        base = self.base_kernel[which].unflatten(-1, (-1, self.group_size))
        out = torch.zeros_like(groups)
        for t in range(self.kernel_size):
            earlier = groups if t == 0 else F.pad(groups, (0, 0, 0, 0, t, 0))[..., : x.shape[-2], :, :]
            out = out + earlier * (base[t] + predicted[..., t, :, None])
        return out.flatten(-2)


class DFlashLayer(nn.Module):
    """Pre-norm attention and MLP with residuals; optionally convolutions around both."""

    def __init__(self, width: int, inner: int, attention: BlockAttention, rms_eps: float):
        super().__init__()
        self.self_attn = attention
        self.mlp = GatedMlp(width, inner)
        self.input_layernorm = nn.RMSNorm(width, eps=rms_eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=rms_eps)
        self.attention_conv: BlockConvolution | None = None
        self.mlp_conv: BlockConvolution | None = None

    def add_convolutions(self, kernel_size: int, group_size: int) -> None:
        """Put convolutions around attention and MLP."""
        width = self.input_layernorm.normalized_shape[0]
        self.attention_conv = BlockConvolution(width, kernel_size, group_size)
        self.mlp_conv = BlockConvolution(width, kernel_size, group_size)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Block states [..., S, D] at positions with `angles` -> [..., S, D]."""

        def attention(normed: Tensor) -> Tensor:
            return self.self_attn(normed, angles, attend)

        normed = self.input_layernorm(x)
        x = x + (self.attention_conv.around(normed, attention) if self.attention_conv else attention(normed))
        normed = self.post_attention_layernorm(x)
        return x + (self.mlp_conv.around(normed, self.mlp) if self.mlp_conv else self.mlp(normed))


def attend_blocks(
    query_BASHD: Tensor,
    key_BASGD: Tensor,
    value_BASGD: Tensor,
    *,
    context_BTGD: tuple[Tensor, Tensor],
    blocked_BAST: Tensor,
    own_blocked_SS: Tensor | None,
) -> Tensor:
    """Attention of A blocks per sequence, S slots each: every slot sees its own block whole, and unblocked context.

    The context's keys and values lie there once per sequence, not once per block. G: KV heads. `blocked_BAST` may have
    one row for all slots of a block. `own_blocked_SS`: what a window hides inside the block.
    """
    kv_heads, dim = key_BASGD.shape[-2:]
    query = query_BASHD.unflatten(-2, (kv_heads, -1)) * dim**-0.5
    context_k, context_v = context_BTGD
    scores = torch.einsum("basgqd,btgd->basgqt", query, context_k).float()
    scores = scores.masked_fill(blocked_BAST[:, :, :, None, None], float("-inf"))
    own = torch.einsum("basgqd,bazgd->basgqz", query, key_BASGD).float()
    if own_blocked_SS is not None:
        own = own.masked_fill(own_blocked_SS[:, None, None], float("-inf"))
    length = scores.shape[-1]
    weights = torch.softmax(torch.cat([scores, own], dim=-1), dim=-1).to(context_v.dtype)
    out = torch.einsum("basgqt,btgd->basgqd", weights[..., :length], context_v)
    out = out + torch.einsum("basgqz,bazgd->basgqd", weights[..., length:], value_BASGD)
    return out.flatten(-3, -2)
