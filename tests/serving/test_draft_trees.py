"""Trees in the engine: the output stays the target's own, the longest path that it would have said is kept."""

from __future__ import annotations

import pytest
import torch

from drafters.checkpoint import as_drafter
from serving.engine import native_build
from serving.engine.engine import Engine, EngineConfig
from serving.engine.native_recursive_drafter import NativeRecursiveDrafter
from serving.engine.native_rows import NativeRows
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_mtp import TAPS, toy_mtp
from tests.toy_target import RightInATree, SampledTrees, toy_model, toy_prompts

NATIVE = pytest.mark.skipif(bool(native_build.unavailable_reason()), reason="no native library")
BACKENDS = ["torch", pytest.param("native", marks=NATIVE)]


def backend(name: str, slots: int = 3, max_len: int = 128):
    if name == "torch":
        return TorchRows(toy_model(), num_slots=slots, max_len=max_len, target_layer_ids=TAPS)
    return NativeRows(
        toy_model(), dtype=torch.float32, num_slots=slots, max_len=max_len, target_layer_ids=TAPS, num_threads=1
    )


def drafter(kind: str):
    if kind == "right":
        return RightInATree(toy_model())
    if kind == "sampled":
        return SampledTrees(toy_model(), candidates=6)
    if kind == "native head":
        return NativeRecursiveDrafter(toy_mtp(toy_model()), num_threads=1)
    return as_drafter(toy_mtp(toy_model(), kind="independent" if kind == "independent heads" else "recursive"))


def engine_for(name: str, made, nodes: int = 9, depth: int = 3, **options) -> Engine:
    config = EngineConfig(num_draft_tokens=depth, tree_nodes=nodes, **options)
    return Engine(backend(name), made, config=config)


KINDS = ["right", "recursive head", "independent heads", pytest.param("native head", marks=NATIVE)]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return toy_prompts(7, seed=3)


@pytest.mark.parametrize("adapt", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "sampled"])
@pytest.mark.parametrize("name", BACKENDS)
def test_trees_never_change_greedy_output(name, kind, adapt, prompts):
    sampling = Sampling(max_new_tokens=40)
    plain = Engine(backend(name)).generate(prompts, sampling, keep_features=True)
    engine = engine_for(name, drafter(kind), adapt_draft_length=adapt)
    drafted = engine.generate(prompts, sampling, keep_features=True)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert engine.stats.fallbacks == {}
    assert engine.stats.acceptance.proposed > 0
    for mine, want in zip(drafted, plain, strict=True):  # of the accepted path, not of its siblings
        torch.testing.assert_close(mine.features_TF.float(), want.features_TF.float(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_seed_gives_plain_decodings_tokens_with_trees(name, kind, prompts):
    params = [Sampling(temperature=0.9, top_p=0.95, max_new_tokens=30, seed=seed) for seed in range(len(prompts))]
    plain = Engine(backend(name)).generate(prompts, params)
    drafted = engine_for(name, drafter(kind)).generate(prompts, params)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]


@pytest.mark.parametrize(("nodes", "tau"), [(9, 4), (8, 4), (5, 3), (2, 2), (1, 1)])
def test_tau_of_a_tree_that_holds_the_right_path(nodes, tau, prompts):
    """Depth d is right in node 3d + 1: so many of these fit into the budget."""
    engine = engine_for("torch", drafter("right"), nodes=nodes)
    completions = engine.generate(prompts, Sampling(max_new_tokens=25, ignore_eos=True))
    acceptance = engine.stats.acceptance
    assert acceptance.tau == tau
    assert acceptance.proposed == acceptance.rounds * nodes
    assert acceptance.by_position == [1.0] * (tau - 1) + [0.0] * (len(acceptance.by_position) - tau + 1)
    passes = [c.acceptance.rounds for c in completions]
    assert passes == [-(-24 // tau)] * len(prompts)


def test_trees_fill_a_slot_to_its_end():
    """Where fewer entries are left than a tree has nodes, only so many of them are verified."""
    prompt = list(range(1, 21))
    for name in ("torch", *(["native"] if not native_build.unavailable_reason() else [])):
        plain = Engine(backend(name, max_len=40)).generate([prompt], Sampling(max_new_tokens=20, ignore_eos=True))
        config = EngineConfig(num_draft_tokens=3, tree_nodes=9)
        engine = Engine(backend(name, max_len=40), drafter("right"), config=config)
        drafted = engine.generate([prompt], Sampling(max_new_tokens=20, ignore_eos=True))
        assert drafted[0].token_ids == plain[0].token_ids
        assert engine.stats.fallbacks == {}


def test_rows_of_a_tree_pass_are_anchor_and_nodes(prompts):
    engine = engine_for("torch", drafter("right"), nodes=6)
    engine.generate([prompts[0]], Sampling(max_new_tokens=10, ignore_eos=True))
    rounds = engine.stats.acceptance.rounds
    assert engine.stats.rows == len(prompts[0]) + rounds * 7
    assert engine.stats.passes == rounds + 1


@pytest.mark.parametrize(
    ("parents", "word"),
    [([-1, 2, 0], "before the one that it follows"), ([-1, -1, 0], "two equal children")],
)
def test_a_tree_that_makes_no_sense_costs_only_its_drafts(parents, word, prompts, caplog):
    class Broken(RightInATree):
        def draft(self, request):
            reply = super().draft(request)
            batch = len(request.slots)
            return type(reply)(tokens_BK=torch.tensor([[5, 5, 7]] * batch), parents_BK=torch.tensor([parents] * batch))

    plain = Engine(backend("torch")).generate(prompts, Sampling(max_new_tokens=12))
    engine = engine_for("torch", Broken(toy_model()))
    drafted = engine.generate(prompts, Sampling(max_new_tokens=12))
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert "ValueError" in engine.stats.fallbacks
    assert word in caplog.text
