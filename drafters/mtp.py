"""MTP drafters: K independent residual heads, or one recursive head that is applied K times.

Indexing, for both: pair p joins the target's features at position p with the verified token at p + 1 (which the
target's own LM head has already given). Step k = 1..K predicts the token at p + 1 + k. Steps run over the draft
vocabulary, a part of the target's; the embedding and (unless it has its own) the LM head are the target's, frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.drafter_module import DrafterModule, DraftLogits
from drafters.target import SharedWeights
from drafters.training_batch import TrainingBatch

Kind = Literal["recursive", "independent"]


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Shape of an MTP drafter. The target's dimensions come first."""

    kind: Kind = "recursive"
    hidden_size: int  # of the target (D)
    vocab_size: int  # of the target (V)
    target_layer_ids: tuple[int, ...]  # tapped layers; independent heads read the last of them only
    num_draft_tokens: int = 5  # K, the drafts it is trained for
    draft_vocab_size: int  # tokens that can be drafted; vocab_size for all
    own_lm_head: bool = False  # independent heads: a projection of their own instead of the target's LM head
    shared_trunk: bool = False  # independent heads: one residual block before all of them
    anchor_embedding: bool = False  # independent heads: they also read the anchor, the token at p + 1
    medusa_heads: bool = False  # independent heads: h + SiLU(Linear(h)), which other servers load, not residual MLPs
    expansion: int = 4  # independent heads: width of the MLP over hidden_size (e)
    dropout: float = 0.0  # independent heads
    num_attention_heads: int = 8  # recursive head
    num_key_value_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 1024
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5

    def to_json(self) -> dict[str, Any]:
        """The config as plain JSON values."""
        return asdict(self) | {"target_layer_ids": list(self.target_layer_ids)}


class ResidualHead(nn.Module):
    """h + MLP(h), MLP = LayerNorm, Linear(D, eD), SiLU, Dropout, Linear(eD, D), LayerNorm."""

    def __init__(self, config: MtpConfig):
        super().__init__()
        width, inner = config.hidden_size, config.expansion * config.hidden_size
        last = nn.LayerNorm(width)
        nn.init.zeros_(last.weight)  # starts as the identity: the head then says what the target's LM head says
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, inner),
            nn.SiLU(),
            nn.Dropout(config.dropout),
            nn.Linear(inner, width),
            last,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return hidden + self.mlp(hidden)


class MedusaHead(nn.Module):
    """h + SiLU(Linear(h)): the head of Medusa (Cai et al. 2024, arXiv 2401.10774)."""

    def __init__(self, config: MtpConfig):
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.hidden_size)
        nn.init.zeros_(self.linear.weight)  # starts as the identity, like a residual head
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return hidden + F.silu(self.linear(hidden))


class IndependentHeads(DrafterModule):
    """K heads on the target's last tapped hidden state at p; head k predicts the token at p + 1 + k by itself.

    The anchor's embedding, where it is read, and the trunk's output are added to that state, starting from zero.
    """

    config: MtpConfig

    def __init__(self, config: MtpConfig):
        super().__init__(config)
        make_head = MedusaHead if config.medusa_heads else ResidualHead
        self.heads = nn.ModuleList(make_head(config) for _ in range(config.num_draft_tokens))
        self.register_buffer("final_norm_D", torch.ones(config.hidden_size), persistent=False)
        width = config.hidden_size
        self.anchor_norm = nn.RMSNorm(width, eps=config.rms_eps) if config.anchor_embedding else None
        self.anchor_proj = nn.Linear(width, width, bias=False) if config.anchor_embedding else None
        if self.anchor_proj is not None:
            nn.init.zeros_(self.anchor_proj.weight)
        self.trunk = ResidualHead(config) if config.shared_trunk else None
        self.lm_heads = None
        if config.own_lm_head:
            shape = (config.num_draft_tokens, config.draft_vocab_size, config.hidden_size)
            self.lm_heads = nn.Parameter(torch.empty(shape))

    def bind(self, shared: SharedWeights) -> None:
        super().bind(shared)
        self.final_norm_D = shared.final_norm_D

    def start_from_target(self) -> None:
        """Own LM heads start as copies of the target's."""
        if self.lm_heads is not None:
            with torch.no_grad():
                self.lm_heads.copy_(self.lm_head_WD.expand_as(self.lm_heads))

    def step_logits(self, features_NF: Tensor, anchors_N: Tensor) -> Tensor:
        """[N, K, W] logits of all heads from features [N, taps * D] at p and the tokens [N] at p + 1."""
        width = self.config.hidden_size
        hidden_ND = F.rms_norm(features_NF[:, -width:], (width,), self.final_norm_D, self.config.rms_eps)
        if self.anchor_norm is not None and self.anchor_proj is not None:
            hidden_ND = hidden_ND + self.anchor_proj(self.anchor_norm(self.embed(anchors_N)))
        if self.trunk is not None:
            hidden_ND = self.trunk(hidden_ND)
        hidden_NKD = torch.stack([head(hidden_ND) for head in self.heads], dim=1)
        if self.lm_heads is not None:
            return torch.einsum("nkd,kwd->nkw", hidden_NKD, self.lm_heads)
        return self.head(hidden_NKD)

    def forward(self, batch: TrainingBatch) -> DraftLogits:
        rows = torch.arange(len(batch.ids_BT), device=batch.ids_BT.device)[:, None]
        features, tokens = batch.features_BTF[rows, batch.anchors_BA], batch.ids_BT[rows, batch.anchors_BA + 1]
        logits = self.step_logits(features.flatten(0, 1), tokens.flatten()).unflatten(0, batch.anchors_BA.shape)
        return DraftLogits(logits, {})


