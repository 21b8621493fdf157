"""Prompts that go on from what a slot still holds: fewer rows, and otherwise the same tokens and the same drafts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from drafters.checkpoint import as_drafter
from drafters.drafter import Drafter, DraftReply, DraftRequest
from drafters.prompt_lookup import PromptLookupDrafter
from serving.engine import native_build
from serving.engine.engine import Engine, EngineConfig
from serving.engine.native_recursive_drafter import NativeRecursiveDrafter
from serving.engine.native_rows import NativeRows
from serving.engine.rows import RowsBackend
from serving.engine.sampling import Sampling
from serving.engine.sequence import Completion, Sequence
from serving.engine.slot_memory import FeatureUse, SlotMemory
from serving.engine.torch_rows import TorchRows
from tests.toy_dflash import toy_dflash
from tests.toy_mtp import TAPS, toy_mtp
from tests.toy_target import AlwaysRight, RightInATree, toy_model, toy_prompts

BASE, OTHER = toy_prompts(2, seed=11, low=40, high=40)
GREEDY, SEEDED = Sampling(max_new_tokens=9), Sampling(max_new_tokens=9, temperature=0.9, seed=3)


class Noting:
    """A drafter whose drafts are kept, and which may be told to fail."""

    def __init__(self, inner: Drafter):
        self.inner, self.name, self.target_layer_ids = inner, inner.name, inner.target_layer_ids
        self.max_draft_tokens, self.max_tree_nodes = inner.max_draft_tokens, inner.max_tree_nodes
        self.drafts: list[list[list[int]]] = []
        self.requests: list[DraftRequest] = []
        self.fails = False

    def allocate(self, num_slots: int, max_len: int) -> None:
        self.inner.allocate(num_slots, max_len)
        self.shape = num_slots, max_len

    def draft(self, request: DraftRequest) -> DraftReply:
        if self.fails:
            self.inner.allocate(*self.shape)  # as new
            raise RuntimeError("lost")
        reply = self.inner.draft(request)
        self.requests.append(request)
        self.drafts.append(reply.tokens_BK.tolist())
        return reply


def backend(name: str = "torch", slots: int = 2) -> RowsBackend:
    if name == "torch":
        return TorchRows(toy_model(), num_slots=slots, max_len=160, target_layer_ids=TAPS)
    if native_build.unavailable_reason():
        pytest.skip(str(native_build.unavailable_reason()))
    return NativeRows(
        toy_model(), dtype=torch.float32, num_slots=slots, max_len=160, target_layer_ids=TAPS, num_threads=1
    )


def make(kind: str) -> Drafter | None:
    model = toy_model()
    if kind == "native recursive":
        return NativeRecursiveDrafter(toy_mtp(model), num_threads=1, dtype=torch.float32)
    if kind == "dflash":
        return as_drafter(toy_dflash(model))
    if kind == "prompt lookup":
        return PromptLookupDrafter(min_ngram=1)
    if kind == "always right":
        return AlwaysRight(model)
    return None if kind == "none" else as_drafter(toy_mtp(model, kind))


def engine(drafter: Drafter | None = None, name: str = "torch", slots: int = 2, **config) -> Engine:
    return Engine(backend(name, slots), drafter, config=EngineConfig(num_draft_tokens=3, **config))


def conversation(made: Engine) -> list[Completion]:
    """Turns one after another: next turns, other ends of the same beginning, the same again, a part of it, others."""

    def ask(prompt: list[int], sampling: Sampling = GREEDY) -> list[int]:
        done.extend(made.generate([prompt], sampling))
        return prompt + done[-1].token_ids

    done: list[Completion] = []
    turn = ask(BASE)
    turn = ask([*turn, 1, 2, 3], SEEDED)
    ask(turn + BASE[:7])
    ask(BASE[:30] + OTHER[:9])
    ask(BASE)
    ask(BASE, SEEDED)
    ask(BASE[:25])
    ask(OTHER)
    ask(OTHER[:17], SEEDED)
    ask(OTHER[:16])  # nothing is left to be worth it
    ask(turn + BASE[:20])
    return done


KINDS = ["none", "recursive", "native recursive", "dflash", "independent", "prompt lookup", "always right"]


@pytest.mark.parametrize(("kind", "name"), [(k, "native" if k in ("none", KINDS[2]) else "torch") for k in KINDS])
def test_tokens_and_drafts_are_those_of_an_engine_that_feeds_all(kind, name):
    found = {}
    for reuse in (True, False):
        drafter = make(kind)
        noting = Noting(drafter) if drafter else None
        made = engine(noting, name, reuse_prefixes=reuse)
        done = conversation(made)
        assert made.stats.fallbacks == {}
        assert made.free_slots == made.num_slots
        assert sum(c.prefix_tokens for c in done) == made.stats.prefix_tokens
        tokens = [(c.token_ids, c.acceptance) for c in done]
        found[reuse] = tokens, noting.drafts if noting else [], made.stats.rows + made.stats.prefix_tokens
        # 11 prompts of 400 tokens in all, of which those that begin as one before them are half
        assert made.stats.prefix_tokens > 200 if reuse else made.stats.prefix_tokens == 0
    assert found[True] == found[False]


def test_the_next_turn_feeds_what_is_new():
    made = engine()
    first = made.generate([BASE], GREEDY)[0]
    fed = made.stats.rows
    prompt = BASE + first.token_ids + [5, 6, 7]
    second = made.generate([prompt], GREEDY)[0]
    assert fed == 40 + 8  # the last token of an answer is never fed
    assert second.prefix_tokens == 48
    assert made.stats.rows - fed == 4 + 8


def test_drafters_go_on_from_the_epoch_that_they_were_told():
    noting = Noting(make("recursive"))
    made = engine(noting)
    done = made.generate([BASE], GREEDY)[0]
    told = noting.requests[-1].starts[0] + noting.requests[-1].counts[0]
    noting.requests.clear()
    made.generate([BASE + done.token_ids], GREEDY)
    first = noting.requests[0]
    assert (first.reused_epochs, first.starts) == ([1], [told])
    assert noting.requests[1].reused_epochs == [-1]
    noting.requests.clear()
    made.generate([[*BASE[:30], 9, 9]], GREEDY)  # pair 29 would name another token
    assert (noting.requests[0].reused_epochs, noting.requests[0].starts) == ([2], [29])


def test_a_drafter_that_was_restarted_is_found_out_once():
    noting = Noting(make("recursive"))
    plain, made = engine(), engine(noting)
    prompts = [BASE, OTHER]
    expected = plain.generate(prompts, GREEDY)
    made.generate(prompts, GREEDY)
    noting.inner.allocate(*noting.shape)  # as new
    again = [made.generate([p], GREEDY)[0] for p in prompts]
    assert [c.token_ids for c in again] == [c.token_ids for c in expected]
    assert made.stats.fallbacks == {"ValueError": 1}
    assert [c.prefix_tokens for c in again] == [39, 0], "what the drafter does not know any more was gone on from"
    assert again[0].acceptance.rounds == 0
    assert again[1].acceptance.rounds > 0


def test_a_prompt_that_waits_to_be_told_survives_a_failure():
    """It goes on from what a drafter knew that fails meanwhile, in another one's round; a third is told all."""
    noting = Noting(make("recursive"))
    made = engine(noting, slots=3, max_prefill_rows=4)
    prompts = [OTHER, BASE + OTHER, OTHER[20:]]
    expected = [engine().generate([p], GREEDY)[0].token_ids for p in prompts]
    made.generate([BASE], GREEDY)
    names = [made.add(OTHER, GREEDY)]
    while not noting.requests or noting.requests[-1].first_tokens != OTHER[:1]:
        made.step()
    names += [made.add(p, GREEDY) for p in prompts[1:]]
    made.step()
    noting.fails = True
    made.step()
    noting.fails = False
    done = {}
    while made.has_work:
        done |= {p.request_id: p.completion for p in made.step() if p.completion}
    assert [done[n].token_ids for n in names] == expected
    assert [done[n].prefix_tokens for n in names] == [0, 39, 0]
    assert made.stats.fallbacks == {"RuntimeError": 1}, "the drafter was asked to go on from what it has lost"
    assert [done[n].acceptance.rounds > 0 for n in names[1:]] == [False, True]


