"""The options of `draftloop train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from drafters.mtp import Kind
from pipelines.training import StepConfig

DRAFT_VOCAB_COVERAGE = 0.95


class TrainError(ValueError):
    """Training that cannot be done; the message is one line with cause and mend."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What is trained, from what, and how."""

    target: str = "smollm2"  # a shipped name, a Hugging Face id, a folder, a .gguf file
    rollouts: str  # --output of generate
    output: str  # folder of the drafter checkpoint
    kind: Kind = "recursive"  # or independent
    num_draft_tokens: int = 5  # drafts that the drafter is trained for (K)
    draft_vocab_coverage: float | None = None  # share of unseen response tokens that can be drafted; None: 0.95
    draft_vocab_size: int | None = None  # in place of the coverage: so many tokens can be drafted; 0: all
    own_lm_head: bool = False  # independent heads: a projection of their own instead of the target's LM head
    held_out: float = 0.05  # share of the rollouts that expected tau is measured on
    steps: StepConfig = field(default_factory=StepConfig)  # the optimiser
    num_workers: int = 1  # Ray Train workers
    cpus_per_worker: float = 1.0  # logical CPUs that Ray sets aside
    threads_per_worker: int | None = None  # of torch; None: the machine's cores over the workers
    use_gpu: bool = False  # one GPU per worker
    save_every_steps: int = 100  # a worker that dies loses at most so many steps

    def __post_init__(self) -> None:
        steps, divisor = self.steps, max(1, self.num_workers)
        size, coverage = self.draft_vocab_size, self.draft_vocab_coverage
        if size is not None and coverage is not None:
            raise TrainError(
                f"draft_vocab_size is {size} and draft_vocab_coverage is {coverage:g}; give one of the two"
            )
        for name, value, good, mend in (
            ("kind", self.kind, self.kind in get_args(Kind), " or ".join(get_args(Kind))),
            ("num_draft_tokens", self.num_draft_tokens, self.num_draft_tokens >= 1, "at least 1"),
            ("draft_vocab_size", size, size is None or size >= 0, "0 for all tokens, or more"),
            ("draft_vocab_coverage", coverage, coverage is None or 0 < coverage <= 1, "a share, such as 0.95"),
            ("own_lm_head", True, not self.own_lm_head or self.kind == "independent", "it to independent heads only"),
            ("held_out", self.held_out, 0 < self.held_out < 1, "a share between 0 and 1"),
            ("num_workers", self.num_workers, self.num_workers >= 1, "at least 1"),
            ("cpus_per_worker", self.cpus_per_worker, self.cpus_per_worker > 0, "more than 0"),
            ("save_every_steps", self.save_every_steps, self.save_every_steps >= 1, "at least 1"),
            ("epochs", steps.epochs, steps.epochs > 0, "more than 0"),
            ("sequences_per_step", steps.sequences_per_step, steps.sequences_per_step >= 1, "at least 1"),
            (
                "sequences_per_step",
                steps.sequences_per_step,
                steps.sequences_per_step % divisor == 0,
                f"a multiple of the {divisor} workers",
            ),
            ("anchors_per_sequence", steps.anchors_per_sequence, steps.anchors_per_sequence >= 1, "at least 1"),
            ("learning_rate", steps.learning_rate, steps.learning_rate > 0, "more than 0"),
            ("rho", steps.rho, 0 < steps.rho <= 1, "more than 0 and at most 1"),
        ):
            if not good:
                raise TrainError(f"{name} is {value}; give {mend}")
