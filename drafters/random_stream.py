"""Counter-based random numbers: a pure function of (seed, position, stream), the same alone or in any batch.

The mixing is the finaliser of SplitMix64 (Steele, Lea, Flood 2014) on the counter; 53 bits become a float in [0, 1).
"""

from __future__ import annotations

import numpy as np

TARGET, DRAFT, ACCEPT = 0, 1, 2  # streams: sampling from the target, drafting, the accept test of the rejection rule

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
    """Float64 in [0, 1), one for each (seed, position) of two int64 arrays of equal shape."""
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds).astype(np.uint64) + _GOLDEN)
        state = _mix(state ^ (np.asarray(positions).astype(np.uint64) * _GOLDEN + np.uint64(stream)))
        return (_mix(state + _GOLDEN) >> np.uint64(11)).astype(np.float64) * 2.0**-53
