"""Rows of trees: each gives what it gives in a chain of its own path, and an accepted path becomes the sequence."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from serving.engine import native_build
from serving.engine.native_rows import NativeRows
from serving.engine.rows import Move, Rows, RowsBackend, Run, make_rows
from serving.engine.torch_rows import TorchRows
from tests.serving.test_families import FAMILIES, make
from tests.toy_target import toy_model

Build = Callable[[], RowsBackend]
NATIVE = [(isa, dtype) for isa in native_build.runnable_isas() for dtype in (torch.float32, torch.bfloat16)]
BACKENDS: dict[str, Build] = {
    f"native {isa} {str(dtype)[6:]}": lambda isa=isa, dtype=dtype: NativeRows(
        toy_model(), dtype=dtype, num_slots=4, max_len=200, isa=isa, num_threads=2, target_layer_ids=(0, 1)
    )
    for isa, dtype in ([] if native_build.unavailable_reason() else NATIVE)
} | {"torch": lambda: TorchRows(toy_model(), num_slots=4, max_len=200, target_layer_ids=(0, 1))}
BACKENDS |= {
    f"torch, {family}": lambda family=family: TorchRows(
        make(FAMILIES[family]), num_slots=4, max_len=200, target_layer_ids=(0, 3)
    )
    for family in FAMILIES
    if family.startswith(("gemma4", "deepseek3"))
}


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def random_tree(count: int, seed: int) -> list[int]:
    """Parents of `count` rows, the anchor first; some trees are deep, some wide."""
    rng = random.Random(seed)
    return [-1] + [rng.choice([i - 1, rng.randrange(i)]) for i in range(1, count)]


def path_of(parents: list[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def same(name: str, a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) if name.startswith("native") else torch.allclose(a, b, atol=1e-3 if "," in name else 2e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_of_a_tree_gives_what_its_path_gives_as_a_chain(name: str):
    """Trees of several sizes and a prompt's chunk in one pass; natively the bits are the same."""
    rows, chains = BACKENDS[name](), BACKENDS[name]()
    prompts = [tokens(n, seed=n) for n in (19, 64, 3)]
    for backend in (rows, chains):
        backend.forward(make_rows([(slot, 0, prompt) for slot, prompt in enumerate(prompts)]))
    drafted = [(tokens(n, seed=n + 50), random_tree(n, seed=n)) for n in (8, 40, 1)]
    late = tokens(45, seed=9)
    runs = [Run(slot, len(prompts[slot]), ids, parents) for slot, (ids, parents) in enumerate(drafted)]
    out = rows.forward(make_rows([*runs, Run(3, 0, late)]))
    logits, features = out.logits_NV.clone(), out.features_RF.clone()
    row = 0
    for slot, (ids, parents) in enumerate(drafted):
        for i in range(len(ids)):
            path = [ids[j] for j in path_of(parents, i)]
            want = chains.forward(make_rows([Run(slot, len(prompts[slot]), path)]))
            assert same(name, logits[row], want.logits_NV[-1]), (slot, i)
            assert same(name, features[row], want.features_RF[-1])
            row += 1
    assert same(name, logits[row:], chains.forward(make_rows([Run(3, 0, late)])).logits_NV)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_accepted_path_goes_on_like_a_chain(name: str):
    rows, chain = BACKENDS[name](), BACKENDS[name]()
    prompt, (ids, parents) = tokens(30, seed=1), (tokens(12, seed=2), [-1, 0, 0, 0, 2, 2, 3, 5, 5, 7, 8, 9])
    path = path_of(parents, 11)  # 0 2 5 7 9 11
    for backend in (rows, chain):
        backend.forward(make_rows([Run(2, 0, prompt)]))
    rows.forward(make_rows([Run(2, 30, ids, parents)]))
    rows.move_entries([Move(2, 30, [30 + j for j in path])])
    chain.forward(make_rows([Run(2, 30, [ids[j] for j in path])]))
    after = tokens(20, seed=3)  # over the entries that rejected siblings left
    mine, want = (b.forward(make_rows([Run(2, 30 + len(path), after)])).logits_NV for b in (rows, chain))
    assert same(name, mine, want)


@pytest.mark.parametrize("name", BACKENDS)
def test_entries_that_cannot_be_moved_are_refused(name: str):
    rows = BACKENDS[name]()
    for slot, start, entries in [(4, 0, [1]), (0, 3, [2]), (0, 3, [5, 4]), (0, 3, [3, 3]), (0, 190, [200])]:
        with pytest.raises(ValueError, match=rf"entries \[.*\] of slot {slot} do not fit at {start}"):
            rows.move_entries([Move(0, 2, [2]), Move(slot, start, entries)])


def test_native_trees_that_make_no_sense_are_refused():
    if native_build.unavailable_reason():
        pytest.skip("no native library")
    rows = NativeRows(toy_model(), dtype=torch.float32, num_slots=2, max_len=20)
    for parents in ([-1, 0, 3, 1], [-1, -1, 0, 1], [0, 0, 1, 2]):
        with pytest.raises(ValueError, match="must lie together, each one position past the row it follows"):
            rows.forward(Rows(
                ids_R=torch.tensor([1, 2, 3, 4]), slots_R=torch.zeros(4, dtype=torch.int64),
                positions_R=torch.tensor([5, 6, 7, 8]), parents_R=torch.tensor(parents),
            ))  # fmt: skip
    with pytest.raises(ValueError, match="position 18 is outside"):  # its entry would be
        rows.forward(make_rows([Run(0, 17, [1, 2, 3, 4], [-1, 0, 0, 0])]))
