"""Accept or reject drafts, as pure tensor functions.

In: the target's tokens or probabilities, and the drafts. Out: accepted lengths and bonus tokens.

Trees: node j of K follows node `parents[b, j]` < j or the anchor (-1); row 0 of the target's rows is the anchor's, row
j + 1 that of node j, and gives the token after it.

Shapes: B sequences, K drafts, V vocabulary, C candidates of a sparse distribution. Row j of the target's K + 1 rows is
the distribution of the token in draft position j (0-based); row K gives the token after all drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.drafter import SparseProbs


class Verdict(NamedTuple):
    """What a round decided: sequence b emits its first `accepted_B[b]` drafts, then `bonus_B[b]`."""

    accepted_B: Tensor  # int64, 0..counts
    bonus_B: Tensor  # int64, the target's correction, or its extra token when every draft was accepted


def verify_tokens(target_tokens_BJ: Tensor, drafts_BK: Tensor, counts_B: Tensor) -> Verdict:
    """Keep drafts while they equal the target's own token; the first other one is replaced by it. J = K + 1.

    With the target's argmax this is greedy verification. With tokens sampled from the target, one independent draw per
    position, it is the rejection rule for a drafter that proposes its argmax (one-hot draft_probs) in coupled form: a
    draft x is kept with probability target_probs[x], and given a rejection the emitted token is distributed as
    target_probs without x.
    """
    num = drafts_BK.shape[1]
    position_K = torch.arange(num, device=drafts_BK.device)
    match_BK = (drafts_BK == target_tokens_BJ[:, :num]) & (position_K[None, :] < counts_B[:, None])
    accepted_B = match_BK.long().cumprod(dim=1).sum(dim=1)
    bonus_B = target_tokens_BJ.gather(1, accepted_B[:, None])[:, 0]
    return Verdict(accepted_B, bonus_B)


def verify_sampled(
    target_probs_BJV: Tensor,
    drafts_BK: Tensor,
    draft_probs: SparseProbs,
    counts_B: Tensor,
    accept_uniforms_BK: Tensor,
    bonus_uniforms_BJ: Tensor,
) -> Verdict:
    """Rejection sampling for drafts drawn from `draft_probs` (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    Draft x is accepted with probability min(1, target_probs[x] / draft_probs[x]); at the first rejection the token is
    drawn from normalise(max(target_probs - draft_probs, 0)), and from the next target row when all were accepted.
    Uniforms are independent in [0, 1). The emitted tokens are distributed as the target's, whatever the drafter.
    """
    batch, num = drafts_BK.shape
    target_of_draft_BK = target_probs_BJV[:, :num].gather(2, drafts_BK[:, :, None])[:, :, 0]
    is_draft_BKC = draft_probs.ids_BKC == drafts_BK[:, :, None]
    draft_of_draft_BK = (draft_probs.probs_BKC.to(target_probs_BJV) * is_draft_BKC).sum(dim=2)
    accept_BK = accept_uniforms_BK * draft_of_draft_BK < target_of_draft_BK
    accept_BK &= torch.arange(num, device=drafts_BK.device)[None, :] < counts_B[:, None]
    accepted_B = accept_BK.long().cumprod(dim=1).sum(dim=1)

    rows_B = torch.arange(batch, device=drafts_BK.device)
    probs_BV = target_probs_BJV[rows_B, accepted_B]
    rejected_B = accepted_B < counts_B
    if num:
        at_B = accepted_B.clamp(max=num - 1)
        minus_BC = draft_probs.probs_BKC[rows_B, at_B].to(probs_BV) * rejected_B[:, None]
        probs_BV = residual(probs_BV, draft_probs.ids_BKC[rows_B, at_B], minus_BC)
    bonus_B = sample(probs_BV, bonus_uniforms_BJ[rows_B, accepted_B])
    return Verdict(accepted_B, bonus_B)


class TreeVerdict(NamedTuple):
    """What a round decided about trees: sequence b emits the tokens of its path, then `bonus_B[b]`."""

    path_BD: Tensor  # int64, the accepted nodes from the anchor down, then -1
    accepted_B: Tensor  # int64, nodes of the path
    bonus_B: Tensor  # int64


def verify_tree_tokens(
    target_tokens_BJ: Tensor, drafts_BK: Tensor, parents_BK: Tensor, counts_B: Tensor
) -> TreeVerdict:
    """Follow the target's own token from the anchor down, while a child of the node holds it. J = K + 1.

    With the target's argmax this is greedy verification. With tokens sampled from the target, one independent draw per
    row, it is recursive rejection over siblings proposed with certainty (one-hot draft_probs), in coupled form: a
    sibling x is kept with probability target_probs[x], whatever the order of the siblings.
    """
    batch, num = drafts_BK.shape
    rows_B = torch.arange(batch, device=drafts_BK.device)
    real_BK = torch.arange(num, device=drafts_BK.device)[None, :] < counts_B[:, None]
    node_B = torch.full_like(counts_B, -1)
    alive_B = torch.ones_like(node_B, dtype=torch.bool)
    path = []
    for _ in range(num):
        wanted_B1 = target_tokens_BJ[rows_B, node_B + 1][:, None]
        child_BK = (parents_BK == node_B[:, None]) & (drafts_BK == wanted_B1) & real_BK & alive_B[:, None]
        alive_B = child_BK.any(dim=1)
        if not alive_B.any():
            break
        node_B = torch.where(alive_B, child_BK.long().argmax(dim=1), node_B)
        path.append(torch.where(alive_B, node_B, -1))
    path_BD = torch.stack(path, dim=1) if path else node_B.new_empty((batch, 0))
    return TreeVerdict(path_BD, (path_BD >= 0).sum(dim=1), target_tokens_BJ[rows_B, node_B + 1])


def verify_tree_sampled(
    target_probs_BJV: Tensor,
    drafts_BK: Tensor,
    parents_BK: Tensor,
    draft_probs: SparseProbs,
    counts_B: Tensor,
    accept_uniforms_BK: Tensor,
    bonus_uniforms_BJ: Tensor,
) -> TreeVerdict:
    """Recursive rejection without replacement over siblings.

    The children of a node were drawn from its `draft_probs` (which each of them carries) one after another, each from
    what the earlier ones left. A child x is accepted with probability min(1, target_probs[x] / draft_probs[x]);
    otherwise target_probs becomes normalise(max(target_probs - draft_probs, 0)), draft_probs loses x and is normalised,
    and the next sibling is judged by these. After the last one the bonus comes from what is left of the target's.
    Uniforms are independent in [0, 1), one per node and one per row. The emitted tokens are distributed as the
    target's. Compare Miao et al. 2024 (SpecInfer) and Jeon et al. 2024 (recursive rejection sampling).
    """
    batch, num = drafts_BK.shape
    rows_B = torch.arange(batch, device=drafts_BK.device)
    node_B = torch.full_like(counts_B, -1)
    probs_BV = target_probs_BJV[:, 0].double()
    untried_B = torch.ones_like(node_B, dtype=torch.bool)  # no child of the node was judged yet
    left_BC = torch.zeros_like(draft_probs.probs_BKC[:, 0], dtype=torch.float64)
    accepted_BK = torch.zeros_like(drafts_BK, dtype=torch.bool)
    for j in range(num):  # a child comes after its parent, siblings in the order in which they were drawn
        judged_B = (parents_BK[:, j] == node_B) & (j < counts_B)
        ids_BC = draft_probs.ids_BKC[:, j]
        left_BC = torch.where(untried_B[:, None], draft_probs.probs_BKC[:, j].double(), left_BC)
        is_draft_BC = ids_BC == drafts_BK[:, j, None]
        draft_prob_B = (left_BC * is_draft_BC).sum(dim=1)
        kept_B = judged_B & (accept_uniforms_BK[:, j] * draft_prob_B < probs_BV[rows_B, drafts_BK[:, j]])
        rejected_B1 = (judged_B & ~kept_B)[:, None]
        rest_BV = residual(probs_BV, ids_BC, left_BC)
        rest_BV = torch.where(rejected_B1, rest_BV / rest_BV.sum(dim=1, keepdim=True), probs_BV)
        probs_BV = torch.where(kept_B[:, None], target_probs_BJV[:, j + 1].double(), rest_BV)
        smaller_BC = left_BC.masked_fill(is_draft_BC, 0.0)
        smaller_BC = smaller_BC / smaller_BC.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        left_BC = torch.where(rejected_B1, smaller_BC, left_BC)
        untried_B = torch.where(judged_B, kept_B, untried_B)
        node_B = torch.where(kept_B, j, node_B)
        accepted_BK[:, j] = kept_B
    order_BK = accepted_BK.long().argsort(dim=1, descending=True, stable=True)  # parents come before their children
    accepted_B = accepted_BK.sum(dim=1)
    beyond_BK = torch.arange(num, device=drafts_BK.device)[None, :] >= accepted_B[:, None]
    bonus_B = sample(probs_BV, bonus_uniforms_BJ[rows_B, node_B + 1])
    return TreeVerdict(order_BK.masked_fill(beyond_BK, -1), accepted_B, bonus_B)


def residual(target_probs_BV: Tensor, draft_ids_BC: Tensor, draft_probs_BC: Tensor) -> Tensor:
    """max(target_probs - draft_probs, 0), not normalised. Where nothing is left (equal distributions, so that a
    rejection is a matter of rounding) the target's own distribution is returned."""
    left_BV = target_probs_BV.scatter_add(1, draft_ids_BC, -draft_probs_BC).clamp_(min=0)
    empty_B1 = left_BV.sum(dim=1, keepdim=True) <= 0
    return torch.where(empty_B1, target_probs_BV, left_BV)


def sample(weights_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """One token per row, by inverting the cumulative sum of its non-negative weights in float64.

    Weights need not be normalised. A token of weight 0 is never returned.
    """
    cdf_NV = weights_NV.double().cumsum(dim=1)
    total_N1 = cdf_NV[:, -1:]
    threshold_N1 = torch.minimum(uniforms_N[:, None] * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    return torch.searchsorted(cdf_NV, threshold_N1, right=True)[:, 0]
