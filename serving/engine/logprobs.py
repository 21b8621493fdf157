"""Log-probabilities of emitted tokens: the target's logits of their rows in, plain numbers out.

They are the target's own, before temperature, top-k and top-p. A row's figures depend on nothing but the row, so that
drafted and plain decoding agree to the last bit wherever their logits do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

LEAST = -9999.0  # stands for everything below it, as in OpenAI's API: JSON has no infinity


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one emitted token."""

    chosen: float  # of the token itself
    top: list[tuple[int, float]]  # (token, logprob) of the most probable ones, best first; equal ones by id


def token_logprobs(logits_NV: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Of N rows the figures of one token each, with the `count` most probable tokens of its row; in float64."""
    rows_NV = logits_NV.double().cpu().numpy()
    return [_of_row(row_V, token, count) for row_V, token in zip(rows_NV, tokens, strict=True)]


def _of_row(row_V: np.ndarray, token: int, count: int) -> TokenLogprobs:
    best = row_V.max()
    # one row at a time: the order of a sum over several rows could depend on their number
    logprobs_V = row_V - (best + np.log(np.exp(row_V - best).sum()))
    top: list[int] = []
    if count := min(count, len(row_V)):
        enough = np.partition(row_V, len(row_V) - count)[len(row_V) - count]
        candidates = np.flatnonzero(row_V >= enough)
        top = candidates[np.argsort(-row_V[candidates], kind="stable")][:count].tolist()
    return TokenLogprobs(_finite(logprobs_V[token]), [(i, _finite(logprobs_V[i])) for i in top])


def _finite(logprob: float) -> float:
    return max(LEAST, float(logprob))  # in this order a NaN becomes LEAST too
