"""The joint regime's training step: a trunk and its MTP module, L_NTP + beta * L_MTP, on the steps of the frozen one.

In: sequences (their stored features are not read) and a trunk with gradients. Out: both, trained, and their curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drafters.acceptance import Acceptance
from drafters.drafter_module import DrafterModule
from drafters.joint import joint_loss, next_token_loss, tapped_forward, trunk_weights
from drafters.training_batch import TrainingBatch, pad_documents
from pipelines.expected_acceptance import expected_acceptance
from pipelines.pack_source import LanePack, PackSource
from pipelines.step_config import StepConfig
from pipelines.training import Team, Trainer
from pipelines.training_sequence import TrainingSequence


class JointModule(nn.Module):
    """Both models as one, so that distributed training sees all parameters."""

    def __init__(self, trunk: nn.Module, module: DrafterModule):
        super().__init__()
        self.trunk, self.module = trunk, module

    def forward(self, batch: TrainingBatch, beta: float, loss: Any, step_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, [next-token loss, correct labels K, known labels K]) of a part of a step."""
        found = joint_loss(self.trunk, self.module, batch, beta, loss, step_tokens=step_tokens)
        facts = torch.cat([found.ntp.detach()[None], found.mtp.correct_K, found.mtp.known_K])
        return found.loss, facts


class JointTrainer(Trainer):
    """Trains trunk and module together. The curve's loss is that of both; `ntp_loss` is the trunk's own."""

    EXTRA = ("ntp_loss",)

    def __init__(
        self,
        joint: JointModule,
        source: PackSource,
        held_out: Sequence[TrainingSequence],
        config: StepConfig,
        *,
        beta: float,
        trunk_learning_rate: float,
        team: Team | None = None,
        forward: nn.Module | None = None,
    ):
        """`trunk_learning_rate` is the trunk's peak; the module's is the config's."""
        joint.trunk.requires_grad_(True)
        joint.trunk.train()
        super().__init__(joint.module, source, held_out, config, team=team, forward=forward or joint)
        self.joint, self.beta = joint, beta
        own = [p for p in joint.trunk.parameters() if p.requires_grad]
        self.optimizer.add_param_group({"params": own, "lr": trunk_learning_rate, "peak": trunk_learning_rate})
        self.parameters = [*self.parameters, *own]
        self._step_tokens = torch.ones(())

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"trunk": self.joint.trunk.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.joint.trunk.load_state_dict(state["trunk"])

    def _batch(self, step: int, pack: LanePack) -> TrainingBatch:
        generator = self._anchor_generator(step, pack)
        documents = [_without_features(s).document(self.config.anchors_per_sequence, generator) for s in pack.sequences]
        return pad_documents(documents).to(self.device)

    def _count(self, packs: Sequence[LanePack], batches: Sequence[TrainingBatch]) -> Tensor:
        own = sum(len(s.ids) - 1 for pack in packs for s in pack.sequences)
        self._step_tokens = self.team.sum(torch.tensor(float(own), device=self.device))
        return super()._count(packs, batches)

    def _backward(self, batch: TrainingBatch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.in_bfloat16):
            loss, facts = self.forward(batch, self.beta, self.loss, self._step_tokens)
        (loss * self.team.world).backward()
        return torch.cat([loss.detach()[None], facts[1:], facts[:1]]).float()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """L_NTP of the trunk on the held-out sequences: mean over their tokens."""
        self.joint.trunk.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for sequence in self.held_out:
            ids_1T = sequence.ids[None].to(self.device)
            logits_1TV = self.joint.trunk(input_ids=ids_1T, use_cache=False).logits
            length = torch.tensor([ids_1T.shape[1]], device=self.device)
            sums += torch.stack([next_token_loss(logits_1TV, ids_1T, length) * (length[0] - 1), length[0] - 1]).double()
        self.joint.trunk.train()
        total, tokens = self.team.sum(sums)
        return float(total / tokens)

    def _expected_of(self, sequence: TrainingSequence) -> Acceptance:
        """On features of the trunk as it is."""
        with torch.no_grad():
            self.joint.trunk.eval()
            self.module.bind(trunk_weights(self.joint.trunk))
            self.module.to(self.device)
            _, features_1TF = tapped_forward(
                self.joint.trunk, sequence.ids[None].to(self.device), self.module.config.target_layer_ids
            )
            self.joint.trunk.train()
        seen = replace(sequence, features=features_1TF[0, :-1].cpu())
        return expected_acceptance(self.module, [seen], self.num_draft_tokens)


def _without_features(sequence: TrainingSequence) -> TrainingSequence:
    """Rows without width: the trunk puts features out anew."""
    return replace(sequence, features=torch.zeros(len(sequence.ids) - 1, 0))
