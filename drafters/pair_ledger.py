"""How many pairs a drafter has taken note of in each slot, so that a gap is found instead of drafted over."""

from __future__ import annotations

from drafters.drafter import DraftRequest


class PairLedger:
    """Length of every slot's noted pairs, void when the slot's epoch changes to one that does not go on from them."""

    def __init__(self, num_slots: int):
        self._epochs = [-1] * num_slots
        self._lengths = [0] * num_slots

    def note(self, request: DraftRequest) -> None:
        """Take the request's pairs into account. Raises ValueError if a sequence's do not follow on those before."""
        asked = zip(request.slots, request.epochs, request.starts, request.counts, strict=True)
        for b, (slot, epoch, start, count) in enumerate(asked):
            self._check(slot, epoch, start, request.reused_epoch(b))
            self._epochs[slot], self._lengths[slot] = epoch, start + count

    def _check(self, slot: int, epoch: int, start: int, reused: int) -> None:
        if self._epochs[slot] != epoch and reused >= 0:
            known = self._lengths[slot] if self._epochs[slot] == reused else 0
            if start > known:
                raise ValueError(
                    f"slot {slot} knows {known} pairs of epoch {reused}, and epoch {epoch} goes on from {start} of them"
                )
            return
        known = self._lengths[slot] if self._epochs[slot] == epoch else 0
        if start != known:
            raise ValueError(f"slot {slot} of epoch {epoch} knows {known} pairs, and the next ones start at {start}")
