"""How a request wants its tokens chosen, and the target's distribution that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of one request. `temperature` 0 is greedy."""

    max_new_tokens: int = 128  # upper bound of emitted tokens
    temperature: float = 0.0  # 0: the target's argmax; otherwise logits are divided by it
    top_k: int = 0  # keep the k most probable tokens; 0: all
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches p
    seed: int = 0  # of the request's own random stream
    stop_token_ids: tuple[int, ...] = ()  # end the sequence, beside the target's own end-of-sequence tokens
    ignore_eos: bool = False  # go on past the target's end-of-sequence tokens (benchmarks)
    logprobs: int | None = None  # log-probabilities of every token and of so many most probable ones; None: none
    num_draft_tokens: int | None = None  # most drafts per round, of a tree all nodes; 0: no drafter; None: no own limit

    def __post_init__(self) -> None:
        for name, bad, mend in (
            ("max_new_tokens", self.max_new_tokens < 1, "at least 1"),
            ("temperature", not 0 <= self.temperature <= 100, "between 0 and 100"),
            ("top_k", self.top_k < 0, "0 (off) or more"),
            ("top_p", not 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", not -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("logprobs", (self.logprobs or 0) < 0, "0 or more"),
            ("num_draft_tokens", (self.num_draft_tokens or 0) < 0, "0 or more"),
        ):
            if bad:
                raise ValueError(f"{name} is {getattr(self, name)}; give {mend}")


def target_probs(logits_NV: Tensor, temperatures_N: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Probabilities [N, V] in float64 after temperature, top-k and top-p, in that order, row by row.

    Rows with temperature 0 get all their mass on the argmax. `top_k_N` 0 and `top_p_N` 1 leave a row as it is. Tokens
    that tie with the k-th most probable one are cut by index, so that exactly k remain.
    """
    logits = logits_NV.double()
    greedy_N1 = (temperatures_N <= 0)[:, None]
    scaled = logits / torch.where(temperatures_N > 0, temperatures_N, 1.0).double()[:, None]
    if bool((top_k_N > 0).any()) or bool((top_p_N < 1).any()):
        scaled = _truncate(scaled, top_k_N, top_p_N)
    probs = torch.softmax(scaled, dim=-1)
    if bool(greedy_N1.any()):
        onehot = torch.zeros_like(probs).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
        probs = torch.where(greedy_N1, onehot, probs)
    return probs


def _truncate(scaled_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Set the logits outside top-k and top-p to minus infinity; the most probable token always stays."""
    sorted_NV, order_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(scaled_NV.shape[1], device=scaled_NV.device)
    limit_N = torch.where(top_k_N > 0, top_k_N, scaled_NV.shape[1])
    sorted_NV = sorted_NV.masked_fill(rank_V[None, :] >= limit_N[:, None], float("-inf"))
    probs = torch.softmax(sorted_NV, dim=-1)
    before = probs.cumsum(dim=-1) - probs  # mass of the more probable tokens
    sorted_NV = sorted_NV.masked_fill((before >= top_p_N.double()[:, None]) & (rank_V > 0)[None, :], float("-inf"))
    return torch.full_like(scaled_NV, float("-inf")).scatter(1, order_NV, sorted_NV)
