"""Passes replayed from graphs give what eager ones give. On CPUs, recorded operators stand for a captured graph: they
run again on the same tensors without the Python code of the pass, so what was computed outside of them stays frozen."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from serving.engine.engine import Engine, EngineConfig
from serving.engine.rows import RowsOutput, Run, make_rows
from serving.engine.sampling import Sampling
from serving.engine.torch_graphs import CAPTURE_AT, CudaCapture, GraphedForward, Layout, Pass
from serving.engine.torch_rows import TorchRows
from tests.serving import test_families
from tests.serving.test_families import FAMILIES
from tests.toy_target import AlwaysRight, HalfRight, toy_model, toy_prompts

SLIDING = "qwen3, some layers sliding"


def make(family: str):
    """A model with a config of its own: models that share one share its attention implementation."""
    return test_families.make(copy.deepcopy(FAMILIES[family]))


class Recorded:
    """A capture for CPUs, which counts."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, run: Pass) -> Pass:
        def outputs() -> tuple[torch.Tensor, torch.Tensor | None]:
            out = run()
            return out.logits_NV, out.features_RF

        recorded = make_fx(outputs, tracing_mode="real")()
        self.captures += 1

        def replay() -> RowsOutput:
            self.replays += 1
            logits_NV, features_RF = recorded()
            return RowsOutput(logits_NV=logits_NV, features_RF=features_RF)

        return replay


class Again:
    """A capture that captures nothing: the pass itself, over its static tensors."""

    def __call__(self, run: Pass) -> Pass:
        return run


def decode_side_by_side(graphed: TorchRows, eager: TorchRows, slots: int, width: int, first: int, last: int) -> None:
    """The same passes on both backends, at positions that differ by slot; all equal."""
    for start in range(first, last, width):
        runs = [(s, start + s, [(7 * s + start + i) % 250 for i in range(width)]) for s in range(slots)]
        wanted = None if start % 2 else list(range(slots * width))
        mine, theirs = (b.forward(make_rows(runs, wanted)) for b in (graphed, eager))
        torch.testing.assert_close(mine.logits_NV, theirs.logits_NV, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.features_RF, theirs.features_RF, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("capture", "family"),
    [(Again, "llama, own heads"), (Again, "gemma2, soft-capping and sliding"), (Recorded, SLIDING)],
)
@pytest.mark.parametrize(("slots", "width"), [(1, 1), (3, 4)])
def test_replayed_passes_equal_eager_ones(family, slots, width, capture):
    capture = capture()
    shape = {"num_slots": 3, "max_len": 150, "target_layer_ids": (0, 2)}
    graphed = TorchRows(make(family), **shape, capture=capture)
    decode_side_by_side(graphed, TorchRows(make(family), **shape), slots, width, first=112, last=144)
    if isinstance(capture, Recorded):
        assert capture.captures == 2  # up to 128 keys, and up to the end of the slot
        assert capture.replays >= 4


@pytest.mark.parametrize("family", ["llama, own heads", SLIDING])
def test_replayed_trees_equal_eager_ones(family):
    """Trees of other shapes go through the graph of the first: what a row sees is an input, not a part of it."""
    capture = Recorded()
    shape = {"num_slots": 3, "max_len": 150, "target_layer_ids": (0, 2)}
    graphed, eager = TorchRows(make(family), **shape, capture=capture), TorchRows(make(family), **shape)
    trees = [[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 0, 4], [-1, 0, 0, 0, 0, 0], [-1, 0, 1, 2, 3, 0]]
    for backend in (graphed, eager):
        backend.forward(make_rows([(s, 0, list(range(1, 30 + s))) for s in range(2)]))
    for number in range(8):
        runs = [
            Run(s, 29 + s, [(5 * number + s + i) % 250 for i in range(6)], trees[(number + s) % 4]) for s in range(2)
        ]
        mine, theirs = (b.forward(make_rows(runs)) for b in (graphed, eager))
        torch.testing.assert_close(mine.logits_NV, theirs.logits_NV, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.features_RF, theirs.features_RF, rtol=1e-4, atol=1e-4)
    assert capture.captures == 1
    assert capture.replays >= 4


