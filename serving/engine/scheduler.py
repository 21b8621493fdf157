"""Who takes part in the next pass: all decoding sequences, and as much prompt as the row budget leaves room for."""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from dataclasses import dataclass

from serving.engine.prefill_budget import PrefillBudget, divide
from serving.engine.sequence import Sequence
from serving.engine.slot_memory import FeatureUse, SlotMemory


@dataclass(frozen=True)
class Plan:
    """The sequences of one pass, each list ordered by slot."""

    decoding: list[Sequence]  # feed their anchor and drafts
    prefilling: list[tuple[Sequence, int]]  # feed the next so many prompt tokens
    admitted: list[Sequence]  # since the last plan


class Scheduler:
    """Admits waiting requests in order of arrival, each to the slot that its memory chooses."""

    def __init__(self, num_slots: int, budget: PrefillBudget, memory: SlotMemory):
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # by slot
        self._free = list(range(num_slots))  # ascending
        self._epochs = [0] * num_slots
        self._budget, self._memory = budget, memory

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def plan(self, use: FeatureUse) -> Plan:
        """Admit what fits, then divide the prefill budget among the prompts. `use`: of this pass's features."""
        admitted = []
        while self.waiting and self._free:
            admitted.append(self._admit(self.waiting.popleft(), use))
        decoding = [s for _, s in sorted(self.running.items()) if not s.prefilling]
        prompts = [s for s in self.running.values() if s.prefilling]  # in order of admission
        shares = divide(self._budget.rows(len(decoding)), [s.prompt_len - s.cached for s in prompts])
        prefilling = [(s, count) for s, count in zip(prompts, shares, strict=True) if count]
        return Plan(decoding, sorted(prefilling, key=lambda item: item[0].slot), admitted)

    def _admit(self, sequence: Sequence, use: FeatureUse) -> Sequence:
        sequence.slot = self._memory.choose(self._free, sequence, use)
        self._free.remove(sequence.slot)
        self._epochs[sequence.slot] += 1
        sequence.epoch = self._epochs[sequence.slot]
        self.running[sequence.slot] = sequence
        self._memory.restore(sequence, use)
        sequence.admitted_at = time.perf_counter()
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Give a running sequence's slot back, with what it holds."""
        if self.running.get(sequence.slot) is not sequence:
            raise RuntimeError(f"slot {sequence.slot} does not belong to request {sequence.request_id}")
        del self.running[sequence.slot]
        insort(self._free, sequence.slot)
        self._memory.keep(sequence)
