"""The counter-based random numbers: pure, uniform, independent between streams and neighbours."""

from __future__ import annotations

import numpy as np
from scipy import stats

from drafters.random_stream import ACCEPT, DRAFT, TARGET, uniforms


def test_pure_function_of_seed_position_and_stream():
    seeds, positions = np.array([3, 3, -7]), np.array([0, 1, 0])
    together = uniforms(seeds, positions, TARGET)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1], TARGET)[0] for i in range(3)]
    assert together.tolist() == alone
    assert len({*together, *uniforms(seeds, positions, DRAFT), *uniforms(seeds, positions, ACCEPT)}) == 9


def test_uniform_over_positions_and_over_seeds():
    n = 100_000
    for u in (
        uniforms(np.zeros(n), np.arange(n), TARGET),
        uniforms(np.arange(n), np.zeros(n), TARGET),
        uniforms(np.arange(n), np.arange(n), ACCEPT),
    ):
        assert 0 <= u.min() <= u.max() < 1
        assert stats.kstest(u, "uniform").pvalue > 1e-3


def test_streams_and_neighbours_are_uncorrelated():
    n = 100_000
    seeds, positions = np.zeros(n), np.arange(n)
    target, accept = uniforms(seeds, positions, TARGET), uniforms(seeds, positions, ACCEPT)
    for a, b in ((target, accept), (target[1:], target[:-1]), (target, uniforms(seeds + 1, positions, TARGET))):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(n)
