"""DFlash: a block-diffusion drafter. All slots of a block are drafted in one pass, given the target's features.

Indexing: pair p joins the target's features at position p with the verified token at p + 1, the anchor. The block is
[anchor, MASK, MASK ...]; slot j stands at position p + 1 + j and predicts that very position, slot 0 is given. The
context is the features at positions <= p. Step k of training_batch.py is slot k. Embedding and LM head: the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.dflash_layer import BlockAttention, DFlashLayer, attend_blocks, inverse_frequency, rotary_angles
from drafters.dflash_selector import (
    Candidates,
    CandidateSelector,
    ConfidenceHead,
    confidence_loss,
    selector_loss,
)
from drafters.drafter_module import DrafterModule, DraftLogits
from drafters.losses import exponential_weights, gamma_for
from drafters.training_batch import IGNORED, TrainingBatch

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """Shape of a DFlash drafter. The target's dimensions come first. Raises ValueError, naming a field that is off."""

    hidden_size: int  # of the target (D)
    vocab_size: int  # of the target (V)
    num_target_layers: int  # of the target
    target_layer_ids: tuple[int, ...]  # tapped layers
    mask_token_id: int  # stands in every slot but the anchor's
    draft_vocab_size: int  # tokens that can be drafted (W); vocab_size for all
    block_size: int = 8  # the anchor included
    num_hidden_layers: int = 1
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 1024
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    sliding_window: int = 0  # sliding layers see positions less than this apart; 0: there are none
    layer_types: tuple[str, ...] = ()  # "full_attention" or "sliding_attention" per layer; (): all full
    selector_top_k: int = 0  # candidates per slot that the path selector chooses from; 0: no selector
    selector_rank: int = 64  # width of the selector's codebooks
    conv_kernel_size: int = 0  # taps of the convolutions along the block; 0: none
    conv_group_size: int = 16  # channels that share a predicted kernel
    confidence_head: bool = False  # estimate each slot's acceptance
    slot_context: bool = False  # every slot's input also reads the last context feature and the anchor's embedding

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_hidden_layers)
        windowed = SLIDING in self.layer_types
        for wrong, what in (
            (self.num_attention_heads % self.num_key_value_heads, "heads that num_key_value_heads does not divide"),
            (self.head_dim % 2, "an odd head_dim"),
            (self.block_size < 2, "a block_size below 2, which leaves no slot to draft"),
            (not 0 <= self.mask_token_id < self.vocab_size, "a mask_token_id outside the vocabulary"),
            (not 0 < self.draft_vocab_size <= self.vocab_size, "a draft_vocab_size outside 1..vocab_size"),
            (not self.target_layer_ids, "no target_layer_ids"),
            (max(self.target_layer_ids, default=0) >= self.num_target_layers, "target_layer_ids past the target's"),
            (set(self.layer_types) - {FULL, SLIDING}, f"layer_types other than {FULL} and {SLIDING}"),
            (len(self.layer_types) != self.num_hidden_layers, "layer_types of another number of layers"),
            (windowed != (self.sliding_window > 0), "only one of sliding_window and sliding layer_types"),
            (self.selector_top_k > self.draft_vocab_size, "a selector_top_k above draft_vocab_size"),
            (
                self.conv_kernel_size and self.hidden_size % self.conv_group_size,
                "a conv_group_size that splits unevenly",
            ),
        ):
            if wrong:
                raise ValueError(f"has {what}")

    @property
    def num_draft_tokens(self) -> int:
        """K, the slots behind the anchor."""
        return self.block_size - 1

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of every layer, None where it sees everything."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)


