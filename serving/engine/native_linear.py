"""One linear layer on the native kernels: for drafters, and for the torch backend's modules."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from serving.engine import native_build
from serving.engine.native_memory import aligned
from serving.engine.native_pack import LinearStruct, Packer, declare

_BYTES_PER_THREAD = 1 << 20  # weights below which another thread costs more than it brings


class LinearMemory:
    """Huge pages and a workspace for `NativeLinear`s that never run at once, such as one model's."""

    def __init__(self, dtype: torch.dtype):
        self.packer = Packer(dtype)
        self.address = 0  # of the workspace
        self._workspace = torch.empty(0)

    def reserve(self, floats: int) -> None:
        """Make the workspace large enough for one more linear."""
        if len(self._workspace) < floats + 16:
            self._workspace = torch.zeros(floats + 16)
            self.address = aligned(self._workspace)


class NativeLinear:
    """x W^T + b with packed weights: [R, I] float32 -> [R, O] float32, each row the same bits in any company.

    bfloat16 rounds weights and inputs, and sums in fp32. The result is a new tensor. `memory` (of the same dtype) is
    what it shares with other linears, which then never run at the same time.
    """

    def __init__(
        self,
        weight_OI: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        num_threads: int | None = None,
        isa: str | None = None,
        memory: LinearMemory | None = None,
    ):
        self._library = declare(native_build.load(isa))
        self._call = self._library.draftloop_linear
        self._memory = memory or LinearMemory(dtype)
        self.dtype = dtype
        self.out_features, self.in_features = weight_OI.shape
        before = self._memory.packer.arena.bytes
        self._struct: LinearStruct = self._memory.packer.linear(weight_OI, bias)
        self._pointer = ctypes.pointer(self._struct)  # made once: a model calls its linears hundreds of times a pass
        self._bf16 = int(dtype == torch.bfloat16)
        self.num_threads = num_threads or threads_for(self._memory.packer.arena.bytes - before)
        self._memory.reserve(self._library.draftloop_linear_workspace_floats(self._pointer, self.num_threads))

    def __call__(self, x_RI: Tensor) -> Tensor:
        if x_RI.ndim != 2 or x_RI.shape[1] != self.in_features:
            raise ValueError(f"give rows of {self.in_features} inputs, not a tensor of shape {tuple(x_RI.shape)}")
        return self._multiply(x_RI, self._pointer)

    def weight(self) -> Tensor:
        """The weights [O, I] in float32, rounded to `dtype`: the product of the identity, without the bias."""
        plain = LinearStruct(self._struct.weight, None, self._struct.in_features, self._struct.out_features)
        return self._multiply(torch.eye(self.in_features), ctypes.pointer(plain)).T.contiguous()

    def _multiply(self, x_RI: Tensor, linear: Any) -> Tensor:
        if x_RI.dtype != torch.float32 or not x_RI.is_cpu:
            x_RI = x_RI.to("cpu", torch.float32)
        x_RI = x_RI.contiguous()
        rows = x_RI.shape[0]
        y_RO = torch.empty(rows, self.out_features)
        self._call(
            linear, self._bf16, x_RI.data_ptr(), self.in_features, rows,
            y_RO.data_ptr(), self._memory.address, self.num_threads,
        )  # fmt: skip
        return y_RO


def threads_for(weight_bytes: int) -> int:
    """Threads that pay for so many bytes of weights, at most torch's number."""
    return max(1, min(torch.get_num_threads(), weight_bytes // _BYTES_PER_THREAD))
