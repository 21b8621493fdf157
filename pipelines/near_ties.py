"""Where two greedy decodings part: was it a near-tie of the target, or another answer?

In: the target's logits for the common prefix, rounded, in the dtype that decoded, and exact, in the next wider one
(float32 for bfloat16, float64 for float32). The rule: rounding moved a logit by at most `error` = max |rounded - exact|
over the vocabulary, a shift that all of them share (the median) left out; so it can only make a token the argmax that
lies within 2 * error of the exact top. Both tokens within that bound: a near-tie. Any other token has another cause.
The error is that of transformers' own pass, which stands in for ours, and a maximum: the rule is lenient, so the
largest gap that was met is reported beside the counts. Nor is "exact" quite so: inside, transformers' RMSNorm and
rotary angles are computed in float32 whatever the dtype, so that a float64 pass still rounds there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafters.target import load_model

WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}  # dtype of the exact logits, by the engine's own

# token ids [T], number of last rows wanted N -> float or double logits [N, V]
Logits = Callable[[list[int], int], Tensor]


@dataclass(frozen=True)
class Tie:
    """How close the tokens in question are to the target's choice at one position."""

    gap: float  # exact logits: top minus the lowest of the tokens in question
    error: float  # max |rounded - exact| over the vocabulary, without what all logits share
    top_two_gap: float  # exact logits: first minus second

    @property
    def bound(self) -> float:
        return 2 * self.error

    @property
    def near(self) -> bool:
        return self.gap <= self.bound


@dataclass(frozen=True)
class Parting:
    """The first place where an answer differs from its reference, and what follows it."""

    position: int  # in the answer, from 0
    expected: int | None  # token of the reference; None: it ended here
    got: int | None
    tie: Tie | None  # None: one of the two ended without an end-of-sequence token
    stray_position: int | None  # first later place whose token is not within the bound either

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the parting and every token after it."""
        return self.tie is not None and self.tie.near and self.stray_position is None


def tie(exact_V: Tensor, rounded_V: Tensor, tokens: tuple[int, ...]) -> Tie:
    """Judge `tokens` by the target's logits after one prefix, in a wider dtype and in the one that decoded."""
    exact_V, rounded_V = exact_V.double(), rounded_V.double()
    first, second = exact_V.topk(2).values.tolist()
    lowest = min(float(exact_V[token]) for token in tokens)
    moved_V = rounded_V - exact_V
    error = float((moved_V - moved_V.median()).abs().max())
    return Tie(gap=first - lowest, error=error, top_two_gap=first - second)


def first_difference(got: list[int], expected: list[int]) -> int | None:
    """First position at which the two differ, one of them ending included; None if they are equal."""
    for i, (a, b) in enumerate(zip(got, expected, strict=False)):
        if a != b:
            return i
    return None if len(got) == len(expected) else min(len(got), len(expected))


def find_parting(
    prompt_ids: list[int], got: list[int], expected: list[int], exact: Logits, rounded: Logits
) -> Parting | None:
    """Where and why `got` leaves `expected`; None if they are equal.

    The tokens after the parting have no reference any more: each must lie within the bound for its own prefix.
    """
    at = first_difference(got, expected)
    if at is None:
        return None
    if at >= min(len(got), len(expected)):
        ends = [tokens[at] if at < len(tokens) else None for tokens in (expected, got)]
        return Parting(at, ends[0], ends[1], None, None)
    ids, rows = prompt_ids + got[:-1], len(got) - at
    exact_NV, rounded_NV = exact(ids, rows), rounded(ids, rows)
    ties = [tie(exact_NV[i], rounded_NV[i], (got[at + i],)) for i in range(1, rows)]
    stray = next((at + i for i, later in enumerate(ties, start=1) if not later.near), None)
    return Parting(at, expected[at], got[at], tie(exact_NV[0], rounded_NV[0], (expected[at], got[at])), stray)


def near_ties(
    parted: Sequence[tuple[list[int], list[int], list[int]]], target_path: Path, rounding: torch.dtype, device: str
) -> list[bool]:
    """Of (prompt, answer, reference), by turns: whether rounding explains that the answer is not its reference.

    `rounding` is the dtype that decoded; the target is loaded anew, in this dtype and in a wider one.
    """
    if not parted:
        return []
    exact, rounded = (logits_of(load_model(target_path, dtype, device)) for dtype in (WIDER[rounding], rounding))
    found = [find_parting(prompt_ids, got, expected, exact, rounded) for prompt_ids, got, expected in parted]
    return [parting is not None and parting.near_tie for parting in found]


def logits_of(model: torch.nn.Module) -> Logits:
    """`Logits` by the own forward of a Hugging Face causal LM, one sequence without a cache."""

    @torch.inference_mode()
    def logits(ids: list[int], rows: int) -> Tensor:
        ids_1T = torch.tensor([ids], device=next(model.parameters()).device)
        logits_NV = model(ids_1T, use_cache=False, logits_to_keep=rows).logits[0].cpu()
        return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()

    return logits
