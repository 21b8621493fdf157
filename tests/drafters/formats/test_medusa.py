"""vLLM's medusa layout: heads on the normed last state, their order, and the way back bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from drafters.formats import FormatError
from drafters.mtp import IndependentHeads
from drafters.target import load_model
from tests.toy_formats import (
    FEW_TOKENS,
    IDS,
    change,
    config_of,
    dflash_of,
    exported,
    heads_of,
    hidden_states,
    imported,
    refusal,
)
from tests.toy_mtp import features_of

KINDS = {
    "tied": {},
    "own LM heads": {"own_lm_head": True},
    "few tokens": {"vocab_ids": FEW_TOKENS},
    "own, few tokens": {"own_lm_head": True, "vocab_ids": FEW_TOKENS},
}


def medusa_of(target: Path, kind: str = "tied") -> IndependentHeads:
    module = heads_of(target, medusa_heads=True, **KINDS[kind])
    assert isinstance(module, IndependentHeads)
    return module


def logits(module: IndependentHeads, target: Path) -> torch.Tensor:
    """[T, K, W] at every pair, from the target's own features."""
    features = features_of(load_model(target, torch.float32), IDS, module.config.target_layer_ids)
    return module.step_logits(features, torch.zeros(len(IDS), dtype=torch.int64))


@pytest.mark.parametrize("kind", list(KINDS))
@torch.no_grad()
def test_a_round_trip_keeps_logits_bit_by_bit(kind, deep_target: Path, tmp_path: Path):
    module = medusa_of(deep_target, kind)
    back, taken = imported(exported(module, deep_target, "medusa", tmp_path), deep_target, tmp_path)
    assert isinstance(back, IndependentHeads)
    assert back.config.target_layer_ids == (3,), "the one layer that the heads read"
    assert (back.lm_heads is None) == (module.lm_heads is None), "a copy of the target's LM head is borrowed again"
    assert torch.equal(back.draft_vocab_ids, module.draft_vocab_ids)
    assert torch.equal(logits(back, deep_target), logits(module, deep_target))
    assert set(taken) == {"indexing", "LM head"}


@pytest.mark.parametrize("kind", list(KINDS))
@torch.no_grad()
def test_vllms_arithmetic_on_the_written_files_gives_our_logits(kind, deep_target: Path, tmp_path: Path):
    """x + silu(W x + b) on what the target's own LM head reads, then `lm_head` or `lm_heads`, spread by token_map."""
    module = medusa_of(deep_target, kind)
    folder = exported(module, deep_target, "medusa", tmp_path)
    config, weights = config_of(folder), load_file(folder / "model.safetensors")
    normed_TD = hidden_states(deep_target)[-1][0]
    ours_TKW = logits(module, deep_target)
    for k in range(config["num_heads"]):
        weight, bias = weights[f"blocks.{k}.layers.0.weight"], weights[f"blocks.{k}.layers.0.bias"]
        block_TD = normed_TD + F.silu(normed_TD @ weight.T + bias)
        head_WD = weights["lm_head.weight" if config["original_lm_head"] else f"lm_heads.{k}.weight"]
        torch.testing.assert_close(block_TD @ head_WD.T, ours_TKW[:, k])
    if config["truncated_vocab_size"] < config["vocab_size"]:
        assert weights["token_map"].tolist() == FEW_TOKENS
    else:
        assert "token_map" not in weights


def test_the_config(deep_target: Path, tmp_path: Path):
    config = config_of(exported(medusa_of(deep_target), deep_target, "medusa", tmp_path))
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "vocab_size": 260,
        "truncated_vocab_size": 260,
        "num_heads": 3,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "logit_scale": 1.0,
        "dtype": "float32",
    }
    counted = [key for key in config if "num" in key and ("heads" in key or "layers" in key)]
    assert counted == ["num_heads", "num_hidden_layers"], "vLLM renames every such key to one of these"


