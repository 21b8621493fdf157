"""The engine on the toy target: drafting never changes the output, tau is what it must be, slots return to zero."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from drafters.checkpoint import as_drafter
from drafters.drafter import DraftReply, DraftRequest
from drafters.prompt_lookup import PromptLookupDrafter
from serving.engine.engine import Engine, EngineConfig, RequestError
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_mtp import TAPS, toy_mtp
from tests.toy_target import AlwaysRight, AlwaysWrong, HalfRight, RandomProposer, toy_model, toy_prompts

DRAFTERS = [AlwaysRight, AlwaysWrong, HalfRight, RandomProposer]


def toy_engine(drafter=None, num_slots=4, num_draft_tokens=3, taps=(), **config) -> Engine:
    rows = TorchRows(toy_model(), num_slots=num_slots, max_len=160, target_layer_ids=taps)
    return Engine(rows, drafter, config=EngineConfig(num_draft_tokens=num_draft_tokens, **config))


@lru_cache
def drafter(kind):
    """One of each kind for all tests: their memory of the toy target's argmax, which they share, makes them fast."""
    made = kind(toy_model())
    if kind is not AlwaysRight:
        made.argmax = drafter(AlwaysRight).argmax
    return made


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return toy_prompts(6, low=1, high=60)


@pytest.fixture(scope="module")
def reference(prompts) -> list[list[int]]:
    """Greedy continuations by transformers' own generate."""
    model = toy_model()
    out = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        out.append(ids[0, len(prompt) :].tolist())
    return out


def test_plain_decoding_equals_generate(prompts, reference):
    completions = toy_engine().generate(prompts, Sampling(max_new_tokens=40))
    assert [c.token_ids for c in completions] == reference
    assert all(c.acceptance.tau is None and c.finish_reason == "length" for c in completions)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("num_slots", [1, 4])
def test_greedy_drafting_never_changes_the_output(kind, num_slots, prompts, reference):
    engine = toy_engine(drafter(kind), num_slots=num_slots)
    completions = engine.generate(prompts, Sampling(max_new_tokens=40))
    assert [c.token_ids for c in completions] == reference
    assert engine.stats.fallbacks == {}
    assert engine.free_slots == num_slots


@pytest.mark.parametrize(("kind", "tau"), [(AlwaysRight, 4.0), (AlwaysWrong, 1.0), (HalfRight, 2.0)])
def test_tau_of_known_drafters(kind, tau, prompts):
    engine = toy_engine(drafter(kind))
    engine.generate(prompts, Sampling(max_new_tokens=33))
    assert engine.stats.acceptance.tau == tau
    assert engine.stats.acceptance.by_position[0] == (0.0 if kind is AlwaysWrong else 1.0)


def test_a_right_drafter_saves_passes(prompts):
    plain, drafted = toy_engine(num_slots=1), toy_engine(drafter(AlwaysRight), num_slots=1)
    for engine in (plain, drafted):
        engine.generate(prompts[:1], Sampling(max_new_tokens=33))
    assert plain.stats.passes == 33  # one prefill, which gives the first token, then one pass a token
    assert drafted.stats.passes == 1 + 8


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_with_argmax_drafters(temperature, prompts):
    def sampling(i: int) -> Sampling:
        return Sampling(max_new_tokens=24, temperature=temperature, top_k=50, top_p=0.95, seed=i)

    alone = [toy_engine(num_slots=1).generate([p], sampling(i))[0].token_ids for i, p in enumerate(prompts)]
    per_prompt = [sampling(i) for i in range(len(prompts))]
    argmax_drafters = [drafter(kind) for kind in (AlwaysRight, AlwaysWrong, HalfRight)]
    trained = as_drafter(toy_mtp(toy_model()))
    for each in (None, *argmax_drafters, PromptLookupDrafter(min_ngram=1), trained):
        together = toy_engine(each, taps=TAPS if each is trained else ()).generate(prompts, per_prompt)
        assert [c.token_ids for c in together] == alone
    assert len({tuple(t) for t in alone}) == len(alone)


