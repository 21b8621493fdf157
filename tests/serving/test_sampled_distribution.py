"""Sampled output of the whole engine follows the target's distribution, whatever the drafter (chi-square, 20,000 samples).

False-alarm rate per test 1e-4, on fixed seeds. The first emitted token comes from the prefill; the second and third
from verify rounds, so those are tested, against probabilities computed by transformers alone.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling, target_probs
from serving.engine.torch_rows import TorchRows
from tests.drafters.test_verify import ALPHA, chi_square
from tests.toy_target import VOCAB, AlwaysRight, AlwaysWrong, HalfRight, RandomProposer, toy_model

SAMPLES = 20_000
PROMPT = [7, 77, 177]
SHAPES = {
    "t1": Sampling(temperature=1.0, max_new_tokens=3),
    "t0.7": Sampling(temperature=0.7, max_new_tokens=3),
    "top-k": Sampling(temperature=1.0, top_k=7, max_new_tokens=3),
    "top-p": Sampling(temperature=1.2, top_p=0.8, max_new_tokens=3),
}


@pytest.fixture(scope="module")
def model():
    # A narrow initialisation keeps the distributions wide: many tokens, none certain.
    return toy_model(initializer_range=0.1)


def next_probs(model, ids: list[int], shape: Sampling) -> np.ndarray:
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[:, -1]
    params = torch.tensor([shape.temperature]), torch.tensor([shape.top_k]), torch.tensor([shape.top_p])
    return target_probs(logits, *params)[0].numpy()


def emitted(model, drafter, shape: Sampling) -> Counter[tuple[int, ...]]:
    rows = TorchRows(model, num_slots=250, max_len=16)
    engine = Engine(rows, drafter, config=EngineConfig(num_draft_tokens=2, max_prefill_rows=2000))
    params = [Sampling(**{**vars(shape), "seed": seed}) for seed in range(SAMPLES)]
    completions = engine.generate([PROMPT] * SAMPLES, params)
    assert engine.stats.fallbacks == {}
    return Counter(tuple(c.token_ids) for c in completions)


def worst_p(model, counts: Counter[tuple[int, ...]], shape: Sampling) -> float:
    """Smallest p-value over the first token, and over the next one after each common beginning, times their number."""
    p_values = []
    for depth in range(3):
        starts: Counter[tuple[int, ...]] = Counter()
        for tokens, count in counts.items():
            starts[tokens[:depth]] += count
        for start, total in starts.items():
            if total < 400:
                continue
            observed = np.zeros(VOCAB)
            for tokens, count in counts.items():
                if tokens[:depth] == start:
                    observed[tokens[depth]] += count
            probs = next_probs(model, PROMPT + list(start), shape)
            assert observed[probs == 0].sum() == 0, "a token outside top-k or top-p came out"
            p_values.append(chi_square(observed[probs > 0], probs[probs > 0]))
    assert len(p_values) > 3, "no verify round was tested"
    return min(p_values) * len(p_values)


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("kind", [None, AlwaysRight, AlwaysWrong, HalfRight, RandomProposer])
def test_emitted_tokens_follow_the_target(kind, shape, model):
    drafter = kind(model_for_drafting()) if kind else None
    counts = emitted(model, drafter, SHAPES[shape])
    assert worst_p(model, counts, SHAPES[shape]) > ALPHA


def model_for_drafting():
    """The drafter's own copy: an engine changes the attention of the model that it takes over."""
    return toy_model(initializer_range=0.1)


def test_the_test_finds_a_wrong_temperature(model):
    counts = emitted(model, None, SHAPES["t1"])
    assert worst_p(model, counts, Sampling(temperature=0.8)) < 1e-8
