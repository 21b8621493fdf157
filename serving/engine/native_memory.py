"""Memory that the native kernels read and write: aligned to cache lines, in huge pages where the system has them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

KEY_BLOCK = 16  # keys lie in blocks of 16


class Arena:
    """Zeroed memory in huge pages where the system has them: streaming weights through 4 KiB pages halves the speed.

    Lives as long as the arena or one of its tensors.
    """

    _PAGE = 1 << 21
    _BLOCK = 1 << 26  # bytes taken from the system at a time; pages that nobody touches cost nothing

    def __init__(self) -> None:
        self._free: Tensor = torch.empty(0, dtype=torch.uint8)
        self.bytes = 0  # handed out

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        padded = size + -size % 64  # cache lines
        if padded > len(self._free):
            self._free = self._block(max(padded, self._BLOCK))
        taken, self._free = self._free[:padded], self._free[padded:]
        self.bytes += size
        return taken[:size].view(dtype).view(*shape)

    def _block(self, size: int) -> Tensor:
        length = size + -size % self._PAGE + self._PAGE
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
        else:
            memory = mmap.mmap(-1, length)
        block = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
        return block[-block.data_ptr() % self._PAGE :]


def kv_buffers(arena: Arena, lanes: tuple[int, ...], *, max_len: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [*lanes, blocks, head_dim, 16] and values [*lanes, positions, head_dim up to 16] of `max_len` positions.

    `lanes` are (layers, slots, kv_heads).
    """
    blocks = -(-max_len // KEY_BLOCK)
    keys = arena.zeros((*lanes, blocks, head_dim, KEY_BLOCK), torch.float32)
    return keys, arena.zeros((*lanes, blocks * KEY_BLOCK, head_dim + -head_dim % KEY_BLOCK), torch.float32)


def kv_slot_bytes(lanes: tuple[int, ...], *, max_len: int, head_dim: int) -> int:
    """Bytes that `kv_buffers` takes for one slot; `lanes` are (layers, kv_heads)."""
    positions = max_len + -max_len % KEY_BLOCK
    return math.prod(lanes) * positions * (2 * head_dim + -head_dim % KEY_BLOCK) * 4


def aligned(workspace: Tensor) -> int:
    """Address of the first cache line of a workspace that has 16 floats to spare."""
    return -(-workspace.data_ptr() // 64) * 64
