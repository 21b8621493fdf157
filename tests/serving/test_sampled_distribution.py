"""Sampled output of the engine follows the target's distribution, whatever the drafter (chi-square).

False-alarm rate per test 1e-4, on fixed seeds. The first emitted token comes from the prefill; the second and third
from verify rounds: 10,000 requests make 20,000 samples of those, which are tested against probabilities computed by
transformers alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from drafters import verify
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling, target_probs
from serving.engine.torch_rows import TorchRows
from tests.drafters.test_verify import ALPHA, chi_square
from tests.toy_target import VOCAB, AlwaysRight, AlwaysWrong, HalfRight, RandomProposer, toy_model

SAMPLES = 10_000  # requests
PROMPT = [7, 77, 177]
SHAPES = {
    "t1": Sampling(temperature=1.0, max_new_tokens=3),
    "t0.7": Sampling(temperature=0.7, max_new_tokens=3),
    "top-k": Sampling(temperature=1.0, top_k=7, max_new_tokens=3),
    "top-p": Sampling(temperature=1.2, top_p=0.8, max_new_tokens=3),
}


class AnyToken(RandomProposer):
    """Samples from all tokens, so that most rejections leave a residual that differs from the target."""

    def __init__(self, model):
        super().__init__(model, candidates=VOCAB)


CASES = [  # an argmax drafter takes another path through the engine than one that samples
    (AlwaysRight, "t0.7"),
    (AlwaysWrong, "top-k"),
    (HalfRight, "top-p"),
    (AnyToken, "t1"),
    (RandomProposer, "top-k"),
]


def wide_model():
    """Its distributions are wide: many tokens, none certain."""
    return toy_model(initializer_range=0.25)


@pytest.fixture(scope="module")
def model():
    """For the reference and for drafting; an engine changes the attention of the model that it takes over."""
    return wide_model()


def next_probs(model, ids: list[int], shape: Sampling) -> np.ndarray:
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[:, -1]
    params = torch.tensor([shape.temperature]), torch.tensor([shape.top_k]), torch.tensor([shape.top_p])
    return target_probs(logits, *params)[0].numpy()


def emitted(drafter, shape: Sampling, samples: int = SAMPLES) -> Counter[tuple[int, ...]]:
    rows = TorchRows(wide_model(), num_slots=400, max_len=16)
    engine = Engine(rows, drafter, config=EngineConfig(num_draft_tokens=2, max_prefill_rows=2000))
    params = [replace(shape, seed=seed) for seed in range(samples)]
    completions = engine.generate([PROMPT] * samples, params)
    assert engine.stats.fallbacks == {}
    assert drafter is None or engine.stats.acceptance.rounds >= samples
    return Counter(tuple(c.token_ids) for c in completions)


def worst_p(model, counts: Counter[tuple[int, ...]], shape: Sampling) -> float:
    """Smallest p-value over the first token, and over the next one after each common beginning, times their number."""
    observed: dict[tuple[int, ...], np.ndarray] = {}  # beginning -> how often each token followed
    for tokens, count in counts.items():
        for depth, token in enumerate(tokens):
            observed.setdefault(tokens[:depth], np.zeros(VOCAB))[token] += count
    p_values = []
    for start, followed in observed.items():
        if followed.sum() < 400:
            continue
        probs = next_probs(model, PROMPT + list(start), shape)
        assert followed[probs == 0].sum() == 0, "a token outside top-k or top-p came out"
        p_values.append(chi_square(followed[probs > 0], probs[probs > 0]))
    assert len(p_values) > 3, "no verify round was tested"
    return min(p_values) * len(p_values)


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_emitted_tokens_follow_the_target(kind, shape, model):
    counts = emitted(kind(model) if kind else None, SHAPES[shape])
    assert worst_p(model, counts, SHAPES[shape]) > ALPHA


def test_a_wrong_temperature_is_found(model):
    counts = emitted(None, SHAPES["t1"], samples=8000)
    assert worst_p(model, counts, Sampling(temperature=0.8)) < 1e-8


def test_a_wrong_rule_in_the_engine_is_found(model, monkeypatch: pytest.MonkeyPatch):
    """After a rejection, the target's distribution in place of the residual."""
    monkeypatch.setattr(verify, "residual", lambda target_probs_BV, _ids, _probs: target_probs_BV)
    counts = emitted(AnyToken(model), SHAPES["t1"], samples=20_000)
    assert worst_p(model, counts, SHAPES["t1"]) < 1e-8
