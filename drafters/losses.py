"""Losses of draft positions and their weights: logits, labels and perhaps the target's logits in, one scalar out.

N anchors, K draft positions, W draft-vocabulary tokens. The loss is sum_k mean over the anchors of weight * token loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.training_batch import IGNORED, TrainingBatch

if TYPE_CHECKING:
    from drafters.drafter_module import DrafterModule

LossKind = Literal["cross_entropy", "kl"]
LossWeights = Literal["geometric", "exponential", "dpace"]

_GAMMA_BY_BLOCK = {8: 4.0, 10: 5.0, 16: 7.0}  # as published for DFlash; about half the block


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised."""

    kind: LossKind = "cross_entropy"  # on the target's tokens, or kl to its distribution over the draft vocabulary
    # of position k: rho^(k-1), exp(-(k-1)/gamma), or those of D-PACE; None: exponential with
    # a gamma, else D-PACE for blocks and geometric for heads
    weights: LossWeights | None = None
    rho: float = 0.8  # geometric weights
    gamma: float | None = None  # exponential weights; None: by the block size (`gamma_for`)
    smoothing: float = 0.5  # D-PACE: a

    def resolved(self, *, blocks: bool) -> LossConfig:
        """With the weights that a drafter of blocks, or of heads, is trained with."""
        if self.weights:
            return self
        if self.gamma is not None:
            return replace(self, weights="exponential")
        return replace(self, weights="dpace" if blocks else "geometric")


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """What N anchors are trained towards."""

    labels_NK: Tensor  # int64, the target's tokens; IGNORED: unknown
    draft_labels_NK: Tensor  # the same as indices into the draft vocabulary; IGNORED: unknown or outside it
    target_logits_NKW: Tensor | None = None  # of the target over the draft vocabulary; only kl needs them
    step_labels_K: Tensor | None = None  # labels of the whole step that can be drafted; None: the anchors' own


class DraftLoss(NamedTuple):
    """Loss of one batch and what it takes to show how training goes."""

    loss: Tensor  # scalar
    correct_K: Tensor  # how many of `known_K` labels were the step's argmax
    known_K: Tensor  # labels per step, those outside the draft vocabulary included