@pytest.mark.parametrize("kind", ["recursive", "prompt lookup"])
def test_a_swap_voids_what_the_drafter_knew(kind):
    noting = Noting(make(kind))
    made = engine(noting)
    expected = engine(make(kind), reuse_prefixes=False).generate([BASE], GREEDY)[0]
    made.generate([BASE], GREEDY)
    made.set_drafter(noting)
    noting.requests.clear()
    again = made.generate([BASE], GREEDY)[0]
    # features of the prompt are gone: a drafter that reads them needs it fed; one that reads tokens is told them again
    assert again.prefix_tokens == (0 if kind == "recursive" else 39)
    assert (noting.requests[0].starts, noting.requests[0].reused_epochs) == ([0], [-1])
    assert (again.token_ids, again.acceptance) == (expected.token_ids, expected.acceptance)


@pytest.mark.parametrize(("prompt", "prefix"), [(BASE, 20), (BASE[:18] + OTHER, 18)])
def test_a_prompt_that_was_cancelled_halfway_is_gone_on_from(prompt, prefix):
    noting, other = Noting(make("recursive")), Noting(make("recursive"))
    made = engine(noting, max_prefill_rows=20)
    expected = engine(other, reuse_prefixes=False).generate([prompt], GREEDY)[0]
    name = made.add(BASE, GREEDY)
    made.step()
    made.cancel(name)
    done = made.generate([prompt], GREEDY)[0]
    assert done.prefix_tokens == prefix
    assert (done.token_ids, noting.drafts) == (expected.token_ids, other.drafts)


