"""How the optimiser walks: the options of a training step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from drafters.losses import LossConfig
from pipelines.step_order import OrderConfig

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """How the optimiser walks."""

    epochs: float = 8.0  # passes over the training sequences
    tokens_per_step: int = 2048  # prompt and response tokens of one optimiser step, over all workers
    micro_batches: int | None = None  # parts of a step, shared out among the workers; None: one for each
    row_tokens: int = 512  # documents are packed into rows of so many tokens
    shuffle_tokens: int = 1_000_000  # sequences are shuffled within so many tokens
    anchors_per_sequence: int = 20  # draft blocks trained per sequence and step
    learning_rate: float = 2e-3  # peak, AdamW
    warmup_fraction: float = 0.04  # of all steps; then cosine to zero
    weight_decay: float = 0.01
    clip_norm: float = 1.0  # of the gradient
    loss: LossConfig = field(default_factory=LossConfig)  # what is minimised
    # of matrix products (autocast; weights and optimiser stay in float32); auto: bfloat16 where the device has it
    precision: Precision = "auto"
    seed: int = 0
    evaluations: int = 5  # times that expected tau is measured, the end included

    def order(self, workers: int = 1) -> OrderConfig:
        """How steps are made up, for so many workers at most."""
        lanes = self.micro_batches or workers
        return OrderConfig(
            lanes=lanes,
            pack_tokens=max(1, self.tokens_per_step // lanes),
            window_tokens=max(1, self.shuffle_tokens // lanes),
            seed=self.seed,
        )


def multiplies_in_bfloat16(precision: Precision, device: torch.device) -> bool:
    """Whether matrix products run in bfloat16."""
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # elsewhere bfloat16 is emulated, and slow
    return bool(native and native())
