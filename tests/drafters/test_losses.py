"""Weights and losses by hand, and against plain loops in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from drafters.losses import (
    FinalNorm,
    LossConfig,
    Supervision,
    dpace_weights,
    draft_loss,
    exponential_weights,
    gamma_for,
    geometric_weights,
    position_weights,
    target_logits,
)
from drafters.training_batch import IGNORED

LOSSES = [
    LossConfig(kind=kind, weights=weights)
    for kind in ("cross_entropy", "kl")
    for weights in ("geometric", "exponential", "dpace")
]


def test_weights_are_powers_of_rho():
    torch.testing.assert_close(geometric_weights(4, 0.8), torch.tensor([1.0, 0.8, 0.64, 0.512]))
    assert geometric_weights(3, 1.0).tolist() == [1.0, 1.0, 1.0]
    assert geometric_weights(1, 0.5).tolist() == [1.0]


@pytest.mark.parametrize("rho", [0.0, -0.5, 1.01, math.nan])
def test_rho_out_of_range_is_refused(rho):
    with pytest.raises(ValueError, match=f"rho must be above 0 and at most 1, got {rho}"):
        geometric_weights(3, rho)


def test_exponential_weights_by_hand():
    # exp(-1/4), exp(-2/4), exp(-3/4)
    expected = torch.tensor([1.0, 0.77880078, 0.60653066, 0.47236655])
    torch.testing.assert_close(exponential_weights(4, 4.0), expected)
    torch.testing.assert_close(exponential_weights(2, 7.0), torch.tensor([1.0, 0.86687790]))
    with pytest.raises(ValueError, match=r"gamma must be above 0 and finite, got 0\.0"):
        exponential_weights(3, 0.0)


def test_gamma_follows_the_block_size():
    assert [gamma_for(size) for size in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert gamma_for(12) == 6.0
    seven_drafts = position_weights(LossConfig(weights="exponential"), 7)  # a block of 8
    torch.testing.assert_close(seven_drafts, exponential_weights(7, 4.0))
    torch.testing.assert_close(
        position_weights(LossConfig(weights="exponential", gamma=2.0), 3), torch.tensor([1.0, 0.60653066, 0.36787944])
    )


def test_dpace_weights_by_hand():
    # a = 0.5, q = 1, 0, 0.5: factors 1, 0.5, 0.75; products 1, 0.5, 0.375; sums from the right
    right, known = torch.tensor([[1.0, 0.0, 0.5]]), torch.ones(1, 3, dtype=torch.bool)
    torch.testing.assert_close(dpace_weights(right, known, 0.5), torch.tensor([[1.875, 0.875, 0.375]]))
    known[0, 2] = False  # past the end of the sequence: nothing can be accepted there
    torch.testing.assert_close(dpace_weights(right, known, 0.5), torch.tensor([[1.5, 0.5, 0.0]]))


def loop_dpace(right: list[float], a: float) -> list[float]:
    """w_j = sum_{i >= j} prod_{k <= i} ((1 - a) q_k + a), as it is written."""
    products = [math.prod((1 - a) * q + a for q in right[: i + 1]) for i in range(len(right))]
    return [sum(products[j:]) for j in range(len(right))]


@pytest.mark.parametrize("a", [0.0, 0.5, 1.0])
def test_dpace_weights_equal_a_plain_loop(a):
    right = torch.rand(6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    weights = dpace_weights(right, torch.ones(6, 7, dtype=torch.bool), a)
    assert not weights.requires_grad
    for n in range(6):
        assert weights[n].tolist() == pytest.approx(loop_dpace(right[n].tolist(), a), rel=1e-12)


def example(seed: int = 0) -> tuple[torch.Tensor, Supervision]:
    """5 anchors, 3 steps, 6 draft tokens, in float64; some labels unknown, some outside the draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 3, 6, generator=generator, dtype=torch.float64)
    draft_labels = torch.randint(0, 6, (5, 3), generator=generator)
    draft_labels[0, 1] = draft_labels[3, 2] = draft_labels[4, 2] = IGNORED
    labels = torch.where(draft_labels == IGNORED, IGNORED, draft_labels * 10)
    labels[0, 1] = 7  # known, and outside the draft vocabulary
    target = 2 * torch.randn(5, 3, 6, generator=generator, dtype=torch.float64)
    return logits, Supervision(labels_NK=labels, draft_labels_NK=draft_labels, target_logits_NKW=target)


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in row)
    return [math.exp(v) / total for v in row]


