"""The engine's side of a drafter: how many drafts a round asks for, which of them are verified, what came of them.

In: the sequences of a round. Out: their drafts, or none where the drafter fails: a failure costs its drafts and nothing
else. Timings and acceptance are noted here, for the next round's choice and for the statistics.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from drafters.acceptance import Acceptance
from drafters.drafter import Drafter
from serving.engine.draft_length import DraftLengthChooser
from serving.engine.round import Drafts, draft_request, note_request, usable_drafts
from serving.engine.rows import RowsBackend
from serving.engine.scheduler import Plan
from serving.engine.sequence import Sequence
from serving.engine.timing import Timings

log = logging.getLogger(__name__)

# Pairs of a sequence that a round tells a drafter at most: after a long prompt or a swap it catches up in parts, round
# by round, while others are drafted for. On two cores a drafter of 6 M parameters takes note of these in about 0.05 s.
MOST_PAIRS = 512

# With the anchor a tree of 7 fills the eight rows that cost a CPU little more than one; where the nodes are chosen by
# cost, more of them may be worth their rows (several sequences, other machines).
TREE_DEPTH, TREE_NODES, MOST_TREE_NODES = 5, 7, 15


@dataclass
class EngineStats:
    """Counters since the engine was built."""

    passes: int = 0  # forward passes
    rows: int = 0  # rows fed
    emitted_tokens: int = 0
    prefix_tokens: int = 0  # prompt tokens that were not fed, since their slots held them already
    acceptance: Acceptance = field(default_factory=Acceptance)
    fallbacks: dict[str, int] = field(default_factory=dict)  # rounds decoded plainly because of the drafter, by reason
    timings: Timings = field(default_factory=Timings)
    draft_lengths: Counter[int] = field(default_factory=Counter)  # drafts asked for, by sequence and round


class Drafting:
    """A drafter at work for one engine."""

    def __init__(
        self,
        drafter: Drafter,
        backend: RowsBackend,
        *,
        most_drafts: int,
        trees: bool,
        adapt: bool,
        sampled: bool = True,
    ):
        self.drafter: Drafter = drafter
        self._sampled = sampled  # False: drafters that could draw their drafts propose their likeliest ones
        self.columns = _feature_columns(backend, drafter) if drafter.target_layer_ids else None  # None: it taps nothing
        self._backend = backend
        drafter.allocate(backend.num_slots, backend.max_len)
        self.failures = 0  # rounds after which it is unknown what the drafter still knows
        self._chooser: DraftLengthChooser | None = None
        if adapt:
            self._chooser = DraftLengthChooser(
                min(most_drafts, drafter.max_draft_tokens), equal_lengths=backend.wants_equal_runs, trees=trees
            )

    def turn(self, plan: Plan) -> Plan:
        """Who of those that decode takes part in this round: all."""
        return plan

    def ahead(self, running: list[Sequence], num_draft_tokens: int, tree_nodes: int, stats: EngineStats) -> None:
        """What can be done for the next round when one is over: nothing, for a drafter in this process."""

    def fetch(self, timeout_s: float) -> None:
        """Keep answers that have come: there are none on the way, from a drafter in this process."""

    def draft(self, plan: Plan, num_draft_tokens: int, tree_nodes: int, stats: EngineStats) -> tuple[list[int], Drafts]:
        """How many drafts were asked of each decoding sequence, and the drafts to verify."""
        batch = len(plan.decoding)
        self._catch_up([s for s in plan.decoding if s.draftable and is_behind(s)], num_draft_tokens, stats)
        places = [i for i, s in enumerate(plan.decoding) if s.draftable and not is_behind(s)]
        sequences = [plan.decoding[i] for i in places]
        room = [int(min(self._backend.max_len - 1 - s.cached, s.most_drafts)) for s in sequences]
        lengths = self._choose_lengths(sequences, num_draft_tokens, batch - len(places)) if places else []
        lengths = [min(n, most) for n, most in zip(lengths, room, strict=True)]
        stats.draft_lengths.update(lengths)
        number = max(lengths, default=0)
        if number < 1:
            return [0] * batch, Drafts.none(batch)
        catching_up = max(s.cached - s.observed for s in sequences)
        started = time.perf_counter()
        try:
            reply = self.drafter.draft(draft_request(sequences, number, self.columns, tree_nodes, self._sampled))
            most = lengths if reply.parents_BK is None else [min(n, tree_nodes) for n in room]
            drafts = usable_drafts(reply, most, self._backend.vocab_size)
        except Exception as error:  # whatever the drafter does, the request goes on
            self._fall_back(sequences, error, stats)
            return [0] * batch, Drafts.none(batch)
        for s in sequences:
            s.told(s.cached - s.observed)
        seconds = time.perf_counter() - started
        if not plan.prefilling and catching_up <= num_draft_tokens + 1:
            stats.timings.note_draft(len(sequences), number, seconds)
            if self._chooser:
                self._chooser.observe_draft(len(sequences), number, seconds)
        drafts = self._cut(drafts, batch - len(places), seconds)
        asked = [0] * batch
        for place, length in zip(places, lengths, strict=True):
            asked[place] = length
        return asked, drafts.spread(places, batch)

    def _catch_up(self, behind: list[Sequence], num_draft_tokens: int, stats: EngineStats) -> None:
        """Tell the drafter a part of what it missed of one sequence: others wait for that only so long."""
        if not behind or num_draft_tokens < 1:
            return
        s = min(behind, key=lambda each: each.cached - each.observed)
        try:
            self.drafter.draft(note_request(s, MOST_PAIRS, self.columns))
        except Exception as error:  # as in `draft`
            self._fall_back([s], error, stats)
        else:
            s.told(MOST_PAIRS)

    def _choose_lengths(self, sequences: list[Sequence], num_draft_tokens: int, plain_rows: int) -> list[int]:
        """Drafts to ask for in this round, by sequence."""
        number = min(num_draft_tokens, self.drafter.max_draft_tokens)
        lengths = [number] * len(sequences)
        if self._chooser and number:
            self._chooser.max_draft_tokens = number
            lengths = self._chooser.choose([s.position_acceptance for s in sequences], plain_rows)
        return lengths

    def _cut(self, drafts: Drafts, plain_rows: int, seconds: float) -> Drafts:
        """The drafts that are worth their rows, by the drafter's confidence.

        Drafts that were drawn at random stay as they are: to verify one or not by what it turned out to be, and to
        draw again if not, would favour the tokens of high confidence.
        """
        if self._chooser is None or drafts.confidence is None or drafts.probs is not None:
            return drafts
        counts = self._chooser.worth_verifying(drafts.confidence, plain_rows, seconds)
        return replace(drafts.cut(counts), offered=[len(tokens) for tokens in drafts.tokens])

    def note_step(self, batch: int, drafts: Drafts, seconds: float, stats: EngineStats) -> None:
        """Seconds of a pass of decoding sequences alone, from its rows to the entries that stay."""
        drafted = sum(len(t) for t in drafts.tokens)
        stats.timings.note_step(batch, drafted, seconds)
        if self._chooser:
            self._chooser.observe_step(batch + drafted, seconds)

    def note_outcome(self, s: Sequence, asked: int, drafts: Drafts, i: int, path: list[int]) -> Acceptance:
        """What became of the drafts of a plan's i-th sequence, of which `asked` were asked for."""
        nodes, depth = len(drafts.tokens[i]), max(drafts.depths(i))
        outcome = Acceptance()
        outcome.record(depth, len(path), nodes)
        s.acceptance.add(outcome)
        if self._chooser is None:
            return outcome
        # what was offered and left out is no rejection; what was not offered is
        cut = drafts.offered is not None and nodes < drafts.offered[i]
        self._chooser.observe_acceptance(s.position_acceptance, depth if cut else asked, len(path))
        if drafts.confidence is not None:
            self._chooser.observe_confidence(drafts.confidence[i], path)
        return outcome

    def _fall_back(self, sequences: list[Sequence], error: Exception, stats: EngineStats) -> None:
        reason = type(error).__name__
        if reason not in stats.fallbacks:
            log.warning("drafter %s failed, decoding goes on plainly: %s: %s", self.drafter.name, reason, error)
        stats.fallbacks[reason] = stats.fallbacks.get(reason, 0) + 1
        self.failures += 1
        for s in sequences:  # what the drafter noted before it failed is unknown: it must not go on from there
            s.draftable, s.pending_features = False, []


class UntappedLayersError(ValueError):
    """A drafter that reads layers which the engine does not tap; one line with the mend."""


def is_behind(s: Sequence) -> bool:
    """Whether a drafter has to be told of the sequence in parts."""
    return s.cached - s.observed > MOST_PAIRS


def _feature_columns(backend: RowsBackend, drafter: Drafter) -> slice | torch.Tensor:
    """Which columns of the backend's features the drafter wants."""
    have, want = backend.target_layer_ids, tuple(drafter.target_layer_ids)
    if have == want:
        return slice(None)
    missing = sorted(set(want) - set(have))
    if missing:
        raise UntappedLayersError(
            f"drafter {drafter.name} taps layers {missing}, which the engine does not tap ({list(have)}); "
            "build the engine with this drafter's target_layer_ids"
        )
    width = backend.hidden_size
    places = torch.tensor([have.index(layer) for layer in want], device=backend.device)
    return (places[:, None] * width + torch.arange(width, device=backend.device)).flatten()
