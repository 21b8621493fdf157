"""What the target says about a round's drafts: its logits and the drafts in, accepted paths and bonus tokens out.

It shapes the target's distribution for each sequence, draws from the sequence's random stream, and hands both to the
pure rules of `drafters.verify`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from drafters import random_stream
from drafters.drafter import SparseProbs
from drafters.verify import (
    TreeVerdict,
    sample,
    verify_sampled,
    verify_tokens,
    verify_tree_sampled,
    verify_tree_tokens,
)
from serving.engine.logprobs import TokenLogprobs, token_logprobs
from serving.engine.rows import RowsOutput
from serving.engine.sampling import target_probs
from serving.engine.sequence import Sequence

if TYPE_CHECKING:
    from serving.engine.round import Drafts

Decision = tuple[list[list[int]], list[int]]  # accepted paths (places among the drafts), bonus tokens; by sequence


class Verification:
    """One pass's logits against the drafts of its B sequences, whose rows lie one after another in it."""

    def __init__(self, sequences: list[Sequence], drafts: Drafts, output: RowsOutput):
        self.sequences, self.drafts, self.logits_NV = sequences, drafts, output.logits_NV
        self._best_N = output.best_N
        self.counts = np.array([len(tokens) for tokens in drafts.tokens])
        self.width = int(self.counts.max()) + 1
        first = np.concatenate([[0], np.cumsum(self.counts[:-1] + 1)])
        # Places past a sequence's own rows repeat its last one.
        self.rows_BJ = first[:, None] + np.minimum(np.arange(self.width)[None, :], self.counts[:, None])
        self.counts_B = torch.from_numpy(self.counts)

    def chains(self) -> Decision:
        """Drafts that follow one another."""
        drafts_BK = self._padded(self.drafts.tokens, -1)
        if self.drafts.probs is not None and self.width > 1:
            accepted, bonus = self._chains_by_rejection(drafts_BK, self.drafts.probs)
        else:
            verdict = verify_tokens(self._target_tokens(), drafts_BK, self.counts_B)
            accepted, bonus = verdict.accepted_B.tolist(), verdict.bonus_B.tolist()
        return [list(range(n)) for n in accepted], bonus

    def trees(self) -> Decision:
        """Drafts of which siblings are alternatives."""
        assert self.drafts.parents is not None
        drafts_BK, parents_BK = self._padded(self.drafts.tokens, -1), self._padded(self.drafts.parents, -2)
        if self.drafts.probs is not None and self.width > 1:
            verdict = self._trees_by_rejection(drafts_BK, parents_BK, self.drafts.probs)
        else:
            verdict = verify_tree_tokens(self._target_tokens(), drafts_BK, parents_BK, self.counts_B)
        paths = [path[:n] for path, n in zip(verdict.path_BD.tolist(), verdict.accepted_B.tolist(), strict=True)]
        return paths, verdict.bonus_B.tolist()

    def logprobs(self, b: int, path: list[int], new_tokens: list[int]) -> list[TokenLogprobs] | None:
        """Of sequence b's new tokens, each from the row that gave it: the anchor's, then those of the accepted path."""
        count = self.sequences[b].sampling.logprobs
        if count is None:
            return None
        rows = torch.tensor([0, *(j + 1 for j in path)]) + int(self.rows_BJ[b, 0])
        return token_logprobs(self.logits_NV[rows.to(self.logits_NV.device)], new_tokens, count)

    def _padded(self, lists: list[list[int]], filler: int) -> Tensor:
        width = self.width - 1
        padded = [part + [filler] * (width - len(part)) for part in lists]
        return torch.tensor(padded, dtype=torch.int64).view(len(lists), width)

    def _positions(self) -> list[np.ndarray]:
        """By sequence, the position of the token that each of its rows gives."""
        return [len(s.tokens) + np.array(self.drafts.depths(b)) for b, s in enumerate(self.sequences)]

    def _target_tokens(self) -> Tensor:
        """[B, J] the target's own token after every row, on the host: its argmax, or a draw from a stream."""
        logits_NV, sequences = self.logits_NV, self.sequences
        if self._best_N is not None:
            tokens_N = self._best_N.clone()
        elif logits_NV.device.type == "cpu" and logits_NV.dtype == torch.float32:
            # numpy's argmax is one thread without a team of workers, which would spin into the next forward pass
            tokens_N = torch.from_numpy(logits_NV.numpy().argmax(axis=-1))
        else:
            tokens_N = logits_NV.argmax(dim=-1)
        if any(s.sampling.temperature > 0 for s in sequences):
            row_of = np.repeat(np.arange(len(sequences)), self.counts + 1)
            rows = np.flatnonzero([sequences[b].sampling.temperature > 0 for b in row_of])
            positions = np.concatenate(self._positions())[rows]
            sampled = [sequences[b] for b in row_of[rows]]
            index = torch.from_numpy(rows).to(logits_NV.device)
            seeds = np.array([s.sampling.seed for s in sampled])
            u = random_stream.uniforms(seeds, positions, random_stream.TARGET)
            tokens_N[index] = sample(_probs(sampled, logits_NV[index]), torch.from_numpy(u).to(logits_NV.device))
        return tokens_N.cpu()[torch.from_numpy(self.rows_BJ)]

    def _target_probs(self) -> Tensor:
        """[B, J, V] on the host."""
        per_row = [s for s in self.sequences for _ in range(self.width)]
        logits = self.logits_NV[torch.from_numpy(self.rows_BJ).flatten().to(self.logits_NV.device)]
        return _probs(per_row, logits).view(len(self.sequences), self.width, -1).cpu()

    def _chains_by_rejection(self, drafts_BK: Tensor, probs: SparseProbs) -> tuple[list[int], list[int]]:
        """The classical rule, for drafts that come with their distribution."""
        num = self.width - 1
        seeds = np.array([s.sampling.seed for s in self.sequences])[:, None]
        positions = np.array([len(s.tokens) for s in self.sequences])[:, None] + np.arange(self.width)[None, :]
        seeds_BJ = np.broadcast_to(seeds, positions.shape)
        accept_u = random_stream.uniforms(seeds_BJ, positions, random_stream.ACCEPT)[:, :num]
        bonus_u = random_stream.uniforms(seeds_BJ, positions, random_stream.TARGET)
        verdict = verify_sampled(
            self._target_probs(),
            drafts_BK.clamp(min=0),
            SparseProbs(ids_BKC=probs.ids_BKC[:, :num].cpu(), probs_BKC=probs.probs_BKC[:, :num].cpu()),
            self.counts_B,
            torch.from_numpy(accept_u),
            torch.from_numpy(bonus_u),
        )
        return verdict.accepted_B.tolist(), verdict.bonus_B.tolist()

    def _trees_by_rejection(self, drafts_BK: Tensor, parents_BK: Tensor, probs: SparseProbs) -> TreeVerdict:
        """Recursive rejection, for trees whose siblings were drawn without replacement."""
        num = self.width - 1
        depths_BJ = self._padded_depths()
        seeds_B1 = np.array([s.sampling.seed for s in self.sequences])[:, None]
        positions_BJ = np.array([len(s.tokens) for s in self.sequences])[:, None] + depths_BJ
        seeds_BJ = np.broadcast_to(seeds_B1, positions_BJ.shape)
        # Siblings stand at one position: each has a stream of its own, by its place among them.
        accept_u = np.empty((len(self.sequences), num))
        places_BK = (parents_BK[:, :, None] == parents_BK[:, None, :]).tril(-1).sum(dim=2).numpy()
        for place in range(int(places_BK.max(initial=0)) + 1):
            at = places_BK == place
            stream = random_stream.ACCEPT + place
            accept_u[at] = random_stream.uniforms(seeds_BJ[:, 1:][at], positions_BJ[:, 1:][at] - 1, stream)
        return verify_tree_sampled(
            self._target_probs(),
            drafts_BK.clamp(min=0),
            parents_BK,
            SparseProbs(ids_BKC=probs.ids_BKC[:, :num].cpu(), probs_BKC=probs.probs_BKC[:, :num].cpu()),
            self.counts_B,
            torch.from_numpy(accept_u),
            torch.from_numpy(random_stream.uniforms(seeds_BJ, positions_BJ, random_stream.TARGET)),
        )

    def _padded_depths(self) -> np.ndarray:
        depths = np.zeros((len(self.sequences), self.width), dtype=np.int64)
        for b in range(len(self.sequences)):
            mine = self.drafts.depths(b)
            depths[b, : len(mine)] = mine
        return depths


def _probs(sequences: list[Sequence], logits_NV: Tensor) -> Tensor:
    """Target probabilities of N rows, row i shaped by the sampling parameters of `sequences[i]`."""
    device = logits_NV.device
    return target_probs(
        logits_NV,
        torch.tensor([s.sampling.temperature for s in sequences], device=device),
        torch.tensor([s.sampling.top_k for s in sequences], device=device),
        torch.tensor([s.sampling.top_p for s in sequences], device=device),
    )
