"""The recursive head on the native kernels: the drafts of the torch one, whatever the company, and plain errors."""

from __future__ import annotations

import pytest
import torch

from drafters.checkpoint import as_drafter
from drafters.drafter import DraftRequest
from serving.engine import native_build
from serving.engine.native_recursive_drafter import NativeRecursiveDrafter
from tests.toy_mtp import toy_mtp
from tests.toy_target import toy_model

if native_build.unavailable_reason():
    pytest.skip(native_build.unavailable_reason() or "", allow_module_level=True)

SHAPES = {
    "grouped": {},
    "one kv head, three taps": {"num_key_value_heads": 1, "target_layer_ids": (0, 1, 1), "num_attention_heads": 3},
    "odd sizes": {"head_dim": 10, "intermediate_size": 41, "num_attention_heads": 6, "num_key_value_heads": 6},
}


def request(
    slots: list[int],
    starts: list[int],
    counts: list[int],
    *,
    steps: int = 4,
    nodes: int = 0,
    taps: int = 2,
    epoch: int = 1,
    seed: int,
) -> DraftRequest:
    """Random pairs that depend on slot, position and seed only."""
    tokens, features = [], []
    for slot, start, count in zip(slots, starts, counts, strict=True):
        for position in range(start, start + count):
            generator = torch.Generator().manual_seed(seed * 10**6 + slot * 10**4 + position)
            tokens.append(torch.randint(0, 256, (1,), generator=generator))
            features.append(torch.randn(1, taps * 32, generator=generator))
    return DraftRequest(
        slots=slots,
        epochs=[epoch] * len(slots),
        counts=counts,
        starts=starts,
        first_tokens=[1] * len(slots),
        tokens_N=torch.cat(tokens),
        features_NF=torch.cat(features),
        num_draft_tokens=steps,
        tree_nodes=nodes,
        temperatures=[0.0] * len(slots),
        seeds=[0] * len(slots),
    )


def native(
    module, *, slots: int = 4, max_len: int = 300, dtype=torch.float32, isa: str | None = None, threads: int = 2
):
    drafter = NativeRecursiveDrafter(module, num_threads=threads, dtype=dtype, isa=isa)
    drafter.allocate(slots, max_len)
    return drafter


