"""One request inside the engine: its tokens, its slot, and what its drafter has been told."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from drafters.acceptance import Acceptance
from serving.engine.draft_length import PositionAcceptance
from serving.engine.logprobs import TokenLogprobs
from serving.engine.sampling import Sampling

FinishReason = Literal["stop", "length", "cancelled", "error"]
Origin = Literal["draft", "bonus", "plain"]  # an accepted draft; the target's own token after drafts, or without any


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
    prefix_tokens: int = 0  # of the prompt, those whose keys and values its slot held already


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What one round brought to one request."""

    request_id: str
    token_ids: list[int]  # new tokens of this round
    num_accepted: int  # how many of them, from the left, were drafts
    num_drafts: int = 0  # drafts that the round verified for this request
    logprobs: list[TokenLogprobs] | None = None  # of `token_ids`, if the request wants them
    completion: Completion | None = None  # set in the request's last progress
    admitted_at: float | None = None  # time.perf_counter() when it got its slot; None: it never had one
    drafter_version: str | None = None  # of the round's drafter, see Engine.drafter_version

    @property
    def origins(self) -> list[Origin]:
        """Where each of the new tokens comes from."""
        own: Origin = "bonus" if self.num_drafts else "plain"
        return ["draft" if i < self.num_accepted else own for i in range(len(self.token_ids))]


def joined(chunks: list[Tensor]) -> Tensor:
    """Features [T, F] of chunks in their order, like the newest: what is kept for the next drafter lies elsewhere."""
    newest = chunks[-1]
    return torch.cat([chunk.to(newest.device, newest.dtype) for chunk in chunks])


def first_of(chunks: list[Tensor], count: int) -> list[Tensor]:
    """The first `count` rows of chunks, as chunks."""
    taken = []
    for chunk in chunks:
        if count <= 0:
            break
        taken.append(chunk[:count])
        count -= len(chunk)
    return taken


def without_first(chunks: list[Tensor], count: int) -> list[Tensor]:
    """The same chunks but for their first `count` rows."""
    left = []
    for chunk in chunks:
        if count < len(chunk):
            left.append(chunk[count:])
        count = max(0, count - len(chunk))
    return left


@dataclass(kw_only=True, eq=False)
class Sequence:
    """State of a request. While it decodes, `len(tokens) == cached + 1`: the anchor has not been fed yet."""

    request_id: str
    tokens: list[int]  # prompt, then emitted tokens
    prompt_len: int
    sampling: Sampling
    stop_ids: frozenset[int]
    keep_features: bool  # for the completion
    keep_history: bool = False  # for the next drafter, should the one at work be replaced
    slot: int = -1
    epoch: int = 0
    cached: int = 0  # positions whose keys and values are in the slot and verified
    prefix_tokens: int = 0  # of the prompt, those that were cached when it was admitted
    observed: int = 0  # pairs (features at p, token at p + 1) that the drafter knows
    drafter_epoch: int = -1  # under which it knows them: until the first draft an earlier sequence's; -1: it knows none
    draftable: bool = True  # False once the drafter has missed pairs that cannot be given again
    pending_features: list[Tensor] = field(default_factory=list)  # of positions observed..cached, for the drafter
    kept_features: list[Tensor] = field(default_factory=list)  # of all positions, for the rollout or the next drafter
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
    def keeps_features(self) -> bool:
        return self.keep_features or self.keep_history

    def told(self, pairs: int) -> None:
        """The drafter was told so many more pairs."""
        self.observed, self.drafter_epoch = self.observed + pairs, self.epoch
        self.pending_features = without_first(self.pending_features, pairs)

    @property
    def history_is_whole(self) -> bool:
        """Whether the features of all cached positions were kept for the next drafter."""
        return self.keep_history and self.cached == sum(len(chunk) for chunk in self.kept_features)

    def forget_drafter(self, needs_features: bool, device: torch.device) -> None:
        """Another drafter is to draft: it is told everything from the start, or nothing if that was not kept."""
        self.observed, self.drafter_epoch, self.pending_features = 0, -1, []
        self.position_acceptance = PositionAcceptance()
        if needs_features and self.history_is_whole:
            self.pending_features = [chunk.to(device) for chunk in self.kept_features]
        told = self.history_is_whole or self.cached == 0 or not needs_features
        self.draftable = told and self.most_drafts > 0

    @property
    def most_drafts(self) -> float:
        """Drafts per round that the request allows; with none the drafter never hears of it."""
        return math.inf if self.sampling.num_draft_tokens is None else self.sampling.num_draft_tokens

    @property
    def reused_epoch(self) -> int:
        """The epoch whose pairs this sequence's first draft is to go on from; -1: none's, or it is not the first."""
        return self.drafter_epoch if self.drafter_epoch != self.epoch else -1

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
            drafter=drafter if self.most_drafts else None,
            prefix_tokens=self.prefix_tokens,
        )
