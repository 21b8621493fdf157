"""The training step of a drafter, without Ray: sequences in, a trained module and its curve out.

The target is frozen; the loss is a weighted sum over draft positions (`drafters/losses.py`). A step is the sum of its
packs, whoever computes them: one worker or several, at once or one after another. `train.py` runs it on Ray.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafters.acceptance import Acceptance
from drafters.drafter_module import DrafterModule, DraftLogits
from drafters.losses import FinalNorm, draft_loss, draftable_labels, position_weights, supervise
from drafters.training_batch import TrainingBatch, pack_documents
from pipelines.curve_point import CurvePoint
from pipelines.expected_acceptance import expected_acceptance
from pipelines.pack_source import LanePack, PackSource
from pipelines.step_config import StepConfig, multiplies_in_bfloat16
from pipelines.training_sequence import TrainingSequence

MAX_SKIPPED_STEPS = 10  # in a row, before training gives up
MAX_SKIPPED_SHARE = 0.1  # of the sequences, before training gives up
SHARE_COUNTS_FROM = 100  # sequences


class TrainingFailedError(ValueError):
    """Training that cannot go on; one line with cause and mend."""


@dataclass(frozen=True)
class Team:
    """This worker among those that train together."""

    rank: int = 0
    world: int = 1
    sum: Callable[[Tensor], Tensor] = lambda tensor: tensor  # over all workers; everybody gets it
    union: Callable[[set[str]], set[str]] = lambda values: values  # the same of sets

    def lanes(self, count: int) -> range:
        """The parts of a step that this worker computes."""
        return range(self.rank, count, self.world)


@dataclass(frozen=True, kw_only=True)
class _StepFacts:
    """Of one step, over all workers."""

    loss: float
    correct_K: Tensor
    known_K: Tensor
    extra: dict[str, float]  # further losses by the name of a point's field


class Trainer:
    """Trains a bound module on its share of every step's packs. One per worker."""

    EXTRA: tuple[str, ...] = ()  # fields of a point that `_backward` returns beside the usual ones

    def __init__(
        self,
        module: DrafterModule,
        source: PackSource,
        held_out: Sequence[TrainingSequence],
        config: StepConfig,
        *,
        team: Team | None = None,
        forward: torch.nn.Module | None = None,
        final_norm: FinalNorm | None = None,
    ):
        """`forward` is the module wrapped for distributed training. `held_out` is this worker's share."""
        self.loss = config.loss.resolved(blocks=hasattr(module.config, "block_size"))
        self.module, self.forward, self.source = module, forward or module, source
        self.held_out, self.config, self.team = held_out, config, team or Team()
        self.lanes = self.team.lanes(source.order.config.lanes)
        if config.loss.kind == "kl" and final_norm is None:
            raise ValueError("the kl loss recomputes the target's logits; give its final_norm")
        if not self.lanes:
            raise ValueError(f"{self.team.world} workers cannot share {source.order.config.lanes} micro-batches")
        self.total_steps = source.order.steps_of(config.epochs)
        self.num_draft_tokens = module.config.num_draft_tokens
        if self.loss.weights != "dpace":
            module.slot_weights_K = position_weights(self.loss, self.num_draft_tokens)
        self.device = module.lm_head_WD.device
        self.final_norm = None
        if final_norm is not None and config.loss.kind == "kl":
            self.final_norm = replace(final_norm, weight_D=final_norm.weight_D.to(self.device))
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        for group in self.optimizer.param_groups:
            group["peak"] = config.learning_rate
        self.in_bfloat16 = multiplies_in_bfloat16(config.precision, self.device)
        # over all starts: optimiser steps taken, response tokens and sequences seen, seconds
        self.done = self.tokens = self.sequences = 0
        self.skipped_steps = self.skipped_in_a_row = self.skipped_sequences = 0
        self.seconds = self.waited_seconds = 0.0
        self._gradient_norm: float | None = None

    COUNTERS = (
        "done",
        "tokens",
        "sequences",
        "skipped_steps",
        "skipped_in_a_row",
        "skipped_sequences",
        "seconds",
        "waited_seconds",
    )

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on after `done` steps: order, anchors and learning rate follow from seed and step."""
        counters = {name: getattr(self, name) for name in self.COUNTERS}
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in self.COUNTERS:
            setattr(self, name, state[name])

    def run(self) -> Iterator[CurvePoint]:
        """Train to the end, yielding a point after every step; some carry expected tau. Raises TrainingFailedError."""
        every = max(1, math.ceil(self.total_steps / max(1, self.config.evaluations)))
        self.module.train()
        first = self.done + 1
        asked = time.perf_counter()
        for step, packs in enumerate(self.source.steps(self.lanes, first, self.total_steps), start=first):
            self.waited_seconds += time.perf_counter() - asked
            facts = self._step(step, packs)
            self.done, self.seconds = step, self.seconds + time.perf_counter() - asked
            measured = by_category = None
            if step % every == 0 or step == self.total_steps:
                measured, by_category = self._expected()
            yield CurvePoint(
                step=step,
                total_steps=self.total_steps,
                seconds=self.seconds,
                waited_seconds=self.waited_seconds,
                loss=facts.loss if facts else None,
                accuracy_by_position=(facts.correct_K / facts.known_K.clamp(min=1)).tolist() if facts else [],
                expected_tau=measured.tau if measured else None,
                acceptance_by_position=measured.by_position if measured else None,
                tokens=self.tokens,
                tau_by_category=by_category,
                skipped_steps=self.skipped_steps,
                skipped_sequences=self.skipped_sequences,
                learning_rate=self.config.learning_rate * self._schedule(step),
                gradient_norm=self._gradient_norm,
                **(facts.extra if facts else {}),
            )
            asked = time.perf_counter()

    # -- a step -------------------------------------------------------------------------------------------------------

    def _step(self, step: int, packs: Sequence[LanePack]) -> _StepFacts | None:
        """Take a step; None if its gradient was not finite."""
        batches = [self._batch(step, pack) for pack in packs]
        labels_K = self._count(packs, batches)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * self._schedule(step)
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(1 + 2 * self.num_draft_tokens + len(self.EXTRA), device=self.device)
        for number, batch in enumerate(batches, start=1):
            with self._in_sync(number == len(batches)):
                sums += self._backward(replace(batch, step_labels_K=labels_K))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
        sizes = [1, self.num_draft_tokens, self.num_draft_tokens, len(self.EXTRA)]
        loss, correct_K, known_K, extra = self.team.sum(sums).cpu().split(sizes)
        self._gradient_norm = float(norm) if bool(torch.isfinite(norm)) else None
        if self._gradient_norm is None:  # the same on every worker: gradients are the team's
            self._skip(step)
            return None
        self.optimizer.step()
        self.skipped_in_a_row = 0
        further = dict(zip(self.EXTRA, extra.tolist(), strict=True))
        return _StepFacts(loss=float(loss), correct_K=correct_K, known_K=known_K, extra=further)

    def _batch(self, step: int, pack: LanePack) -> TrainingBatch:
        """The lane's pack with anchors that follow from seed, step and lane."""
        generator = self._anchor_generator(step, pack)
        documents = [s.document(self.config.anchors_per_sequence, generator) for s in pack.sequences]
        return pack_documents(documents, self.config.row_tokens).to(self.device)

    def _anchor_generator(self, step: int, pack: LanePack) -> torch.Generator:
        return torch.Generator().manual_seed((self.config.seed * 1_000_003 + step) * 1009 + pack.lane)

    def _count(self, packs: Sequence[LanePack], batches: Sequence[TrainingBatch]) -> Tensor:
        """[K] labels of the whole step that can be drafted; counts what the team saw. Raises TrainingFailedError."""
        sequences = [s for pack in packs for s in pack.sequences]
        used = sum(int(batch.documents_used()) for batch in batches)
        own = [sum(s.response_tokens for s in sequences), len(sequences), len(sequences) - used]
        labels_K = torch.stack([draftable_labels(self.module, batch) for batch in batches]).sum(dim=0)
        total = self.team.sum(torch.cat([labels_K.double(), torch.tensor(own, device=self.device).double()]))
        tokens, seen, skipped = (int(x) for x in total[-3:])
        self.tokens, self.sequences = self.tokens + tokens, self.sequences + seen
        self.skipped_sequences += skipped
        if self.sequences >= SHARE_COUNTS_FROM and self.skipped_sequences > MAX_SKIPPED_SHARE * self.sequences:
            raise TrainingFailedError(
                f"the features of {self.skipped_sequences} of {self.sequences} sequences are not finite; "
                "generate the rollouts again, in another dtype if the target overflows"
            )
        return total[: self.num_draft_tokens].float()

    def _backward(self, batch: TrainingBatch) -> Tensor:
        """Add a batch's gradient; returns its part of the step's [loss, correct labels K, known labels K, EXTRA]."""
        with warnings.catch_warnings(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.in_bfloat16):
            # norms keep float32 weights: they are no matrix products
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
            output: DraftLogits = self.forward(batch)
        supervision = supervise(self.module, batch, self.final_norm)
        result = draft_loss(self.loss, output.logits_BAKW.flatten(0, 1), supervision)
        loss = result.loss + sum(output.auxiliary.values())
        (loss * self.team.world).backward()  # distributed training takes the mean over workers, a step is their sum
        return torch.cat([loss.detach()[None], result.correct_K, result.known_K]).float()

    def _in_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Workers add up their gradients with the last of a step's batches."""
        no_sync = getattr(self.forward, "no_sync", None)
        return contextlib.nullcontext() if last or no_sync is None else no_sync()

    def _skip(self, step: int) -> None:
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise TrainingFailedError(
                f"the gradient was not finite in {self.skipped_in_a_row} steps in a row, up to step {step}; "
                "give a lower learning_rate, or precision float32"
            )

    def _schedule(self, step: int) -> float:
        """Share of the peak learning rate: linear warm-up, then cosine to zero at the last step (1-based)."""
        warmup = max(1.0, self.config.warmup_fraction * self.total_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 1) / self.total_steps))
        return min(1.0, step / warmup) * cosine

    # -- expected tau -------------------------------------------------------------------------------------------------

    def _expected(self) -> tuple[Acceptance, dict[str, float]]:
        """Expected acceptance on the held-out sequences, and tau of each of their categories."""
        categories = sorted(self.team.union({s.category for s in self.held_out}))
        parts = {category: Acceptance() for category in categories}
        for sequence in self.held_out:
            parts[sequence.category].add(self._expected_of(sequence))
        whole, taus = Acceptance(), {}
        counts = torch.stack([_counts(parts[c], self.num_draft_tokens) for c in categories]) if categories else None
        for category, row in zip(categories, [] if counts is None else self.team.sum(counts), strict=True):
            part = _acceptance(row)
            whole.add(part)
            if part.tau is not None:
                taus[category] = part.tau
        return whole, taus

    def _expected_of(self, sequence: TrainingSequence) -> Acceptance:
        return expected_acceptance(self.module, [sequence], self.num_draft_tokens)


def _counts(acceptance: Acceptance, num_draft_tokens: int) -> Tensor:
    """[1 + 2K] the counters as numbers that can be added up."""
    missing = [0] * (num_draft_tokens - len(acceptance.proposed_by_position))
    by_position = [*acceptance.proposed_by_position, *missing, *acceptance.accepted_by_position, *missing]
    return torch.tensor([acceptance.rounds, *by_position], dtype=torch.float64)


def _acceptance(counts: Tensor) -> Acceptance:
    rounds, *rest = (int(x) for x in counts)
    proposed, accepted = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    if not rounds:
        return Acceptance()
    return Acceptance(rounds, sum(proposed), proposed, accepted)