@pytest.mark.parametrize(
    ("kind", "num_slots", "family"),
    [(None, 1, None), (AlwaysRight, 3, None), (HalfRight, 3, SLIDING)],
)
def test_greedy_output_is_that_of_the_eager_engine(kind, num_slots, family):
    """Five requests of different lengths through the slots: they join while others decode, and leave gaps."""

    def model():
        return make(family) if family else toy_model()

    def complete(capture):
        rows = TorchRows(model(), num_slots=num_slots, max_len=160, target_layer_ids=(1,), capture=capture)
        engine = Engine(rows, kind(model()) if kind else None, config=EngineConfig(num_draft_tokens=3))
        params = [Sampling(max_new_tokens=n) for n in (38, 14, 25, 19, 30)]
        completions = engine.generate(toy_prompts(5, low=3, high=20), params, keep_features=True)
        assert engine.stats.fallbacks == {}
        assert engine.free_slots == num_slots
        return completions, engine.stats.acceptance.tau

    capture = Recorded()
    (mine, my_tau), (theirs, their_tau) = complete(capture), complete(None)
    assert [c.token_ids for c in mine] == [c.token_ids for c in theirs]
    assert my_tau == their_tau
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.features_TF, b.features_TF, rtol=2e-2, atol=2e-2)
    assert capture.replays > 2


def test_only_dense_decoding_passes_have_a_layout():
    rows = TorchRows(toy_model(), num_slots=4, max_len=300, capture=Recorded())

    def layout(runs, wanted=None):
        return rows._graphs.layout(make_rows(runs, wanted))

    assert layout([(0, 5, [1]), (1, 90, [2])]) == Layout(slots=2, width=1, length=128)
    assert layout([(0, 126, [1, 2])], [0, 1]) == Layout(slots=1, width=2, length=128)
    assert layout([(0, 127, [1, 2])]) == Layout(slots=1, width=2, length=256)
    assert layout([(0, 256, [1])]) == Layout(slots=1, width=1, length=300)  # no more than a slot holds
    assert layout([(0, 5, [1, 2])], [1]) is None  # a prompt
    assert layout([(0, 5, [1]), (1, 9, [1, 2])]) is None  # a mixed pass
    assert layout([(0, 5, [1]), (2, 9, [1])]) is None  # an idle slot
    assert layout([(1, 5, [1])]) is None
    assert layout([(0, 0, [1] * 33)]) is None


def test_rare_layouts_run_eagerly_and_the_least_used_graph_goes():
    capture = Recorded()
    rows = TorchRows(toy_model(), num_slots=4, max_len=128, capture=capture)
    rows._graphs = GraphedForward(rows._run, rows._keys, rows._values, capture, max_graphs=2)

    def decode(slots, times):
        for _ in range(times):
            rows.forward(make_rows([(s, 3, [s]) for s in range(slots)]))
        return capture.captures

    assert decode(1, CAPTURE_AT - 1) == 0
    assert decode(1, 1) == 1
    assert decode(2, CAPTURE_AT) == 2
    assert decode(1, 1) == 2  # the graph of two slots is now the one not used for longest
    assert decode(3, CAPTURE_AT) == 3
    assert decode(1, 1) == 3
    assert decode(2, CAPTURE_AT - 1) == 3  # it has to come up as often as before
    assert decode(2, 1) == 4


def test_a_target_that_cannot_be_captured_goes_on_eagerly(caplog):
    def refuse(run: Pass) -> Pass:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    shape = {"num_slots": 2, "max_len": 64, "target_layer_ids": (0,)}
    with caplog.at_level(logging.WARNING):
        decode_side_by_side(
            TorchRows(toy_model(), **shape, capture=refuse), TorchRows(toy_model(), **shape), 2, 2, 50, 60
        )
    assert [r.getMessage() for r in caplog.records] == [
        "CUDA graphs are off from here on, a capture failed: operation not permitted when stream is capturing"
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama, own heads", SLIDING])
def test_captured_graphs_equal_eager_passes(family):
    shape = {"num_slots": 3, "max_len": 150, "target_layer_ids": (0, 2)}
    graphed = TorchRows(make(family).cuda(), **shape, capture=CudaCapture("cuda"))
    eager = TorchRows(make(family).cuda(), **shape)
    for slots, width in ((1, 1), (3, 4), (2, 1)):
        decode_side_by_side(graphed, eager, slots, width, first=104, last=144)
    assert len(graphed._graphs._graphs) > 2
