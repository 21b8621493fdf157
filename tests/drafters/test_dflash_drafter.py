"""DFlash in service: what it drafts round by round is what training says, alone or in a batch, as a chain or a tree."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from drafters.dflash import SLIDING, DFlashModule
from drafters.dflash_drafter import DFlashDrafter
from drafters.drafter import Drafter, DraftReply
from tests.toy_dflash import FEW_TOKENS, SLOTS, VARIANTS, batch_of, random_sequences, request_of, toy_dflash
from tests.toy_target import toy_model

ROUNDS = [  # ends of the three sequences' pairs after each round: fresh prompts, then a few pairs each
    [(0, 4), (0, 11), (0, 1)],
    [(4, 5), (11, 14), (1, 3)],
    [(5, 9), (14, 15), (3, 8)],
    [(9, 10), (15, 20), (8, 9)],
]
SELECTOR = {"selector_top_k": 4, "selector_rank": 6}


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module", params=list(VARIANTS))
def module(request, model) -> DFlashModule:
    return toy_dflash(model, **VARIANTS[request.param])


def serve(module: DFlashModule, num_slots: int = 3) -> DFlashDrafter:
    drafter = DFlashDrafter(module)
    drafter.allocate(num_slots, 32)
    return drafter


def with_hidden(drafter: DFlashDrafter, request) -> tuple[DraftReply, Tensor]:
    """The reply, and the block's normalised hidden states [B, K, D]."""
    caught: list[Tensor] = []
    hook = drafter.module.norm.register_forward_hook(lambda _m, _a, out: caught.append(out))
    reply = drafter.draft(request)
    hook.remove()
    return reply, caught[0]


# -- the same as in training -------------------------------------------------------------------------------------------


def test_drafts_of_many_rounds_are_those_of_training(module):
    ids, features = random_sequences(3, 24)
    drafter = serve(module)
    assert isinstance(drafter, Drafter)
    for spans in ROUNDS:
        reply, hidden_BKD = with_hidden(drafter, request_of(ids, features, spans))
        batch = batch_of(ids, features, torch.tensor([[end - 1] for _, end in spans]))
        torch.testing.assert_close(hidden_BKD, module.block_hidden(batch)[:, 0], rtol=1e-4, atol=1e-4)
        assert reply.tokens_BK.tolist() == module.propose(batch)[:, 0].tolist()
        assert reply.probs is None
        assert reply.counts is None


def test_a_sequence_drafts_alone_what_it_drafts_in_a_batch(module):
    ids, features = random_sequences(3, 24)
    together, alone = serve(module), serve(module)
    for spans in ROUNDS:
        _, hidden_BKD = with_hidden(together, request_of(ids, features, spans))
        for b in (0, 1, 2):
            own = request_of(ids[b : b + 1], features[b : b + 1], spans[b : b + 1], slots=[2 - b])
            torch.testing.assert_close(with_hidden(alone, own)[1][0], hidden_BKD[b], rtol=1e-4, atol=1e-4)


def test_a_full_slot_still_drafts(module):
    ids, features = random_sequences(1, 33)
    reply = serve(module).draft(request_of(ids, features, [(0, 32)]))
    assert reply.tokens_BK.tolist() == module.propose(batch_of(ids, features, [31]))[:, 0].tolist()


def test_fewer_drafts_are_the_beginning_of_the_whole_block(module):
    ids, features = random_sequences(3, 24)
    drafters = [serve(module) for _ in range(SLOTS + 1)]
    for spans in ROUNDS:
        whole = drafters[SLOTS].draft(request_of(ids, features, spans)).tokens_BK
        for num in range(SLOTS):  # 0: only take note
            reply = drafters[num].draft(request_of(ids, features, spans, num))
            assert reply.tokens_BK.tolist() == whole[:, :num].tolist()


