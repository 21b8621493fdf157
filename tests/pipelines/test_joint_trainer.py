"""The joint regime's trainer: both models learn, in parts as in one go, and a run that was killed goes on."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from pipelines.joint_trainer import JointModule, JointTrainer
from pipelines.pack_source import memory_source
from pipelines.step_config import StepConfig
from pipelines.training import Team
from tests.toy_mtp import sequence_of, toy_mtp
from tests.toy_target import toy_model

CONFIG = StepConfig(
    epochs=6, tokens_per_step=60, anchors_per_sequence=8, learning_rate=1e-2, evaluations=2, precision="float32"
)


@pytest.fixture(scope="module")
def sequences():
    """Counting up: text that a trunk can learn."""
    model = toy_model()
    return [sequence_of(model, [(first + i) % 40 for i in range(20)], prompt_len=3) for first in range(0, 40, 4)]


def trainer_of(sequences, config=CONFIG, beta=0.3, seed=0, team=None, workers=1) -> JointTrainer:
    trunk = toy_model()
    joint = JointModule(trunk, toy_mtp(trunk, seed=seed))
    source = memory_source(sequences, config.order(workers))
    return JointTrainer(joint, source, sequences[:3], config, beta=beta, trunk_learning_rate=3e-3, team=team)


def test_both_losses_fall_and_are_told_apart(sequences):
    trainer = trainer_of(sequences)
    before = trainer.held_out_loss()
    points = list(trainer.run())
    assert trainer.held_out_loss() < before - 0.5
    assert points[-1].ntp_loss < points[0].ntp_loss - 0.5
    assert points[-1].loss - points[-1].ntp_loss < 0.7 * (points[0].loss - points[0].ntp_loss)
    assert points[-1].expected_tau is not None
    assert {group["peak"] for group in trainer.optimizer.param_groups} == {1e-2, 3e-3}


def test_with_beta_0_the_trunk_is_trained_as_if_there_were_no_heads(sequences):
    one, other = (trainer_of(sequences, replace(CONFIG, epochs=1, clip_norm=1e9), beta=0.0, seed=s) for s in (0, 5))
    for trainer in (one, other):
        for _ in trainer.run():
            pass
    for (name, ours), theirs in zip(
        one.joint.trunk.state_dict().items(), other.joint.trunk.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_resumed_training_ends_with_the_weights_of_an_undisturbed_run(sequences):
    config = replace(CONFIG, epochs=1.5)
    undisturbed = trainer_of(sequences, config)
    total = len(list(undisturbed.run()))
    killed, state = trainer_of(sequences, config), None
    for point in killed.run():
        if point.step == 2:
            state = copy.deepcopy(killed.state_dict())
            break
    resumed = trainer_of(sequences, config, seed=9)
    resumed.load_state_dict(state)
    assert len(list(resumed.run())) == total - 2
    for name, tensor in undisturbed.joint.state_dict().items():
        assert torch.equal(resumed.joint.state_dict()[name], tensor), name


def test_two_parts_of_a_step_are_the_whole(sequences):
    config = replace(CONFIG, micro_batches=2, clip_norm=1e9)

    def gradients(rank: int, world: int, totals: list[torch.Tensor], said: list[torch.Tensor]) -> torch.Tensor:
        def add(tensor: torch.Tensor) -> torch.Tensor:
            said.append(tensor)
            return totals[len(said) - 1] if len(said) <= len(totals) else tensor

        trainer = trainer_of(sequences, config, team=Team(rank, world, add))
        next(trainer.run())
        return torch.cat([p.grad.flatten() for p in trainer.parameters])

    alone: list[torch.Tensor] = []
    whole = gradients(0, 1, [], alone)
    parts = [gradients(rank, 2, alone, []) for rank in (0, 1)]
    torch.testing.assert_close(torch.stack(parts).mean(dim=0), whole, rtol=1e-3, atol=1e-4)
