"""The speculators layout: layers counted from the embeddings, reduced vocabularies, and the way back bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from drafters.dflash import FULL, SLIDING, DFlashModule
from drafters.formats import FormatError
from tests.drafters.formats.test_z_lab import LAYER_FIELDS
from tests.toy_dflash import DFLASH2
from tests.toy_formats import (
    FEW_TOKENS,
    TAPPED,
    change,
    config_of,
    dflash_of,
    exported,
    hidden_states,
    imported,
    real_batch,
    refusal,
)

KINDS = {
    "plain": {},
    "sliding": {"sliding_window": 3, "layer_types": (FULL, SLIDING)},
    "few tokens": {"vocab_ids": FEW_TOKENS},
    "dflash 2": DFLASH2,
}


@pytest.mark.parametrize("kind", list(KINDS))
@torch.no_grad()
def test_a_round_trip_keeps_logits_bit_by_bit(kind, deep_target: Path, tmp_path: Path):
    module = dflash_of(deep_target, **KINDS[kind])
    back, taken = imported(exported(module, deep_target, "speculators", tmp_path), deep_target, tmp_path)
    assert back.config == module.config
    assert torch.equal(back.draft_vocab_ids, module.draft_vocab_ids)
    batch = real_batch(deep_target, TAPPED)
    assert torch.equal(back(batch).logits_BAKW, module(batch).logits_BAKW)
    assert torch.equal(back.propose(batch), module.propose(batch))
    assert set(taken) == {"few tokens": {"lm_head.weight"}, "sliding": {"sliding_window"}}.get(kind, set())


@torch.no_grad()
def test_the_layout(deep_target: Path, tmp_path: Path):
    module = dflash_of(deep_target, vocab_ids=FEW_TOKENS)
    folder = exported(module, deep_target, "speculators", tmp_path)
    config = config_of(folder)
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": str(deep_target), "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": LAYER_FIELDS,
        "draft_vocab_size": 5,
        "target_hidden_size": 32,
        "block_size": 5,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 255,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    weights = load_file(folder / "model.safetensors")
    assert (weights["t2d"].dtype, weights["d2t"].dtype) == (torch.bool, torch.int64)
    assert weights["t2d"].nonzero().flatten().tolist() == FEW_TOKENS
    assert [i + int(offset) for i, offset in enumerate(weights["d2t"])] == FEW_TOKENS

    # whoever counts the embeddings as 0 finds our features, and the LM head's rows in the draft vocabulary's order
    states = hidden_states(deep_target)
    taps = torch.cat([states[i] for i in config["aux_hidden_state_layer_ids"]], dim=-1)
    context = F.rms_norm(taps @ weights["fc.weight"].T, (32,), weights["hidden_norm.weight"], 1e-6)
    assert isinstance(module, DFlashModule)
    torch.testing.assert_close(module.fuse(real_batch(deep_target, TAPPED).features_BTF), context)
    hidden = module.block_hidden(real_batch(deep_target, TAPPED))
    torch.testing.assert_close(module.head(hidden), hidden @ weights["lm_head.weight"].T)

    whole = exported(dflash_of(deep_target, **DFLASH2), deep_target, "speculators", tmp_path / "b")
    assert (
        config_of(whole)["speculators_model_type"] == config_of(whole)["speculators_config"]["algorithm"] == "dflash2"
    )
    assert {key: config_of(whole)[key] for key in DFLASH2} == DFLASH2
    assert not {"t2d", "d2t", "lm_head.weight"} & set(load_file(whole / "model.safetensors"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"slot_context": True}, "slot_context, which the speculators layout cannot say"),
        ({**DFLASH2, "vocab_ids": FEW_TOKENS}, "5 of 260 tokens beside a selector"),
        ({"target_layer_ids": (0, 3)}, "the target's last layer, 3"),
    ],
)
def test_what_the_layout_cannot_say_is_refused_by_name(changes, named, deep_target: Path, tmp_path: Path):
    with pytest.raises(FormatError) as caught:
        exported(dflash_of(deep_target, **changes), deep_target, "speculators", tmp_path)
    assert named in str(caught.value)


NO_PROPOSALS = {"algorithm": "dflash", "proposal_methods": []}
REFUSED = [
    ("plain", {"mask_token_id": None}, "lacks key 'mask_token_id'"),
    ("plain", {"aux_hidden_state_layer_ids": None}, "lacks key 'aux_hidden_state_layer_ids'"),
    ("plain", {"aux_hidden_state_layer_ids": [0, 2]}, "0 being the embeddings"),
    ("plain", {"aux_hidden_state_layer_ids": [1, 4]}, "taps the target's last layer, 3"),
    ("plain", {"block_size": None}, "lacks key 'block_size'"),
    ("plain", {"block_size": 4}, "contradicts itself: 4 speculative_tokens from blocks of 4"),
    ("plain", {"draft_vocab_size": None}, "lacks key 'draft_vocab_size'"),
    ("plain", {"draft_vocab_size": 5}, "lacks tensor d2t"),
    ("few tokens", {"draft_vocab_size": 6}, "are of different vocabularies"),
    ("plain", {"sample_from_anchor": True}, "drafts in slot 0 of a block"),
    ("plain", {"sample_from_anchor": None, "speculators_config": NO_PROPOSALS}, "lacks key 'sample_from_anchor'"),
    ("sliding", {"sliding_window_non_causal": None}, "lacks key 'sliding_window_non_causal': its sliding layers"),
    ("sliding", {"sliding_window_non_causal": False}, "has False as 'sliding_window_non_causal'"),
    ("plain", {"projector_type": "domino"}, "has 'domino' as 'projector_type'"),
    ("plain", {"shift_label": True}, "has True as 'shift_label'"),
    ("plain", {"speculators_model_type": "eagle3"}, "has 'eagle3' as 'speculators_model_type'"),
    ("plain", {"transformer_layer_config": None}, "lacks key 'transformer_layer_config'"),
    ("plain", {"transformer_layer_config__head_dim": None}, "lacks key 'transformer_layer_config.head_dim'"),
    (
        "plain",
        {"transformer_layer_config__model_type": "llama"},
        "has 'llama' as 'transformer_layer_config.model_type'",
    ),
    ("dflash 2", {"selector_top_k": None}, "lacks key 'selector_top_k'"),
    ("plain", {"markov_rank": 8}, "has the unknown key 'markov_rank'"),
]


@pytest.fixture(scope="module")
def sources(deep_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: exported(
            dflash_of(deep_target, **KINDS[kind]), deep_target, "speculators", tmp_path_factory.mktemp("source")
        )
        for kind in KINDS
    }


@pytest.mark.parametrize(("kind", "values", "named"), REFUSED)
def test_a_source_that_lacks_or_contradicts_is_refused_by_key(
    kind, values, named, sources: dict[str, Path], deep_target: Path, tmp_path: Path
):
    message = refusal(sources[kind], deep_target, tmp_path, values)
    assert named in message
    assert "\n" not in message


def test_what_older_files_leave_open_is_told(deep_target: Path, tmp_path: Path):
    folder = exported(dflash_of(deep_target), deep_target, "speculators", tmp_path)
    change(folder, sample_from_anchor=None, sliding_window_non_causal=False)
    _, taken = imported(folder, deep_target, tmp_path)
    assert taken["sample_from_anchor"] == "False: 4 of a block's 5 slots are proposed"
    assert taken["sliding_window_non_causal"].startswith("of no effect")


def test_an_lm_head_of_its_own_is_refused(deep_target: Path, tmp_path: Path):
    folder = exported(dflash_of(deep_target, vocab_ids=FEW_TOKENS), deep_target, "speculators", tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] * 2}, folder / "model.safetensors")
    with pytest.raises(FormatError, match=r"has lm_head\.weight of its own"):
        imported(folder, deep_target, tmp_path)