def test_a_new_epoch_forgets_the_old_one(module):
    ids, features = random_sequences(2, 24)
    used, fresh = serve(module), serve(module)
    used.draft(request_of(ids[:1], features[:1], [(0, 20)]))
    for span in ((0, 5), (5, 6), (6, 9)):
        again = used.draft(request_of(ids[1:], features[1:], [span], epochs=[2]))
        assert again.tokens_BK.tolist() == fresh.draft(request_of(ids[1:], features[1:], [span])).tokens_BK.tolist()
    with pytest.raises(ValueError, match="slot 0 of epoch 2 knows 9 pairs, and the next ones start at 10"):
        used.draft(request_of(ids[1:], features[1:], [(10, 11)], epochs=[2]))


def test_sliding_layers_forget_in_service_too(model):
    module = toy_dflash(model, num_hidden_layers=1, sliding_window=6, layer_types=(SLIDING,))
    ids, features = random_sequences(1, 20)
    hidden = {}
    for place in (None, *range(13)):
        other = features.clone()
        if place is not None:
            other[0, place] += 1
        drafter = serve(module)
        drafter.draft(request_of(ids, other, [(0, 10)]))
        hidden[place] = with_hidden(drafter, request_of(ids, other, [(10, 13)]))[1][0]
    for place in range(13):  # the anchor is at 13; slot k, at 13 + k, sees from 5 before it on
        seen = (hidden[place] != hidden[None]).any(dim=-1).tolist()
        assert seen == [place >= 13 + k - 5 for k in range(1, SLOTS + 1)]


class TornProduct:
    """What a packed kernel is to torch: a product that takes and gives float32 rows and has no weight to look at."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._weight, self._bias = weight, bias

    def __call__(self, x_RI: Tensor) -> Tensor:
        assert x_RI.ndim == 2
        return torch.nn.functional.linear(x_RI.float(), self._weight, self._bias)

    def weight(self) -> Tensor:
        raise AssertionError("layers are called, their weights are not read")


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_packed_layers_draft_the_same(name, model):
    plain, packed = toy_dflash(model, **VARIANTS[name]), toy_dflash(model, **VARIANTS[name])
    packed.pack(TornProduct)
    ids, features = random_sequences(3, 24)
    one, other = serve(plain), serve(packed)
    for spans in ROUNDS:
        request = request_of(ids, features, spans)
        assert torch.equal(other.draft(request).tokens_BK, one.draft(request).tokens_BK)


# -- sampling ----------------------------------------------------------------------------------------------------------


def scores_in_the_plain(module: DFlashModule, hidden_D: Tensor, previous: int) -> dict[int, float]:
    """Candidates (token ids) of one slot after a token, with the selector's score; without one, of the logits."""
    known = module.draft_vocab_ids.tolist()
    logits = module.head(hidden_D).double()
    selector = module.candidate_selector
    if selector is None:
        return {known[c]: float(logits[c]) for c in range(len(known))}
    index = known.index(previous) if previous in known else len(known)
    wanted = selector.predecessor_codebook[index].double() * selector.hidden_projection(hidden_D).double()
    best = logits.argsort(descending=True)[: module.config.selector_top_k].tolist()
    return {known[c]: float(logits[c] + wanted @ selector.successor_codebook[c].double()) for c in best}


def shares(scores: dict[int, float], temperature: float = 1.0) -> dict[int, float]:
    exps = {token: math.exp(score / temperature) for token, score in scores.items()}
    return {token: e / sum(exps.values()) for token, e in exps.items()}