class DFlashModule(DrafterModule):
    """The drafter's weights and its training pass; dflash_drafter.py serves it. Chen et al. 2026 (arXiv 2602.06036)."""

    config: DFlashConfig
    inverse_frequency: Tensor
    tap_scale: Tensor  # [taps], multiplies the features of each tap; checkpoints have it folded into fc

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_eps
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.register_buffer("tap_scale", torch.ones(len(config.target_layer_ids)))
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(
            DFlashLayer(width, config.intermediate_size, BlockAttention(width, *heads, eps), eps)
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(width, eps=eps)
        nn.init.constant_(
            self.norm.weight, 0.3
        )  # the LM head is scaled for the target's own norm: mild logits at first
        if config.conv_kernel_size:
            for layer, _ in self.stack():
                layer.add_convolutions(config.conv_kernel_size, config.conv_group_size)
        self.slot_context_proj = nn.Linear(2 * width, width, bias=False) if config.slot_context else None
        self.candidate_selector = None
        if config.selector_top_k:
            partial_vocab = config.draft_vocab_size < config.vocab_size
            self.candidate_selector = CandidateSelector(
                width, config.draft_vocab_size, config.selector_rank, other_tokens=partial_vocab
            )
        self.confidence = ConfidenceHead(width, config.num_draft_tokens) if config.confidence_head else None
        self.register_buffer(
            "inverse_frequency", inverse_frequency(config.rope_theta, config.head_dim), persistent=False
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DFlashModule:
        super()._apply(fn, recurse)  # must not follow the weights into bfloat16
        exact = inverse_frequency(self.config.rope_theta, self.config.head_dim)
        self.inverse_frequency = exact.to(self.inverse_frequency.device)
        return self

    def stack(self) -> list[tuple[DFlashLayer, int | None]]:
        """The layers with their sliding windows (None: they see everything)."""
        layers = [layer for layer in self.layers if isinstance(layer, DFlashLayer)]
        return list(zip(layers, self.config.windows, strict=True))

    def initialise_from_target_layers(self, state_dict: Mapping[str, Tensor], layer_ids: tuple[int, ...]) -> None:
        """Start drafter layer i as the target's decoder layer `layer_ids[i]`; what the target lacks stays fresh.

        `state_dict` holds the target's weights under names that end in `layers.N.self_attn.q_proj.weight` and the like.
        Raises ValueError, naming a weight whose shape does not fit, or a layer that is not there.
        """
        if len(layer_ids) != len(self.layers):
            raise ValueError(
                f"the drafter has {len(self.layers)} layers; name as many of the target's, not {layer_ids}"
            )
        for i, ((layer, _), source) in enumerate(zip(self.stack(), layer_ids, strict=True)):
            marker = f"layers.{source}."
            found = {n.split(marker, 1)[1]: w for n, w in state_dict.items() if f".{marker}" in f".{n}"}
            if "self_attn.q_proj.weight" not in found:
                raise ValueError(f"the target has no weight named {marker}self_attn.q_proj.weight")
            for name, parameter in layer.named_parameters():
                if name not in found:
                    continue
                if found[name].shape != parameter.shape:
                    raise ValueError(
                        f"layers.{i}.{name} is {tuple(parameter.shape)}, the target's {marker}{name} is "
                        f"{tuple(found[name].shape)}; give the drafter the target's heads and sizes"
                    )
                with torch.no_grad():
                    parameter.copy_(found[name])

    # -- the parts that training and service share ---------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """Tapped features [..., taps * D] -> context features [..., D], the same for all layers."""
        taps = features.unflatten(-1, (len(self.tap_scale), -1)) * self.tap_scale[:, None]
        return self.hidden_norm(self.fc(taps.flatten(-2)))

    def scale_taps(self, features_NF: Tensor) -> None:
        """Let every tap enter with a root mean square of 1 over these features: deep layers' are far larger, and would
        drown the others. Call before training."""
        taps = features_NF.float().unflatten(-1, (len(self.tap_scale), -1))
        self.tap_scale.copy_(taps.pow(2).mean(dim=(0, 2)).clamp(min=1e-12).rsqrt())

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary angles at integer positions [...]."""
        return rotary_angles(positions, self.inverse_frequency)

    def block_input(self, anchors: Tensor, last_context: Tensor) -> Tensor:
        """[..., S, D] input of the blocks of anchor tokens [...] whose newest context feature is [..., D]."""
        tokens = anchors.new_full((*anchors.shape, self.config.block_size), self.config.mask_token_id)
        tokens[..., 0] = anchors
        x = self.embed(tokens)
        if self.slot_context_proj is None:
            return x
        anchor = F.rms_norm(x[..., 0, :], (self.config.hidden_size,), None, self.config.rms_eps)  # like the context
        return x + self.slot_context_proj(torch.cat([last_context, anchor], dim=-1))[..., None, :]

    def candidates(self, hidden_NKD: Tensor, logits_NKW: Tensor, count: int) -> Candidates:
        """The `count` likeliest tokens of every slot, and what the selector needs to choose between them."""
        top = logits_NKW.topk(count, dim=-1)
        selector = self.candidate_selector
        projected = None if selector is None else selector.hidden_projection(hidden_NKD)
        return Candidates(top.indices, top.values, logits_NKW.logsumexp(dim=-1), projected)

    def candidate_scores(self, candidates: Candidates, rows: Tensor, slot: int, previous: Tensor) -> Tensor:
        """[F, C] scores of slot `slot` (0-based) of blocks `rows` [F], each after a previous token [F].

        Tokens are indices into the draft vocabulary, IGNORED for any other.
        """
        index, logits = candidates.index_NKC[rows, slot], candidates.logits_NKC[rows, slot]
        if self.candidate_selector is None or candidates.projected_NKR is None:
            return logits
        return self.candidate_selector.scores(previous, candidates.projected_NKR[rows, slot], index, logits)

    # -- training ------------------------------------------------------------------------------------------------------

    def block_hidden(self, batch: TrainingBatch) -> Tensor:
        """[B, A, K, D] normalised hidden states of the slots to draft, at all anchors."""
        device, last_BA = batch.ids_BT.device, batch.anchors_BA
        rows_B1 = torch.arange(len(last_BA), device=device)[:, None]
        slot_S = torch.arange(self.config.block_size, device=device)
        position_BAS = batch.anchor_positions()[:, :, None] + 1 + slot_S
        unseen_BA1T = batch.pairs_hidden()[:, :, None]
        context_BTD = self.fuse(batch.features_BTF)
        x = self.block_input(batch.ids_BT[rows_B1, last_BA + 1], context_BTD[rows_B1, last_BA])
        block_angles, context_angles = self.angles(position_BAS), self.angles(batch.positions_BT)
        for layer, window in self.stack():
            blocked, own_blocked = unseen_BA1T, None
            if window is not None:
                blocked = unseen_BA1T | (position_BAS[..., None] - batch.positions_BT[:, None, None] >= window)
                own_blocked = (slot_S[:, None] - slot_S).abs() >= window
            attend = partial(
                attend_blocks,
                context_BTGD=layer.self_attn.keys_values(context_BTD, context_angles),
                blocked_BAST=blocked,
                own_blocked_SS=own_blocked,
            )
            x = layer(x, block_angles, attend)
        return self.norm(x[:, :, 1:])

    def forward(self, batch: TrainingBatch) -> DraftLogits:
        """Logits of all slots at all anchors; losses of the selector and the confidence head are auxiliary."""
        hidden_BAKD = self.block_hidden(batch)
        logits_BAKW = self.head(hidden_BAKD)
        if self.candidate_selector is None and self.confidence is None:
            return DraftLogits(logits_BAKW, {})
        return DraftLogits(logits_BAKW, self._auxiliary(batch, hidden_BAKD.flatten(0, 1), logits_BAKW.flatten(0, 1)))

    def _auxiliary(self, batch: TrainingBatch, hidden_NKD: Tensor, logits_NKW: Tensor) -> dict[str, Tensor]:
        """Selector: sum over slots of weight * mean cross-entropy. Confidence: mean over blocks (`confidence_loss`)."""
        losses: dict[str, Tensor] = {}
        num = self.config.num_draft_tokens
        labels_NK = batch.labels(num).flatten(0, 1)
        index_NK = self.draft_labels(labels_NK)
        labels_K = (index_NK != IGNORED).sum(dim=0) if batch.step_labels_K is None else batch.step_labels_K
        found = self.candidates(hidden_NKD, logits_NKW, self.config.selector_top_k or 1)
        scores_NKC = found.logits_NKC
        if self.candidate_selector is not None:
            anchors_N = self.anchor_tokens(batch).flatten()
            # a label that cannot be drafted stands before the next slot as any other token does, as IGNORED
            previous_NK = torch.cat([self.draft_labels(anchors_N)[:, None], index_NK[:, :-1]], dim=1)
            loss_NK, scores_NKC = selector_loss(self.candidate_selector, found, logits_NKW, previous_NK, index_NK)
            per_slot_K = loss_NK.sum(dim=0) / labels_K.clamp(min=1)
            weights_K = self.slot_weights_K
            if weights_K is None:
                weights_K = exponential_weights(num, gamma_for(self.config.block_size))
            losses["selector"] = (per_slot_K * weights_K.to(per_slot_K)).sum()
        if self.confidence is not None:
            best_NK = scores_NKC.argmax(dim=-1)
            draft_NK = found.index_NKC.gather(2, best_NK[:, :, None])[:, :, 0]
            log_prob_NK = scores_NKC.float().log_softmax(dim=-1).amax(dim=-1) + found.log_mass().float()
            log_odds_NK = self.confidence(hidden_NKD.detach(), log_prob_NK.detach())
            losses["confidence"] = confidence_loss(log_odds_NK, draft_NK == index_NK, labels_NK != IGNORED, labels_K[0])
        return losses

    def anchor_tokens(self, batch: TrainingBatch) -> Tensor:
        """[B, A] token ids at p + 1."""
        rows_B1 = torch.arange(len(batch.ids_BT), device=batch.ids_BT.device)[:, None]
        return batch.ids_BT[rows_B1, batch.anchors_BA + 1]

    @torch.no_grad()
    def propose(self, batch: TrainingBatch) -> Tensor:
        """The tokens [B, A, K] that it would propose at every anchor: greedy, by the selector if there is one."""
        hidden_BAKD = self.block_hidden(batch)
        logits_BAKW = self.head(hidden_BAKD)
        if self.candidate_selector is None:
            return self.draft_vocab_ids[logits_BAKW.argmax(dim=-1)]
        found = self.candidates(hidden_BAKD.flatten(0, 1), logits_BAKW.flatten(0, 1), self.config.selector_top_k)
        previous_N = self.draft_labels(self.anchor_tokens(batch).flatten())
        rows_N = torch.arange(len(previous_N), device=previous_N.device)
        path = []
        for slot in range(self.config.num_draft_tokens):
            best_N1 = self.candidate_scores(found, rows_N, slot, previous_N).argmax(dim=-1, keepdim=True)
            previous_N = found.index_NKC[:, slot].gather(1, best_N1)[:, 0]
            path.append(previous_N)
        return self.draft_vocab_ids[torch.stack(path, dim=1)].unflatten(0, batch.anchors_BA.shape)