@pytest.mark.parametrize("isa", native_build.runnable_isas())
@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_are_those_of_the_torch_head(shape: str, isa: str):
    module = toy_mtp(toy_model(), vocab_ids=range(3, 250, 2), **SHAPES[shape])
    taps = len(module.config.target_layer_ids)
    reference, drafter = as_drafter(module), native(module, isa=isa)
    reference.allocate(4, 300)
    starts = [0, 0, 0]
    for counts in ([130, 1, 97], [1, 4, 2], [5, 5, 5], [1, 1, 1]):  # prompts longer than a chunk of rows among them
        asked = request([3, 0, 2], starts, counts, taps=taps, seed=1)
        assert drafter.draft(asked).tokens_BK.tolist() == reference.draft(asked).tokens_BK.tolist()
        starts = [s + c for s, c in zip(starts, counts, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_do_not_depend_on_the_company(dtype: torch.dtype):
    """More sequences than go through the layer together, some of which catch up; each alone drafts the same."""
    module = toy_mtp(toy_model())
    many = 100
    together = native(module, slots=many, max_len=40, dtype=dtype)
    lengths = [1 + 7 * slot % 11 for slot in range(many)]
    slots = list(range(many))
    first = together.draft(request(slots, [0] * many, lengths, seed=2)).tokens_BK
    second = together.draft(request(slots, lengths, [1 + s % 3 for s in slots], seed=2)).tokens_BK
    for slot in (0, 1, 50, 95, 96, 99):
        alone = native(module, slots=many, max_len=40, dtype=dtype, threads=1)
        one = alone.draft(request([slot], [0], [lengths[slot]], seed=2)).tokens_BK
        two = alone.draft(request([slot], [lengths[slot]], [1 + slot % 3], seed=2)).tokens_BK
        assert (one[0].tolist(), two[0].tolist()) == (first[slot].tolist(), second[slot].tolist())


@pytest.mark.parametrize("isa", native_build.runnable_isas())
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_are_those_of_the_torch_head(shape: str, isa: str):
    """Several rounds of trees of many sizes, so that what trees left in the slots is overwritten."""
    module = toy_mtp(toy_model(), vocab_ids=range(3, 250, 2), **SHAPES[shape])
    taps = len(module.config.target_layer_ids)
    reference, drafter = as_drafter(module), native(module, isa=isa)
    reference.allocate(4, 300)
    starts = [0, 0, 0]
    for counts, nodes, steps in (([130, 1, 97], 7, 5), ([1, 4, 2], 1, 3), ([5, 5, 5], 40, 6), ([1, 1, 1], 12, 1)):
        asked = request([3, 0, 2], starts, counts, steps=steps, nodes=nodes, taps=taps, seed=1)
        mine, want = drafter.draft(asked), reference.draft(asked)
        assert mine.counts == want.counts
        for b, count in enumerate(want.counts):
            assert mine.tokens_BK[b, :count].tolist() == want.tokens_BK[b, :count].tolist()
            assert mine.parents_BK[b, :count].tolist() == want.parents_BK[b, :count].tolist()
            torch.testing.assert_close(
                mine.confidence_BK[b, :count], want.confidence_BK[b, :count], atol=1e-6, rtol=1e-4
            )
        starts = [s + c for s, c in zip(starts, counts, strict=True)]


def test_a_tree_of_one_child_each_is_the_chain():
    """With a head that is sure of every token, the likeliest nodes lie one below the other."""
    module = toy_mtp(toy_model())
    with torch.no_grad():
        module.norm.weight.mul_(1000)
    chain = native(module).draft(request([0, 1], [0, 0], [5, 9], steps=6, seed=3))
    tree = native(module).draft(request([0, 1], [0, 0], [5, 9], steps=6, nodes=6, seed=3))
    assert tree.tokens_BK.tolist() == chain.tokens_BK.tolist()
    assert tree.parents_BK.tolist() == [[-1, 0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trees_do_not_depend_on_the_company(dtype: torch.dtype):
    module = toy_mtp(toy_model())
    many = 20  # more than go through the layer together
    together = native(module, slots=many, max_len=40, dtype=dtype)
    lengths = [1 + 7 * slot % 11 for slot in range(many)]
    whole = together.draft(request(list(range(many)), [0] * many, lengths, nodes=9, seed=2))
    for slot in (0, 5, 6, 19):
        alone = native(module, slots=many, max_len=40, dtype=dtype, threads=1)
        one = alone.draft(request([slot], [0], [lengths[slot]], nodes=9, seed=2))
        assert one.tokens_BK[0].tolist() == whole.tokens_BK[slot].tolist()
        assert one.parents_BK[0].tolist() == whole.parents_BK[slot].tolist()
        assert torch.equal(one.confidence_BK[0], whole.confidence_BK[slot])


def test_fewer_drafts_are_the_first_of_more():
    module = toy_mtp(toy_model())
    longest = native(module).draft(request([0, 1], [0, 0], [5, 9], steps=7, seed=3)).tokens_BK
    for steps in range(7):
        shorter = native(module).draft(request([0, 1], [0, 0], [5, 9], steps=steps, seed=3)).tokens_BK
        assert shorter.tolist() == longest[:, :steps].tolist()


def test_a_new_epoch_forgets_the_old_one():
    module = toy_mtp(toy_model())
    used, fresh = native(module), native(module)
    used.draft(request([0], [0], [60], seed=4))
    again = used.draft(request([0], [0], [5], epoch=2, seed=5)).tokens_BK
    assert again.tolist() == fresh.draft(request([0], [0], [5], seed=5)).tokens_BK.tolist()


def test_drafts_fit_behind_a_full_slot():
    drafter = native(toy_mtp(toy_model()), max_len=20)
    assert drafter.draft(request([0], [0], [20], steps=16, seed=6)).tokens_BK.shape == (1, 16)


def test_errors_are_plain():
    drafter = native(toy_mtp(toy_model()), max_len=20)
    drafter.draft(request([0], [0], [4], seed=7))
    with pytest.raises(ValueError, match="slot 0 of epoch 1 knows 4 pairs, and the next ones start at 6"):
        drafter.draft(request([0], [6], [1], seed=7))
    with pytest.raises(ValueError, match="17 drafts asked for, this drafter makes at most 16"):
        drafter.draft(request([0], [4], [1], steps=17, seed=7))
    with pytest.raises(ValueError, match=r"features of shape \(1, 32\) for 1 pairs"):
        drafter.draft(request([1], [0], [1], taps=1, seed=7))
    with pytest.raises(ValueError, match="pair 269 does not fit the drafter: position"):
        drafter.draft(request([2], [0], [270], steps=8, seed=7))
    with pytest.raises(ValueError, match="pair 229 does not fit the drafter: position"):  # a tree takes more room
        drafter.draft(request([3], [0], [230], steps=8, nodes=60, seed=7))
