"""A drafter that is asked ahead: whatever becomes of its answers, tokens are the target's own and no wait repeats."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.checkpoint import as_drafter
from drafters.drafter import Answer, DrafterAwayError, DraftReply, DraftRequest
from serving.engine import drafting
from serving.engine.engine import Engine, EngineConfig
from serving.engine.overlap import OverlapChoice
from serving.engine.sampling import Sampling
from serving.engine.sequence import first_of, without_first
from serving.engine.torch_rows import TorchRows
from tests.toy_mtp import TAPS, toy_mtp
from tests.toy_target import AlwaysRight, RightInATree, toy_model, toy_prompts

PROMPTS = toy_prompts(5, seed=3, low=3, high=30)
SAMPLINGS = [
    Sampling(max_new_tokens=24),
    Sampling(max_new_tokens=9),
    Sampling(max_new_tokens=24, temperature=0.9, seed=5),
    Sampling(max_new_tokens=17, temperature=1.1, top_k=20, seed=6),
    Sampling(max_new_tokens=24, stop_token_ids=tuple(range(0, 256, 9))),
]
NUM_DRAFTS = 3


class Elsewhere:
    """Works at once, and hands its answers out as a script says: "now", "late" (one call too late), "never", "error",
    "foreign" (a token outside the vocabulary), "short" (for too few sequences)."""

    def __init__(self, inner, script=()):
        self.inner, self.script = inner, deque(script)
        self.name, self.target_layer_ids = "elsewhere", inner.target_layer_ids
        self.max_draft_tokens, self.max_tree_nodes = inner.max_draft_tokens, inner.max_tree_nodes
        self.away, self.events = None, Counter()
        self.asked: list[list[int]] = []  # slots of every request
        self._tickets, self._ready, self._held = itertools.count(), [], []

    def allocate(self, num_slots: int, max_len: int) -> None:
        self.inner.allocate(num_slots, max_len)

    def draft(self, request: DraftRequest) -> DraftReply:
        raise AssertionError("it is asked ahead")

    def ask(self, request: DraftRequest) -> int:
        if self.away is not None:
            raise DrafterAwayError(self.away)
        self.asked.append(request.slots)
        ticket, how = next(self._tickets), self.script.popleft() if self.script else "now"
        reply = self.inner.draft(request)
        if how == "foreign":
            reply = replace(reply, tokens_BK=torch.full_like(reply.tokens_BK, 10**6))
        if how == "short":
            reply = DraftReply(tokens_BK=reply.tokens_BK[:0])
        answer = Answer(
            ticket=ticket, reply=None if how == "error" else reply, error="broken" if how == "error" else None
        )
        if how == "late":
            self._held.append(answer)
        elif how != "never":
            self._ready.append(answer)
        return ticket

    def answers(self, timeout_s: float) -> list[Answer]:
        found, self._ready, self._held = self._ready, self._held, []
        return found


@lru_cache
def rows() -> TorchRows:
    return TorchRows(toy_model(), num_slots=4, max_len=96, target_layer_ids=TAPS)


def engine_with(drafter, **changes) -> Engine:
    config = {"num_draft_tokens": NUM_DRAFTS, "draft_deadline_s": 0.0, "overlap": "off", "keep_history": True} | changes
    return Engine(rows(), drafter, config=EngineConfig(**config))


@lru_cache
def plain() -> list[list[int]]:
    return [c.token_ids for c in Engine(rows()).generate(PROMPTS, SAMPLINGS)]


def answers_of(engine: Engine) -> list[list[int]]:
    done = engine.generate(PROMPTS, SAMPLINGS)
    assert engine.free_slots == engine.num_slots
    return [c.token_ids for c in done]


@pytest.mark.parametrize("overlap", ["off", "on", "auto"])
@pytest.mark.parametrize("make", [AlwaysRight, RightInATree])
def test_asked_ahead_it_drafts_as_well_as_in_the_round(make, overlap):
    nodes = 6 if make is RightInATree else 0
    engine = engine_with(Elsewhere(make(toy_model())), overlap=overlap, tree_nodes=nodes)
    at_once = Engine(rows(), make(toy_model()), config=EngineConfig(num_draft_tokens=NUM_DRAFTS, tree_nodes=nodes))
    assert answers_of(engine) == answers_of(at_once) == plain()
    assert not engine.stats.fallbacks
    assert engine.stats.acceptance.tau == pytest.approx(at_once.stats.acceptance.tau, abs=0.15)
    if overlap == "off":  # the very same rounds
        assert engine.stats.acceptance == at_once.stats.acceptance


def test_halves_take_turns_so_that_one_is_drafted_for_while_the_other_is_verified():
    drafter = Elsewhere(AlwaysRight(toy_model()))
    engine = engine_with(drafter, overlap="on")
    engine.generate(PROMPTS[:4], Sampling(max_new_tokens=40))
    pairs = [frozenset(slots) for slots in drafter.asked if len(slots) == 2]
    assert len(pairs) > 10
    assert all(a.isdisjoint(b) for a, b in itertools.pairwise(pairs))


fates = st.sampled_from(["now", "now", "now", "late", "error", "foreign", "short"])


@settings(max_examples=40)
@given(script=st.lists(fates, max_size=25), overlap=st.sampled_from(["off", "on"]))
def test_whatever_becomes_of_the_answers_tokens_are_the_targets(script, overlap):
    engine = engine_with(Elsewhere(AlwaysRight(toy_model()), script), overlap=overlap)
    assert answers_of(engine) == plain()


def test_a_late_answer_costs_one_round_and_the_drafter_goes_on():
    drafter = Elsewhere(AlwaysRight(toy_model()), ["now", "late"])
    engine = engine_with(drafter)
    done = engine.generate(PROMPTS[:1], Sampling(max_new_tokens=40))[0]
    assert engine.stats.fallbacks == {"deadline": 1, "overdue": 1}
    assert drafter.events == {"late_reply": 1}
    assert done.acceptance.tau == NUM_DRAFTS + 1  # of the rounds that had drafts
    assert done.acceptance.rounds >= 8


def test_nothing_is_asked_while_an_answer_is_missing():
    drafter = Elsewhere(AlwaysRight(toy_model()), ["now", "never"])
    engine = engine_with(drafter)
    engine.generate(PROMPTS[:2], Sampling(max_new_tokens=40))
    assert len(drafter.asked) == 2
    assert engine.stats.fallbacks["deadline"] == 1
    assert engine.stats.fallbacks["overdue"] > 20


def test_an_error_costs_the_sequences_of_its_round_their_drafts_and_others_nothing():
    drafter = Elsewhere(AlwaysRight(toy_model()), ["error"])
    engine = engine_with(drafter)
    first = engine.generate(PROMPTS[:2], Sampling(max_new_tokens=12))
    assert [c.acceptance.rounds for c in first] == [0, 0]
    assert engine.stats.fallbacks == {"broken": 1}
    later = engine.generate(PROMPTS[2:3], Sampling(max_new_tokens=12))
    assert later[0].acceptance.tau == NUM_DRAFTS + 1


def test_a_drafter_that_is_gone_is_not_waited_for_and_its_successor_drafts_for_running_requests_too():
    gone = Elsewhere(AlwaysRight(toy_model()))
    engine = engine_with(gone)
    for prompt in PROMPTS[:2]:
        engine.add(prompt, Sampling(max_new_tokens=90 - len(prompt)))
    done = []
    for step in itertools.count():
        if step == 5:
            gone.away = "dead"
        if step == 9:
            engine.set_drafter(Elsewhere(AlwaysRight(toy_model())))
        done += [p.completion for p in engine.step() if p.completion]
        if not engine.has_work:
            break
    assert engine.stats.fallbacks == {"dead": 4}
    expected = Engine(rows()).generate(PROMPTS[:2], [Sampling(max_new_tokens=90 - len(p)) for p in PROMPTS[:2]])
    assert {tuple(c.token_ids) for c in done} == {tuple(c.token_ids) for c in expected}
    assert all(c.acceptance.rounds > 12 for c in done)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_history_lets_a_new_drafter_go_on_from_what_the_old_one_knew(elsewhere):
    """A drafter that reads features drafts after a swap what it would have drafted had it been there all along."""
    sampling = Sampling(max_new_tokens=50 - len(PROMPTS[0]))

    def made():
        drafter = as_drafter(toy_mtp(toy_model()))
        return Elsewhere(drafter) if elsewhere else drafter

    def rounds(swap_at: int | None, keep: bool) -> tuple[list[int], int]:
        engine = engine_with(made(), keep_history=keep)
        engine.add(PROMPTS[0], sampling)
        for step in itertools.count():
            if step == swap_at:
                engine.set_drafter(made())
            for progress in engine.step():
                if progress.completion:
                    return progress.completion.token_ids, progress.completion.acceptance.rounds

    undisturbed, kept, forgotten = rounds(None, True), rounds(8, True), rounds(8, False)
    assert undisturbed[0] == kept[0] == forgotten[0]
    assert kept[1] >= undisturbed[1] - 1
    assert forgotten[1] <= 8


@pytest.mark.parametrize("elsewhere", [True, False])
def test_what_a_drafter_missed_is_told_in_parts_while_others_are_drafted_for(monkeypatch, elsewhere):
    monkeypatch.setattr(drafting, "MOST_PAIRS", 8)
    told: list[tuple[list[int], int]] = []

    class Spy(AlwaysRight):
        def draft(self, request: DraftRequest) -> DraftReply:
            told.append((request.counts, request.num_draft_tokens))
            return super().draft(request)

    long_and_short = [toy_prompts(1, seed=4, low=40, high=40)[0], PROMPTS[0][:5]]
    sampling = Sampling(max_new_tokens=30)
    spy = Spy(toy_model())
    engine = engine_with(Elsewhere(spy) if elsewhere else spy, reuse_prefixes=False)
    alone = engine.generate(long_and_short[:1], sampling)
    assert alone[0].acceptance.tau == NUM_DRAFTS + 1
    told.clear()
    done = engine.generate(long_and_short, sampling)
    assert [c.token_ids for c in done] == [c.token_ids for c in Engine(rows()).generate(long_and_short, sampling)]
    noted = [counts for counts, drafts in told if drafts == 0]
    assert noted == [[8]] * 5  # of 40 pairs, and one more with each plain round
    assert all(max(counts) <= 8 for counts, _ in told)
    assert all(c.acceptance.tau == NUM_DRAFTS + 1 for c in done)


def test_overlap_is_kept_where_a_sequences_round_is_cheaper_that_way():
    for half_s, chosen in ((0.6, True), (0.4, True), (1.4, False)):
        choice = OverlapChoice("auto")
        for _ in range(200):
            halves = choice.halves(4)
            choice.observe(4, halves, 2 if halves else 4, half_s * 2 if halves else 4.0)
        assert choice.halves(4) is chosen
    assert not OverlapChoice("on").halves(1)
    assert not OverlapChoice("off").halves(4)


@pytest.mark.parametrize("count", [0, 1, 3, 5, 7])
def test_features_are_parted_without_a_row_lost_or_twice(count):
    chunks = [torch.arange(2.0)[:, None], torch.arange(2.0, 5.0)[:, None], torch.arange(5.0, 7.0)[:, None]]
    parts = first_of(chunks, count) + without_first(chunks, count)
    assert torch.equal(torch.cat(parts)[:, 0], torch.arange(7.0))
    assert sum(len(part) for part in first_of(chunks, count)) == count
