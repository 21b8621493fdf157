"""Weights and loss by hand."""

from __future__ import annotations

import math

import pytest
import torch

from drafters.losses import draft_loss, geometric_weights
from drafters.training_batch import IGNORED


def test_weights_are_powers_of_rho():
    torch.testing.assert_close(geometric_weights(4, 0.8), torch.tensor([1.0, 0.8, 0.64, 0.512]))
    assert geometric_weights(3, 1.0).tolist() == [1.0, 1.0, 1.0]
    assert geometric_weights(1, 0.5).tolist() == [1.0]


@pytest.mark.parametrize("rho", [0.0, -0.5, 1.01, math.nan])
def test_rho_out_of_range_is_refused(rho):
    with pytest.raises(ValueError, match=f"rho must be above 0 and at most 1, got {rho}"):
        geometric_weights(3, rho)


def example(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """5 anchors, 3 steps, 6 draft tokens, in float64; some labels unknown, some outside the draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 3, 6, generator=generator, dtype=torch.float64)
    draft_labels = torch.randint(0, 6, (5, 3), generator=generator)
    draft_labels[0, 1] = draft_labels[3, 2] = draft_labels[4, 2] = IGNORED
    labels = torch.where(draft_labels == IGNORED, IGNORED, draft_labels * 10)
    labels[0, 1] = 7  # known, and outside the draft vocabulary
    return logits, labels, draft_labels, torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)


def loop_loss(logits: torch.Tensor, draft_labels: torch.Tensor, weights: torch.Tensor) -> float:
    """sum_k lambda_k * mean over known labels of -log q_k(label), in plain Python."""
    total = 0.0
    for k in range(logits.shape[1]):
        losses = []
        for n in range(logits.shape[0]):
            label = int(draft_labels[n, k])
            if label != IGNORED:
                row = logits[n, k].tolist()
                losses.append(math.log(sum(math.exp(v) for v in row)) - row[label])
        if losses:
            total += float(weights[k]) * sum(losses) / len(losses)
    return total


@pytest.mark.parametrize("seed", range(3))
def test_loss_equals_a_plain_loop(seed):
    logits, labels, draft_labels, weights = example(seed)
    result = draft_loss(logits, labels, draft_labels, weights)
    assert float(result.loss) == pytest.approx(loop_loss(logits, draft_labels, weights), rel=1e-6)
    assert result.known_K.tolist() == [5, 5, 3]
    right = (logits.argmax(-1) == draft_labels).sum(dim=0)
    assert result.correct_K.tolist() == right.tolist()


def test_gradient_equals_finite_differences():
    logits, labels, draft_labels, weights = example()
    logits.requires_grad_(True)
    draft_loss(logits, labels, draft_labels, weights).loss.backward()
    plain, step = logits.detach(), 1e-5
    for place in [(0, 0, 0), (2, 1, 3), (1, 2, 5), (4, 0, 2)]:
        up, down = plain.clone(), plain.clone()
        up[place] += step
        down[place] -= step
        slope = (loop_loss(up, draft_labels, weights) - loop_loss(down, draft_labels, weights)) / (2 * step)
        assert float(logits.grad[place]) == pytest.approx(slope, rel=1e-4, abs=1e-8)
    assert logits.grad[0, 1].abs().max() == 0  # outside the draft vocabulary
    assert logits.grad[3, 2].abs().max() == 0  # unknown


def test_nothing_known_is_no_loss_and_no_nan():
    logits = torch.randn(2, 3, 6, requires_grad=True)
    nothing = torch.full((2, 3), IGNORED)
    result = draft_loss(logits, nothing, nothing, torch.ones(3))
    result.loss.backward()
    assert result.loss.item() == 0
    assert logits.grad.abs().max() == 0
    assert result.known_K.tolist() == result.correct_K.tolist() == [0, 0, 0]
