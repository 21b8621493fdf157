"""Whatever joins, leaves, is cancelled or stops, and however long the drafts: every sequence equals its solo run, and
every slot is free at the end (hypothesis, on the toy target with the native and the torch backend)."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafters.prompt_lookup import PromptLookupDrafter
from serving.engine import native_build
from serving.engine.engine import Engine, EngineConfig
from serving.engine.native_rows import NativeRows
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_target import (
    AlwaysRight,
    AlwaysWrong,
    HalfRight,
    RandomProposer,
    RightInATree,
    toy_model,
    toy_prompts,
)

SHARED = toy_prompts(1, seed=4, low=20, high=20)[0]
PROMPTS = [*toy_prompts(3, seed=3, low=1, high=30), *(SHARED + p for p in toy_prompts(3, seed=5, low=1, high=12))]
SAMPLINGS = (
    Sampling(max_new_tokens=24),
    Sampling(max_new_tokens=7),
    Sampling(max_new_tokens=24, temperature=0.9, seed=5),
    Sampling(max_new_tokens=24, temperature=1.1, top_k=20, top_p=0.9, seed=6),
    Sampling(max_new_tokens=24, stop_token_ids=tuple(range(0, 256, 9))),
)


@lru_cache
def rows(backend: str):
    if backend == "native":
        if native_build.unavailable_reason():
            pytest.skip(str(native_build.unavailable_reason()))
        return NativeRows(toy_model(), dtype=torch.float32, num_slots=3, max_len=64, num_threads=1)
    return TorchRows(toy_model(), num_slots=3, max_len=64)


@lru_cache
def solo(backend: str, prompt: int, sampling: int) -> list[int]:
    """Plain decoding of one request alone."""
    return Engine(rows(backend)).generate([PROMPTS[prompt]], SAMPLINGS[sampling])[0].token_ids


@lru_cache
def drafter(name: str):
    """One of each kind for all examples: their memory of the toy target's argmax makes them fast."""
    kinds = {d.name: d for d in (AlwaysRight, AlwaysWrong, HalfRight, RightInATree)}
    return PromptLookupDrafter(min_ngram=1) if name == "prompt-lookup" else kinds[name](toy_model())


joins = st.tuples(st.just("join"), st.integers(0, len(PROMPTS) - 1), st.integers(0, len(SAMPLINGS) - 1))
events = st.lists(
    st.one_of(
        joins,
        joins,
        st.tuples(st.just("cancel"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("length"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("nodes"), st.integers(0, 12), st.just(0)),
        st.tuples(st.just("rounds"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("swap"), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("backend", ["native", "torch"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    script=events,
    name=st.sampled_from(["always-right", "always-wrong", "half-right", "right-in-a-tree", "prompt-lookup", "none"]),
    prefill=st.integers(1, 40),
    adapt=st.booleans(),
)
def test_every_sequence_equals_its_solo_run(backend, script, name, prefill, adapt):
    config = EngineConfig(max_prefill_rows=prefill, adapt_draft_length=adapt, tree_nodes=8)
    engine = Engine(rows(backend), None if name == "none" else drafter(name), config=config)
    wanted: dict[str, tuple[int, int]] = {}
    cancelled: set[str] = set()
    done = {}

    def rounds(most: int) -> None:
        for _ in range(most):
            done.update({p.request_id: p.completion for p in engine.step() if p.completion})

    for kind, first, second in script:
        if kind == "join":
            request_id = engine.add(PROMPTS[first], SAMPLINGS[second])
            wanted[request_id] = (first, second)
        elif kind == "cancel" and wanted:
            request_id = list(wanted)[first % len(wanted)]
            engine.cancel(request_id)
            cancelled.add(request_id)
        elif kind == "length":
            engine.num_draft_tokens = first
        elif kind == "nodes" and name == "right-in-a-tree":
            engine.tree_nodes = max(1, first)
        elif kind == "rounds":
            rounds(first)
        elif kind == "swap":
            engine.set_drafter(engine.drafter)
    rounds(400)

    assert not engine.has_work
    assert engine.free_slots == 3
    assert engine.stats.fallbacks == {}
    assert done.keys() == wanted.keys()
    for request_id, (prompt, sampling) in wanted.items():
        alone, tokens = solo(backend, prompt, sampling), done[request_id].token_ids
        if request_id in cancelled and done[request_id].finish_reason == "cancelled":
            assert tokens == alone[: len(tokens)]
        else:
            assert tokens == alone


@lru_cache
def proposer() -> RandomProposer:
    return RandomProposer(toy_model())


@lru_cache
def solo_drafted(prompt: int, sampling: Sampling) -> list[int]:
    """One request alone, with the drafter that samples."""
    return Engine(rows("torch"), proposer()).generate([PROMPTS[prompt]], sampling)[0].token_ids


@settings(max_examples=12)
@given(script=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=2, max_size=6))
def test_a_drafter_that_samples_gives_the_same_tokens_in_any_company(script):
    """Its drafts change which random numbers decide, so it is compared with its own solo run."""
    sampling = Sampling(max_new_tokens=16, temperature=1.0, seed=9)
    alone = [solo_drafted(i, sampling) for i in script]
    engine = Engine(rows("torch"), proposer())
    assert [c.token_ids for c in engine.generate([PROMPTS[i] for i in script], sampling)] == alone
    assert engine.free_slots == 3
