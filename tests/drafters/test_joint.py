"""The joint regime: its value, and where its gradients go; the frozen regime beside it."""

from __future__ import annotations

import pytest
import torch

from drafters.joint import joint_loss, tapped_forward
from drafters.losses import LossConfig, Supervision, draft_loss
from drafters.training_batch import Document, TrainingBatch, anchor_places, pad_documents
from pipelines.step_config import StepConfig
from tests.toy_mtp import TAPS, features_of, sequence_of, tokens_of, toy_mtp, toy_trainer
from tests.toy_target import toy_model, toy_prompts

KINDS = ["recursive", "independent"]
PROMPTS = toy_prompts(3, low=9, high=16)


@pytest.fixture
def model():
    return toy_model()


def batch_of(prompts: list[list[int]], features: list[torch.Tensor] | None = None) -> TrainingBatch:
    """Every pair of every sequence that has a label is an anchor; without features their places are empty."""
    rows = features or [torch.full((len(p) - 1, 64), torch.nan) for p in prompts]
    places = [anchor_places([(2, len(p))]) for p in prompts]
    documents = [
        Document(ids_T=torch.tensor(p), features_TF=f, anchors_A=anchors, ends_A=ends)
        for p, f, (anchors, ends) in zip(prompts, rows, places, strict=True)
    ]
    return pad_documents(documents)


def frozen_loss(model, module, config: LossConfig) -> float:
    """The loss of the frozen regime on features of a plain forward pass, sequence by sequence."""
    with torch.no_grad():
        batch = batch_of(PROMPTS, [features_of(model, p)[:-1] for p in PROMPTS])
        labels = batch.labels(module.config.num_draft_tokens)
        target = [
            [[model(torch.tensor([p[: a + k + 1]])).logits[0, -1] for k in (1, 2, 3)] for a in anchors]
            for p, anchors in zip(PROMPTS, batch.anchors_BA.tolist(), strict=True)
        ]
        supervision = Supervision(
            labels_NK=labels.flatten(0, 1),
            draft_labels_NK=module.draft_labels(labels).flatten(0, 1),
            target_logits_NKW=torch.stack([torch.stack(row) for rows in target for row in rows]),
        )
        return float(draft_loss(config, module(batch).logits_BAKW.flatten(0, 1), supervision).loss)


def next_token_loss(model) -> float:
    """Mean of -log p(next token) over all positions of all prompts, one prompt at a time."""
    total, count = 0.0, 0
    for prompt in PROMPTS:
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for position, token in enumerate(prompt[1:]):
            total, count = total - float(log_probs[position, token]), count + 1
    return total / count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [LossConfig(), LossConfig(kind="kl", weights="dpace")], ids=str)
def test_value_is_that_of_both_losses(kind, config, model):
    module = toy_mtp(model, kind)
    with torch.no_grad():
        found = joint_loss(model, module, batch_of(PROMPTS), 0.3, config)
    ntp, mtp = next_token_loss(model), frozen_loss(model, module, config)
    assert float(found.ntp) == pytest.approx(ntp, rel=1e-5)
    assert float(found.mtp.loss) == pytest.approx(mtp, rel=1e-4)
    assert float(found.loss) == pytest.approx(ntp + 0.3 * mtp, rel=1e-4)


def trunk_gradients(model, module, beta: float) -> dict[str, torch.Tensor]:
    model.zero_grad()
    joint_loss(model, module, batch_of(PROMPTS), beta).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_trunk_and_heads(kind, model):
    module = toy_mtp(model, kind).train()
    without, joint = trunk_gradients(model, module, 0.0), trunk_gradients(model, module, 1.0)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())
    inside = "model.layers.1.mlp.down_proj.weight"
    assert (joint[inside] - without[inside]).abs().max() > 1e-4, "the heads' loss does not reach the trunk"
    # the final norm is the target's own business where the heads read features, that is, what comes before it
    assert torch.equal(joint["model.norm.weight"], without["model.norm.weight"])
    assert "embedding_VD" not in dict(module.named_parameters())


def test_borrowed_weights_follow_the_trunk(model):
    module = toy_mtp(model, vocab_ids=range(0, 256, 2))
    joint_loss(model, module, batch_of(PROMPTS), 1.0)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    joint_loss(model, module, batch_of(PROMPTS), 1.0)
    assert torch.equal(module.lm_head_WD, model.lm_head.weight.detach()[::2])


def test_trunk_and_heads_learn_together(model):
    module = toy_mtp(model).train()
    optimizer = torch.optim.AdamW([*model.parameters(), *module.parameters()], lr=3e-3)
    losses = []
    for _ in range(40):
        found = joint_loss(model, module, batch_of(PROMPTS), 0.5)
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
        losses.append((found.ntp.item(), found.mtp.loss.item()))
    assert losses[-1][0] < losses[0][0] / 2
    assert losses[-1][1] < losses[0][1] / 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_frozen_regime_leaves_the_trunk_alone(kind, model):
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    module = toy_mtp(model, kind)
    sequences = [sequence_of(model, p, prompt_len=2) for p in PROMPTS]
    config = StepConfig(epochs=2, tokens_per_step=tokens_of(sequences), evaluations=1)
    for _ in toy_trainer(module, sequences, [], config).run():
        pass
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.grad is None, name


def test_tapped_features_are_the_outputs_of_the_layers_whatever_the_padding(model):
    _, features = tapped_forward(model, batch_of(PROMPTS).ids_BT, TAPS)
    for b, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(features[b, : len(prompt)], features_of(model, prompt), rtol=1e-4, atol=1e-4)


def test_a_negative_beta_is_refused(model):
    with pytest.raises(ValueError, match="beta must be 0 or more, got -1"):
        joint_loss(model, toy_mtp(model), batch_of(PROMPTS), -1)
