"""The options of `draftloop train`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from drafters.losses import LossConfig, LossKind, LossWeights
from pipelines.step_config import Precision, StepConfig

DRAFT_VOCAB_COVERAGE = 0.95
MTP_DRAFT_TOKENS = 5

DrafterKind = Literal["recursive", "independent", "dflash"]
OwnKind = Literal["own-mtp", "gemma-assistant"]  # what a target came with: never fresh, gone on from as `init_from`


class TrainError(ValueError):
    """Training that cannot be done; the message is one line with cause and mend."""


@dataclass(frozen=True, kw_only=True)
class IndependentOptions:
    """What only independent MTP heads have."""

    own_lm_head: bool = False  # a projection of their own instead of the target's LM head
    shared_trunk: bool = False  # one residual block before all heads
    anchor_embedding: bool = False  # the heads also read the token that drafts follow
    medusa_heads: bool = False  # h + SiLU(Linear(h)) in place of a residual MLP: vLLM loads such


@dataclass(frozen=True, kw_only=True)
class DFlashOptions:
    """What only DFlash has."""

    block_size: int = 8  # the anchor included; block_size - 1 drafts
    num_hidden_layers: int = 1  # of the drafter
    selector_top_k: int = 16  # candidates per slot for the path selector; 0: no selector
    conv_kernel_size: int = 2  # taps of the convolutions along the block; 0: none
    confidence_head: bool = False  # estimates each slot's acceptance
    slot_context: bool = True  # every slot reads the newest context feature and the anchor's embedding
    sliding_window: int = 0  # all layers see positions less than this apart; 0: everything
    init_from_target_layers: bool = False  # start as the target's last layers instead of at random
    mask_token_id: int | None = None  # fills the block's slots; None: a token that never occurs (`mask_token.py`)


@dataclass(frozen=True, kw_only=True)
class JointOptions:
    """What only the joint regime has: trunk and heads learn together, L_NTP + beta * L_MTP."""

    beta: float = 0.3  # weight of the heads' loss
    trunk_learning_rate: float = 2e-5  # peak, of the trunk's own weights
    num_taps: int = 3  # layers that condition the heads, spread up to the last


@dataclass(frozen=True, kw_only=True)
class OnlineOptions:
    """What only online training has: the target actors that compute features while the drafter trains."""

    num_taps: int = 3  # layers to tap, spread up to the last
    target_layer_ids: tuple[int, ...] | None = None  # layers to tap, from 0; in place of `num_taps`
    dtype: str = "float32"  # of the target: float32 or bfloat16
    backend: str = "auto"  # of its engine: auto, native or torch
    batch: int = 8  # sequences that an actor reads at once
    num_actors: tuple[int, int] = (1, 1)  # least and most target actors for each trainer
    cpus_per_actor: float = 1.0  # CPUs that Ray sets aside
    gpus_per_actor: float = 0.0  # GPUs for an actor; 0 runs on the CPU
    resources: tuple[tuple[str, float], ...] = ()  # custom ones that an actor's node must have
    threads_per_actor: int | None = None  # compute threads; None: torch's choice


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What is trained, from what, and how."""

    target: str = "smollm2"  # a shipped name, a Hugging Face id, a folder, a .gguf file
    rollouts: tuple[str, ...]  # --output of generate, one or several times
    output: str  # folder of the drafter checkpoint
    kind: DrafterKind | OwnKind = "recursive"
    num_draft_tokens: int | None = None  # K, drafts that an MTP drafter is trained for; None: 5
    draft_vocab_coverage: float | None = None  # share of unseen response tokens that can be drafted; None: 0.95
    draft_vocab_size: int | None = None  # in place of the coverage: so many tokens can be drafted; 0: all
    joint: JointOptions | None = None  # the target is trained too, into a new one; None: it stays as it is (frozen)
    online: OnlineOptions | None = None  # features are computed on the way; None: they are read from the rollouts
    independent: IndependentOptions = field(default_factory=IndependentOptions)
    dflash: DFlashOptions = field(default_factory=DFlashOptions)
    held_out: float = 0.05  # share of the rollouts that expected tau is measured on, 1024 of them at most
    cache_bytes: int = 4 * 2**30  # of features that a worker keeps in memory from one epoch to the next
    steps: StepConfig = field(default_factory=StepConfig)  # the optimiser and the loss
    parity_prompts: int = 32  # held-out prompts that the parity gate decodes, at most
    rollout_weights: tuple[float, ...] = ()  # times that each of `rollouts` is read per epoch; (): once
    init_from: str | None = None  # drafter to go on from, in its own kind and shape; None: a fresh one
    num_workers: int = 1  # Ray Train workers; elastic: at most
    min_workers: int | None = None  # a run begins and goes on with as few, where there are no more; None: never fewer
    cpus_per_worker: float = 1.0  # logical CPUs that Ray sets aside
    threads_per_worker: int | None = None  # of torch; None: the machine's cores over the workers
    use_gpu: bool = False  # one GPU per worker
    resources: tuple[tuple[str, float], ...] = ()  # custom ones that a worker's node must have: (name, amount)
    save_every_steps: int = 100  # a worker that dies loses at most so many steps
    max_failures: int = 3  # workers that may die before the run gives up
    keep_checkpoints: int = 2  # saved states of an unfinished run: the latest and those of best expected tau

    def __post_init__(self) -> None:
        for name, value, good, mend in (*self._checks(), *_step_checks(self.steps, max(1, self.num_workers))):
            if not good:
                raise TrainError(f"{name} is {value}; give {mend}")
        self._check_belonging()
        _check_loss(self.steps.loss, blocks=self.kind == "dflash")

    @property
    def tokens_only(self) -> bool:
        """Whether features that rollouts may have are left alone."""
        return self.online is not None or self.joint is not None

    def drafts(self) -> int:
        """K, whatever the kind."""
        if self.kind == "dflash":
            return self.dflash.block_size - 1
        return MTP_DRAFT_TOKENS if self.num_draft_tokens is None else self.num_draft_tokens

    def _is_kind(self) -> bool:
        return self.kind in get_args(DrafterKind) or (self.kind in get_args(OwnKind) and self.init_from is not None)

    def _checks(self) -> tuple[tuple[str, Any, bool, str], ...]:
        """(name, value, whether it is good, what to give) of the run's own options."""
        least, weights = self.min_workers, self.rollout_weights
        size, coverage, number, block = (
            self.draft_vocab_size, self.draft_vocab_coverage, self.num_draft_tokens, self.dflash,
        )  # fmt: skip
        kinds = " or ".join(get_args(DrafterKind))
        from_import = ", or --init-from what `draftloop import` made" if self.kind in get_args(OwnKind) else ""
        return (
            ("rollouts", self.rollouts, len(self.rollouts) > 0, "the --output of generate"),
            ("kind", self.kind, self._is_kind(), f"{kinds}{from_import}"),
            ("num_draft_tokens", number, number is None or number >= 1, "at least 1"),
            ("draft_vocab_size", size, size is None or size >= 0, "0 for all tokens, or more"),
            ("draft_vocab_coverage", coverage, coverage is None or 0 < coverage <= 1, "a share, such as 0.95"),
            ("block_size", block.block_size, block.block_size >= 2, "at least 2"),
            ("num_hidden_layers", block.num_hidden_layers, block.num_hidden_layers >= 1, "at least 1"),
            ("selector_top_k", block.selector_top_k, block.selector_top_k >= 0, "0 for no selector, or more"),
            ("conv_kernel_size", block.conv_kernel_size, block.conv_kernel_size >= 0, "0 for none, or more"),
            *self._online_checks(),
            *self._joint_checks(),
            ("held_out", self.held_out, 0 < self.held_out < 1, "a share between 0 and 1"),
            ("parity_prompts", self.parity_prompts, self.parity_prompts >= 1, "at least 1"),
            ("cache_bytes", self.cache_bytes, self.cache_bytes >= 0, "0 or more"),
            ("num_workers", self.num_workers, self.num_workers >= 1, "at least 1"),
            ("cpus_per_worker", self.cpus_per_worker, self.cpus_per_worker > 0, "more than 0"),
            ("keep_checkpoints", self.keep_checkpoints, self.keep_checkpoints >= 1, "at least 1"),
            ("max_failures", self.max_failures, self.max_failures >= 0, "0 or more"),
            ("min_workers", least, least is None or 1 <= least <= self.num_workers, "1 to num_workers"),
            ("rollout_weights", weights, len(weights) in (0, len(self.rollouts)), "one for each of the rollouts"),
            ("rollout_weights", weights, all(0 < w < math.inf for w in weights), "numbers above 0"),
            ("save_every_steps", self.save_every_steps, self.save_every_steps >= 1, "at least 1"),
        )

    def _joint_checks(self) -> tuple[tuple[str, Any, bool, str], ...]:
        joint = self.joint
        if joint is None:
            return ()
        rate = joint.trunk_learning_rate
        return (
            ("beta", joint.beta, 0 <= joint.beta < math.inf, "0 or more"),
            ("num_taps", joint.num_taps, joint.num_taps >= 1, "at least 1"),
            ("trunk_learning_rate", rate, 0 < rate < math.inf, "more than 0"),
            ("kind", self.kind, self.kind != "dflash", "recursive or independent: the joint regime trains MTP heads"),
            ("online", self.online, self.online is None, "no --online: a trunk puts out its features itself"),
            ("init_from", self.init_from, self.init_from is None, "none: the joint regime begins with fresh heads"),
        )

    def _online_checks(self) -> tuple[tuple[str, Any, bool, str], ...]:
        online = self.online
        if online is None:
            return ()
        layers, (least, most) = online.target_layer_ids, online.num_actors
        return (
            ("num_taps", online.num_taps, online.num_taps >= 1, "at least 1"),
            ("target_layer_ids", layers, layers is None or len(layers) > 0, "layers of the target"),
            ("dtype", online.dtype, online.dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
            ("batch", online.batch, online.batch >= 1, "at least 1"),
            ("num_actors", online.num_actors, 1 <= least <= most, "1 <= least <= most"),
            ("cpus_per_actor", online.cpus_per_actor, online.cpus_per_actor >= 0, "0 or more"),
            ("gpus_per_actor", online.gpus_per_actor, online.gpus_per_actor >= 0, "0 or more"),
        )

    def _check_belonging(self) -> None:
        """Refuse options that mean nothing to the kind, and two that say the same."""
        if self.draft_vocab_size is not None and self.draft_vocab_coverage is not None:
            raise TrainError(
                f"draft_vocab_size is {self.draft_vocab_size} and draft_vocab_coverage is "
                f"{self.draft_vocab_coverage:g}; give one of the two"
            )
        for kind, options in (("independent", self.independent), ("dflash", self.dflash)):
            changed = [f.name for f in fields(options) if getattr(options, f.name) != f.default]
            if changed and self.kind != kind:
                value = getattr(options, changed[0])
                raise TrainError(f"{changed[0]} is {value}; give it to kind {kind} only, not to {self.kind}")
        if self.kind == "dflash" and self.num_draft_tokens is not None:
            raise TrainError(
                f"num_draft_tokens is {self.num_draft_tokens}; give block_size instead: one less is drafted"
            )


def _step_checks(steps: StepConfig, workers: int) -> tuple[tuple[str, Any, bool, str], ...]:
    parts = steps.micro_batches
    return (
        ("epochs", steps.epochs, steps.epochs > 0, "more than 0"),
        ("tokens_per_step", steps.tokens_per_step, steps.tokens_per_step >= 1, "at least 1"),
        ("micro_batches", parts, parts is None or parts >= workers, f"at least one for each of the {workers} workers"),
        ("row_tokens", steps.row_tokens, steps.row_tokens >= 1, "at least 1"),
        ("shuffle_tokens", steps.shuffle_tokens, steps.shuffle_tokens >= 1, "at least 1"),
        ("anchors_per_sequence", steps.anchors_per_sequence, steps.anchors_per_sequence >= 1, "at least 1"),
        ("learning_rate", steps.learning_rate, steps.learning_rate > 0, "more than 0"),
        ("precision", steps.precision, steps.precision in get_args(Precision), " or ".join(get_args(Precision))),
    )


def _check_loss(loss: LossConfig, *, blocks: bool) -> None:
    """Refuse a loss that there is not, and weights' options that the chosen weights do not have."""
    loss = loss.resolved(blocks=blocks)
    gamma = loss.gamma
    for name, value, good, mend in (
        ("loss", loss.kind, loss.kind in get_args(LossKind), " or ".join(get_args(LossKind))),
        ("loss_weights", loss.weights, loss.weights in get_args(LossWeights), " or ".join(get_args(LossWeights))),
        ("rho", loss.rho, 0 < loss.rho <= 1, "more than 0 and at most 1"),
        ("gamma", gamma, gamma is None or 0 < gamma < math.inf, "more than 0"),
        ("smoothing", loss.smoothing, 0 <= loss.smoothing <= 1, "a share between 0 and 1"),
    ):
        if not good:
            raise TrainError(f"{name} is {value}; give {mend}")
    for name, weights in (("rho", "geometric"), ("gamma", "exponential"), ("smoothing", "dpace")):
        changed = getattr(loss, name) != LossConfig.__dataclass_fields__[name].default
        if changed and loss.weights != weights:
            raise TrainError(f"{name} is {getattr(loss, name)}; give it to {weights} loss weights only")
