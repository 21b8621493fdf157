"""Trees in the engine: the output stays the target's own, the longest path that it would have said is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from drafters.checkpoint import as_drafter
from drafters.drafter import DraftReply, SparseProbs
from serving.engine import native_build
from serving.engine.draft_length import DraftLengthChooser
from serving.engine.engine import Engine, EngineConfig
from serving.engine.native_recursive_drafter import NativeRecursiveDrafter
from serving.engine.native_rows import NativeRows
from serving.engine.sampling import Sampling
from serving.engine.sequence import Completion
from serving.engine.torch_rows import TorchRows
from tests.toy_mtp import TAPS, toy_mtp
from tests.toy_target import AlwaysRight, RightInATree, SampledTrees, toy_model, toy_prompts

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


GREEDY = Sampling(max_new_tokens=40)
SEEDED = [Sampling(temperature=0.9, top_p=0.95, max_new_tokens=30, seed=seed) for seed in range(7)]


@pytest.fixture(scope="module")
def plain(prompts) -> Callable[[str, bool], list[Completion]]:
    """What a backend decodes without drafts, greedily or with seeds; once each."""

    @functools.cache
    def decode(name: str, seeded: bool) -> list[Completion]:
        return Engine(backend(name)).generate(prompts, SEEDED if seeded else GREEDY, keep_features=not seeded)

    return decode


@pytest.mark.parametrize("adapt", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "sampled"])
@pytest.mark.parametrize("name", BACKENDS)
def test_trees_never_change_greedy_output(name, kind, adapt, prompts, plain):
    engine = engine_for(name, drafter(kind), adapt_draft_length=adapt)
    drafted = engine.generate(prompts, GREEDY, keep_features=True)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain(name, False)]
    assert engine.stats.fallbacks == {}
    assert engine.stats.acceptance.proposed > 0
    for mine, want in zip(drafted, plain(name, False), strict=True):  # of the accepted path, not of its siblings
        torch.testing.assert_close(mine.features_TF.float(), want.features_TF.float(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_seed_gives_plain_decodings_tokens_with_trees(name, kind, prompts, plain):
    drafted = engine_for(name, drafter(kind)).generate(prompts, SEEDED)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain(name, True)]


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


class Confident(AlwaysRight):
    """Chains with a confidence of its own for every draft, and perhaps a distribution."""

    def __init__(self, model, confidence: list[float], *, drawn: bool = False):
        super().__init__(model)
        self.stated, self.drawn = confidence, drawn

    def draft(self, request):
        reply = super().draft(request)
        batch, number = reply.tokens_BK.shape
        probs = None
        if self.drawn:
            probs = SparseProbs(ids_BKC=reply.tokens_BK[:, :, None], probs_BKC=torch.ones(batch, number, 1))
        stated = torch.tensor(self.stated[:number]).expand(batch, -1)
        return DraftReply(tokens_BK=reply.tokens_BK, confidence_BK=stated, probs=probs)


def chosen_rows(drafter, monkeypatch, prompts) -> tuple[Engine, list[list[int]]]:
    """Rows that each sequence brought to the rounds of an engine whose first row is free and every other one dear."""
    monkeypatch.setattr(DraftLengthChooser, "choose", lambda self, sequences, plain_rows=0: [4] * len(sequences))
    monkeypatch.setattr(DraftLengthChooser, "observe_step", lambda self, rows, seconds: None)
    engine = engine_for("torch", drafter, nodes=0, depth=4, adapt_draft_length=True)
    for rows in range(1, 20):  # each row adds a tenth of a plain step
        engine._drafting._chooser._steps.record(rows, 0.01 * (1 + 0.1 * (rows - 1)))
    taken: list[list[int]] = []
    right = engine.backend.forward

    def forward(rows):
        taken.append([count for _, _, count, _ in rows.runs()])
        return right(rows)

    monkeypatch.setattr(engine.backend, "forward", forward)
    engine.generate(prompts[:1], Sampling(max_new_tokens=12, ignore_eos=True))
    return engine, taken[1:]


def test_drafts_that_are_not_worth_their_rows_are_not_verified(monkeypatch, prompts):
    """At first the drafter is believed: two drafts of 0.9 pay for a tenth of a step each, two of 0.01 do not."""
    engine, rows = chosen_rows(Confident(toy_model(), [0.9, 0.9, 0.01, 0.01]), monkeypatch, prompts)
    assert rows[0] == [3]
    assert engine.stats.acceptance.accepted_by_position[:2] == engine.stats.acceptance.proposed_by_position[:2]


def test_what_was_left_out_is_not_held_against_the_drafter(monkeypatch, prompts):
    engine, rows = chosen_rows(Confident(toy_model(), [0.9, 0.9, 0.01, 0.01]), monkeypatch, prompts)
    assert [3] in rows
    assert all(rate > 0.6 for rate in engine._drafting._chooser.acceptance.rates([0.6] * 4)[:2])
    assert engine._drafting._chooser.acceptance.rates([0.6] * 4)[2:] == pytest.approx([0.6, 0.6])


def test_drafts_that_were_drawn_are_verified_whatever_they_turned_out_to_be(monkeypatch, prompts):
    """To leave out a draft for what was drawn, and to draw again, would favour the tokens of high confidence."""
    _, rows = chosen_rows(Confident(toy_model(), [0.9, 0.01, 0.01, 0.01], drawn=True), monkeypatch, prompts)
    assert rows[0] == [5]


@pytest.mark.parametrize("stated", [float("nan"), 1.5, -0.1])
def test_a_confidence_that_is_no_probability_costs_only_the_drafts(stated, prompts):
    plain = Engine(backend("torch")).generate(prompts, Sampling(max_new_tokens=12))
    engine = engine_for("torch", Confident(toy_model(), [0.9, stated, 0.5]), nodes=0, adapt_draft_length=True)
    drafted = engine.generate(prompts, Sampling(max_new_tokens=12))
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert "ValueError" in engine.stats.fallbacks
