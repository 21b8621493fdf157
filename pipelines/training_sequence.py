"""One rollout as the trainer sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.training_batch import Document, Span, random_anchors


@dataclass(frozen=True)
class TrainingSequence:
    """A prompt and what the target wrote, in one turn or in several."""

    ids: Tensor  # int64 [T], prompt and response
    prompt_len: int
    features: Tensor  # [T - 1, taps * D]
    category: str = ""  # of its prompt
    greedy: bool = True  # the response is the target's argmax throughout
    turns: tuple[Span, ...] = ()  # of a conversation, what the target wrote; empty: everything from prompt_len on

    @property
    def spans(self) -> tuple[Span, ...]:
        """Places [first, end) of the tokens that the target wrote."""
        return self.turns or ((self.prompt_len, len(self.ids)),)

    @property
    def response_tokens(self) -> int:
        """Tokens that the target wrote."""
        return sum(end - first for first, end in self.spans)

    def document(self, anchors: int, generator: torch.Generator) -> Document:
        """For a training batch, with up to so many anchors drawn at random; none if its features are not finite."""
        ids, features = self.ids, self.features
        places, ends = random_anchors(self.spans, anchors, generator)
        if not bool(torch.isfinite(features).all()):
            places, ends, features = places[:0], ends[:0], torch.zeros_like(features)
        return Document(ids_T=ids, features_TF=features, anchors_A=places, ends_A=ends)


def spans_of(loss_mask: Sequence[int]) -> tuple[Span, ...]:
    """The runs of ones in a mask over tokens, as [first, end)."""
    edges = [i for i, (before, now) in enumerate(zip([0, *loss_mask], [*loss_mask, 0], strict=True)) if before != now]
    return tuple(zip(edges[::2], edges[1::2], strict=True))
