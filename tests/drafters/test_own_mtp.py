"""A target's own MTP layers: the drafts of transformers round by round, alone and in a batch; training is service."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.checkpoint import CheckpointError, as_drafter, load_module, read_config, save_checkpoint
from drafters.drafter import Drafter, DraftRequest
from drafters.own_mtp_module import OwnMtpModule
from drafters.target import TargetError, load_target, shared_weights, target_fingerprint
from drafters.training_batch import Document, pack_documents, pad_documents
from tests.toy_mtp import features_of
from tests.toy_own_mtp import CONFIGS, LAST, edit_config, own_mtp, plain_model, reference, save_own_mtp_target

PROMPTS = [[1, 4, 2, 5, 3], [0, 3, 3, 1, 2, 5, 4, 0, 2], [5, 5, 1, 0], [2, 0, 1, 4, 4, 3, 1]]
NEW = 22

FAMILIES = [name for name in CONFIGS if name != "deepseek, two layers"]  # for trainings


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[Path, Any, list[tuple[list[int], dict[int, list[int]]]]]:
    """(the target's folder, the target by transformers, what it said and drafted on PROMPTS)."""
    folder = save_own_mtp_target(tmp_path_factory.mktemp("target"), request.param)
    model = plain_model(folder)
    return folder, model, reference(model, PROMPTS, NEW)


def asked(
    told: list[tuple[int, int, int, list[int], torch.Tensor]], num_draft_tokens: int, **more: Any
) -> DraftRequest:
    """Of (slot, epoch, pairs known, sequence up to its anchor, features of the whole sequence)."""
    pieces = [ids[start + 1 :] for _, _, start, ids, _ in told]
    features = [features[start : len(ids) - 1] for _, _, start, ids, features in told]
    return DraftRequest(
        slots=[t[0] for t in told],
        epochs=[t[1] for t in told],
        counts=[len(piece) for piece in pieces],
        starts=[t[2] for t in told],
        first_tokens=[t[3][0] for t in told],
        tokens_N=torch.tensor(list(itertools.chain(*pieces))),
        features_NF=torch.cat(features),
        num_draft_tokens=num_draft_tokens,
        temperatures=[0.0] * len(told),
        seeds=[0] * len(told),
        **more,
    )


def drafts_of_rounds(drafter: Drafter, model: Any, said: list, num: int) -> list[dict[int, list[int]]]:
    """The reference's rounds asked of a drafter, those of all sequences side by side as long as each has some."""
    features = [features_of(model, ids, LAST) for ids, _ in said]
    anchors = [sorted(rounds) for _, rounds in said]
    found: list[dict[int, list[int]]] = [{} for _ in said]
    known = [0] * len(said)
    for turn in range(max(len(places) for places in anchors)):
        live = [b for b, places in enumerate(anchors) if turn < len(places)]
        told = [(b, 7, known[b], said[b][0][: anchors[b][turn] + 1], features[b]) for b in live]
        drafts = drafter.draft(asked(told, num)).tokens_BK.tolist()
        for b, row in zip(live, drafts, strict=True):
            found[b][anchors[b][turn]] = row
            known[b] = anchors[b][turn]
    return found


def test_drafts_are_those_of_transformers(family):
    folder, model, said = family
    module = own_mtp(folder)
    num = module.config.num_mtp_layers
    accepted = [b - a - 1 for _, rounds in said for a, b in itertools.pairwise(sorted(rounds))]
    assert min(accepted) == 0, "drafts are rejected"
    assert max(accepted) >= min(num, 2), "and accepted"
    batched = as_drafter(module)
    batched.allocate(len(said), 64)
    assert drafts_of_rounds(batched, model, said, num) == [rounds for _, rounds in said]
    for ids, rounds in said:
        alone = as_drafter(module)
        alone.allocate(1, 64)
        assert drafts_of_rounds(alone, model, [(ids, rounds)], num) == [rounds]


def test_a_long_prompt_told_in_parts_beside_short_ones(family):
    folder, model, said = family
    drafter, module = as_drafter(own_mtp(folder)), own_mtp(folder)
    num = module.config.num_mtp_layers
    drafter.allocate(3, 90)
    torch.manual_seed(0)
    ids = torch.randint(0, 6, (70,)).tolist()
    (whole,) = reference(model, [ids], 2)
    features = features_of(model, whole[0], LAST)
    drafter.draft(asked([(2, 1, 0, ids[:20], features)], 0))
    drafter.draft(asked([(2, 1, 19, ids[:24], features)], 1))
    short, rounds = said[0]
    first = min(rounds)
    told = [(0, 1, 0, short[: first + 1], features_of(model, short, LAST)), (2, 1, 23, [*ids, whole[0][70]], features)]
    drafts = drafter.draft(asked(told, num)).tokens_BK.tolist()
    assert drafts == [rounds[first], whole[1][70]]


def test_a_sequence_that_goes_on_from_another_s_beginning(family):
    folder, model, said = family
    module = own_mtp(folder)
    num = module.config.num_mtp_layers
    drafter = as_drafter(module)
    drafter.allocate(1, 64)
    old, new = said[0][0], said[0][0][:9] + [(t + 1) % 6 for t in said[0][0][9:14]]
    drafter.draft(asked([(0, 1, 0, old[:20], features_of(model, old, LAST))], num))
    features = features_of(model, new, LAST)
    going_on = drafter.draft(asked([(0, 2, 8, new, features)], num, reused_epochs=[1]))
    fresh = as_drafter(module)
    fresh.allocate(1, 64)
    assert going_on.tokens_BK.tolist() == fresh.draft(asked([(0, 1, 0, new, features)], num)).tokens_BK.tolist()
    with pytest.raises(ValueError, match="knows 13 pairs"):
        drafter.draft(asked([(0, 2, 12, new, features)], num))


def test_training_says_what_service_drafts(family):
    """On sequences that hold the drafts themselves: several documents in one row, all anchors at once."""
    folder, model, said = family
    module = own_mtp(folder)
    lone = module.config.num_mtp_layers == 1
    num = 3 if lone else module.config.num_mtp_layers
    assert module.config.num_draft_tokens == num
    drafter = as_drafter(module)
    drafter.allocate(len(said), 64)
    documents, drafts = [], []
    for slot, (ids, _) in enumerate(said):
        prefix, features = ids[:17], features_of(model, ids, LAST)
        drafts.append(drafter.draft(asked([(slot, 1, 0, prefix, features)], num)).tokens_BK[0])
        noise = torch.randn(num, features.shape[1])
        documents.append(
            Document(
                ids_T=torch.cat([torch.tensor(prefix), drafts[-1]]),
                features_TF=torch.cat([features[:16], noise]),
                anchors_A=torch.tensor([15]),
                ends_A=torch.tensor([17 + num]),
            )
        )
    with torch.no_grad():
        packed = module(pack_documents(documents, row_tokens=2 * (17 + num))).logits_BAKW
        padded = module(pad_documents(documents)).logits_BAKW
    assert packed.shape[:2] == (2, 2)
    torch.testing.assert_close(packed.flatten(0, 1), padded.flatten(0, 1), rtol=1e-4, atol=1e-4)
    assert padded.argmax(dim=-1)[:, 0].tolist() == torch.stack(drafts).tolist()


def saved(folder: Path, path: Path) -> OwnMtpModule:
    module = own_mtp(folder)
    save_checkpoint(path, module, {"target_fingerprint": target_fingerprint(folder, LAST)})
    return module


def test_saved_and_loaded_gives_the_same_drafts(family, tmp_path: Path):
    folder, model, said = family
    module = saved(folder, tmp_path / "d")
    config = read_config(tmp_path / "d")
    assert config == module.config
    loaded = load_module(tmp_path / "d", folder)
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    drafter = as_drafter(loaded)
    drafter.allocate(1, 64)
    assert drafts_of_rounds(drafter, model, said[:1], config.num_mtp_layers) == [said[0][1]]


def test_biases_and_angles_keep_their_precision(tmp_path: Path):
    module = own_mtp(save_own_mtp_target(tmp_path, "deepseek"))
    exact = {name: buffer.clone() for name, buffer in module.named_buffers() if name.startswith(("layers", "rotary"))}
    assert any("correction_bias" in name for name in exact)
    module.to(torch.bfloat16)
    assert module.layers[0].eh_proj.weight.dtype == module.embedding_VD.dtype == torch.bfloat16
    for name, buffer in module.named_buffers():
        if name in exact:
            assert torch.equal(buffer, exact[name]), name


def test_what_is_missing_is_named(tmp_path: Path):
    folder = save_own_mtp_target(tmp_path / "t", "glm4")
    saved(folder, tmp_path / "d")
    for change, message in (
        ({"num_mtp_layers": 2}, "has num_draft_tokens 3 with 2 MTP layers"),
        ({"num_mtp_layers": 1, "cache_widths": [[2, 8]]}, "cache_widths that are not four numbers"),
    ):
        edit_config(tmp_path / "d", **change)
        with pytest.raises(CheckpointError, match=message):
            read_config(tmp_path / "d")
    target = load_target(str(folder))
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "enorm" not in n}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"cannot be read .*enorm"):
        own_mtp(folder)
    save_file(
        {n: t for n, t in tensors.items() if "layers.2." not in n}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(TargetError, match="says num_mtp_layers 1 and holds no tensor of them"):
        own_mtp(folder)
    target.config.num_mtp_layers = 0
    from drafters.formats.own_mtp import read

    with pytest.raises(TargetError, match="has no MTP layers"):
        read(folder, target)
    with pytest.raises(TargetError, match="give own to read its own MTP layers"):
        read(tmp_path, target)


def test_copies_of_the_embedding_in_mtp_layers_are_not_the_target_s(tmp_path: Path):
    folder = save_own_mtp_target(tmp_path, "mellum, sliding")
    tensors = load_file(folder / "model.safetensors")
    copies = {"mtp.embed_tokens.weight": torch.zeros(6, 32), "mtp.lm_head.weight": torch.zeros(6, 32)}
    save_file(tensors | copies, folder / "model.safetensors", {"format": "pt"})
    shared = shared_weights(folder, torch.float32)
    assert torch.equal(shared.embedding_VD, tensors["model.embed_tokens.weight"])
    assert torch.equal(shared.lm_head_VD, tensors["lm_head.weight"])