def loop_loss(config: LossConfig, logits: torch.Tensor, at: Supervision, weighted_by: torch.Tensor) -> float:
    """sum_k mean over known labels of weight * token loss, in plain Python; D-PACE weights come from `weighted_by`."""
    total = 0.0
    for k in range(logits.shape[1]):
        losses = []
        for n in range(logits.shape[0]):
            label = int(at.draft_labels_NK[n, k])
            if label == IGNORED:
                continue
            probs = softmax(logits[n, k].tolist())
            if config.kind == "cross_entropy":
                loss = -math.log(probs[label])
            else:
                target = softmax(at.target_logits_NKW[n, k].tolist())
                loss = sum(t * math.log(t / q) for t, q in zip(target, probs, strict=True))
            losses.append(loop_weight(config, at, weighted_by, n, k) * loss)
        if losses:
            total += sum(losses) / len(losses)
    return total


def loop_weight(config: LossConfig, at: Supervision, logits: torch.Tensor, n: int, k: int) -> float:
    if config.weights == "geometric":
        return 0.8**k
    if config.weights == "exponential":
        return math.exp(-k / 2)  # a block of 4
    right = []
    for j in range(logits.shape[1]):
        if int(at.labels_NK[n, j]) == IGNORED:
            break
        label = int(at.draft_labels_NK[n, j])
        right.append(softmax(logits[n, j].tolist())[label] if label != IGNORED else 0.0)
    return loop_dpace(right, 0.5)[k]


@pytest.mark.parametrize("config", LOSSES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_loss_equals_a_plain_loop(config, seed):
    logits, supervision = example(seed)
    result = draft_loss(config, logits, supervision)
    assert float(result.loss) == pytest.approx(loop_loss(config, logits, supervision, logits), rel=1e-6)
    assert result.known_K.tolist() == [5, 5, 3]
    right = (logits.argmax(-1) == supervision.draft_labels_NK).sum(dim=0)
    assert result.correct_K.tolist() == right.tolist()


@pytest.mark.parametrize("config", LOSSES, ids=str)
def test_gradient_equals_finite_differences(config):
    logits, supervision = example()
    logits.requires_grad_(True)
    draft_loss(config, logits, supervision).loss.backward()
    plain, step = logits.detach(), 1e-5
    for place in [(0, 0, 0), (2, 1, 3), (1, 2, 5), (4, 0, 2)]:
        up, down = plain.clone(), plain.clone()
        up[place] += step
        down[place] -= step
        # the weights stay those of the unchanged logits: no gradient flows through them
        rise = loop_loss(config, up, supervision, plain) - loop_loss(config, down, supervision, plain)
        assert float(logits.grad[place]) == pytest.approx(rise / (2 * step), rel=1e-5, abs=1e-9)
    assert logits.grad[0, 1].abs().max() == 0  # outside the draft vocabulary
    assert logits.grad[3, 2].abs().max() == 0  # unknown


@pytest.mark.parametrize("config", LOSSES, ids=str)
def test_nothing_known_is_no_loss_and_no_nan(config):
    logits = torch.randn(2, 3, 6, requires_grad=True)
    nothing = torch.full((2, 3), IGNORED)
    supervision = Supervision(labels_NK=nothing, draft_labels_NK=nothing, target_logits_NKW=torch.randn(2, 3, 6))
    result = draft_loss(config, logits, supervision)
    result.loss.backward()
    assert result.loss.item() == 0
    assert logits.grad.abs().max() == 0
    assert result.known_K.tolist() == result.correct_K.tolist() == [0, 0, 0]


def test_kl_is_zero_for_the_targets_own_logits_and_needs_them():
    logits, supervision = example()
    same = replace(supervision, target_logits_NKW=logits + 3.0)  # a shift of all logits is the same distribution
    assert float(draft_loss(LossConfig(kind="kl"), logits, same).loss) == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="give target_logits_NKW"):
        draft_loss(LossConfig(kind="kl"), logits, replace(supervision, target_logits_NKW=None))


def test_target_logits_by_hand():
    norm = FinalNorm(torch.tensor([1.0, 2.0]), 0.0)
    head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    features = torch.tensor([[3.0, 4.0]])  # of root mean square sqrt(12.5)
    expected = torch.tensor([[3.0, 8.0, 11.0]]) / math.sqrt(12.5)
    torch.testing.assert_close(target_logits(features, norm, head), expected)