@pytest.mark.parametrize("vocab_ids", [None, FEW_TOKENS])
@torch.no_grad()
def test_reported_probabilities_are_the_softmax_of_the_scores_after_the_drafted_path(vocab_ids, model):
    module = toy_dflash(model, vocab_ids, **SELECTOR)
    ids, features = random_sequences(3, 24)
    temperatures = [0.7, 0.0, 2.5]
    drafter, greedy = serve(module), serve(module)
    for spans in ROUNDS:
        reply, hidden_BKD = with_hidden(drafter, request_of(ids, features, spans, temperatures=temperatures))
        assert reply.probs is not None
        for b, (_, end) in enumerate(spans):
            previous = int(ids[b, end])
            for k in range(SLOTS):
                scores = scores_in_the_plain(module, hidden_BKD[b, k], previous)
                reported = zip(reply.probs.ids_BKC[b, k].tolist(), reply.probs.probs_BKC[b, k].tolist(), strict=True)
                if temperatures[b] == 0:
                    expected = {token: float(token == max(scores, key=lambda c: scores[c])) for token in scores}
                else:
                    expected = shares(scores, temperatures[b])
                assert dict(reported) == pytest.approx(expected, abs=1e-4)
                previous = int(reply.tokens_BK[b, k])
        assert reply.tokens_BK[1].tolist() == greedy.draft(request_of(ids, features, spans)).tokens_BK[1].tolist()


