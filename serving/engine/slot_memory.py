"""What the slots still hold of sequences that have ended, and which slot serves a new request best.

In: sequences as they end and as they are admitted. Out: a slot, and how much of the prompt is in it already, with what
the drafter knows of that. Entries are never copied from slot to slot: a prefix that many requests share is fed once in
every slot.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto
from weakref import WeakKeyDictionary

from torch import Tensor

from serving.engine.rows import RowsBackend
from serving.engine.sequence import Sequence, joined

LEAST_PREFIX = 16  # tokens: what is shorter is not worth a slot that holds something else


class FeatureUse(Enum):
    """What becomes of the features of a pass, as far as the drafter goes."""

    NONE = auto()  # there is no drafter, or it reads none
    KEPT = auto()  # they are kept for it
    DROPPED = auto()  # it would need them, but drafting is switched off


@dataclass(frozen=True, kw_only=True)
class Remains:
    """What one slot holds."""

    tokens: list[int]  # those whose keys and values are its first entries
    drafter_epoch: int = -1  # under which the drafter knows the slot's pairs; -1: it knows none
    observed: int = 0  # pairs that it knows
    pending_features: list[Tensor] = field(default_factory=list)  # of positions observed..len(tokens), if it reads any
    draftable: bool = False  # whether a drafter that reads features can go on from here
    history: list[Tensor] = field(default_factory=list)  # features of all of `tokens`, where sequences keep them
    released: int = 0  # grows with every release

    def without_drafter(self) -> Remains:
        """The same entries, of which the drafter knows nothing: with their history it can be told everything."""
        return Remains(
            tokens=self.tokens,
            pending_features=self.history,
            draftable=bool(self.history),
            history=self.history,
            released=self.released,
        )


@dataclass(frozen=True)
class Prefix:
    """The part of a prompt that need not be fed again."""

    cached: int = 0  # first tokens whose entries stay
    observed: int = 0  # first pairs that the drafter need not be told again


class SlotMemory:
    """Remembers every free slot. With `reuse` off it remembers nothing, and hands out the lowest free slot.

    `lowest_first`: the lowest free slot in any case, for backends whose passes are captured for slots without gaps.
    """

    def __init__(self, num_slots: int, *, reuse: bool, lowest_first: bool = False):
        self._reuse, self._lowest_first = reuse, lowest_first
        self._remains = [Remains(tokens=[]) for _ in range(num_slots)]
        self._releases = 0

    def claim(self, backend: RowsBackend) -> None:
        """Before a pass: if another engine has used the backend since, its entries lie where ours were."""
        if _LAST_USER.get(backend) is not self:
            self._remains = [Remains(tokens=[]) for _ in self._remains]
            _LAST_USER[backend] = self

    def choose(self, free: Seq[int], sequence: Sequence, use: FeatureUse) -> int:
        """The slot for a sequence, of those that are free (ascending).

        First a slot of whose entries the prompt goes on from half at least: its next turn, or the same questions to
        the same text. Then an empty one, for to share a system prompt is no reason to lose a long conversation. Then
        whichever shares more, and of equals the one that nobody came back to for the longest time.
        """
        if not self._reuse or self._lowest_first:
            return free[0]
        shared: dict[int, int] = {}
        head = sequence.tokens[:LEAST_PREFIX]
        for slot in free if sequence.prompt_len > LEAST_PREFIX else ():
            if self._remains[slot].tokens[:LEAST_PREFIX] == head:
                shared[slot] = self._prefix(slot, sequence, use).cached
        kin = [s for s, n in shared.items() if n >= max(LEAST_PREFIX, len(self._remains[s].tokens) / 2)]
        if kin:
            return max(kin, key=lambda s: (shared[s], -self._remains[s].released))
        for slot in free:
            if len(self._remains[slot].tokens) < LEAST_PREFIX:
                return slot
        return max(free, key=lambda s: (shared.get(s, 0) // LEAST_PREFIX, -self._remains[s].released))

    def restore(self, sequence: Sequence, use: FeatureUse) -> None:
        """Let an admitted sequence go on from what its slot holds, and forget that."""
        remains = self._remains[sequence.slot]
        prefix = self._prefix(sequence.slot, sequence, use)
        self._remains[sequence.slot] = Remains(tokens=[])
        if prefix.cached < LEAST_PREFIX:
            return
        if sequence.keep_history and remains.history:
            sequence.kept_features = [joined(remains.history)[: prefix.cached].clone()]
        if use is FeatureUse.KEPT and prefix.cached > prefix.observed:
            sequence.pending_features = [joined(remains.pending_features)[: prefix.cached - prefix.observed].clone()]
        sequence.cached = sequence.prefix_tokens = prefix.cached
        sequence.observed = prefix.observed
        sequence.drafter_epoch = remains.drafter_epoch if prefix.observed else -1
        sequence.draftable = use is not FeatureUse.DROPPED and sequence.most_drafts > 0

    def keep(self, sequence: Sequence) -> None:
        """Remember what a sequence leaves behind in its slot."""
        if not self._reuse:
            return
        self._releases += 1
        remains = Remains(
            tokens=sequence.tokens[: sequence.cached],  # entries past the last token are of a block with a stop in it
            drafter_epoch=sequence.drafter_epoch,
            observed=sequence.observed,
            pending_features=sequence.pending_features,
            draftable=sequence.draftable,
            history=sequence.kept_features if sequence.history_is_whole else [],
            released=self._releases,
        )
        self._remains[sequence.slot] = remains if sequence.draftable else remains.without_drafter()

    def forget_drafter(self) -> None:
        """The drafter is another one, or does not know any more what it was told."""
        self._remains = [remains.without_drafter() for remains in self._remains]

    def _prefix(self, slot: int, sequence: Sequence, use: FeatureUse) -> Prefix:
        """How far a prompt and a slot agree. The prompt's last token is always fed: its logits are wanted."""
        remains = self._remains[slot]
        if sequence.keep_features or (use is FeatureUse.KEPT and not remains.draftable):
            return Prefix()
        shared = _common_prefix(remains.tokens, sequence.tokens)
        most = min(shared, sequence.prompt_len - 1)
        if use is FeatureUse.DROPPED:
            return Prefix(most)
        # Pair p joins the features at p with token p + 1, which must be a shared one. The features of pairs that the
        # drafter was told are gone: where those of the last shared token are needed once more, it is fed again.
        observed = max(0, min(remains.observed, shared - 1))
        if use is FeatureUse.KEPT and remains.observed > observed:
            return Prefix(min(most, observed), min(most, observed))
        return Prefix(most, min(most, observed))


def _common_prefix(one: list[int], other: list[int]) -> int:
    """Tokens that both begin with, found by halves: comparing slices is quick."""
    low, high = 0, min(len(one), len(other)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


_LAST_USER: WeakKeyDictionary[RowsBackend, SlotMemory] = WeakKeyDictionary()  # of backends that engines take turns with