def test_switched_off_drafting_reuses_and_stays_off_for_what_it_missed():
    noting = Noting(make("recursive"))
    made = engine(noting)
    made.num_draft_tokens = 0
    made.generate([BASE], GREEDY)
    made.add(BASE, GREEDY)
    made._scheduler.plan(FeatureUse.DROPPED)  # admitted, and nothing fed
    made.num_draft_tokens = 3
    while made.has_work:
        made.step()
    assert made.stats.fallbacks == {}
    assert noting.requests == []


def test_moved_entries_of_a_tree_are_gone_on_from():
    made = engine(RightInATree(toy_model()), tree_nodes=12)
    first = made.generate([BASE], GREEDY)[0]
    prompt = BASE + first.token_ids + OTHER[:5]
    again = made.generate([prompt], GREEDY)[0]
    assert again.prefix_tokens >= 48
    assert again.token_ids == engine().generate([prompt], GREEDY)[0].token_ids
    assert again.acceptance.tau > 3


def test_features_are_kept_of_the_whole_sequence():
    made = engine()
    first = made.generate([BASE], GREEDY, keep_features=True)[0]
    again = made.generate([BASE], GREEDY, keep_features=True)[0]
    assert again.prefix_tokens == 0
    assert torch.equal(first.features_TF, again.features_TF)


def test_engines_that_take_turns_with_a_backend_do_not_go_on_from_each_others_entries():
    rows = backend()
    one, other = Engine(rows), Engine(rows)
    expected = one.generate([BASE], GREEDY)[0].token_ids
    other.generate([OTHER], GREEDY)
    again = one.generate([BASE], GREEDY)[0]
    assert (again.token_ids, again.prefix_tokens) == (expected, 0)


