"""The options of `draftloop train`."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafters.mtp import Kind
from pipelines.training import StepConfig


class TrainError(ValueError):
    """Training that cannot be done; the message is one line with cause and mend."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What is trained, from what, and how."""

    target: str = "smollm2"  # a shipped name, a Hugging Face id, a folder, a .gguf file
    rollouts: str  # --output of generate
    output: str  # folder of the drafter checkpoint
    kind: Kind = "recursive"  # or independent
    num_steps: int = 5  # drafts that the drafter is trained for (K)
    draft_vocab_size: int = 8192  # most frequent tokens of the rollouts that can be drafted; 0: all
    own_lm_head: bool = False  # independent heads: a projection of their own instead of the target's LM head
    held_out: float = 0.05  # share of the rollouts that expected tau is measured on
    steps: StepConfig = field(default_factory=StepConfig)  # the optimiser
    num_workers: int = 1  # Ray Train workers
    cpus_per_worker: float = 1.0  # logical CPUs that Ray sets aside
    threads_per_worker: int | None = None  # of torch; None: the machine's cores over the workers
    use_gpu: bool = False  # one GPU per worker
    save_every_steps: int = 100  # a worker that dies loses at most so many steps