def draft_loss(config: LossConfig, logits_NKW: Tensor, supervision: Supervision) -> DraftLoss:
    """Weighted loss of K positions at N anchors.

    A label outside the draft vocabulary carries no loss of either kind (no draft can be right there) and counts as
    wrong. Parts of a step whose `step_labels_K` are the step's have losses that add up to the loss of the whole.
    """
    labels_NK, draft_labels_NK = supervision.labels_NK, supervision.draft_labels_NK
    in_loss_NK = draft_labels_NK != IGNORED
    logits = logits_NKW if logits_NKW.dtype == torch.float64 else logits_NKW.float()
    cross_entropy_NK = F.cross_entropy(
        logits.flatten(0, 1), draft_labels_NK.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(labels_NK.shape)
    token_loss_NK = cross_entropy_NK
    if config.kind == "kl":
        if supervision.target_logits_NKW is None:
            raise ValueError("the kl loss needs the target's logits; give target_logits_NKW")
        token_loss_NK = kl_to_target(logits, supervision.target_logits_NKW.to(logits.dtype)) * in_loss_NK
    if config.weights == "dpace":
        right_NK = torch.where(in_loss_NK, torch.exp(-cross_entropy_NK.detach()), 0.0)
        weights = dpace_weights(right_NK, labels_NK != IGNORED, config.smoothing)
    else:
        weights = position_weights(config, labels_NK.shape[1]).to(logits)
    labels_K = in_loss_NK.sum(dim=0) if supervision.step_labels_K is None else supervision.step_labels_K
    per_step_K = (token_loss_NK * weights).sum(dim=0) / labels_K.clamp(min=1)
    correct_NK = (logits_NKW.argmax(dim=-1) == draft_labels_NK) & in_loss_NK
    return DraftLoss(per_step_K.sum(), correct_NK.sum(dim=0), (labels_NK != IGNORED).sum(dim=0))


def supervise(module: DrafterModule, batch: TrainingBatch, final_norm: FinalNorm | None = None) -> Supervision:
    """What a batch's anchors are trained towards, with the target's logits if its final norm is given.

    Those are recomputed from the features of its last decoder layer, which must be the last tap.
    """
    num_draft_tokens = module.config.num_draft_tokens
    labels_BAK = batch.labels(num_draft_tokens)
    target = None
    if final_norm is not None:
        hidden_BAKD = batch.features_before_labels(num_draft_tokens, module.config.hidden_size)
        target = target_logits(hidden_BAKD, final_norm, module.lm_head_WD).flatten(0, 1)
    return Supervision(
        labels_NK=labels_BAK.flatten(0, 1),
        draft_labels_NK=module.draft_labels(labels_BAK).flatten(0, 1),
        target_logits_NKW=target,
        step_labels_K=batch.step_labels_K,
    )


def draftable_labels(module: DrafterModule, batch: TrainingBatch) -> Tensor:
    """[K] labels of each position that can be drafted: what a mean over the batch divides by."""
    labels_BAK = batch.labels(module.config.num_draft_tokens)
    return (module.draft_labels(labels_BAK) != IGNORED).sum(dim=(0, 1))


def kl_to_target(logits_NKW: Tensor, target_logits_NKW: Tensor) -> Tensor:
    """[N, K] KL(target || drafter), both renormalised over the draft vocabulary."""
    target_log_NKW = F.log_softmax(target_logits_NKW, dim=-1)
    log_ratio_NKW = target_log_NKW - F.log_softmax(logits_NKW, dim=-1)
    return (target_log_NKW.exp() * log_ratio_NKW).sum(dim=-1)


@dataclass(frozen=True)
class FinalNorm:
    """The target's RMSNorm before its LM head."""

    weight_D: Tensor
    eps: float
    logit_softcap: float | None = None  # of the LM head behind it


def target_logits(features_ND: Tensor, norm: FinalNorm, lm_head_WD: Tensor) -> Tensor:
    """[..., W] what the target says after positions whose last decoder layer put out `features_ND` [..., D]."""
    with torch.no_grad():
        normed = F.rms_norm(features_ND, (features_ND.shape[-1],), norm.weight_D, norm.eps)
        logits = F.linear(normed, lm_head_WD)
        cap = norm.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


# -- weights of the positions k = 1..K --------------------------------------------------------------------------------


def position_weights(config: LossConfig, num_draft_tokens: int) -> Tensor:
    """[K] the weights that depend on the position alone. D-PACE's are no such weights."""
    if config.weights in (None, "geometric"):
        return geometric_weights(num_draft_tokens, config.rho)
    if config.weights == "exponential":
        gamma = gamma_for(num_draft_tokens + 1) if config.gamma is None else config.gamma
        return exponential_weights(num_draft_tokens, gamma)
    raise ValueError(f"{config.weights} weights depend on the drafter; see dpace_weights")


def geometric_weights(num_draft_tokens: int, rho: float) -> Tensor:
    """lambda_k = rho^(k-1) for k = 1..K (frozen regime), not normalised."""
    if not 0 < rho <= 1:
        raise ValueError(f"rho must be above 0 and at most 1, got {rho}")
    return rho ** torch.arange(num_draft_tokens, dtype=torch.float32)


def exponential_weights(num_draft_tokens: int, gamma: float) -> Tensor:
    """exp(-(k-1) / gamma) for k = 1..K (DFlash), not normalised."""
    if not 0 < gamma < math.inf:
        raise ValueError(f"gamma must be above 0 and finite, got {gamma}")
    return torch.exp(-torch.arange(num_draft_tokens, dtype=torch.float32) / gamma)


def gamma_for(block_size: int) -> float:
    """Gamma of DFlash's exponential weights: the published one, or half of a block size that has none."""
    return _GAMMA_BY_BLOCK.get(block_size, block_size / 2)


def dpace_weights(right_NK: Tensor, known_NK: Tensor, smoothing: float) -> Tensor:
    """D-PACE: w_j = sum_{i >= j} prod_{k <= i} ((1 - a) q_k + a) with a = `smoothing`; [N, K], detached.

    `right_NK` is q, the drafter's probability of the right token. With a = 0, w_j is the expected number of accepted
    drafts from position j on. Positions that are not known are left out of the sums.
    """
    factor_NK = ((1 - smoothing) * right_NK.detach() + smoothing) * known_NK  # 0 ends all that follows
    return factor_NK.cumprod(dim=1).flip(1).cumsum(dim=1).flip(1)
