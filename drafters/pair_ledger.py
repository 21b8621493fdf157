"""How many pairs a drafter has taken note of in each slot, so that a gap is found instead of drafted over."""

from __future__ import annotations

from drafters.drafter import DraftRequest


class PairLedger:
    """Length of every slot's noted pairs, void when the slot's epoch changes."""

    def __init__(self, num_slots: int):
        self._epochs = [-1] * num_slots
        self._lengths = [0] * num_slots

    def note(self, request: DraftRequest) -> None:
        """Take the request's pairs into account. Raises ValueError if a sequence's do not follow on those before."""
        asked = zip(request.slots, request.epochs, request.starts, request.counts, strict=True)
        for slot, epoch, start, count in asked:
            known = self._lengths[slot] if self._epochs[slot] == epoch else 0
            if start != known:
                raise ValueError(
                    f"slot {slot} of epoch {epoch} knows {known} pairs, and the next ones start at {start}"
                )
            self._epochs[slot], self._lengths[slot] = epoch, start + count
