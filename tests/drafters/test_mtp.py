"""MTP drafters: what is trained is what is served, step by step; labels sit right; nothing leaks backwards."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from drafters.acceptance import Acceptance
from drafters.checkpoint import as_drafter
from drafters.drafter import DraftRequest
from drafters.drafter_module import DrafterModule
from drafters.losses import LossConfig, Supervision, draft_loss
from drafters.mtp import make_mtp
from drafters.training_batch import IGNORED, Document, TrainingBatch, pad_documents
from pipelines.expected_acceptance import expected_acceptance
from pipelines.step_config import StepConfig
from pipelines.training_sequence import TrainingSequence
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_mtp import (
    TAPS,
    Overheard,
    continued,
    features_of,
    rows_of,
    sequence_of,
    shared_of,
    tokens_of,
    toy_mtp,
    toy_mtp_config,
    toy_trainer,
)
from tests.toy_target import toy_model, toy_prompts

KINDS = ["recursive", "independent"]
STEPS = 3  # K of the toy drafters
NEW = 24  # tokens per continuation


@pytest.fixture(scope="module")
def model():
    """The target in the plain, for references; engines take over copies of their own."""
    return toy_model()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return toy_prompts(9, low=1, high=60)


@pytest.fixture(scope="module")
def sequences(model, prompts) -> list[TrainingSequence]:
    return continued(model, prompts, NEW)


@pytest.fixture(scope="module", params=KINDS)
def trained(request, model, sequences) -> DrafterModule:
    """Half learned, so that some drafts are right and some wrong."""
    module = toy_mtp(model, request.param)
    config = StepConfig(epochs=60, tokens_per_step=tokens_of(sequences), learning_rate=1e-2, evaluations=1)
    for _ in toy_trainer(module, sequences, [], config).run():
        pass
    return module.eval()


def toy_engine(drafter, **changes) -> Engine:
    """Three slots for nine ragged requests, prompts fed in chunks of at most seven rows a pass."""
    options = {"num_draft_tokens": STEPS, "max_prefill_rows": 7} | changes
    rows = TorchRows(toy_model(), num_slots=3, max_len=128, target_layer_ids=TAPS)
    return Engine(rows, drafter, config=EngineConfig(**options))


def teacher_forced(model, module: DrafterModule, ids: list[int], rounds: list[tuple[int, list[int]]]) -> torch.Tensor:
    """[rounds, K, W] training-mode logits at every round's anchor pair p, on the tokens up to p + 1 and its drafts.

    Features come from a plain pass over the whole sequence; those behind the anchor are noise, which must not matter.
    """
    features = features_of(model, ids)
    documents = [
        Document(
            ids_T=torch.tensor(ids[: p + 2] + drafts),
            features_TF=torch.cat([features[: p + 1], torch.randn(len(drafts), features.shape[1])]),
            anchors_A=torch.tensor([p]),
            ends_A=torch.tensor([p + 2 + len(drafts)]),
        )
        for p, drafts in rounds
    ]
    with torch.no_grad():
        return module(pad_documents(documents)).logits_BAKW[:, 0]


def assert_parity(model, module: DrafterModule, overheard: Overheard, completions) -> int:
    """Every draft is the training-mode argmax at its step; returns the number of drafts compared."""
    compared = 0
    for completion in completions:
        ids = completion.prompt_ids + completion.token_ids
        rounds = overheard.rounds_of(ids)
        assert rounds[0][0] == len(completion.prompt_ids) - 1, "drafting starts at the last prompt token's pair"
        logits_NKW = teacher_forced(model, module, ids, rounds)
        drafts_NK = module.draft_labels(torch.tensor([drafts for _, drafts in rounds]))
        chosen_NK = logits_NKW.gather(2, drafts_NK[:, :, None])[:, :, 0]
        # two passes round differently: equal to within a rounding, not bit by bit
        torch.testing.assert_close(chosen_NK, logits_NKW.amax(dim=-1), rtol=1e-3, atol=1e-3)
        compared += drafts_NK.numel()
    return compared


VARIANTS = [
    {},
    {"shared_trunk": True},
    {"anchor_embedding": True},
    {"shared_trunk": True, "anchor_embedding": True},
    {"medusa_heads": True},
]


@pytest.mark.parametrize("vocab_ids", [None, range(1, 256, 3)])
@pytest.mark.parametrize(
    ("kind", "changes"), [("recursive", {}), *(("independent", changes) for changes in VARIANTS)], ids=str
)
def test_served_drafts_are_those_of_training(kind, changes, vocab_ids, model, prompts):
    module = toy_mtp(model, kind, vocab_ids, **changes)
    overheard = Overheard(module)
    engine = toy_engine(overheard)
    params = [Sampling(max_new_tokens=10 + 5 * (i % 3)) for i in range(len(prompts))]
    completions = engine.generate(prompts, params)
    assert engine.stats.fallbacks == {}
    assert assert_parity(model, module, overheard, completions) > 300


@pytest.mark.learning
def test_parity_holds_where_drafts_are_accepted(trained, model, prompts):
    overheard = Overheard(trained)
    completions = toy_engine(overheard).generate(prompts, Sampling(max_new_tokens=NEW))
    assert_parity(model, trained, overheard, completions)


@pytest.mark.learning
def test_expected_acceptance_is_the_engines(trained, sequences, prompts):
    overheard = Overheard(trained)
    engine = toy_engine(overheard)
    engine.generate(prompts, Sampling(max_new_tokens=NEW + STEPS + 2))  # so that every compared round has a next one
    served = Acceptance()
    for sequence in sequences:
        anchors = [p for p, _ in overheard.rounds_of(sequence.ids.tolist())]
        for here, following in pairwise(anchors):
            if here + 1 + STEPS < len(sequence.ids):  # all its drafts can be checked against the known continuation
                served.record(STEPS, following - here - 1)
    expected = expected_acceptance(trained, sequences, STEPS)
    assert expected == served
    assert 1.3 < expected.tau < STEPS + 0.9, "a drafter that is always right or wrong would prove little"
    assert trained.training is False


@pytest.mark.learning
def test_drafting_never_changes_greedy_output(model, prompts, sequences, trained):
    reference = [s.ids[s.prompt_len :].tolist() for s in sequences]
    for module in (toy_mtp(model, trained.config.kind), trained):
        for number in (1, 2, STEPS):
            completions = toy_engine(as_drafter(module), num_draft_tokens=number).generate(
                prompts, Sampling(max_new_tokens=NEW)
            )
            assert [c.token_ids for c in completions] == reference


# -- indexing: a target whose continuation is known -------------------------------------------------------------------

COUNTED = 48  # tokens that the successor target knows


@pytest.fixture(scope="module")
def successor():
    """A target that counts: after token t comes t + 1, round the clock. Both layers are the identity."""
    return make_successor()


def make_successor():
    model = toy_model(vocab_size=COUNTED, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = model.model.embed_tokens.weight
        embedding.copy_(torch.nn.functional.normalize(embedding, dim=-1))
        model.lm_head.weight.copy_(4 * embedding.roll(1, dims=0))  # the head of t + 1 is the embedding of t
    return model


def counting_drafter(model, kind: str) -> DrafterModule:
    """Trained for some seconds on counted sequences."""
    ids = [[(first + i) % COUNTED for i in range(30)] for first in range(0, COUNTED, 3)]
    sequences = [sequence_of(model, i, prompt_len=4) for i in ids]
    module = toy_mtp(model, kind, vocab_ids=range(COUNTED), vocab_size=COUNTED)
    config = StepConfig(epochs=36, tokens_per_step=240, learning_rate=1e-2, anchors_per_sequence=24, evaluations=1)
    for _ in toy_trainer(module, sequences, [], config).run():
        pass
    return module.eval()


def counted_tau(module: DrafterModule) -> float:
    rows = TorchRows(make_successor(), num_slots=4, max_len=64, target_layer_ids=TAPS)
    engine = Engine(rows, as_drafter(module), config=EngineConfig(num_draft_tokens=STEPS))
    for completion in engine.generate([[7, 8], [20], [40, 41, 42]], Sampling(max_new_tokens=41)):
        last = completion.prompt_ids[-1]
        assert completion.token_ids == [(last + 1 + i) % COUNTED for i in range(41)]
    return engine.stats.acceptance.tau


@pytest.mark.learning
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_of_counted_sequences_drafts_almost_everything(kind, successor):
    assert counted_tau(counting_drafter(successor, kind)) > STEPS + 0.8


@pytest.mark.learning
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [-1, 1])
def test_labels_that_are_off_by_one_are_found_by_that(kind, shift, successor, monkeypatch: pytest.MonkeyPatch):
    right = TrainingBatch.labels

    def shifted(self: TrainingBatch, num_draft_tokens: int) -> torch.Tensor:
        return right(replace(self, ids_BT=self.ids_BT.roll(shift, dims=1)), num_draft_tokens)

    monkeypatch.setattr(TrainingBatch, "labels", shifted)
    assert counted_tau(counting_drafter(successor, kind)) < 1.2


# -- what a step may see ----------------------------------------------------------------------------------------------


def logits_of(
    module: DrafterModule, ids_BT: torch.Tensor, features_BTF: torch.Tensor, anchors: list[int]
) -> torch.Tensor:
    """[B, A, K, W] at the same anchors of every sequence."""
    anchors_BA = torch.tensor([anchors]).expand(len(ids_BT), -1)
    with torch.no_grad():
        return module(rows_of(ids_BT, features_BTF, anchors_BA)).logits_BAKW


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_after_an_anchor_leaks_into_its_steps(kind, model):
    module = toy_mtp(model, kind)
    length, p = 20, 9
    ids = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(0))
    features = torch.randn(1, length, 64, generator=torch.Generator().manual_seed(1))
    before = logits_of(module, ids, features, [p])[0, 0]
    for place in range(length):
        other_ids, other_features = ids.clone(), features.clone()
        other_ids[0, place] = (ids[0, place] + 1) % 256
        other_features[0, place] += 1
        by_token = (logits_of(module, other_ids, features, [p])[0, 0] != before).any(dim=-1).tolist()
        by_features = (logits_of(module, ids, other_features, [p])[0, 0] != before).any(dim=-1).tolist()
        if kind == "independent":
            assert by_token == [False] * STEPS
            assert by_features == [place == p] * STEPS
        else:  # token 0 is in no pair; the token that step k predicts, at p + 1 + k, conditions the steps after k
            assert by_token == [0 < place < p + 1 + k for k in range(1, STEPS + 1)]
            assert by_features == [place <= p] * STEPS


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_independent_heads_read_the_anchor_only_where_they_are_told_to(changes, model):
    module = toy_mtp(model, "independent", **changes)
    p = 9
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    features = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(1))
    before = logits_of(module, ids, features, [p])
    for place in range(20):
        other = ids.clone()
        other[0, place] = (ids[0, place] + 1) % 256
        changed = bool((logits_of(module, other, features, [p]) != before).any())
        assert changed == (place == p + 1 and "anchor_embedding" in changes)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_fresh_independent_heads_say_what_the_targets_head_says(changes, model):
    module = make_mtp(toy_mtp_config("independent", **changes))
    module.bind(shared_of(model))
    features, anchors = torch.randn(4, 64), torch.tensor([3, 1, 4, 1])
    with torch.no_grad():
        said = model.lm_head(model.model.norm(features[:, 32:]))
        logits = module.step_logits(features, anchors)
    torch.testing.assert_close(logits, said[:, None].expand_as(logits), rtol=1e-4, atol=1e-4)
    module.step_logits(features, anchors).square().sum().backward()
    used = [module.anchor_proj.weight] if changes.get("anchor_embedding") else []
    used += list(module.trunk.mlp[-1].parameters()) if changes.get("shared_trunk") else []
    assert all(weight.grad.abs().max() > 0 for weight in used), "a part that starts at zero must be able to leave it"


@pytest.mark.parametrize("kind", KINDS)
def test_an_anchor_sees_neither_other_anchors_nor_other_sequences(kind, model):
    module = toy_mtp(model, kind)
    ids = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(0))
    features = torch.randn(3, 20, 64, generator=torch.Generator().manual_seed(1))
    together = logits_of(module, ids, features, [2, 9, 10, 16])
    for b in range(3):
        for a, p in enumerate([2, 9, 10, 16]):
            alone = logits_of(module, ids[b : b + 1, : p + 2 + STEPS], features[b : b + 1, : p + 2 + STEPS], [p])[0, 0]
            torch.testing.assert_close(together[b, a], alone, rtol=1e-4, atol=1e-4)


# -- the draft vocabulary ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_draft_vocabulary_maps_ids_and_leaves_the_rest_out_of_the_loss(kind, model):
    module = toy_mtp(model, kind, vocab_ids=[5, 17, 200])
    labels = torch.tensor([[17, 200, 5], [6, IGNORED, 17]])
    mapped = module.draft_labels(labels)
    assert mapped.tolist() == [[1, 2, 0], [IGNORED, IGNORED, 1]]
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0], [0, 0, 1]]), 3).float() * 9
    supervision = Supervision(labels_NK=labels, draft_labels_NK=mapped)
    result = draft_loss(LossConfig(rho=1.0), logits, supervision)
    assert result.correct_K.tolist() == [1, 1, 2]
    assert result.known_K.tolist() == [2, 1, 2]  # 6 cannot be drafted: known, and wrong
    assert result.loss < 0.01
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    logits = logits_of(module, ids, torch.randn(1, 12, 64), [4])
    assert logits.shape == (1, 1, STEPS, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_not_bound_to_a_target_of_another_shape(kind):
    with pytest.raises(ValueError, match=r"\(100, 32\).*\(256, 32\)"):
        toy_mtp(toy_model(vocab_size=100), kind)


# -- slots ------------------------------------------------------------------------------------------------------------


def pairs(slot: int, epoch: int, start: int, count: int, seed: int, num: int = STEPS) -> DraftRequest:
    generator = torch.Generator().manual_seed(seed * 1000 + start)
    return DraftRequest(
        slots=[slot],
        epochs=[epoch],
        counts=[count],
        starts=[start],
        first_tokens=[1],
        tokens_N=torch.randint(0, 256, (count,), generator=generator),
        features_NF=torch.randn(count, 64, generator=generator),
        num_draft_tokens=num,
        temperatures=[0.0],
        seeds=[0],
    )


def fresh_drafter(model, kind: str):
    drafter = as_drafter(toy_mtp(model, kind))
    drafter.allocate(2, 64)
    return drafter


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_epoch_forgets_the_old_one(kind, model):
    used, fresh = fresh_drafter(model, kind), fresh_drafter(model, kind)
    used.draft(pairs(0, 1, 0, 40, seed=1))
    used.draft(pairs(0, 1, 40, 3, seed=1))
    for start, count in ((0, 5), (5, 2), (7, 1)):
        again, first = used.draft(pairs(0, 2, start, count, seed=2)), fresh.draft(pairs(0, 1, start, count, seed=2))
        assert again.tokens_BK.tolist() == first.tokens_BK.tolist()


def test_missing_pairs_are_an_error(model):
    drafter = fresh_drafter(model, "recursive")
    drafter.draft(pairs(0, 1, 0, 4, seed=0))
    with pytest.raises(ValueError, match="slot 0 of epoch 1 knows 4 pairs, and the next ones start at 5"):
        drafter.draft(pairs(0, 1, 5, 1, seed=0))
    with pytest.raises(ValueError, match="knows 0 pairs"):
        drafter.draft(pairs(0, 2, 4, 1, seed=0))
    with pytest.raises(ValueError, match="knows 0 pairs"):
        drafter.draft(pairs(1, 1, 4, 1, seed=0))


@pytest.mark.parametrize("kind", KINDS)
def test_taking_note_without_drafting(kind, model):
    noted, asked = fresh_drafter(model, kind), fresh_drafter(model, kind)
    assert noted.draft(pairs(0, 1, 0, 6, seed=3, num=0)).tokens_BK.shape == (1, 0)
    asked.draft(pairs(0, 1, 0, 6, seed=3))
    following = pairs(0, 1, 6, 2, seed=3)
    assert noted.draft(following).tokens_BK.tolist() == asked.draft(following).tokens_BK.tolist()


# -- trees of independent heads ----------------------------------------------------------------------------------------


def best_paths(log_probs_KW: torch.Tensor, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """The likeliest `budget` paths of all lengths, by trying all of them."""
    paths: list[tuple[float, tuple[int, ...]]] = []
    above: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for row in log_probs_KW.tolist():
        above = [(score + value, (*path, token)) for score, path in above for token, value in enumerate(row)]
        paths += above
    return sorted(paths, reverse=True)[:budget]


@pytest.mark.parametrize("budget", [1, 2, 5, 20, 63])
@pytest.mark.parametrize("depth", [1, STEPS])
def test_trees_hold_the_likeliest_paths_within_the_budget(budget, depth, model):
    vocab_ids = list(range(40, 52))
    module = toy_mtp(model, "independent", vocab_ids, anchor_embedding=True)
    drafter = as_drafter(module)
    drafter.allocate(2, 64)
    request = replace(pairs(0, 1, 0, 3, seed=1), num_draft_tokens=depth, tree_nodes=budget)
    reply = drafter.draft(request)
    with torch.no_grad():
        logits = module.step_logits(request.features_NF[-1:], request.tokens_N[-1:])[0, :depth]
    expected = best_paths(logits.log_softmax(-1), budget)

    tokens, parents = reply.tokens_BK[0].tolist(), reply.parents_BK[0].tolist()
    assert reply.counts == [len(expected)]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert paths == [tuple(vocab_ids[token] for token in path) for _, path in expected]
    assert reply.confidence_BK[0].log().tolist() == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert reply.probs is None


def test_trees_of_a_batch_and_their_bounds(model):
    drafter = as_drafter(toy_mtp(model, "independent"))
    drafter.allocate(2, 64)
    one, other = (replace(pairs(slot, 1, 0, 3, seed=slot), tree_nodes=7) for slot in (0, 1))
    both = DraftRequest(
        slots=[0, 1], epochs=[1, 1], counts=[3, 3], starts=[0, 0], first_tokens=[1, 1],
        tokens_N=torch.cat([one.tokens_N, other.tokens_N]),
        features_NF=torch.cat([one.features_NF, other.features_NF]),
        num_draft_tokens=STEPS, tree_nodes=7, temperatures=[0.0] * 2, seeds=[0] * 2,
    )  # fmt: skip
    together = drafter.draft(both)
    for b, request in enumerate((one, other)):
        alone = drafter.draft(request)
        assert together.tokens_BK[b].tolist() == alone.tokens_BK[0].tolist()
        assert together.parents_BK[b].tolist() == alone.parents_BK[0].tolist()
    assert drafter.max_tree_nodes == 63
    assert drafter.draft(replace(both, tree_nodes=1000)).counts == [63, 63]
    assert drafter.draft(replace(both, tree_nodes=0)).parents_BK is None


def test_positions_keep_their_precision_in_bfloat16(model):
    exact, rounded = toy_mtp(model, "recursive"), toy_mtp(model, "recursive").to(torch.bfloat16)
    x = torch.ones(1, 1, 8)
    at = torch.tensor([1999])
    torch.testing.assert_close(rounded.rotate(x, at), exact.rotate(x, at))
