"""The training step of a drafter, without Ray: sequences in, a trained module and its curve out.

The target is frozen; the loss is a weighted sum over draft positions (`drafters/losses.py`). Expected tau is read off
by walking held-out continuations of the target round by round, as the engine would. `train.py` runs it on Ray.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from drafters.acceptance import Acceptance
from drafters.drafter_module import DrafterModule, DraftLogits
from drafters.losses import FinalNorm, LossConfig, draft_loss, position_weights, supervise
from drafters.training_batch import TrainingBatch, pad_sequences, random_anchors


@dataclass(frozen=True)
class TrainingSequence:
    """One rollout as the trainer sees it."""

    ids: Tensor  # int64 [T], prompt and response
    prompt_len: int
    features: Tensor  # [T - 1, taps * D]
    category: str = ""  # of its prompt
    greedy: bool = True  # the response is the target's argmax throughout


ANCHORS_AT_ONCE = 128  # of a long sequence, whose logits for all anchors would not fit into memory
Precision = Literal["auto", "float32", "bfloat16"]


def multiplies_in_bfloat16(precision: Precision, device: torch.device) -> bool:
    """Whether matrix products run in bfloat16."""
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # elsewhere bfloat16 is emulated, and slow
    return bool(native and native())


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """How the optimiser walks."""

    epochs: float = 8.0  # passes over the training sequences
    sequences_per_step: int = 8  # sequences of one optimiser step, over all workers
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


@dataclass(frozen=True)
class CurvePoint:
    """State of training after a step."""

    step: int
    total_steps: int
    seconds: float  # of optimiser steps, over all starts of the run; without measuring expected tau
    loss: float  # mean since the last point
    accuracy_by_position: list[float]  # K, share of the batch's labels that are the step's argmax
    expected_tau: float | None = None  # on the held-out sequences, where measured
    acceptance_by_position: list[float] | None = None
    tokens: int = 0  # response tokens seen so far, repeats counted
    tau_by_category: dict[str, float] | None = None  # expected tau of the held-out sequences, category by category

    @property
    def evaluated(self) -> bool:
        """Whether expected tau was measured here; it may be unknown, if all held-out responses are too short."""
        return self.acceptance_by_position is not None


@dataclass
class _Window:
    """Means since the last point shown."""

    losses: list[float] = field(default_factory=list)
    correct_K: Tensor | int = 0
    known_K: Tensor | int = 0


def expected_acceptance(module: DrafterModule, sequences: list[TrainingSequence], num_draft_tokens: int) -> Acceptance:
    """What the engine would accept on the target's own continuations: rounds walked from anchor to anchor.

    Rounds that would draft past the known continuation are left out.
    """
    acceptance = Acceptance()
    for accepted in accepted_drafts(module, sequences, num_draft_tokens):
        acceptance.add(walk_rounds(accepted, num_draft_tokens))
    return acceptance


def accepted_drafts(module: DrafterModule, sequences: list[TrainingSequence], num_draft_tokens: int) -> list[list[int]]:
    """Per sequence, how many drafts would be kept in a round that begins after response token i = 0, 1, 2 ...

    The lists end where drafts would reach past the known continuation.
    """
    was_training, device = module.training, module.lm_head_WD.device
    module.eval()
    accepted: list[list[int]] = []
    for sequence in sequences:
        first = sequence.prompt_len - 1
        count = len(sequence.ids) - 1 - num_draft_tokens - first
        if count < 1:
            accepted.append([])
            continue
        kept: list[int] = []
        for anchors in torch.arange(first, first + count).split(ANCHORS_AT_ONCE):
            used = torch.ones((1, len(anchors)), dtype=torch.bool)
            batch = make_batch([sequence], anchors[None], used).to(device)
            match = (module.propose(batch) == batch.labels(num_draft_tokens))[0, :, :num_draft_tokens]
            kept += match.long().cumprod(dim=1).sum(dim=1).tolist()
        accepted.append(kept)
    module.train(was_training)
    return accepted


def walk_rounds(accepted: Sequence[int], num_draft_tokens: int) -> Acceptance:
    """The rounds within one list of `accepted_drafts`: each begins after the last token of the one before it."""
    acceptance, place = Acceptance(), 0
    while place < len(accepted):
        kept = min(accepted[place], num_draft_tokens)
        acceptance.record(num_draft_tokens, kept)
        place += kept + 1
    return acceptance


def make_batch(sequences: list[TrainingSequence], anchors: Tensor, mask: Tensor) -> TrainingBatch:
    """Pad sequences into a batch in float32."""
    ids, features, lengths = pad_sequences([s.ids for s in sequences], [s.features for s in sequences], torch.float32)
    return TrainingBatch(ids_BT=ids, features_BTF=features, lengths_B=lengths, anchors_BA=anchors, anchor_mask_BA=mask)


def total_steps(config: StepConfig, num_sequences: int) -> int:
    """Optimiser steps of a run over `num_sequences` training sequences."""
    return max(1, math.ceil(config.epochs * num_sequences / config.sequences_per_step))


class Trainer:
    """Trains a bound module on its share of every step's sequences. One per worker; `rank` of `world` workers."""

    def __init__(
        self,
        module: DrafterModule,
        sequences: list[TrainingSequence],
        held_out: list[TrainingSequence],
        config: StepConfig,
        *,
        rank: int = 0,
        world: int = 1,
        forward: torch.nn.Module | None = None,
        final_norm: FinalNorm | None = None,
    ):
        self.loss = config.loss.resolved(blocks=hasattr(module.config, "block_size"))
        if config.loss.kind == "kl" and final_norm is None:
            raise ValueError("the kl loss recomputes the target's logits; give its final_norm")
        if config.sequences_per_step % world:
            raise ValueError(f"sequences_per_step ({config.sequences_per_step}) must divide by {world} workers")
        if not sequences:
            raise ValueError("no training sequence has three response tokens; generate more or longer rollouts")
        self.module, self.forward = module, forward or module  # `forward` may be wrapped for distributed training
        self.sequences, self.held_out, self.config = sequences, held_out, config
        self.rank, self.world = rank, world
        self.total_steps = total_steps(config, len(sequences))
        self.num_draft_tokens = module.config.num_draft_tokens
        if self.loss.weights != "dpace":
            module.slot_weights_K = position_weights(self.loss, self.num_draft_tokens)
        device = module.lm_head_WD.device
        self.final_norm = None
        if final_norm is not None and config.loss.kind == "kl":
            self.final_norm = FinalNorm(final_norm.weight_D.to(device), final_norm.eps)
        parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.parameters = parameters
        self.in_bfloat16 = multiplies_in_bfloat16(config.precision, device)
        self.done = 0  # optimiser steps taken
        self.seconds = 0.0  # that they took, over all starts

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on after `done` steps: the order of the data is a function of seed and step alone."""
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "done": self.done,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.seconds = int(state["done"]), float(state["seconds"])

    def run(self) -> Iterator[CurvePoint]:
        """Train to the end, yielding a point after every step; some carry expected tau."""
        window, tokens = _Window(), 0
        every = max(1, math.ceil(self.total_steps / max(1, self.config.evaluations)))
        self.module.train()
        for step, (chosen, anchor_seed) in enumerate(self._order(), start=1):
            tokens += sum(len(s.ids) - s.prompt_len for s in chosen) * self.world
            if step <= self.done:
                continue
            started = time.perf_counter()
            self._step(step, chosen, anchor_seed, window)
            self.done, self.seconds = step, self.seconds + time.perf_counter() - started
            measured = by_category = None
            if step % every == 0 or step == self.total_steps:
                measured, by_category = self._expected()
            correct, known = torch.as_tensor(window.correct_K), torch.as_tensor(window.known_K)
            yield CurvePoint(
                step=step,
                total_steps=self.total_steps,
                seconds=self.seconds,
                loss=sum(window.losses) / len(window.losses),
                accuracy_by_position=(correct / known.clamp(min=1)).tolist(),
                expected_tau=measured.tau if measured else None,
                acceptance_by_position=measured.by_position if measured else None,
                tokens=tokens,
                tau_by_category=by_category,
            )
            if step % 10 == 0 or measured:
                window = _Window()

    def _expected(self) -> tuple[Acceptance, dict[str, float]]:
        """Expected acceptance on the held-out sequences, and tau of each of their categories."""
        parts: dict[str, list[TrainingSequence]] = {}
        for sequence in self.held_out:
            parts.setdefault(sequence.category, []).append(sequence)
        whole, taus = Acceptance(), {}
        for category, sequences in sorted(parts.items()):
            part = expected_acceptance(self.module, sequences, self.num_draft_tokens)
            whole.add(part)
            if part.tau is not None:
                taus[category] = part.tau
        return whole, taus

    def _order(self) -> Iterator[tuple[list[TrainingSequence], int]]:
        """This worker's sequences of every step and a seed for their anchors: a function of seed and step alone."""
        generator = torch.Generator().manual_seed(self.config.seed)
        order: list[int] = []
        per_worker = self.config.sequences_per_step // self.world
        for step in range(self.total_steps):
            while len(order) < self.config.sequences_per_step:
                order += torch.randperm(len(self.sequences), generator=generator).tolist()
            chosen, order = order[: self.config.sequences_per_step], order[self.config.sequences_per_step :]
            mine = chosen[self.rank * per_worker : (self.rank + 1) * per_worker]
            yield [self.sequences[i] for i in mine], (self.config.seed * 1_000_003 + step) * self.world + self.rank

    def _step(self, step: int, chosen: list[TrainingSequence], anchor_seed: int, window: _Window) -> None:
        device = self.module.lm_head_WD.device
        anchors, mask = random_anchors(
            [s.prompt_len for s in chosen],
            [len(s.ids) for s in chosen],
            self.config.anchors_per_sequence,
            torch.Generator().manual_seed(anchor_seed),
        )
        batch = make_batch(chosen, anchors, mask).to(device)
        with warnings.catch_warnings(), torch.autocast(device.type, torch.bfloat16, enabled=self.in_bfloat16):
            # norms keep float32 weights: they are no matrix products
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
            output: DraftLogits = self.forward(batch)
        supervision = supervise(self.module, batch, self.final_norm)
        result = draft_loss(self.loss, output.logits_BAKW.flatten(0, 1), supervision)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self.optimizer.zero_grad(set_to_none=True)
        loss = result.loss + sum(output.auxiliary.values())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
        self.optimizer.step()
        window.losses.append(float(loss.detach()))
        window.correct_K = window.correct_K + result.correct_K
        window.known_K = window.known_K + result.known_K

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up, then cosine to zero at the last step (1-based)."""
        warmup = max(1.0, self.config.warmup_fraction * self.total_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 1) / self.total_steps))
        return self.config.learning_rate * min(1.0, step / warmup) * cosine
