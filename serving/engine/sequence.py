"""One request inside the engine: its tokens, its slot, and what its drafter has been told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from drafters.acceptance import Acceptance
from serving.engine.draft_length import PositionAcceptance
from serving.engine.sampling import Sampling

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request."""

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]  # emitted tokens, with the stop token that ended them, if any
    finish_reason: FinishReason
    acceptance: Acceptance  # of this request's verify rounds
    features_TF: Tensor | None  # bfloat16, T = len(prompt_ids) + len(token_ids) - 1: the last token is never fed
    drafter: str | None  # name of the drafter that served it last


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What one round brought to one request."""

    request_id: str
    token_ids: list[int]  # new tokens of this round
    num_accepted: int  # how many of them, from the left, were drafts
    completion: Completion | None = None  # set in the request's last progress
    admitted_at: float | None = None  # time.perf_counter() when it got its slot; None: it never had one
    drafter_version: str | None = None  # of the round's drafter, see Engine.drafter_version


@dataclass(kw_only=True, eq=False)
class Sequence:
    """State of a request. While it decodes, `len(tokens) == cached + 1`: the anchor has not been fed yet."""

    request_id: str
    tokens: list[int]  # prompt, then emitted tokens
    prompt_len: int
    sampling: Sampling
    stop_ids: frozenset[int]
    keep_features: bool
    slot: int = -1
    epoch: int = 0
    cached: int = 0  # positions whose keys and values are in the slot and verified
    observed: int = 0  # pairs (features at p, token at p + 1) handed to the drafter
    draftable: bool = True  # False once the drafter has missed pairs that cannot be given again
    pending_features: list[Tensor] = field(default_factory=list)  # of positions observed..cached, for the drafter
    kept_features: list[Tensor] = field(default_factory=list)  # of all positions, for the rollout
    acceptance: Acceptance = field(default_factory=Acceptance)
    position_acceptance: PositionAcceptance = field(default_factory=PositionAcceptance)  # decayed, for the draft length
    finish_reason: FinishReason | None = None
    arrived_at: float = field(default_factory=time.perf_counter)
    admitted_at: float | None = None  # as in Progress

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are still to be fed (the last one gives the first emitted token)."""
        return self.cached < self.prompt_len

    @property
    def emitted(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def append(self, new_tokens: list[int]) -> list[int]:
        """Take over verified tokens up to a stop or the limit, note the finish reason, return those taken."""
        for i, token in enumerate(new_tokens):
            self.tokens.append(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) - self.prompt_len >= self.sampling.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return new_tokens[: i + 1]
        return new_tokens

    def completion(self, drafter: str | None) -> Completion:
        """The finished request; features are cut to the positions before the last token."""
        features = None
        if self.keep_features and self.kept_features:
            features = torch.cat(self.kept_features)[: len(self.tokens) - 1]
        return Completion(
            request_id=self.request_id,
            prompt_ids=self.tokens[: self.prompt_len],
            token_ids=self.emitted,
            finish_reason=self.finish_reason or "error",
            acceptance=self.acceptance,
            features_TF=features,
            drafter=drafter,
        )
