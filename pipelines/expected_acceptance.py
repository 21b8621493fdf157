"""What the engine would accept of a drafter: a module and the target's own continuations in, acceptance out.

Rounds are walked from anchor to anchor, as the engine would. Those that would draft past the known continuation are
left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafters.acceptance import Acceptance
from drafters.drafter_module import DrafterModule
from drafters.training_batch import Document, Span, pad_documents
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


@torch.no_grad()
def accepted_drafts(module: DrafterModule, sequence: TrainingSequence, span: Span, num_draft_tokens: int) -> list[int]:
    """How many drafts would be kept in a round that begins after token i = 0, 1, 2 ... of a turn.

    The list ends where drafts would reach past the known continuation.
    """
    first, end = span
    pairs = torch.arange(first - 1, max(first - 1, end - 1 - num_draft_tokens))
    was_training, device = module.training, module.lm_head_WD.device
    module.eval()
    kept: list[int] = []
    for anchors in pairs.split(ANCHORS_AT_ONCE):
        if not len(anchors):
            continue
        ends = torch.full_like(anchors, end)
        batch = pad_documents(
            [Document(ids_T=sequence.ids, features_TF=sequence.features, anchors_A=anchors, ends_A=ends)]
        ).to(device)
        match = (module.propose(batch) == batch.labels(num_draft_tokens))[0, :, :num_draft_tokens]
        kept += match.long().cumprod(dim=1).sum(dim=1).tolist()
    module.train(was_training)
    return kept


def walk_rounds(accepted: Sequence[int], num_draft_tokens: int) -> Acceptance:
    """The rounds within one list of `accepted_drafts`: each begins after the last token of the one before it."""
    acceptance, place = Acceptance(), 0
    while place < len(accepted):
        kept = min(accepted[place], num_draft_tokens)
        acceptance.record(num_draft_tokens, kept)
        place += kept + 1
    return acceptance
