"""Who takes part in the next pass: all decoding sequences, and as much prompt as the row budget leaves room for."""

from __future__ import annotations

import heapq
import time
from collections import deque
from dataclasses import dataclass

from serving.engine.sequence import Sequence


@dataclass(frozen=True)
class Plan:
    """The sequences of one pass, each list ordered by slot."""

    decoding: list[Sequence]  # feed their anchor and drafts
    prefilling: list[tuple[Sequence, int]]  # feed the next so many prompt tokens


class Scheduler:
    """Admits waiting requests in order of arrival to the lowest free slots, so that used slots lie at the front."""

    def __init__(self, num_slots: int, max_prefill_rows: int):
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # by slot
        self._free = list(range(num_slots))
        self._epochs = [0] * num_slots
        self._max_prefill_rows = max_prefill_rows

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def plan(self) -> Plan:
        """Admit what fits, then divide the prefill budget among prompts, oldest first."""
        while self.waiting and self._free:
            self._admit(self.waiting.popleft())
        decoding = [s for _, s in sorted(self.running.items()) if not s.prefilling]
        prefilling, budget = [], self._max_prefill_rows
        for sequence in self.running.values():  # in order of admission
            if sequence.prefilling and budget > 0:
                count = min(budget, sequence.prompt_len - sequence.cached)
                prefilling.append((sequence, count))
                budget -= count
        return Plan(decoding, sorted(prefilling, key=lambda item: item[0].slot))

    def _admit(self, sequence: Sequence) -> None:
        sequence.slot = heapq.heappop(self._free)
        self._epochs[sequence.slot] += 1
        sequence.epoch = self._epochs[sequence.slot]
        self.running[sequence.slot] = sequence
        sequence.admitted_at = time.perf_counter()

    def release(self, sequence: Sequence) -> None:
        """Give a running sequence's slot back."""
        if self.running.get(sequence.slot) is not sequence:
            raise RuntimeError(f"slot {sequence.slot} does not belong to request {sequence.request_id}")
        del self.running[sequence.slot]
        heapq.heappush(self._free, sequence.slot)
