"""What reads a DFlash block: a selector that walks it slot by slot (DFlash 2), and a head that estimates acceptance.

In: the block's normalised hidden states and logits over the draft vocabulary. Out: scores of each slot's candidates
given the token before it, and the chance that a slot's draft is kept. Tokens are indices into the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.training_batch import IGNORED

SMALLEST = 1e-6  # probabilities are kept this far from 0 and 1 before they become log-odds


@dataclass(frozen=True)
class Candidates:
    """The likeliest tokens of every slot, likeliest first. N blocks of K slots, C candidates."""

    index_NKC: Tensor  # int64, into the draft vocabulary
    logits_NKC: Tensor
    log_total_NK: Tensor  # logsumexp over the whole draft vocabulary
    projected_NKR: Tensor | None  # the selector's view of the hidden states; None: no selector

    def log_mass(self) -> Tensor:
        """[N, K] log of the probability that the candidates have together."""
        return (self.logits_NKC.logsumexp(dim=-1) - self.log_total_NK).clamp(max=0.0)


class CandidateSelector(nn.Module):
    """score_j(c) = logit_j(c) + <P[previous] * (W h_j), S[c]> over the candidates c of slot j (DFlash 2).

    P has a row per token of the draft vocabulary and, where that is not all, a last one for any other, since an
    anchor may be any token. It starts as if it were not there (S = 0).
    """

    def __init__(self, width: int, draft_vocab_size: int, rank: int, other_tokens: bool):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(draft_vocab_size + int(other_tokens), rank))
        self.successor_codebook = nn.Parameter(torch.zeros(draft_vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def scores(self, previous: Tensor, projected: Tensor, index: Tensor, logits: Tensor) -> Tensor:
        """[..., C] from previous tokens [...], projected states [..., R], candidates and their logits [..., C].

        A previous token outside the draft vocabulary is IGNORED, -1, and so takes the last row of P.
        """
        wanted = self.predecessor_codebook[previous] * projected
        return logits + (self.successor_codebook[index] @ wanted[..., None])[..., 0]


class ConfidenceHead(nn.Module):
    """The chance that a slot's draft is kept, given that all before it were.

    Log-odds are the drafter's own for its draft, scaled, plus a linear reading of the hidden state and a bias per slot;
    it starts as the drafter's own probability. Compare DSpark, whose head is trained by binary
    cross-entropy too.
    """

    def __init__(self, width: int, num_draft_tokens: int):
        super().__init__()
        self.hidden_weight = nn.Parameter(torch.zeros(width))
        self.own_weight = nn.Parameter(torch.ones(()))
        self.slot_bias = nn.Parameter(torch.zeros(num_draft_tokens))

    def forward(self, hidden_NKD: Tensor, log_prob_NK: Tensor) -> Tensor:
        """Log-odds [N, K] from hidden states and the drafter's log-probability of its drafts, of the first K slots."""
        prob = log_prob_NK.exp().clamp(SMALLEST, 1 - SMALLEST)
        read = hidden_NKD.float() @ self.hidden_weight.float()  # accumulated in float32
        return read + self.own_weight * torch.logit(prob) + self.slot_bias[: prob.shape[1]]


def selector_loss(
    selector: CandidateSelector, candidates: Candidates, logits_NKW: Tensor, previous_NK: Tensor, labels_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """(cross-entropy of every slot [N, K], 0 where the label is IGNORED; scores [N, K, C] of the candidates).

    Teacher forced: `previous_NK` are the true tokens before each slot. The true token competes with the candidates
    whether it is one of them or not, as a further one in the latter case.
    """
    assert candidates.projected_NKR is not None
    scores_NKC = selector.scores(previous_NK, candidates.projected_NKR, candidates.index_NKC, candidates.logits_NKC)
    known_NK = labels_NK != IGNORED
    label_NK1 = labels_NK.clamp(min=0)[:, :, None]
    own_NK1 = selector.scores(previous_NK, candidates.projected_NKR, label_NK1, logits_NKW.gather(2, label_NK1))
    is_label_NKC = candidates.index_NKC == label_NK1
    missing_NK = ~is_label_NKC.any(dim=-1)
    all_scores = torch.cat([scores_NKC, own_NK1.masked_fill(~missing_NK[:, :, None], float("-inf"))], dim=-1)
    place_NK = torch.where(missing_NK, scores_NKC.shape[-1], is_label_NKC.long().argmax(dim=-1))
    loss_NK = F.cross_entropy(all_scores.float().flatten(0, 1), place_NK.flatten(), reduction="none")
    return loss_NK.view(known_NK.shape) * known_NK, scores_NKC


def confidence_loss(log_odds_NK: Tensor, right_NK: Tensor, known_NK: Tensor, blocks: Tensor) -> Tensor:
    """Binary cross-entropy against whether a slot's draft is right, over known slots all of whose predecessors are.

    Summed over slots, a mean over `blocks` (scalar, how many there are).
    """
    before_NK = F.pad((right_NK & known_NK).long().cumprod(dim=1), (1, 0), value=1)[:, :-1].bool()
    counted_NK = before_NK & known_NK
    loss_NK = F.binary_cross_entropy_with_logits(log_odds_NK.float(), right_NK.float(), reduction="none")
    return (loss_NK * counted_NK).sum() / blocks.clamp(min=1)
