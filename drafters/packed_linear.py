"""A drafter's matrix products on another kernel, such as the engine's native one, which is handed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# (weight [O, I], bias [O] or None) -> a product of rows [R, I] float32 -> [R, O] float32
PackLinear = Callable[[Tensor, Any], Callable[[Tensor], Tensor]]


class PackedLinear(nn.Module):
    """A linear layer whose weights lie packed in `pack`'s own form. For inference only."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, pack: PackLinear):
        super().__init__()
        self._product = pack(weight_OI.detach(), None if bias_O is None else bias_O.detach())

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self._product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def pack_linears(module: nn.Module, pack: PackLinear) -> None:
    """Replace every `nn.Linear` below `module`."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child.weight, child.bias, pack))
        else:
            pack_linears(child, pack)
