"""Prompt lookup: drafts what followed the last occurrence of the newest n-gram, in prompt and output. No training.

Source: Saxena 2023 (prompt lookup decoding). The day-0 drafter, and a baseline in every table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from drafters.drafter import DraftReply, DraftRequest

Gram = tuple[int, ...]


@dataclass
class _Text:
    """One sequence with an index of its n-grams: gram -> the place after its latest occurrence but the very last."""

    epoch: int
    tokens: list[int]
    after: dict[Gram, int] = field(default_factory=dict)
    indexed: int = 0  # places up to here have been entered as the place after a gram


class PromptLookupDrafter:
    """Looks the longest n-gram up first, down to `min_ngram` tokens; offers fewer drafts where the text ends."""

    name = "prompt-lookup"
    target_layer_ids: tuple[int, ...] = ()
    max_tree_nodes = 0

    def __init__(self, max_ngram: int = 3, min_ngram: int = 2, max_draft_tokens: int = 16):
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram {min_ngram} and max_ngram {max_ngram} must be 1 <= min <= max")
        self.max_ngram, self.min_ngram, self.max_draft_tokens = max_ngram, min_ngram, max_draft_tokens
        self._texts: dict[int, _Text] = {}  # by slot

    def allocate(self, num_slots: int, max_len: int) -> None:
        """Forget every slot; texts grow as they come."""
        self._texts.clear()

    def draft(self, request: DraftRequest) -> DraftReply:
        """See `Drafter`. Raises ValueError if pairs are missing."""
        number, offset, new = request.num_draft_tokens, 0, request.tokens_N.tolist()
        drafts: list[list[int]] = []
        for b, slot in enumerate(request.slots):
            count = request.counts[b]
            text = self._text(request, b)
            if len(text.tokens) != request.starts[b] + 1:
                known = len(text.tokens) - 1
                raise ValueError(f"slot {slot} knows {known} pairs, and the next ones start at {request.starts[b]}")
            text.tokens += new[offset : offset + count]
            offset += count
            self._index(text)
            drafts.append(self._look_up(text, number))
        tokens = [row + [0] * (number - len(row)) for row in drafts]
        return DraftReply(
            tokens_BK=torch.tensor(tokens, dtype=torch.int64).view(len(drafts), number),
            counts=[len(row) for row in drafts],
        )

    def _text(self, request: DraftRequest, b: int) -> _Text:
        """Sequence b's text so far; where it goes on from another epoch, the beginning of that one's."""
        slot, epoch, reused = request.slots[b], request.epochs[b], request.reused_epoch(b)
        text = self._texts.get(slot)
        if text is not None and text.epoch == epoch:
            return text
        tokens = [request.first_tokens[b]]
        if text is not None and text.epoch == reused:
            tokens = text.tokens[: request.starts[b] + 1]
        text = self._texts[slot] = _Text(epoch, tokens)
        return text

    def _index(self, text: _Text) -> None:
        """Enter the grams that end before the last token; a later occurrence replaces an earlier one."""
        tokens = text.tokens
        for place in range(max(text.indexed, 1), len(tokens)):
            for size in range(self.min_ngram, min(self.max_ngram, place) + 1):
                text.after[tuple(tokens[place - size : place])] = place
        text.indexed = len(tokens)

    def _look_up(self, text: _Text, number: int) -> list[int]:
        tokens = text.tokens
        for size in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            place = text.after.get(tuple(tokens[len(tokens) - size :]))
            if place is not None:
                return tokens[place : place + number]
        return []
