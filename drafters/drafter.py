"""The round between the engine and a drafter: one request and one reply for the whole batch.

In: the tokens that the target has verified since the last round, with their features. Out: draft tokens (and, for
drafters that sample, the distribution they were drawn from). The engine knows a drafter only through this file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DraftRequest:
    """Newly verified pairs of B sequences, N pairs in all, laid end to end in the order of `slots`.

    Pair i of a sequence joins the target's features at position p with the verified token at position p + 1. The first
    request of an epoch starts at p = 0, every later one where the last ended; so the last token of a sequence's pairs
    is the newest verified token, the anchor, whose own features are not known yet.

    A sequence that begins like the one before it in its slot names that one's epoch in its first request, and starts at
    p > 0: it goes on from the first p pairs of that epoch, and the further ones of that are void.
    """

    slots: list[int]  # B, the engine's cache slot of each sequence
    epochs: list[int]  # B, grows whenever a slot is handed to another sequence; state of an older epoch is void
    counts: list[int]  # B, pairs of each sequence, at least 1 each
    starts: list[int]  # B, position p of the first pair of each sequence
    first_tokens: list[int]  # B, the token at position 0 of each sequence, which no pair carries
    tokens_N: Tensor  # int64, the token at p + 1
    features_NF: Tensor | None  # the tapped hidden states at p, concatenated over layers; None if the drafter taps none
    num_draft_tokens: int  # drafts wanted per sequence (K), or a tree's greatest depth; 0: only take note of the pairs
    tree_nodes: int = 0  # most nodes of each sequence's draft tree; 0: a chain of num_draft_tokens
    temperatures: list[float]  # B, 0 is greedy; only drafters that sample look at it
    seeds: list[int]  # B, seeds of the sequences' random streams
    reused_epochs: list[int] = field(default_factory=list)  # B, the epoch whose pairs are gone on from, -1: none's

    def reused_epoch(self, b: int) -> int:
        """Of sequence b; a request without `reused_epochs` goes on from none."""
        return self.reused_epochs[b] if self.reused_epochs else -1


@dataclass(frozen=True, kw_only=True)
class SparseProbs:
    """The distribution each draft was drawn from, over C candidates; probability elsewhere is 0.

    In a tree, siblings are drawn one after another without replacement, and all carry the distribution of the first.
    """

    ids_BKC: Tensor  # int64, distinct per (B, K)
    probs_BKC: Tensor  # float, sums to 1 over C


@dataclass(frozen=True, kw_only=True)
class DraftReply:
    """K drafts for each of B sequences; `counts` says how many of them are meant (None: all K).

    With `parents_BK` they are the nodes of a tree: node j follows node `parents_BK[b, j]` < j, or the anchor (-1), and
    the children of a node are distinct. The target decides between siblings in their order. Likelier nodes come first,
    so that any beginning of a tree is a tree.
    """

    tokens_BK: Tensor  # int64
    counts: list[int] | None = None  # B, drafts offered per sequence, 0..K
    probs: SparseProbs | None = None  # None: the drafter proposes its likeliest tokens (one-hot draft_probs)
    parents_BK: Tensor | None = None  # int64; None: a chain
    confidence_BK: Tensor | None = None  # float, the drafter's own probability that a node and all above it are kept


def empty_reply(batch: int) -> DraftReply:
    """No drafts for `batch` sequences: the round decodes plainly."""
    return DraftReply(tokens_BK=torch.empty((batch, 0), dtype=torch.int64))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of one request to a drafter that is asked ahead."""

    ticket: int
    reply: DraftReply | None  # None: there are no drafts
    error: str | None = None  # then why, in a word or two; what the drafter knows of the sequences is uncertain
    seconds: float = 0.0  # that the drafter spent on it


class DrafterAwayError(RuntimeError):
    """The drafter cannot be asked now; the message is the reason in a word or two."""


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. They keep their own state per slot, void with a new epoch that does not go on from it."""

    name: str  # what tables and logs call it
    target_layer_ids: tuple[int, ...]  # tapped layers, counted from 0 at the first decoder layer's output; () for none
    max_draft_tokens: int  # the most drafts that one request may ask for
    max_tree_nodes: int  # the most nodes of a tree, 0 for drafters that score no alternatives

    def draft(self, request: DraftRequest) -> DraftReply:
        """Take note of the pairs, then propose `request.num_draft_tokens` tokens after each sequence's anchor."""
        ...

    def allocate(self, num_slots: int, max_len: int) -> None:
        """Make room for `num_slots` sequences of up to `max_len` tokens. Called once, before the first draft."""
        ...


@runtime_checkable
class AwaitedDrafter(Drafter, Protocol):
    """A drafter that works elsewhere, beside the target: it is asked, and its reply is fetched later or given up on."""

    away: str | None  # why it cannot be asked at present, in a word or two; None: it can
    events: Counter[str]  # what went wrong on the way to it, by kind

    def ask(self, request: DraftRequest) -> int:
        """Send a request without waiting and return its ticket. Raises DrafterAwayError."""
        ...

    def answers(self, timeout_s: float) -> list[Answer]:
        """Answers that have come, one for each ticket at most; waits up to `timeout_s` seconds for the first."""
        ...