def test_samples_follow_the_reported_distribution(model):
    """2000 seeds at one anchor: at every slot, how often a token is drawn is what was reported, summed over paths."""
    module = toy_dflash(model, **SELECTOR)
    ids, features = random_sequences(1, 8)
    count, drawn = 2000, {}
    expected: dict[tuple[int, int], float] = {}
    drafter = serve(module, 500)
    for part in range(count // 500):
        request = request_of(
            ids.expand(500, -1),
            features.expand(500, -1, -1),
            [(0, 5)] * 500,
            epochs=[part] * 500,
            temperatures=[4.0] * 500,
            seeds=list(range(part * 500, part * 500 + 500)),
        )
        reply = drafter.draft(request)
        assert reply.probs is not None
        again = drafter.draft(request_of(ids, features, [(0, 5)], epochs=[9], temperatures=[4.0], seeds=[part * 500]))
        assert again.tokens_BK.tolist() == reply.tokens_BK[:1].tolist(), "a sequence's draws are its own"
        for k in range(SLOTS):
            for token in reply.tokens_BK[:, k].tolist():
                drawn[k, token] = drawn.get((k, token), 0) + 1
            tokens, probs = reply.probs.ids_BKC[:, k].flatten(), reply.probs.probs_BKC[:, k].flatten()
            for token, prob in zip(tokens.tolist(), probs.tolist(), strict=True):
                expected[k, token] = expected.get((k, token), 0.0) + prob
    spread = [value for value in expected.values() if 0.05 * count < value < 0.95 * count]
    assert len(spread) >= SLOTS, "a drafter that is nearly sure of all its drafts proves little"
    for key, value in expected.items():
        share = value / count
        assert abs(drawn.get(key, 0) - value) < 4.5 * math.sqrt(count * share * (1 - share)) + 1e-2


def test_without_a_selector_the_argmax_is_proposed_at_any_temperature(model):
    module = toy_dflash(model)
    ids, features = random_sequences(3, 24)
    reply = serve(module).draft(request_of(ids, features, ROUNDS[0], temperatures=[0.0, 1.0, 2.0]))
    assert reply.probs is None
    assert reply.tokens_BK.tolist() == serve(module).draft(request_of(ids, features, ROUNDS[0])).tokens_BK.tolist()


@pytest.mark.parametrize("changes", [{}, SELECTOR, {**SELECTOR, "vocab_ids": FEW_TOKENS}])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@torch.no_grad()
def test_confidence_is_the_chance_that_a_draft_and_all_before_it_are_kept(changes, temperature, model):
    module = toy_dflash(model, confidence_head=True, **changes)
    ids, features = random_sequences(3, 24)
    request = request_of(ids, features, ROUNDS[0], SLOTS - 1, temperatures=[temperature] * 3)
    reply, hidden_BKD = with_hidden(serve(module), request)
    assert reply.confidence_BK is not None
    head = module.confidence
    for b, (_, end) in enumerate(ROUNDS[0]):
        previous, joint = int(ids[b, end]), 1.0
        for k in range(SLOTS - 1):
            scores = scores_in_the_plain(module, hidden_BKD[b, k], previous)
            previous = int(reply.tokens_BK[b, k])
            logits = module.head(hidden_BKD[b, k])
            index = [module.draft_vocab_ids.tolist().index(c) for c in scores]
            own = shares(scores)[previous] * float(logits.double().softmax(dim=-1)[index].sum())
            odds = float(head.own_weight * math.log(own / (1 - own)) + head.slot_bias[k])
            odds += float(head.hidden_weight @ hidden_BKD[b, k])
            joint *= 1 / (1 + math.exp(-odds))
            assert float(reply.confidence_BK[b, k]) == pytest.approx(joint, rel=1e-2, abs=1e-4)


# -- trees -------------------------------------------------------------------------------------------------------------


def all_paths(module: DFlashModule, hidden_KD: Tensor, anchor: int, depth: int) -> dict[tuple[int, ...], float]:
    """Every path of up to `depth` drafts with its joint probability."""
    paths = {(): 1.0}
    for k in range(depth):
        logits = module.head(hidden_KD[k]).double().softmax(dim=-1)
        known = {token: i for i, token in enumerate(module.draft_vocab_ids.tolist())}
        for path in [p for p in paths if len(p) == k]:
            scores = scores_in_the_plain(module, hidden_KD[k], path[-1] if path else anchor)
            mass = float(logits[[known[token] for token in scores]].sum())
            paths |= {(*path, token): paths[path] * mass * share for token, share in shares(scores).items()}
    del paths[()]
    return paths


@pytest.mark.parametrize("changes", [SELECTOR, {**SELECTOR, "vocab_ids": FEW_TOKENS}, {"vocab_ids": range(0, 256, 40)}])
@pytest.mark.parametrize(("budget", "depth"), [(1, 1), (7, 3), (12, SLOTS), (100, 2)])
@torch.no_grad()
def test_trees_hold_the_likeliest_paths(budget, depth, changes, model):
    module = toy_dflash(model, **changes)
    ids, features = random_sequences(3, 24)
    drafter = serve(module)
    for spans in ROUNDS[:2]:
        temperatures = [0.0, 1.0, 0.5]  # a tree is the same at any
        request = request_of(ids, features, spans, depth, tree_nodes=budget, temperatures=temperatures)
        reply, hidden_BKD = with_hidden(drafter, request)
        assert reply.parents_BK is not None
        assert reply.confidence_BK is not None
        assert reply.counts is not None
        assert reply.probs is None
        for b, (_, end) in enumerate(spans):
            expected = all_paths(module, hidden_BKD[b], int(ids[b, end]), depth)
            best = sorted(expected.values(), reverse=True)[: min(budget, drafter.max_tree_nodes)]
            assert reply.counts[b] == len(best)
            paths: list[tuple[int, ...]] = []
            for j in range(reply.counts[b]):
                parent = int(reply.parents_BK[b, j])
                paths.append((*(paths[parent] if parent >= 0 else ()), int(reply.tokens_BK[b, j])))
            assert len(set(paths)) == len(paths)
            assert [expected[path] for path in paths] == pytest.approx(best, rel=1e-3)
            assert reply.confidence_BK[b, : len(best)].tolist() == pytest.approx(best, rel=1e-3)


def test_a_trees_best_path_starts_with_the_best_draft(model):
    module = toy_dflash(model, **SELECTOR)
    ids, features = random_sequences(3, 24)
    tree = serve(module).draft(request_of(ids, features, ROUNDS[0], tree_nodes=5))
    chain = serve(module).draft(request_of(ids, features, ROUNDS[0]))
    assert tree.tokens_BK[:, 0].tolist() == chain.tokens_BK[:, 0].tolist()
    assert list(itertools.chain.from_iterable(tree.parents_BK[:, :1].tolist())) == [-1] * 3
