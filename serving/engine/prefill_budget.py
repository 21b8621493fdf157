"""How many prompt rows a pass takes, so that running streams do not wait long, and how prompts share them."""

from __future__ import annotations

import statistics
from collections import deque

LEAST_ROWS = 16  # prompt rows of a pass, whatever it costs: fewer stream the weights for little
_WINDOW = 16  # latest passes that tell what a row costs; of their median, since other processes make outliers


class PrefillBudget:
    """Prompt rows per pass: `max_rows`, and no more than `max_stall_s` has time for while others decode."""

    def __init__(self, max_rows: int, max_stall_s: float | None):
        self._max_rows, self._max_stall_s = max_rows, max_stall_s
        self._seconds_per_row: deque[float] = deque(maxlen=_WINDOW)
        self._decoding_rows = 0  # of the last pass

    def rows(self, decoding: int) -> int:
        """For the next pass, in which `decoding` sequences decode."""
        if not decoding or self._max_stall_s is None:
            return self._max_rows
        least = min(LEAST_ROWS, self._max_rows)
        if not self._seconds_per_row:
            return least
        fit = int(self._max_stall_s / statistics.median(self._seconds_per_row)) - self._decoding_rows
        return max(least, min(fit, self._max_rows))

    def observe(self, decoding_rows: int, prefill_rows: int, seconds: float) -> None:
        """A pass. It tells the cost of a row if it is no small one, and if somebody decodes, who waits for its end:
        a GPU is still at work on the others when they return."""
        self._decoding_rows = decoding_rows
        if decoding_rows and prefill_rows >= min(LEAST_ROWS, self._max_rows):
            self._seconds_per_row.append(max(seconds, 1e-9) / (decoding_rows + prefill_rows))


def divide(rows: int, left: list[int]) -> list[int]:
    """Prompt rows of a pass for each of the sequences that have so many `left`, given in order of admission.

    One half is cut into equal parts, so that no prompt stands still however many others come and go; the oldest have
    theirs first, if there is less than a row for each. All the rest goes to whoever has least left: a short question
    need not wait for the long texts before it, and of equals the oldest is done first instead of all at the end.
    """
    shares = [0] * len(left)
    half = -(-rows // 2)
    part = max(1, half // max(1, len(left)))
    for i, want in enumerate(left):
        shares[i] = min(want, part, half)
        half -= shares[i]
    spare = rows - sum(shares)
    for i in sorted(range(len(left)), key=lambda i: left[i]):
        extra = min(spare, left[i] - shares[i])
        shares[i] += extra
        spare -= extra
    return shares
