"""Sampled output of the engine follows the target's distribution, whatever the drafter (chi-square).

The first emitted token comes from the prefill; the second and third come from verify rounds and are the samples that
count. They are tested against probabilities computed by transformers alone, given the tokens before them. The target
is a toy of 16 tokens, so that most of those beginnings come up often enough to be tested one by one.

Here a small part in seconds; `test_sampled_cross_product.py` has every drafter with every shape. False-alarm rate per
test 1e-4, on fixed seeds: the draws are the same in every run.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np
import pytest
import torch
from scipy import stats

from drafters import verify
from drafters.checkpoint import as_drafter
from drafters.drafter import Drafter
from drafters.prompt_lookup import PromptLookupDrafter
from drafters.verify import Verdict
from serving.engine import verification
from serving.engine.engine import Engine, EngineConfig
from serving.engine.rows import RowsBackend
from serving.engine.sampling import Sampling, target_probs
from serving.engine.torch_rows import TorchRows
from tests.drafters.test_verify import ALPHA, chi_square_parts
from tests.toy_mtp import TAPS, toy_mtp
from tests.toy_own_mtp import random_own_mtp
from tests.toy_target import (
    AlwaysRight,
    AlwaysWrong,
    HalfRight,
    RandomProposer,
    RightInATree,
    SampledTrees,
    toy_model,
)

pytestmark = pytest.mark.statistical

VOCAB = 16
REQUESTS = 3000  # of a case here: two samples each
NUM_SLOTS = 2500  # wide batches: the cost is Python's, by pass and by sequence
PROMPT = [7, 3, 12]
PROMPT_TO_LOOK_UP = [7, 3, 12, 0, 9, 15, 1, 7, 4, 10, 2, 14, 6, 13, 5, 11, 8, 3]  # every token has a successor here
NEW_TOKENS = 3
MAX_LEN = len(PROMPT_TO_LOOK_UP) + 12
SHAPES = {
    "t1": Sampling(temperature=1.0, max_new_tokens=NEW_TOKENS),
    "t0.7": Sampling(temperature=0.7, max_new_tokens=NEW_TOKENS),
    "top-k": Sampling(temperature=1.0, top_k=7, max_new_tokens=NEW_TOKENS),
    "top-p": Sampling(temperature=1.2, top_p=0.8, max_new_tokens=NEW_TOKENS),
}
DRAFTERS: dict[str, Callable[[], Drafter]] = {  # those that sample go by the rejection rule, the others by the coupled
    "always-right": lambda: AlwaysRight(target()),
    "always-wrong": lambda: AlwaysWrong(target()),
    "half-right": lambda: HalfRight(target()),
    "random-few": lambda: RandomProposer(target(), candidates=6),
    "random-any": lambda: RandomProposer(target(), candidates=VOCAB),
    "prompt-lookup": lambda: PromptLookupDrafter(min_ngram=1),
    "mtp-recursive": lambda: as_drafter(toy_mtp(target(), vocab_size=VOCAB, draft_vocab_size=VOCAB)),
    "own-mtp": lambda: as_drafter(random_own_mtp(target(), layers=2)),
    "mtp-recursive trees": lambda: as_drafter(toy_mtp(target(), vocab_size=VOCAB, draft_vocab_size=VOCAB)),
    "right-in-trees": lambda: RightInATree(target()),
    "sampled-trees": lambda: SampledTrees(target(), candidates=6),
}
TREE_NODES = 5  # of the drafters that are named for them
CASES = [
    ("half-right", "top-p"),
    ("prompt-lookup", "t0.7"),
    ("mtp-recursive", "t1"),
    ("own-mtp", "t1"),
    ("random-any", "t1"),
    ("random-few", "top-k"),
    ("mtp-recursive trees", "t1"),
    ("sampled-trees", "t1"),
]


def new_target():
    """Its distributions are wide: many tokens, none certain."""
    return toy_model(vocab_size=VOCAB, initializer_range=0.25)


@lru_cache
def target():
    """For the reference and for drafting; an engine changes the attention of the model that it takes over."""
    return new_target()


@lru_cache
def rows() -> TorchRows:
    """One backend for all cases: every request begins its slot anew."""
    return TorchRows(new_target(), num_slots=NUM_SLOTS, max_len=MAX_LEN, target_layer_ids=TAPS)


@cache
def next_logits(prompt: tuple[int, ...], added: int) -> torch.Tensor:
    """[VOCAB ** added, VOCAB] by transformers, after the prompt and every possible continuation of so many tokens."""
    continuations = list(itertools.product(range(VOCAB), repeat=added))
    with torch.inference_mode():
        return target()(torch.tensor([prompt + more for more in continuations]), logits_to_keep=1).logits[:, -1]


@cache
def next_probs(prompt: tuple[int, ...], added: int, shape: Sampling) -> np.ndarray:
    """[VOCAB, ..., VOCAB] probabilities of the next token, given the prompt and `added` tokens after it."""
    logits = next_logits(prompt, added)
    count = len(logits)
    params = [shape.temperature] * count, [shape.top_k] * count, [shape.top_p] * count
    return target_probs(logits, *(torch.tensor(p) for p in params)).view((VOCAB,) * (added + 1)).numpy()


def emitted(
    drafter: str | None, shape: Sampling, requests: int = REQUESTS, backend: RowsBackend | None = None
) -> Counter[tuple[int, ...]]:
    """How often each sequence, prompt and three tokens, came out of the engine on `backend` (None: `rows`)."""
    prompt = PROMPT_TO_LOOK_UP if drafter == "prompt-lookup" else PROMPT
    nodes = TREE_NODES if drafter and "trees" in drafter else 0
    config = EngineConfig(
        num_draft_tokens=2, tree_nodes=nodes, max_prefill_rows=len(prompt) * NUM_SLOTS, reuse_prefixes=False
    )
    engine = Engine(backend or rows(), DRAFTERS[drafter]() if drafter else None, config=config)
    params = [replace(shape, seed=seed) for seed in range(requests)]
    gc.disable()  # tens of thousands of live objects and no cycle among them: collecting would take half the time
    try:
        completions = engine.generate([prompt] * requests, params)
    finally:
        gc.enable()
    assert engine.stats.fallbacks == {}
    if drafter:
        assert engine.stats.acceptance.rounds >= requests
        assert engine.stats.acceptance.proposed_by_position[0] >= requests, "drafts were asked for and not offered"
    return Counter((*c.prompt_ids, *c.token_ids) for c in completions)


def num_verified(counts: Counter[tuple[int, ...]]) -> int:
    """Tokens that verify rounds decided: all but the first of each answer."""
    return (NEW_TOKENS - 1) * counts.total()


def worst_p(counts: Counter[tuple[int, ...]], shape: Sampling) -> float:
    """Smallest p-value over the first token, and over the next one after each beginning, times their number.

    Beginnings that came up rarely are tested together, their statistics added up, so that every sample counts.
    """
    observed: dict[tuple[int, ...], np.ndarray] = {}  # beginning -> how often each token followed
    for tokens, count in counts.items():
        prompt_len = len(tokens) - NEW_TOKENS
        for place in range(prompt_len, len(tokens)):
            observed.setdefault(tokens[:place], np.zeros(VOCAB))[tokens[place]] += count
    p_values, statistic, degrees, tested = [], 0.0, 0, 0.0
    for start, followed in observed.items():
        probs = next_probs(start[:prompt_len], len(start) - prompt_len, replace(shape, seed=0))[start[prompt_len:]]
        possible = probs > 0
        if followed[~possible].any():  # a token outside top-k or top-p
            return 0.0
        part = chi_square_parts(followed[possible], probs[possible])
        if len(start) > prompt_len and part[1]:
            tested += followed.sum()
        if followed.sum() >= 200:
            p_values.append(float(stats.chi2.sf(*part)) if part[1] else 1.0)
        else:
            statistic, degrees = statistic + part[0], degrees + part[1]
    assert tested >= 0.8 * num_verified(counts), "verify rounds were hardly tested"
    p_values.append(float(stats.chi2.sf(statistic, degrees)) if degrees else 1.0)
    return min(p_values) * len(p_values)


@pytest.mark.parametrize(("drafter", "shape"), CASES)
def test_emitted_tokens_follow_the_target(drafter, shape):
    assert worst_p(emitted(drafter, SHAPES[shape]), SHAPES[shape]) > ALPHA


def test_a_wrong_temperature_is_found():
    assert worst_p(emitted(None, SHAPES["t1"]), replace(SHAPES["t1"], temperature=0.8)) < 1e-8


def draw_from_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: after a rejection, the target's distribution in place of the residual, for siblings as well."""
    monkeypatch.setattr(verify, "residual", lambda target_probs_BV, _ids, _probs: target_probs_BV)


def keep_some_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: one draft in ten is kept although the target drew another token."""
    right = verification.verify_tokens

    def wrong(target_tokens_BJ, drafts_BK, counts_B) -> Verdict:
        if drafts_BK.shape[1]:
            lucky_B = torch.arange(len(drafts_BK)) % 10 == 0
            target_tokens_BJ = target_tokens_BJ.clone()
            target_tokens_BJ[lucky_B, 0] = torch.where(counts_B > 0, drafts_BK[:, 0], target_tokens_BJ[:, 0])[lucky_B]
        return right(target_tokens_BJ, drafts_BK, counts_B)

    monkeypatch.setattr(verification, "verify_tokens", wrong)


FAULTS = [
    (draw_from_target, "random-any"),
    (keep_some_drafts, "prompt-lookup"),
    (draw_from_target, "sampled-trees"),
]


@pytest.mark.parametrize(("fault", "drafter"), FAULTS)
def test_a_wrong_rule_in_the_engine_is_found(fault, drafter, monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    assert worst_p(emitted(drafter, SHAPES["t1"], requests=2 * REQUESTS), SHAPES["t1"]) < 1e-8