@pytest.mark.parametrize(
    ("changes", "named", "mend"),
    [
        ({}, "residual MLPs for heads", "train with --medusa-heads"),
        ({"medusa_heads": True, "shared_trunk": True}, "a shared trunk", "without --shared-trunk"),
        ({"medusa_heads": True, "anchor_embedding": True}, "the anchor's embedding", "without --anchor-embedding"),
        (
            {"medusa_heads": True, "target_layer_ids": (0, 2)},
            "heads on layer 2, not on the last, 3",
            "without --layers",
        ),
        ({"medusa_heads": True, "rms_eps": 1e-5}, "an rms_eps of 1e-05, the target's norm 1e-06", "train it anew"),
    ],
)
def test_what_the_layout_cannot_say_is_refused_by_name(changes, named, mend, deep_target: Path, tmp_path: Path):
    with pytest.raises(FormatError) as caught:
        exported(heads_of(deep_target, **changes), deep_target, "medusa", tmp_path)
    assert named in str(caught.value)
    assert mend in str(caught.value)


def test_a_dflash_is_no_set_of_heads(deep_target: Path, tmp_path: Path):
    with pytest.raises(FormatError, match="is for independent heads"):
        exported(dflash_of(deep_target), deep_target, "medusa", tmp_path)


REFUSED = [
    ("tied", {"num_heads": None}, "lacks key 'num_heads'"),
    ("tied", {"num_heads": 4}, "lacks tensor blocks.3.layers.0.weight"),
    ("tied", {"num_heads": 2}, "has tensor blocks.2.layers.0.bias"),
    ("tied", {"num_hidden_layers": 2}, "has 2 as 'num_hidden_layers'"),
    ("tied", {"medusa_num_heads": 5}, "'num_heads' is 3, 'medusa_num_heads' is 5"),
    ("tied", {"hidden_size": 64}, "has 64 as 'hidden_size', the target has 32"),
    ("tied", {"vocab_size": None}, "lacks key 'vocab_size'"),
    ("tied", {"original_lm_head": False}, "lacks tensor lm_heads.0.weight"),
    ("tied", {"truncated_vocab_size": 5}, "has no token_map"),
    ("few tokens", {"truncated_vocab_size": 6}, "has a token_map of 5"),
    ("tied", {"medusa_fc_bias": None}, "has tensor blocks.0.layers.0.bias"),
    ("tied", {"logit_scale": 0.5}, "has 0.5 as 'logit_scale'"),
]


@pytest.fixture(scope="module")
def sources(deep_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: exported(medusa_of(deep_target, kind), deep_target, "medusa", tmp_path_factory.mktemp("source"))
        for kind in ("tied", "few tokens")
    }


@pytest.mark.parametrize(("kind", "values", "named"), REFUSED)
def test_a_source_that_lacks_or_contradicts_is_refused_by_key(
    kind, values, named, sources: dict[str, Path], deep_target: Path, tmp_path: Path
):
    message = refusal(sources[kind], deep_target, tmp_path, values)
    assert named in message
    assert "\n" not in message


@torch.no_grad()
def test_a_published_folder_is_read_and_what_it_leaves_open_is_told(deep_target: Path, tmp_path: Path):
    """Older names of the counts, prefixed tensors, heads without a bias, one LM head that is not the target's."""
    module = medusa_of(deep_target)
    for head in module.heads:
        head.linear.bias.zero_()
    folder = exported(module, deep_target, "medusa", tmp_path)
    change(folder, num_heads=None, num_hidden_layers=None, medusa_fc_bias=None, truncated_vocab_size=None)
    change(folder, medusa_num_heads=3, medusa_num_layers=1)
    weights = {f"medusa_heads.{name}": w for name, w in load_file(folder / "model.safetensors").items()}
    weights = {name: w for name, w in weights.items() if not name.endswith("bias")}
    weights["medusa_heads.lm_head.weight"] = 2 * weights["medusa_heads.lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    back, taken = imported(folder, deep_target, tmp_path)
    assert isinstance(back, IndependentHeads)
    assert torch.equal(logits(back, deep_target), 2 * logits(module, deep_target))
    assert set(taken) == {"indexing", "LM head", "medusa_fc_bias", "truncated_vocab_size"}
    assert taken["LM head"] == "of the heads' own"
