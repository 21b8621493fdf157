"""A model's matrix products on another kernel, such as the engine's native one, which is handed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Product(Protocol):
    """x W^T + b with weights in a form of its own."""

    def __call__(self, x_RI: Tensor) -> Tensor:
        """Rows [R, I], taken as float32, to [R, O] float32."""
        ...

    def weight(self) -> Tensor:
        """W [O, I] as the product uses it, in float32; slow."""
        ...


PackLinear = Callable[[Tensor, Any], Product]  # (weight [O, I], bias [O] or None)


class PackedLinear(nn.Module):
    """A linear layer whose weights lie packed in `pack`'s own form. For inference only."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, pack: PackLinear):
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self._product = pack(weight_OI.detach(), None if bias_O is None else bias_O.detach())
        self._dtype = weight_OI.dtype
        self._weight: Tensor | None = None
        self.bias = None if bias_O is None else bias_O.detach()

    @property
    def weight(self) -> Tensor:
        """[O, I], for code of the model that reads it past `forward`; unpacked at first use, and then kept."""
        if self._weight is None:
            self._weight = self._product.weight().to(self._dtype)
        return self._weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O] in the dtype of x."""
        out = self._product(x if x.ndim == 2 else x.reshape(-1, self.in_features))
        out = out if x.ndim == 2 else out.view(*x.shape[:-1], self.out_features)
        return out if out.dtype == x.dtype else out.to(x.dtype)


def pack_linears(module: nn.Module, pack: PackLinear, only: torch.dtype | None = None) -> None:
    """Replace every plain `nn.Linear` below `module`, one after another so that each one's own weights are freed.

    Subclasses stay, since they may compute something else. `only`: those with weights of another dtype stay, too.
    """
    for name, child in list(module.named_children()):
        if type(child) is not nn.Linear:
            pack_linears(child, pack, only)
        elif only in (None, child.weight.dtype):
            setattr(module, name, PackedLinear(child.weight, child.bias, pack))
