"""Draft trees: the likeliest continuations of one anchor by joint probability, within a node budget.

In: for nodes of the tree, their best next tokens with log-probabilities, depth by depth. Out: tokens, parents and joint
probabilities, likeliest first. A child is never likelier than its parent, so the `budget` best of all nodes are closed
under parents, and only nodes among the best so far can have children among the best (compare EAGLE-2, Li et al. 2024).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

ROOT = -1  # the anchor, as a parent
MAX_TREE_NODES = 63  # with the anchor 64 rows of a verify pass


class Node(NamedTuple):
    """One drafted token and the chance, by the drafter, that it and all above it are kept."""

    log_prob: float  # joint
    token: int
    parent: int  # place in `TreeBuilder.nodes`, or ROOT
    depth: int  # 1 below the anchor


@dataclass
class TreeBuilder:
    """Grows one tree: `extend` the `frontier` until it is empty or deep enough, then read it off with `finish`."""

    budget: int  # most nodes
    nodes: list[Node] = field(default_factory=list)  # in the order found
    frontier: list[int] = field(default_factory=lambda: [ROOT])  # whose children may be among the best; likeliest first

    def extend(self, tokens_FC: list[list[int]], log_probs_FC: list[list[float]]) -> None:
        """Give every node of the frontier its best next tokens (distinct, likeliest first)."""
        first_new = len(self.nodes)
        lowest = [self.nodes[i].log_prob for i in self._best()]  # a heap of the best so far
        heapq.heapify(lowest)
        for parent, tokens, log_probs in zip(self.frontier, tokens_FC, log_probs_FC, strict=True):
            above, depth = (0.0, 0) if parent == ROOT else (self.nodes[parent].log_prob, self.nodes[parent].depth)
            for token, log_prob in zip(tokens, log_probs, strict=True):
                joint = above + min(log_prob, 0.0)
                if len(lowest) < self.budget:
                    heapq.heappush(lowest, joint)
                elif joint > lowest[0]:
                    heapq.heapreplace(lowest, joint)
                else:
                    break  # nor are the less likely ones that follow among the best
                self.nodes.append(Node(joint, token, parent, depth + 1))
        self.frontier = [i for i in self._best() if i >= first_new]

    def finish(self) -> tuple[list[int], list[int], list[float]]:
        """(tokens, parents, joint probabilities) of the best nodes, likeliest first; a parent is a place in these."""
        best = self._best()
        place = {ROOT: ROOT} | {node: i for i, node in enumerate(best)}
        chosen = [self.nodes[i] for i in best]
        return [n.token for n in chosen], [place[n.parent] for n in chosen], [math.exp(n.log_prob) for n in chosen]

    def _best(self) -> list[int]:
        """The likeliest `budget` nodes; of equal ones the earlier found, which puts parents before their children."""
        return sorted(range(len(self.nodes)), key=lambda i: (-self.nodes[i].log_prob, i))[: self.budget]


def pad_trees(trees: list[TreeBuilder]) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """(tokens, parents, joint probabilities), each [B, K], and the nodes of each tree, K being the most of them."""
    read = [tree.finish() for tree in trees]
    counts = [len(tokens) for tokens, _, _ in read]
    most = max(counts, default=0)
    tokens_BK = torch.zeros((len(trees), most), dtype=torch.int64)
    parents_BK = torch.full((len(trees), most), ROOT)
    probs_BK = torch.zeros((len(trees), most))
    for b, (tokens, parents, probs) in enumerate(read):
        tokens_BK[b, : counts[b]] = torch.tensor(tokens, dtype=torch.int64)
        parents_BK[b, : counts[b]] = torch.tensor(parents, dtype=torch.int64)
        probs_BK[b, : counts[b]] = torch.tensor(probs)
    return tokens_BK, parents_BK, probs_BK, counts
