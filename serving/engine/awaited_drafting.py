"""The engine's side of a drafter that works elsewhere: asked as soon as a round is over, waited for in the next one.

The batch may be split in halves: while the target verifies one, the drafter drafts for the other. A reply that misses
its deadline costs its drafts and one wait, no more: nothing further is asked until it has come, and then the drafter
goes on from there, since what it was told it knows.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from drafters.drafter import Answer, AwaitedDrafter, DrafterAwayError
from serving.engine import drafting
from serving.engine.drafting import Drafting, EngineStats, is_behind
from serving.engine.overlap import OverlapChoice
from serving.engine.round import Drafts, draft_request, note_request, usable_drafts
from serving.engine.rows import RowsBackend
from serving.engine.scheduler import Plan
from serving.engine.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Ask:
    """A request under way."""

    ticket: int
    sequences: list[Sequence]
    lengths: list[int]  # drafts wanted, by sequence
    room: list[int]  # entries left in each slot
    tree_nodes: int
    seconds: float  # that asking took
    catching_up: bool  # whether more than a round's pairs were told


class AwaitedDrafting(Drafting):
    """An AwaitedDrafter at work for one engine."""

    drafter: AwaitedDrafter

    def __init__(
        self,
        drafter: AwaitedDrafter,
        backend: RowsBackend,
        *,
        deadline_s: float,
        overlap: OverlapChoice,
        **options: Any,
    ):
        super().__init__(drafter, backend, **options)
        self._deadline_s, self._overlap = deadline_s, overlap
        self._asked: list[_Ask] = []  # oldest first; their sequences wait for drafts
        self._owed: dict[int, _Ask] = {}  # by ticket, past their round; their sequences decode plainly
        self._missed: set[int] = set()  # of those, the tickets that a round waited for
        self._notes: dict[int, Sequence] = {}  # by ticket: a sequence of whose past the drafter is told a part
        self._answers: dict[int, Answer] = {}  # came while another one was waited for
        self._round = (0.0, 0, False, 0)  # start, sequences that decode, in halves, how many of them now; 0: no measure

    def turn(self, plan: Plan) -> Plan:
        """Who decodes in this round: the sequences asked for first, and those that wait for no drafts."""
        started, batch = time.perf_counter(), len(plan.decoding)
        decoding = set(map(id, plan.decoding))
        while self._asked and not any(id(s) in decoding for s in self._asked[0].sequences):
            ended = self._asked.pop(0)
            self._owed[ended.ticket] = ended
        waiting = {id(s) for ask in self._asked[1:] for s in ask.sequences}
        mine = [s for s in plan.decoding if id(s) not in waiting]
        self._round = (started, batch, len(mine) < batch, 0 if plan.prefilling else len(mine))
        return replace(plan, decoding=mine)

    def draft(self, plan: Plan, num_draft_tokens: int, tree_nodes: int, stats: EngineStats) -> tuple[list[int], Drafts]:
        """See `Drafting.draft`; the drafts are those asked for after an earlier round."""
        batch = len(plan.decoding)
        started = time.perf_counter()
        self._take_late()
        ask = self._asked.pop(0) if self._asked else None
        if ask is None:
            return [0] * batch, Drafts.none(batch)
        answer = self._wait_for(ask)
        if answer is None or answer.reply is None:
            self._go_without(ask, answer, stats)
            return [0] * batch, Drafts.none(batch)
        try:
            most = ask.lengths if answer.reply.parents_BK is None else [min(n, ask.tree_nodes) for n in ask.room]
            drafts = usable_drafts(answer.reply, most, self._backend.vocab_size)
        except Exception as error:  # whatever came, the request goes on
            self._fall_back(ask.sequences, error, stats)
            return [0] * batch, Drafts.none(batch)
        if not plan.prefilling and not ask.catching_up:
            stats.timings.note_draft(len(ask.sequences), max(ask.lengths), answer.seconds)
        seconds = ask.seconds + time.perf_counter() - started  # of the engine's time; the rest was overlapped
        return self._offer(plan, ask, drafts, seconds)

    def _offer(self, plan: Plan, ask: _Ask, drafts: Drafts, seconds: float) -> tuple[list[int], Drafts]:
        """The drafts of those that still run, as the plan orders them."""
        batch = len(plan.decoding)
        place_of = {id(s): place for place, s in enumerate(plan.decoding)}
        kept = [i for i, s in enumerate(ask.sequences) if id(s) in place_of]
        lengths, places = [ask.lengths[i] for i in kept], [place_of[id(ask.sequences[i])] for i in kept]
        if self._chooser and not plan.prefilling and not ask.catching_up:
            self._chooser.observe_draft(len(ask.sequences), max(ask.lengths), seconds)
        drafts = self._cut(drafts.of(kept), batch - len(places), seconds)
        asked = [0] * batch
        for place, length in zip(places, lengths, strict=True):
            asked[place] = length
        return asked, drafts.spread(places, batch)

    def ahead(self, running: list[Sequence], num_draft_tokens: int, tree_nodes: int, stats: EngineStats) -> None:
        """Ask for the drafts of the rounds to come, for all of `running` that wait for none yet."""
        started, batch, in_halves, count = self._round
        self._overlap.observe(batch, in_halves, count, time.perf_counter() - started)
        decoding = [s for s in running if not s.prefilling]
        if self.drafter.away is not None:
            self._give_up()
        waiting = {id(s) for ask in self._asked for s in ask.sequences}
        untold = [s for s in decoding if s.draftable and is_behind(s)]
        ready = [s for s in decoding if s.draftable and id(s) not in waiting and not is_behind(s)]
        if self.drafter.away is not None or self._owed:
            if ready or untold:
                self._count(self.drafter.away or "overdue", stats)
            return
        half = -(-len(decoding) // 2)
        if self._overlap.halves(len(decoding)):
            parts = [ready[:half]] if self._asked else [ready[:half], ready[half:]]
            plain_rows = 0
        else:
            parts = [] if self._asked else [ready]  # the others' round comes first, then all are one batch
            plain_rows = len(decoding) - len(ready)
        try:
            for part in parts:
                if part:
                    self._ask(part, num_draft_tokens, tree_nodes, plain_rows, stats)
            if untold and not self._notes and num_draft_tokens:
                self._note(min(untold, key=lambda s: s.cached - s.observed))
        except DrafterAwayError as error:
            self._count(str(error), stats)  # nothing was sent: the pairs are still to be told
        except Exception as error:  # whatever it is, the round that is over stays whole
            self._fall_back(ready + untold, error, stats)

    def _note(self, s: Sequence) -> None:
        """Tell the drafter a part of what it missed of one sequence, behind what it is to draft."""
        self._notes[self.drafter.ask(note_request(s, drafting.MOST_PAIRS, self.columns))] = s
        s.told(drafting.MOST_PAIRS)

    def _ask(
        self, sequences: list[Sequence], num_draft_tokens: int, tree_nodes: int, plain_rows: int, stats: EngineStats
    ) -> None:
        """`plain_rows`: sequences that will decode beside these without drafts."""
        started = time.perf_counter()
        room = [int(min(self._backend.max_len - 1 - s.cached, s.most_drafts)) for s in sequences]
        lengths = self._choose_lengths(sequences, num_draft_tokens, plain_rows)
        lengths = [min(n, most) for n, most in zip(lengths, room, strict=True)]
        stats.draft_lengths.update(lengths)
        if max(lengths, default=0) < 1:
            return
        request = draft_request(sequences, max(lengths), self.columns, tree_nodes, sampled=self._sampled)
        ticket = self.drafter.ask(request)
        catching_up = max(request.counts) > num_draft_tokens + 1
        for s in sequences:
            s.told(s.cached - s.observed)
        seconds = time.perf_counter() - started
        self._asked.append(_Ask(ticket, sequences, lengths, room, tree_nodes, seconds, catching_up))

    def _wait_for(self, ask: _Ask) -> Answer | None:
        """Its answer, or None: at the deadline, and at once while others are owed."""
        until = time.monotonic() + (0.0 if self._owed else self._deadline_s)
        while ask.ticket not in self._answers:
            left = until - time.monotonic()
            self.fetch(max(0.0, left))
            if left <= 0 or self.drafter.away is not None:
                break
        return self._answers.pop(ask.ticket, None)

    def fetch(self, timeout_s: float) -> None:
        """Keep the answers that have come; waits up to `timeout_s` seconds for the first."""
        for answer in self.drafter.answers(timeout_s):
            noted = self._notes.pop(answer.ticket, None)
            if noted is None:
                self._answers[answer.ticket] = answer
            elif answer.error is not None:
                self._lose([noted])

    def _take_late(self) -> None:
        """Answers that missed their round: what the drafter was told it knows now, its drafts are of the past."""
        if (self._owed or self._notes) and self.drafter.away is None:
            self.fetch(0.0)
        for ticket in [ticket for ticket in self._answers if ticket in self._owed]:
            answer, ask = self._answers.pop(ticket), self._owed.pop(ticket)
            if answer.error is not None:
                self._lose(ask.sequences)
            if ticket in self._missed:
                self._missed.discard(ticket)
                self.drafter.events["late_reply"] += 1

    def _go_without(self, ask: _Ask, answer: Answer | None, stats: EngineStats) -> None:
        """A round whose drafts did not come in time, or not at all."""
        if answer is not None:
            self._lose(ask.sequences)
            self._count(answer.error or "no_drafts", stats)
            return
        self._owed[ask.ticket] = ask
        self._missed.add(ask.ticket)
        if self._chooser and not ask.catching_up:  # a drafter that is slower than that should lose its turn
            self._chooser.observe_draft(len(ask.sequences), max(ask.lengths), ask.seconds + self._deadline_s)
        self._count(self.drafter.away or "deadline", stats)

    def _lose(self, sequences: list[Sequence]) -> None:
        """What the drafter noted of these before it failed is unknown: it must not go on from there."""
        self.failures += 1
        for s in sequences:
            s.draftable, s.pending_features = False, []

    def _give_up(self) -> None:
        """The drafter is gone with all that it was told."""
        for ask in [*self._asked, *self._owed.values()]:
            self._lose(ask.sequences)
        self._lose(list(self._notes.values()))
        self._asked, self._owed, self._notes, self._answers, self._missed = [], {}, {}, {}, set()

    def _count(self, reason: str, stats: EngineStats) -> None:
        if reason not in stats.fallbacks:
            log.warning("drafter %s: %s; rounds go on plainly", self.drafter.name, reason)
        stats.fallbacks[reason] = stats.fallbacks.get(reason, 0) + 1
