"""What a trial changes of a drafter while it drafts: its config, its attention, its angles, its draft vocabulary.

In: a module. Out: the same module, changed as long as the context lasts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drafters.dflash import DFlashModule
from drafters.drafter_module import DrafterModule
from drafters.target import SharedWeights


@contextmanager
def with_config(module: DrafterModule, **changes: Any) -> Iterator[None]:
    before: Any = module.config
    module.config = replace(before, **changes)
    try:
        yield
    finally:
        module.config = before


@contextmanager
def causal_blocks(module: DrafterModule) -> Iterator[None]:
    """Slots of a DFlash drafter see the slots before them alone."""
    assert isinstance(module, DFlashModule)

    def hide_later(_layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, angles, attend = inputs
        later_SS = torch.ones((x.shape[-2], x.shape[-2]), dtype=torch.bool, device=x.device).triu(1)
        hidden_SS = attend.keywords["own_blocked_SS"]
        return x, angles, partial(attend, own_blocked_SS=later_SS if hidden_SS is None else hidden_SS | later_SS)

    with contextlib.ExitStack() as stack:
        for layer, _ in module.stack():
            stack.callback(layer.register_forward_pre_hook(hide_later).remove)
        yield


@contextmanager
def with_theta(module: DrafterModule, theta: float) -> Iterator[None]:
    before: Any = module.inverse_frequency
    exponent = torch.arange(len(before), dtype=torch.float32, device=before.device) / len(before)
    module.inverse_frequency = theta**-exponent
    try:
        yield
    finally:
        module.inverse_frequency = before


@contextmanager
def with_vocabulary(module: DrafterModule, shared: SharedWeights, ids_W: Tensor) -> Iterator[None]:
    before_W = module.draft_vocab_ids.clone()
    like = module.lm_head_WD

    def bind(ids: Tensor) -> None:
        module.draft_vocab_ids.copy_(ids)
        module.bind(shared)
        module.to(device=like.device, dtype=like.dtype)

    bind(ids_W)
    try:
        yield
    finally:
        bind(before_W)
