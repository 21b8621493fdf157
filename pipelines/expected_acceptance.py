"""What the engine would accept of a drafter: a module and the target's own continuations in, acceptance out.

Rounds are walked from anchor to anchor, as the engine would. Those that would draft past the known continuation are
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drafters.acceptance import Acceptance
from drafters.drafter_module import DrafterModule
from drafters.training_batch import Document, Span, TrainingBatch, pad_documents
from pipelines.training_sequence import TrainingSequence

ANCHORS_AT_ONCE = 128  # of a long sequence, whose logits for all anchors would not fit into memory


def expected_acceptance(
    module: DrafterModule, sequences: Sequence[TrainingSequence], num_draft_tokens: int
) -> Acceptance:
    """Of all turns of all sequences."""
    acceptance = Acceptance()
    for sequence in sequences:
        for span in sequence.spans:
            acceptance.add(walk_rounds(accepted_drafts(module, sequence, span, num_draft_tokens), num_draft_tokens))
    return acceptance


def accepted_drafts(module: DrafterModule, sequence: TrainingSequence, span: Span, num_draft_tokens: int) -> list[int]:
    """How many drafts would be kept in a round that begins after token i = 0, 1, 2 ... of a turn.

    The list ends where drafts would reach past the known continuation.
    """
    first, end = span
    pairs_N = torch.arange(first - 1, max(first - 1, end - 1 - num_draft_tokens))
    drafts_NK = proposed_drafts(module, sequence, end, pairs_N)[:, :num_draft_tokens]
    said_NK = sequence.ids[pairs_N[:, None] + torch.arange(2, 2 + num_draft_tokens)]
    kept: list[int] = (drafts_NK == said_NK).long().cumprod(dim=1).sum(dim=1).tolist()
    return kept


@torch.no_grad()
def proposed_drafts(
    module: DrafterModule,
    sequence: TrainingSequence,
    end: int,
    pairs_N: Tensor,
    propose: Callable[[TrainingBatch], Tensor] | None = None,
) -> Tensor:
    """[N, K] what it proposes at some pairs of the turn that ends before place `end`; `propose` stands in for its own.

    A recursive head reads the target's tokens as its own earlier drafts: what it proposes behind a draft that the
    target refuses is not what it drafts there in service.
    """
    was_training, device = module.training, module.lm_head_WD.device
    module.eval()
    found = [torch.empty((0, module.config.num_draft_tokens), dtype=torch.int64)]
    for anchors_A in pairs_N.split(ANCHORS_AT_ONCE):
        if not len(anchors_A):
            continue
        ends_A = torch.full_like(anchors_A, end)
        batch = pad_documents(
            [Document(ids_T=sequence.ids, features_TF=sequence.features, anchors_A=anchors_A, ends_A=ends_A)]
        ).to(device)
        found.append((propose or module.propose)(batch)[0].cpu())
    module.train(was_training)
    return torch.cat(found)


def walk_rounds(accepted: Sequence[int], num_draft_tokens: int) -> Acceptance:
    """The rounds within one list of `accepted_drafts`: each begins after the last token of the one before it."""
    acceptance, place = Acceptance(), 0
    while place < len(accepted):
        kept = min(accepted[place], num_draft_tokens)
        acceptance.record(num_draft_tokens, kept)
        place += kept + 1
    return acceptance