@pytest.mark.parametrize("kind", ["native recursive", "prompt lookup"])
def test_random_traffic_equals_that_without_reuse(kind):
    """Requests that share beginnings join, leave and are cancelled; every one has the tokens and the tau of its own."""
    rng = random.Random(5)
    texts = [BASE, OTHER, BASE[:20] + OTHER]
    requests = []
    for i in range(40):
        prompt = rng.choice(texts)[: rng.randint(10, 60)] + rng.choices(range(256), k=rng.randint(0, 6))
        sampling = Sampling(max_new_tokens=rng.randint(1, 14), temperature=rng.choice([0.0, 0.8]), seed=i)
        requests.append((prompt, sampling, rng.random() < 0.15))
    alone = engine(make(kind), "native", slots=1, reuse_prefixes=False)
    expected = [alone.generate([prompt], sampling)[0] for prompt, sampling, _ in requests]
    made = engine(make(kind), "native", slots=3, max_prefill_rows=24)
    done = {}
    for i, (prompt, sampling, leaves) in enumerate(requests):
        made.add(prompt, sampling, request_id=str(i))
        for _ in range(rng.randint(0, 6)):
            done |= {p.request_id: p.completion for p in made.step() if p.completion}
        if leaves:
            made.cancel(str(i))
    while made.has_work:
        done |= {p.request_id: p.completion for p in made.step() if p.completion}
    assert made.stats.fallbacks == {}
    assert made.free_slots == made.num_slots
    assert made.stats.prefix_tokens > 400
    for i, own in enumerate(expected):
        found = done[str(i)]
        if found.finish_reason == "cancelled":
            assert found.token_ids == own.token_ids[: len(found.token_ids)]
        else:
            assert (found.token_ids, found.acceptance) == (own.token_ids, own.acceptance)


# -- which slot --------------------------------------------------------------------------------------------------------


def asked(prompt: list[int], slot: int = -1) -> Sequence:
    return Sequence(
        request_id="x", tokens=list(prompt), prompt_len=len(prompt), sampling=GREEDY, stop_ids=frozenset(),
        keep_features=False, slot=slot, cached=len(prompt),
    )  # fmt: skip


def holding(*texts: list[int], slots: int = 4, **options) -> SlotMemory:
    """A memory whose slots 0, 1, .. hold the texts, released in this order."""
    memory = SlotMemory(slots, **({"reuse": True} | options))
    for slot, text in enumerate(texts):
        memory.keep(asked(text, slot))
    return memory


def chosen(memory: SlotMemory, prompt: list[int], free=(0, 1, 2, 3)) -> int:
    return memory.choose(free, replace(asked(prompt), cached=0), FeatureUse.NONE)


SYSTEM = OTHER[:24]
LONG, SHORT, NEW = SYSTEM + BASE * 3, SYSTEM + BASE[:9], [7] * 50


@pytest.mark.parametrize(
    ("memory", "prompt", "slot"),
    [
        (holding(), BASE, 0),
        (holding(OTHER, BASE), [*BASE, 1], 1),  # its own
        (holding(LONG, SHORT), [*SYSTEM, 5], 1),  # of a short text the beginning is most
        (holding(LONG), [*SYSTEM, 5], 1),  # a long one is not given up while a slot is empty
        (holding(OTHER, BASE), NEW, 2),
        (holding(OTHER[:9], BASE), NEW, 0),  # too short to be kept
        (holding(LONG, BASE, BASE, BASE), NEW, 0),  # the oldest
        (holding(BASE, LONG, BASE, LONG), [*SYSTEM, 5], 1),  # none is empty: the same beginning, the oldest of them
        (holding(OTHER, BASE, reuse=False), BASE, 0),
        (holding(OTHER, BASE, lowest_first=True), BASE, 0),
    ],
)
def test_the_slot_that_is_chosen(memory, prompt, slot):
    assert chosen(memory, prompt) == slot


def test_only_free_slots_are_chosen():
    memory = holding(BASE, OTHER)
    assert chosen(memory, BASE, free=[1, 3]) == 3
    assert chosen(memory, BASE, free=[1]) == 1