class RecursiveHead(DrafterModule):
    """One transformer layer over [embedding of the last token ; hidden], applied K times with shared weights.

    Step 1 runs over every verified pair and leaves its keys and values behind: the context. Step k > 1 takes the
    embedding of the token that step k - 1 drafted and that step's output as hidden, and sees the context up to its
    anchor and the steps before it. Compare EAGLE-3 (Li et al. 2025): features fused from several layers, and training
    unrolled over the drafter's own outputs.
    """

    config: MtpConfig
    inverse_frequency: Tensor

    def __init__(self, config: MtpConfig):
        super().__init__(config)
        width, dim = config.hidden_size, config.head_dim
        self.tap_norm = nn.Parameter(torch.ones(len(config.target_layer_ids), width))
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.embedding_norm = nn.RMSNorm(width, eps=config.rms_eps)
        self.hidden_norm = nn.RMSNorm(width, eps=config.rms_eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.attention_norm = nn.RMSNorm(width, eps=config.rms_eps)
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.kv_proj = nn.Linear(width, 2 * config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=config.rms_eps)
        self.gate_up_proj = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)
        self.norm = nn.RMSNorm(width, eps=config.rms_eps)
        self.register_buffer("inverse_frequency", _inverse_frequency(config), persistent=False)
        nn.init.constant_(
            self.norm.weight, 0.3
        )  # tied heads are scaled for the target's own norm: mild logits at first

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RecursiveHead:
        super()._apply(fn, recurse)  # a change to bfloat16 would shift the angles of far positions by a quarter turn
        self.inverse_frequency = _inverse_frequency(self.config).to(self.inverse_frequency.device)
        return self

    # -- the parts, on rows [..., width] ------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """Tapped features [..., taps * D] -> hidden [..., D]; every tap is normalised by itself."""
        taps, width = self.tap_norm.shape
        parts = F.rms_norm(features.unflatten(-1, (taps, width)), (width,), None, self.config.rms_eps)
        if torch.is_grad_enabled():  # scale the few weights, not the many features: those then need no gradient
            return F.linear(parts.flatten(-2), self.fc.weight * self.tap_norm.flatten())
        return self.fc((parts * self.tap_norm).flatten(-2))

    def enter(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input [..., D] from token ids and hidden states."""
        embedded = self.embedding_norm(self.embed(tokens))
        return self.input_proj(torch.cat([embedded, self.hidden_norm(hidden)], dim=-1))

    def keys_values(self, normed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values [..., kv_heads, head_dim]."""
        key, value = self.kv_proj(normed).unflatten(-1, (2, -1, self.config.head_dim)).unbind(dim=-3)
        return self.rotate(key, positions), value

    def queries(self, normed: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [..., heads, head_dim]."""
        return self.rotate(self.q_proj(normed).unflatten(-1, (-1, self.config.head_dim)), positions)

    def leave(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual output [..., D] from the layer's input and the attention output [..., heads, head_dim]."""
        x = x + self.o_proj(attended.flatten(-2))
        gate, up = self.gate_up_proj(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., W] over the draft vocabulary."""
        return self.head(self.norm(hidden))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of [..., heads, head_dim] at integer positions [...]."""
        angle = positions[..., None].float() * self.inverse_frequency
        cos, sin = angle.cos()[..., None, :].to(x.dtype), angle.sin()[..., None, :].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: TrainingBatch) -> DraftLogits:
        rows_B1 = torch.arange(len(batch.ids_BT), device=batch.ids_BT.device)[:, None]
        anchors = batch.anchors_BA
        x_BAD, context_k, context_v = self._context(batch, rows_B1)
        blocked_BAT, first_BA = batch.pairs_hidden(), batch.anchor_positions()
        own_keys: list[Tensor] = []  # of steps 2.., [B, A, kv_heads, head_dim]
        own_values: list[Tensor] = []
        outputs = []
        for k in range(self.config.num_draft_tokens):
            positions_BA = first_BA + k
            normed = self.attention_norm(x_BAD)
            if k > 0:
                key, value = self.keys_values(normed, positions_BA)
                own_keys.append(key)
                own_values.append(value)
            query = self.queries(normed, positions_BA)
            attended = _attend_steps(query, context_k, context_v, blocked_BAT, own_keys, own_values)
            hidden_BAD = self.leave(x_BAD, attended)
            outputs.append(hidden_BAD)
            if k + 1 < self.config.num_draft_tokens:
                following = batch.ids_BT[rows_B1, (anchors + k + 2).clamp(max=batch.ids_BT.shape[1] - 1)]
                x_BAD = self.enter(following, hidden_BAD)
        return DraftLogits(self.logits(torch.stack(outputs, dim=2)), {})

    def _context(self, batch: TrainingBatch, rows_B1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step 1's input at the anchors [B, A, D]; keys and values [B, T, kv_heads, head_dim] of the pairs up to them.

        Nobody looks at what lies behind a document's last anchor, padding above all: there the keys are zero.
        """
        seen_BT = batch.pairs_seen()
        tokens_N, features_NF = batch.ids_BT.roll(-1, dims=1)[seen_BT], batch.features_BTF[seen_BT]
        x_ND = self.enter(tokens_N, self.fuse(features_NF))  # pair p joins the features at p with the token at p + 1
        padded = []
        for part_NHD in self.keys_values(self.attention_norm(x_ND), batch.positions_BT[seen_BT]):
            whole = part_NHD.new_zeros((*seen_BT.shape, *part_NHD.shape[1:]))
            padded.append(whole.index_put((seen_BT,), part_NHD))
        place_BT = (seen_BT.flatten().cumsum(dim=0) - 1).view_as(seen_BT)  # of a pair among the N
        return x_ND[place_BT[rows_B1, batch.anchors_BA]], padded[0], padded[1]


def _inverse_frequency(config: MtpConfig) -> Tensor:
    """Rotary frequencies [head_dim / 2], always in float32."""
    return config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)


def _attend_steps(
    query_BAHD: Tensor,
    context_k: Tensor,  # [B, T, kv_heads, head_dim]
    context_v: Tensor,
    blocked_BAT: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
) -> Tensor:
    """Attention of one step: each anchor sees the context that is not blocked, and its own earlier steps."""
    heads, kv_heads, dim = query_BAHD.shape[2], context_k.shape[2], query_BAHD.shape[3]
    query = query_BAHD.unflatten(2, (kv_heads, heads // kv_heads)) * dim**-0.5
    scores = torch.einsum("bakgd,btkd->bakgt", query, context_k).float()
    scores = scores.masked_fill(blocked_BAT[:, :, None, None, :], float("-inf"))
    length = scores.shape[-1]
    if own_keys:
        keys = torch.stack(own_keys, dim=2)  # [B, A, steps, kv_heads, head_dim]
        scores = torch.cat([scores, torch.einsum("bakgd,baskd->bakgs", query, keys).float()], dim=-1)
    weights = torch.softmax(scores, dim=-1).to(context_v.dtype)
    out = torch.einsum("bakgt,btkd->bakgd", weights[..., :length], context_v)
    if own_values:
        out = out + torch.einsum("bakgs,baskd->bakgd", weights[..., length:], torch.stack(own_values, dim=2))
    return out.flatten(2, 3)


def make_mtp(config: MtpConfig) -> RecursiveHead | IndependentHeads:
    """A drafter of the configured kind with fresh weights, not bound to a target yet."""
    return RecursiveHead(config) if config.kind == "recursive" else IndependentHeads(config)