def test_chunked_prefill_gives_the_same_tokens_and_features(prompts):
    whole = toy_engine(taps=(0, 1)).generate(prompts, Sampling(max_new_tokens=12), keep_features=True)
    chunked = toy_engine(taps=(0, 1), max_prefill_rows=7)
    parts = chunked.generate(prompts, Sampling(max_new_tokens=12), keep_features=True)
    for a, b in zip(whole, parts, strict=True):
        assert a.token_ids == b.token_ids
        torch.testing.assert_close(a.features_TF, b.features_TF, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", [None, *DRAFTERS])
def test_kept_features_are_the_targets_hidden_states(kind, prompts):
    model = toy_model()
    engine = toy_engine(kind(model) if kind else None, taps=(0,))
    for c in engine.generate(prompts, Sampling(max_new_tokens=20), keep_features=True):
        ids = c.prompt_ids + c.token_ids
        with torch.inference_mode():
            hidden = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[1][0]
        assert c.features_TF.shape == (len(ids) - 1, 32)
        torch.testing.assert_close(c.features_TF, hidden[:-1].bfloat16(), rtol=0.02, atol=0.02)


def test_stop_token_inside_an_accepted_block_ends_the_request(prompts, reference):
    stop = reference[0][9]
    first = reference[0].index(stop)
    engine = toy_engine(drafter(AlwaysRight), num_draft_tokens=8)
    completion = engine.generate(prompts[:1], Sampling(max_new_tokens=40, stop_token_ids=(stop,)))[0]
    assert completion.token_ids == reference[0][: first + 1]
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_max_new_tokens_is_exact(limit, prompts, reference):
    completions = toy_engine(drafter(AlwaysRight)).generate(prompts, Sampling(max_new_tokens=limit))
    assert [c.token_ids for c in completions] == [r[:limit] for r in reference]


def test_cancel_frees_the_slot_and_leaves_the_others_alone(prompts, reference):
    engine = toy_engine(drafter(HalfRight), num_slots=2)
    names = [engine.add(p, Sampling(max_new_tokens=40)) for p in prompts[:4]]
    engine.step()
    engine.step()
    engine.cancel(names[0])
    engine.cancel(names[3])  # still waiting
    engine.cancel("never heard of")
    done = {}
    while engine.has_work:
        for p in engine.step():
            if p.completion:
                done[p.request_id] = p.completion
    assert [done[n].finish_reason for n in names] == ["cancelled", "length", "length", "cancelled"]
    assert [done[n].token_ids for n in names[1:3]] == reference[1:3]
    assert engine.free_slots == 2


def test_a_prompt_fills_the_whole_context(prompts):
    engine = toy_engine(drafter(AlwaysRight), num_slots=1)
    prompt = (prompts[0] * 200)[:150]
    completion = engine.generate([prompt], Sampling(max_new_tokens=10))[0]
    assert len(completion.token_ids) == 10
    assert engine.stats.fallbacks == {}


@pytest.mark.parametrize(
    ("prompt", "sampling", "word"),
    [
        ([], Sampling(), "empty"),
        ([5, 256], Sampling(), "vocabulary"),
        ([5] * 100, Sampling(max_new_tokens=100), "context"),
    ],
)
def test_bad_requests_are_refused_in_one_line(prompt, sampling, word):
    with pytest.raises(RequestError, match=word) as error:
        toy_engine().add(prompt, sampling)
    assert "\n" not in str(error.value)


def test_a_request_id_in_use_is_refused():
    engine = toy_engine()
    engine.add([1], Sampling(), request_id="a")
    with pytest.raises(RequestError, match="in use"):
        engine.add([1], Sampling(), request_id="a")


class Failing(AlwaysRight):
    """Works twice, then raises, answers for too few sequences, or proposes nonsense."""

    def __init__(self, model, how: str):
        super().__init__(model)
        self.how, self.calls = how, 0

    def draft(self, request: DraftRequest) -> DraftReply:
        self.calls += 1
        reply = super().draft(request)
        if self.calls <= 2:
            return reply
        if self.how == "raises":
            raise RuntimeError("out of memory")
        return DraftReply(tokens_BK=reply.tokens_BK[1:] if self.how == "short" else reply.tokens_BK + 1000)


@pytest.mark.parametrize("how", ["raises", "short", "nonsense"])
def test_a_failing_drafter_costs_only_its_drafts(how, prompts, reference):
    engine = toy_engine(Failing(toy_model(), how))
    completions = engine.generate(prompts, Sampling(max_new_tokens=40))
    assert [c.token_ids for c in completions] == reference
    assert sum(engine.stats.fallbacks.values()) > 0


def test_swapping_the_drafter_between_rounds_keeps_the_tokens(prompts, reference):
    engine = toy_engine(drafter(AlwaysWrong))
    names = [engine.add(p, Sampling(max_new_tokens=40)) for p in prompts]
    done = {}
    for round_number in range(200):
        if round_number == 5:
            engine.set_drafter(drafter(AlwaysRight))
        if round_number == 9:
            engine.set_drafter(None)
        if round_number == 12:
            engine.set_drafter(drafter(HalfRight))
        done |= {p.request_id: p.completion for p in engine.step() if p.completion}
    assert [done[n].token_ids for n in names] == reference
    assert engine.stats.fallbacks == {}


def test_a_drafter_with_untapped_layers_is_refused_by_name():
    tapping = AlwaysRight(toy_model())
    tapping.target_layer_ids = (1,)
    with pytest.raises(ValueError, match=r"taps layers \[1\]"):
        toy_engine(tapping)
    engine = toy_engine(AlwaysRight(toy_model()))
    with pytest.raises(ValueError, match=r"taps layers \[1\]"):
        engine.set_drafter(tapping)
    assert engine.drafter_name == "always-right"
    assert engine.generate([[1, 2, 3]])[0].acceptance.tau > 1, "the drafter in service was lost"
