"""The DFlash module: what a slot sees, where it stands, what it is trained towards. Loops in the plain as reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.checkpoint import as_drafter
from drafters.dflash import FULL, SLIDING, DFlashModule
from drafters.dflash_layer import BlockConvolution
from drafters.losses import gamma_for
from drafters.training_batch import IGNORED, TrainingBatch
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.drafters.test_mtp import COUNTED, make_successor
from tests.toy_dflash import BLOCK, FEW_TOKENS, MASK, SLOTS, VARIANTS, batch_of, random_sequences, toy_dflash
from tests.toy_dflash import toy_dflash_config as config_of
from tests.toy_mtp import TAPS, Overheard, continued, features_of
from tests.toy_target import toy_model, toy_prompts


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module", params=list(VARIANTS))
def module(request, model) -> DFlashModule:
    return toy_dflash(model, **VARIANTS[request.param])


def logits_of(module: DFlashModule, ids_BT: Tensor, features_BTF: Tensor, anchors) -> Tensor:
    """[B, A, K, W]"""
    with torch.no_grad():
        return module(batch_of(ids_BT, features_BTF, anchors)).logits_BAKW


# -- against loops over slots, heads and positions --------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + 1e-6).sqrt() * weight.double()


def turned(head: Tensor, position: int) -> Tensor:
    """Rotary embedding of one head, pair by pair."""
    out, half = head.clone(), len(head) // 2
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / len(head))
        out[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)
        out[i + half] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)
    return out


def convolved(x: list[Tensor], base: Tensor, predicted: list[Tensor]) -> list[Tensor]:
    """Tap t of slot j multiplies slot j - t; base [taps, D], predicted per slot [taps, groups]."""
    out = []
    for j in range(len(x)):
        total = torch.zeros_like(x[0])
        for t in range(min(j + 1, len(base))):
            for d in range(len(total)):
                total[d] += x[j - t][d] * (base[t][d] + predicted[j][t][d // 8])
        out.append(total)
    return out


def around(conv: BlockConvolution | None, x: list[Tensor], part) -> list[Tensor]:
    if conv is None:
        return part(x)
    kernels = [(conv.kernel_projection.weight.double() @ slot).view(2, 2, -1) for slot in x]
    base = conv.base_kernel.double()
    return convolved(part(convolved(x, base[0], [k[0] for k in kernels])), base[1], [k[1] for k in kernels])


def attention(layer, window: int | None, x: list[Tensor], context: Tensor, position: int) -> list[Tensor]:
    """x: the block's states at `position` and after; context: features [p + 1, D] at 0..p."""
    attn = layer.self_attn
    wq, wk, wv, wo = (getattr(attn, f"{n}_proj").weight.double() for n in "qkvo")
    seen = [(p, c) for p, c in enumerate(context)] + [(position + j, s) for j, s in enumerate(x)]
    outs = []
    for j, slot in enumerate(x):
        heads = []
        for h in range(4):
            part, kv_part = slice(8 * h, 8 * h + 8), slice(8 * (h // 2), 8 * (h // 2) + 8)
            query = turned(norm((wq @ slot)[part], attn.q_norm.weight), position + j)
            near = [(p, s) for p, s in seen if window is None or abs(position + j - p) < window]
            keys = [turned(norm((wk @ s)[kv_part], attn.k_norm.weight), p) for p, s in near]
            weights = torch.softmax(torch.stack([query @ k / math.sqrt(8) for k in keys]), dim=0)
            heads.append(sum(w * (wv @ s)[kv_part] for w, (_, s) in zip(weights, near, strict=True)))
        outs.append(wo @ torch.cat(heads))
    return outs


def mlp(layer, x: list[Tensor]) -> list[Tensor]:
    gate, up, down = (getattr(layer.mlp, f"{n}_proj").weight.double() for n in ("gate", "up", "down"))
    return [down @ (F.silu(gate @ s) * (up @ s)) for s in x]


def reference_logits(module: DFlashModule, ids: Tensor, features: Tensor, p: int) -> Tensor:
    """[K, W] of the block whose anchor is the token at p + 1, slot by slot in float64."""
    context = torch.stack([norm(module.fc.weight.double() @ f.double(), module.hidden_norm.weight) for f in features])
    context = context[: p + 1]
    embedding = module.embedding_VD.double()
    x = [embedding[t] for t in [int(ids[p + 1])] + [MASK] * SLOTS]
    if module.slot_context_proj is not None:
        more = module.slot_context_proj.weight.double() @ torch.cat([context[p], norm(x[0], torch.ones(32))])
        x = [slot + more for slot in x]
    for layer, window in zip(module.layers, module.config.windows, strict=True):
        normed = [norm(slot, layer.input_layernorm.weight) for slot in x]
        change = around(layer.attention_conv, normed, lambda s, la=layer, w=window: attention(la, w, s, context, p + 1))
        x = [a + b for a, b in zip(x, change, strict=True)]
        normed = [norm(slot, layer.post_attention_layernorm.weight) for slot in x]
        change = around(layer.mlp_conv, normed, lambda s, la=layer: mlp(la, s))
        x = [a + b for a, b in zip(x, change, strict=True)]
    return torch.stack([module.lm_head_WD.double() @ norm(slot, module.norm.weight) for slot in x[1:]])


def test_logits_are_those_of_plain_loops(module):
    ids, features = random_sequences(2, 14)
    anchors = torch.tensor([[0, 7], [3, 8]])
    logits = logits_of(module, ids, features, anchors)
    for b in range(2):
        for a in range(2):
            with torch.no_grad():
                expected = reference_logits(module, ids[b], features[b], int(anchors[b, a]))
            torch.testing.assert_close(logits[b, a].double(), expected, rtol=1e-3, atol=1e-3)


def test_convolution_by_hand():
    conv = BlockConvolution(2, kernel_size=2, group_size=2)
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    assert torch.equal(conv.around(x, lambda y: 10 * y), 10 * x), "it starts as the identity"
    with torch.no_grad():
        conv.base_kernel[0] = torch.tensor([[1.0, 0.0], [0.5, 1.0]])  # before: own slot, then the slot before
        conv.base_kernel[1] = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
        conv.kernel_projection.weight[3] = torch.tensor([1.0, 0.0])  # after, slot before: its first channel
    # before: [1, 0], [3 + .5, 2], [5 + 1.5, 4]; after: slot 1 adds 3 * slot 0, slot 2 adds 5 * slot 1
    expected = torch.tensor([[[1.0, 0.0], [3.5 + 3 * 1, 2.0], [6.5 + 5 * 3.5, 4 + 5 * 2.0]]])
    assert torch.equal(conv.around(x, lambda y: y), expected)


# -- what a slot may see ----------------------------------------------------------------------------------------------


def test_nothing_after_the_anchor_is_seen_nor_the_anchors_own_features(module):
    ids, features = random_sequences(1, 20)
    p = 9
    reach = sum((w or 99) - 1 for w in module.config.windows)  # how far a slot sees through all layers
    before = logits_of(module, ids, features, [p])[0, 0]
    for place in range(20):
        other_ids, other_features = ids.clone(), features.clone()
        other_ids[0, place] = (ids[0, place] + 1) % 256
        other_features[0, place] += 1
        by_token = (logits_of(module, other_ids, features, [p])[0, 0] != before).any(dim=-1).tolist()
        by_features = (logits_of(module, ids, other_features, [p])[0, 0] != before).any(dim=-1).tolist()
        # the anchor alone, and features before it: its own, at p + 1, are not known yet
        assert by_token == [place == p + 1 and k <= reach for k in range(1, BLOCK)]
        if place > p or reach > 99:
            assert by_features == [place <= p] * SLOTS


def test_a_block_sees_neither_other_blocks_nor_other_sequences(module):
    ids, features = random_sequences(3, 20)
    anchors = torch.tensor([[2, 9, 10]] * 3)
    before = logits_of(module, ids, features, anchors)
    moved, other_ids, other_features = anchors.clone(), ids.clone(), features.clone()
    moved[0, 1:] = torch.tensor([5, 14])
    other_ids[1:], other_features[1:] = 7, 0.5
    after = logits_of(module, other_ids, other_features, moved)
    assert torch.equal(after[0, 0], before[0, 0])
    assert not torch.equal(after[0, 1], before[0, 1])
    for a, p in enumerate([2, 9, 10]):
        alone = logits_of(module, ids[1:2, : p + 2], features[1:2, : p + 2], [p])[0, 0]
        torch.testing.assert_close(alone, before[1, a], rtol=1e-4, atol=1e-4)


def test_slots_see_each_other_in_both_directions(model, monkeypatch: pytest.MonkeyPatch):
    module = toy_dflash(model)
    ids, features = random_sequences(1, 12)
    before = logits_of(module, ids, features, [6])[0, 0]
    plain = DFlashModule.block_input
    for slot in range(BLOCK):

        def changed(self, anchors: Tensor, last_context: Tensor, slot: int = slot) -> Tensor:
            x = plain(self, anchors, last_context).clone()
            x[..., slot, :] += 0.5
            return x

        monkeypatch.setattr(DFlashModule, "block_input", changed)
        after = logits_of(module, ids, features, [6])[0, 0]
        assert (after != before).any(dim=-1).tolist() == [True] * SLOTS, slot


def test_a_sliding_layer_sees_no_further_than_its_window(model):
    module = toy_dflash(model, num_hidden_layers=1, sliding_window=6, layer_types=(SLIDING,))
    ids, features = random_sequences(1, 20)
    p = 12
    before = logits_of(module, ids, features, [p])[0, 0]
    for place in range(p + 1):
        other = features.clone()
        other[0, place] += 1
        seen = (logits_of(module, ids, other, [p])[0, 0] != before).any(dim=-1).tolist()
        # slot k stands at p + 1 + k and sees from 5 before it on; slot 0 is seen by all and sees from p - 4 on, but in
        # one layer its own attention does not reach the others
        assert seen == [place >= p + 1 + k - 5 for k in range(1, BLOCK)]


def test_positions_keep_their_precision_in_bfloat16(model):
    exact, rounded = toy_dflash(model), toy_dflash(model).to(torch.bfloat16)
    at = torch.tensor([1999])
    assert all(torch.equal(a, b) for a, b in zip(exact.angles(at), rounded.angles(at), strict=True))


# -- labels: a target whose continuation is known, and the engine as the judge ----------------------------------------


def counting_drafter(target, **changes) -> DFlashModule:
    """Trained for some seconds on counted sequences."""
    changes = {"vocab_ids": range(COUNTED), "vocab_size": COUNTED, "mask_token_id": COUNTED - 1} | changes
    module = toy_dflash(target, **changes).train()
    ids = torch.stack([(torch.arange(30) + first) % COUNTED for first in range(0, COUNTED, 2)])
    features = torch.stack([features_of(target, row.tolist()) for row in ids])
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-3)
    for step in range(120):
        anchors = torch.randint(0, 28 - SLOTS, (len(ids), 4), generator=torch.Generator().manual_seed(step))
        batch = batch_of(ids, features, anchors)
        labels = module.draft_labels(batch.labels(SLOTS))
        output = module(batch)
        loss = F.cross_entropy(output.logits_BAKW.flatten(0, 2), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        (loss + sum(output.auxiliary.values())).backward()
        optimizer.step()
    return module.eval()


def counted_tau(module: DFlashModule) -> float:
    rows = TorchRows(make_successor(), num_slots=4, max_len=64, target_layer_ids=TAPS)
    engine = Engine(rows, as_drafter(module), config=EngineConfig(num_draft_tokens=SLOTS))
    for completion in engine.generate([[7, 8], [20], [40, 41, 42]], Sampling(max_new_tokens=22)):
        last = completion.prompt_ids[-1]
        assert completion.token_ids == [(last + 1 + i) % COUNTED for i in range(22)]
    return engine.stats.acceptance.tau


@pytest.mark.learning
@pytest.mark.parametrize("changes", [{}, {"selector_top_k": 4, "selector_rank": 6, "confidence_head": True}])
def test_a_drafter_of_counted_sequences_drafts_almost_everything(changes):
    assert counted_tau(counting_drafter(make_successor(), **changes)) > SLOTS + 0.5


@pytest.mark.learning
@pytest.mark.parametrize("shift", [-1, 1])  # 1: slot 1 would be trained on the anchor, which is given
def test_labels_that_are_off_by_one_are_found_by_that(shift, monkeypatch: pytest.MonkeyPatch):
    right = TrainingBatch.labels

    def shifted(self: TrainingBatch, num_draft_tokens: int) -> Tensor:
        return right(replace(self, ids_BT=self.ids_BT.roll(shift, dims=1)), num_draft_tokens)

    monkeypatch.setattr(TrainingBatch, "labels", shifted)
    assert counted_tau(counting_drafter(make_successor())) < 1.2


def test_the_anchor_is_not_predicted(module):
    ids, features = random_sequences(1, 20)
    batch = batch_of(ids, features, [4])
    with torch.no_grad():
        assert module(batch).logits_BAKW.shape[2] == SLOTS
    assert batch.labels(SLOTS)[0, 0].tolist() == ids[0, 6 : 6 + SLOTS].tolist()  # the anchor is at 5


@pytest.mark.parametrize("taps", [(0,), (1,), (0, 1)])
def test_served_drafts_are_those_of_training_on_the_tapped_layers(taps, model):
    module = toy_dflash(model, target_layer_ids=taps)
    prompts = toy_prompts(6, low=1, high=40)
    overheard = Overheard(module)
    rows = TorchRows(toy_model(), num_slots=3, max_len=128, target_layer_ids=(0, 1))
    config = EngineConfig(num_draft_tokens=SLOTS, max_prefill_rows=7)
    compared = 0
    for completion in Engine(rows, overheard, config=config).generate(prompts, Sampling(max_new_tokens=12)):
        ids = completion.prompt_ids + completion.token_ids
        features = features_of(model, ids, taps)
        for p, drafts in overheard.rounds_of(ids):
            if p + 1 < len(ids):
                batch = batch_of(torch.tensor([ids]), features[None], [p])
                assert drafts == module.propose(batch)[0, 0].tolist()
                compared += 1
    assert compared > 30


def test_drafting_never_changes_greedy_output(model, module):
    prompts = toy_prompts(3, low=2, high=20)
    reference = [s.ids[s.prompt_len :].tolist() for s in continued(model, prompts, 10)]
    rows = TorchRows(toy_model(), num_slots=3, max_len=64, target_layer_ids=TAPS)
    engine = Engine(rows, as_drafter(module), config=EngineConfig(num_draft_tokens=SLOTS))
    assert [c.token_ids for c in engine.generate(prompts, Sampling(max_new_tokens=10))] == reference


# -- selector and confidence head -------------------------------------------------------------------------------------


@torch.no_grad()
def walked(module: DFlashModule, hidden_KD: Tensor, logits_KW: Tensor, previous: int) -> list[int]:
    """The selector's greedy path in the plain: tokens as draft indices, the anchor's too (W: not in the vocabulary)."""
    selector, path = module.candidate_selector, []
    for hidden, logits in zip(hidden_KD, logits_KW.double(), strict=True):
        wanted = selector.predecessor_codebook[previous].double() * selector.hidden_projection(hidden).double()
        best = logits.argsort(descending=True)[: module.config.selector_top_k].tolist()
        scores = [float(logits[c] + wanted @ selector.successor_codebook[c].double()) for c in best]
        previous = best[scores.index(max(scores))]
        path.append(previous)
    return path


@pytest.mark.parametrize("vocab_ids", [None, FEW_TOKENS])
def test_the_selector_walks_from_the_anchor(vocab_ids, model):
    module = toy_dflash(model, vocab_ids, selector_top_k=4, selector_rank=6)
    ids, features = random_sequences(2, 20)
    batch = batch_of(ids, features, [3, 8, 11])
    proposed, hidden = module.propose(batch), module.block_hidden(batch)
    greedy = []
    for b in range(2):
        for a, p in enumerate([3, 8, 11]):
            anchor = int(ids[b, p + 1])
            known = list(range(256)) if vocab_ids is None else list(vocab_ids)
            index = known.index(anchor) if anchor in known else len(known)
            logits = module.head(hidden[b, a])
            path = walked(module, hidden[b, a], logits, index)
            assert proposed[b, a].tolist() == [known[i] for i in path]
            greedy.append(path == logits.argmax(dim=-1).tolist())
    assert not all(greedy), "a selector that never chooses another token proves little"


@torch.no_grad()
def test_auxiliary_losses_are_those_of_plain_loops(model):
    ids, features = random_sequences(2, 16, seed=4)
    module = toy_dflash(model, FEW_TOKENS, confidence_head=True, selector_top_k=4, selector_rank=6)
    known = list(FEW_TOKENS)
    ids = torch.where(torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.7, ids // 3 * 3, ids)
    # labels often follow the drafter, so that the confidence head has something to learn from
    anchors = torch.tensor([[2, 6], [9, 12]])
    for _ in range(SLOTS):
        proposed = module.propose(batch_of(ids, features, anchors))
        for k in range(SLOTS - 1):
            ids[0, 4 + k] = proposed[0, 0, k]
    batch = batch_of(ids, features, anchors)
    output = module(batch)
    hidden, selector = module.block_hidden(batch), module.candidate_selector
    by_slot: list[list[float]] = [[] for _ in range(SLOTS)]
    confidence, rights = [], 0
    for b in range(2):
        for a in range(2):
            before_right, p = True, int(anchors[b, a])
            for k in range(SLOTS):
                place = p + 2 + k
                if place >= 16:
                    continue
                token, previous = int(ids[b, place]), int(ids[b, place - 1])
                previous = known.index(previous) if previous in known else len(known)
                logits = output.logits_BAKW[b, a, k].double()
                projected = selector.hidden_projection(hidden[b, a, k]).double()
                wanted = selector.predecessor_codebook[previous].double() * projected
                best = logits.argsort(descending=True)[:4].tolist()
                scores = {c: float(logits[c] + wanted @ selector.successor_codebook[c].double()) for c in best}
                draft = max(scores, key=lambda c: scores[c])
                if before_right:
                    share = math.exp(scores[draft]) / sum(math.exp(s) for s in scores.values())
                    mass = float(logits.softmax(dim=-1)[best].sum())
                    head = module.confidence
                    odds = head.own_weight * math.log(share * mass / (1 - share * mass)) + head.slot_bias[k]
                    odds = float(odds + head.hidden_weight @ hidden[b, a, k])
                    before_right = known[draft] == token
                    rights += before_right
                    confidence.append(math.log1p(math.exp(-odds if before_right else odds)))
                if token in known:
                    c = known.index(token)
                    scores[c] = float(logits[c] + wanted @ selector.successor_codebook[c].double())
                    by_slot[k].append(math.log(sum(math.exp(s) for s in scores.values())) - scores[c])
    expected = sum(math.exp(-k / gamma_for(BLOCK)) * sum(losses) / len(losses) for k, losses in enumerate(by_slot))
    assert float(output.auxiliary["selector"]) == pytest.approx(expected, rel=1e-3)
    assert rights >= SLOTS - 1
    assert float(output.auxiliary["confidence"]) == pytest.approx(sum(confidence) / len(by_slot[0]), rel=1e-3)


def test_the_confidence_head_trains_itself_alone(model):
    module = toy_dflash(model, confidence_head=True)
    ids, features = random_sequences(2, 16)
    module(batch_of(ids, features, [3, 7])).auxiliary["confidence"].backward()
    assert {n for n, w in module.named_parameters() if w.grad is not None} == {
        f"confidence.{n}" for n in ("hidden_weight", "own_weight", "slot_bias")
    }


# -- configs and the start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"block_size": 1}, "block_size"),
        ({"mask_token_id": 256}, "mask_token_id"),
        ({"draft_vocab_size": 257}, "draft_vocab_size"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"target_layer_ids": (0, 2)}, "target_layer_ids"),
        ({"layer_types": ("causal", FULL)}, "layer_types"),
        ({"layer_types": (FULL,)}, "layer_types"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"layer_types": (FULL, SLIDING)}, "sliding_window"),
        ({"selector_top_k": 300}, "selector_top_k"),
        ({"conv_kernel_size": 2, "conv_group_size": 5}, "conv_group_size"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        config_of(**changes)


def test_layers_may_start_as_the_targets(model):
    module = toy_dflash(model, num_hidden_layers=2)
    q_norm = module.layers[0].self_attn.q_norm.weight.clone()
    module.initialise_from_target_layers(model.state_dict(), (1, 0))
    for i, source in enumerate((1, 0)):
        of_target = model.model.layers[source].state_dict()
        for name, weight in module.layers[i].state_dict().items():
            assert torch.equal(weight, of_target[name]) if name in of_target else "_norm" in name
    assert torch.equal(module.layers[0].self_attn.q_norm.weight, q_norm), "the toy target has none"
    with pytest.raises(ValueError, match=r"no weight named layers\.7\."):
        module.initialise_from_target_layers(model.state_dict(), (0, 7))
    with pytest.raises(ValueError, match="has 2 layers"):
        module.initialise_from_target_layers(model.state_dict(), (0,))
    narrow = toy_dflash(model, num_hidden_layers=1, intermediate_size=48)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj\.weight is \(48, 32\).* is \(64, 32\)"):
        narrow.initialise_from_target_layers(model.state_dict(), (0,))
