"""How much of a tree is verified: on made-up machines, with drafters whose every chance is known."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from drafters.draft_tree import TreeBuilder
from serving.engine.confidence import Calibration
from serving.engine.draft_length import DraftLengthChooser, PositionAcceptance

DRAFT_S = 0.4e-3  # of one depth


def cpu_step(rows: int) -> float:
    """A two-core CPU: eight rows are free, then every row costs."""
    return max(7.5e-3, 0.92e-3 * rows)


def gpu_step(rows: int) -> float:
    """64 rows are free."""
    return max(12e-3, 0.19e-3 * rows)


def tree_of(children: list[float], depth: int, nodes: int) -> tuple[list[int], list[int], list[float]]:
    """(which child, parents, joint chances) of a tree in which child i of any node is right with chance children[i]."""
    tree = TreeBuilder(nodes)
    for _ in range(depth):
        width = len(tree.frontier)
        tree.extend([list(range(len(children)))] * width, [[math.log(c) for c in children]] * width)
    return tree.finish()


class Simulation:
    """Rounds with sequences of one kind, or of several."""

    def __init__(self, children: list[list[float]], step=cpu_step, nodes: int = 15, depth: int = 6, bias: float = 1.0):
        self.children, self.step, self.nodes, self.bias = children, step, nodes, bias
        self.chooser = DraftLengthChooser(depth, trees=True)
        self.sequences = [PositionAcceptance() for _ in children]
        self.seconds, self.tokens, self.counts = 0.0, 0, []
        self._rng = random.Random(0)

    def run(self, rounds: int) -> Simulation:
        for _ in range(rounds):
            depth = max(self.chooser.choose(self.sequences))
            if not depth:
                self._note(self.step(len(self.children)), len(self.children))
                self.tokens += len(self.children)
                continue
            trees = [tree_of(chances, depth, self.nodes) for chances in self.children]
            confidence = [[c**self.bias for c in tree[2]] for tree in trees]
            counts = self.chooser.worth_verifying(confidence, 0, depth * DRAFT_S)
            self.counts.append(counts)
            self.chooser.observe_draft(len(trees), depth, depth * DRAFT_S)
            rows = len(trees) + sum(counts)
            self._note(self.step(rows), rows)
            self.seconds += depth * DRAFT_S
            for b, (child, parents, _) in enumerate(trees):
                path = self._walk(b, child[: counts[b]], parents[: counts[b]])
                self.tokens += len(path) + 1
                self.chooser.observe_acceptance(self.sequences[b], depth, len(path))
                self.chooser.observe_confidence(confidence[b][: counts[b]], path)
        return self

    def _note(self, seconds: float, rows: int) -> None:
        self.chooser.observe_step(rows, seconds)
        self.seconds += seconds

    def _walk(self, b: int, child: list[int], parents: list[int]) -> list[int]:
        path, node = [], -1
        while True:
            u, right = self._rng.random(), -1
            for i, chance in enumerate(self.children[b]):
                if u < chance:
                    right = i
                    break
                u -= chance
            found = [j for j, parent in enumerate(parents) if parent == node and child[j] == right]
            if not found:
                return path
            node = found[0]
            path.append(node)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def best_fixed(children: list[float], batch: int, step) -> float:
    """Tokens per second of the best depth and node count for all, plain decoding among them."""
    speeds = [batch / step(batch)]
    for depth in range(1, 7):
        chances = tree_of(children, depth, 15)[2]
        for nodes in range(1, len(chances) + 1):
            tokens = batch * (1 + sum(chances[:nodes]))
            speeds.append(tokens / (step(batch * (nodes + 1)) + depth * DRAFT_S))
    return max(speeds)


@pytest.mark.statistical
@pytest.mark.parametrize("bias", [1.0, 0.5, 1.3])
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("children", [[0.5, 0.2, 0.1], [0.9, 0.05], [0.15, 0.1]])
def test_is_as_fast_as_the_best_tree_chain_or_none(children, batch, bias):
    """A drafter that is too sure of itself (bias below 1) or not sure enough is found out."""
    simulation = Simulation([children] * batch, bias=bias).run(1000)
    assert simulation.tokens_per_s > 0.88 * best_fixed(children, batch, cpu_step)


@pytest.mark.parametrize("batch", [1, 2])
def test_drafting_comes_back_soon_after_the_traffic_has_become_easy(batch):
    """It is off, at next to no cost, while drafts are refused, and on again a few seconds after they are not."""

    def every_row_costs(rows: int) -> float:
        return 15e-3 + 1.3e-3 * rows

    simulation = Simulation([[0.02, 0.01]] * batch, every_row_costs, depth=5).run(1500)
    assert simulation.tokens_per_s > 0.98 * batch / every_row_costs(batch)
    simulation.children = [[0.65, 0.15, 0.05]] * batch
    simulation.counts.clear()
    simulation.run(500)
    assert len(simulation.counts) > 100


def test_where_more_rows_are_free_more_nodes_are_verified():
    few = Simulation([[0.5, 0.2, 0.1]], nodes=40).run(300).counts[-50:]
    many = Simulation([[0.5, 0.2, 0.1]], gpu_step, nodes=40).run(300).counts[-50:]
    assert np.mean(few) < 10
    assert np.mean(many) > 30


def test_the_free_rows_go_to_the_sequence_that_makes_more_of_them():
    """In one pass: sixteen nodes each, and rows are free up to eight."""
    simulation = Simulation([[0.6, 0.2, 0.1], [0.05, 0.03, 0.02]]).run(500)
    good, bad = np.mean(simulation.counts[-100:], axis=0)
    assert good > 4 * bad


def test_a_sure_drafters_tree_is_a_chain():
    simulation = Simulation([[0.95, 0.01, 0.01]]).run(300)
    assert tree_of([0.95, 0.01, 0.01], 6, 15)[1][:6] == [-1, 0, 1, 2, 3, 4]
    assert np.mean(simulation.counts[-50:]) == pytest.approx(6, abs=1.5)  # more would be siblings


@pytest.mark.parametrize("true", [[0.9, 0.4, 0.1], [0.6, 0.35, 0.02], [0.98, 0.7, 0.4]])
def test_calibration_learns_the_chance_of_each_confidence(true):
    rng, calibration = random.Random(1), Calibration()
    stated = [0.9, 0.4, 0.1]
    for _ in range(1500):
        calibration.observe(stated, [j for j in range(3) if rng.random() < true[j]])
    assert calibration.chances(stated) == pytest.approx(true, abs=0.12)
    for _ in range(1500):  # the traffic changes
        calibration.observe(stated, [j for j in range(3) if rng.random() < stated[j] ** 2])
    assert calibration.chances(stated) == pytest.approx([0.81, 0.16, 0.01], abs=0.12)


def test_an_untaught_calibration_believes_the_drafter():
    assert Calibration().chances([0.9, 0.4, 0.1, 0.0, 1.0]) == pytest.approx([0.9, 0.4, 0.1, 0.0, 1.0], abs=1e-5)


def test_more_confidence_is_never_worse():
    calibration = Calibration()
    for _ in range(200):
        calibration.observe([0.9, 0.4], [1])  # the second is kept, the first never
    chances = calibration.chances([0.9, 0.4, 0.39])
    assert all(a >= b for a, b in itertools.pairwise(chances))


def test_before_anything_is_known_everything_is_verified():
    assert DraftLengthChooser(4, trees=True).worth_verifying([[0.5, 0.1], [0.2]], 0, 1e-3) == [2, 1]
    assert DraftLengthChooser(4, trees=True).worth_verifying([[], []], 0, 1e-3) == [0, 0]
