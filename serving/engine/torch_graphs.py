"""CUDA graphs for the `torch` backend: passes whose layout repeats are captured once and then replayed.

In: a pass of rows. Out: its logits and features from a replayed graph, or None where the pass has to run eagerly
(prefill, mixed passes, idle slots between busy ones, a layout that is still rare). Source: torch's notes on CUDAGraph.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.engine.rows import Rows, RowsOutput, entries_of
from serving.engine.torch_attention import MAX_PADDED_RUN, RowGroup, SlotPass, Trees, TreeSight

log = logging.getLogger(__name__)

LENGTH_BUCKET = 128  # keys: a graph attends to a multiple of this many, and masks those that are not there yet
MAX_GRAPHS = 32  # kept at a time; each holds its own logits
CAPTURE_AT = 3  # a layout is captured when it comes up for this time: a capture costs as much as dozens of passes
WARMUP_RUNS = 3  # eager runs before a capture, in which libraries choose kernels and allocate their workspaces

Pass = Callable[[], RowsOutput]
# Runs a pass over static tensors into a graph; what it returns repeats the pass on what these tensors then hold. The
# output stays valid until the next pass.
Capture = Callable[[Pass], Pass]


class CudaCapture:
    """`Capture` with CUDA graphs, which share one memory pool: only the latest output is ever needed."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        with torch.cuda.device(self._device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()

    def __call__(self, run: Pass) -> Pass:
        with torch.cuda.device(self._device):  # a stream of another device would record nothing
            previous = torch.cuda.current_stream()
            try:
                return self._captured(run)
            finally:
                torch.cuda.set_stream(previous)  # a capture that fails leaves its own stream behind

    def _captured(self, run: Pass) -> Pass:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARMUP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as one that loads a drafter, may go on allocating meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()

        def replay() -> RowsOutput:
            with torch.cuda.device(self._device):
                graph.replay()
            return output

        return replay


@dataclass(frozen=True)
class Layout:
    """What a graph is made for: slots 0 to `slots` - 1 with `width` rows each, attending to `length` keys."""

    slots: int
    width: int
    length: int
    trees: bool = False


@dataclass
class _Captured:
    static_3R: Tensor  # ids, positions and places in the KV cache of the rows
    static_SWW: Tensor  # bool, which of its run's rows each row of a tree sees
    replay: Pass


class GraphedForward:
    """Captured passes by layout, the least recently used one dropped when there are `max_graphs`."""

    def __init__(
        self,
        run: Callable[[Tensor, Tensor, SlotPass], RowsOutput],
        keys: list[Tensor],
        values: list[Tensor],
        capture: Capture,
        *,
        max_graphs: int = MAX_GRAPHS,
    ):
        self._run, self._keys, self._values = run, keys, values
        self._capture: Capture | None = capture
        self._max_graphs = max_graphs
        self._max_len = keys[0].shape[1]
        self._seen: Counter[Layout] = Counter()
        self._graphs: OrderedDict[Layout, _Captured] = OrderedDict()

    def forward(self, rows: Rows) -> RowsOutput | None:
        """The pass from its graph, captured if it is time to; None if it has to run eagerly."""
        layout = self.layout(rows)
        if layout is None or self._capture is None:
            return None
        graph = self._graphs.get(layout)
        if graph is None:
            self._seen[layout] += 1
            if self._seen[layout] < CAPTURE_AT:
                return None
        packed = torch.stack([rows.ids_R, rows.positions_R, rows.slots_R * self._max_len + entries_of(rows)])
        ancestors = _ancestors(rows, layout) if layout.trees else torch.zeros(0, dtype=torch.bool)
        if graph is None:
            graph = self._captured(layout, packed, ancestors)
            if graph is None:
                return None
        else:
            graph.static_3R.copy_(packed)
            graph.static_SWW.copy_(ancestors)
        self._graphs.move_to_end(layout)
        return graph.replay()

    def layout(self, rows: Rows) -> Layout | None:
        """The pass's layout, or None if no graph can hold it."""
        runs = rows.runs()
        width = runs[0][2]
        if width > MAX_PADDED_RUN or (rows.logit_rows is not None and len(rows.logit_rows) < len(rows.ids_R)):
            return None
        if any(slot != i or count != width for i, (slot, _, count, _) in enumerate(runs)):
            return None
        keys = max(position for _, _, _, position in runs) + width
        length = min(keys + -keys % LENGTH_BUCKET, self._max_len)
        return Layout(len(runs), width, length, rows.parents_R is not None)

    def _captured(self, layout: Layout, packed_3R: Tensor, ancestors_SWW: Tensor) -> _Captured | None:
        """A new graph for the layout; None, and no graph ever again, if this model cannot be captured."""
        assert self._capture is not None
        static_3R = packed_3R.to(self._keys[0].device, copy=True)
        static_SWW = ancestors_SWW.to(static_3R.device, copy=True)

        def run() -> RowsOutput:
            # All that depends on the rows is made in here, the masks too: outside it would be frozen in the graph.
            ids_R, positions_R, flat_R = static_3R
            sight = None
            if layout.trees:
                starts = (flat_R % self._max_len).view(layout.slots, layout.width)[:, :1]
                sight = TreeSight(starts.expand(-1, layout.width), static_SWW)
            group = RowGroup(
                first_slot=0,
                slots=layout.slots,
                width=layout.width,
                gather=None,
                scatter=None,
                rows=slice(None),
                positions=positions_R.view(layout.slots, layout.width),
                length=layout.length,
                sight=sight,
                has_later_keys=True,
            )
            return self._run(ids_R, positions_R, SlotPass(self._keys, self._values, flat_R, [group]))

        if len(self._graphs) >= self._max_graphs:
            evicted, _ = self._graphs.popitem(last=False)
            del self._seen[evicted]  # it has to prove itself again
        try:
            captured = _Captured(static_3R, static_SWW, self._capture(run))
        except RuntimeError as error:  # such as experts chosen on the host, for which a capture cannot wait
            log.warning("CUDA graphs are off from here on, a capture failed: %s", str(error).strip().splitlines()[0])
            self._capture = None
            self._graphs.clear()
            return None
        self._graphs[layout] = captured
        return captured


def _ancestors(rows: Rows, layout: Layout) -> Tensor:
    """[slots, width, width] bool, on the host."""
    return Trees(rows).sight(0, layout.slots, layout.width, rows.runs(), torch.device("cpu")).ancestors
