"""Losses and weights by draft position."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.training_batch import IGNORED


def geometric_weights(num_draft_tokens: int, rho: float) -> Tensor:
    """lambda_k = rho^(k-1) for k = 1..K (DESIGN: frozen MTP regime), not normalised."""
    if not 0 < rho <= 1:
        raise ValueError(f"rho must be above 0 and at most 1, got {rho}")
    return rho ** torch.arange(num_draft_tokens, dtype=torch.float32)


class DraftLoss(NamedTuple):
    """Loss of one batch and what it takes to show how training goes."""

    loss: Tensor  # scalar: sum_k lambda_k * mean cross-entropy of step k
    correct_K: Tensor  # how many of `known_K` labels were the step's argmax
    known_K: Tensor  # labels per step, those outside the draft vocabulary included


def draft_loss(logits_NKV: Tensor, labels_NK: Tensor, draft_labels_NK: Tensor, weights_K: Tensor) -> DraftLoss:
    """Weighted cross-entropy of K steps at N anchors.

    `labels_NK` holds the true tokens (IGNORED: unknown), `draft_labels_NK` the same as indices into the draft
    vocabulary (IGNORED: unknown or outside it; such labels carry no loss, and count as wrong).
    """
    num_draft_tokens = labels_NK.shape[1]
    in_loss_NK = draft_labels_NK != IGNORED
    token_loss_NK = F.cross_entropy(
        logits_NKV.float().flatten(0, 1), draft_labels_NK.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(-1, num_draft_tokens)
    per_step_K = token_loss_NK.sum(dim=0) / in_loss_NK.sum(dim=0).clamp(min=1)
    correct_NK = (logits_NKV.argmax(dim=-1) == draft_labels_NK) & in_loss_NK
    return DraftLoss((per_step_K * weights_K).sum(), correct_NK.sum(dim=0), (labels_NK != IGNORED).sum(dim=0))
