"""DFlash checkpoints: the layout that others load, what it cannot say under a name of its own, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.checkpoint import CheckpointError, as_drafter, is_drafter, load_module, read_config, save_checkpoint
from drafters.dflash import FULL, SLIDING, DFlashModule
from drafters.dflash_drafter import DFlashDrafter
from drafters.target import load_model, target_fingerprint
from tests.toy_dflash import DFLASH2, batch_of, random_sequences, toy_dflash
from tests.toy_mtp import TAPS

KINDS = {
    "plain": ({}, "DFlashDraftModel"),
    "sliding": ({"sliding_window": 3, "layer_types": (FULL, SLIDING)}, "DFlashDraftModel"),
    "dflash 2": (DFLASH2, "DFlash2DraftModel"),
    "selector alone": ({"selector_top_k": 4, "selector_rank": 6}, "DraftloopDFlashModel"),
    "convolutions alone": ({"conv_kernel_size": 2, "conv_group_size": 8}, "DraftloopDFlashModel"),
    "few tokens": ({"vocab_ids": [3, 99, 258, 259]}, "DraftloopDFlashModel"),
    "slot context": ({"slot_context": True}, "DraftloopDFlashModel"),
    "confidence head": ({"confidence_head": True, **DFLASH2}, "DraftloopDFlashModel"),
}


def drafter_of(target: Path, **options) -> DFlashModule:
    return toy_dflash(load_model(target, torch.float32), **({"vocab_size": 260, "draft_vocab_size": 260} | options))


def save(target: Path, folder: Path, kind: str) -> DFlashModule:
    module = drafter_of(target, **KINDS[kind][0])
    save_checkpoint(folder, module, {"target_fingerprint": target_fingerprint(target, TAPS)})
    return module


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", list(KINDS))
@torch.no_grad()
def test_saved_and_loaded_gives_the_same_logits(kind, toy_target_dir: Path, tmp_path: Path):
    module, folder = save(toy_target_dir, tmp_path / "drafter", kind), tmp_path / "drafter"
    assert config_of(folder)["architectures"] == [KINDS[kind][1]]
    assert is_drafter(folder)
    loaded = load_module(folder, toy_target_dir)
    assert isinstance(loaded, DFlashModule)
    assert loaded.config == module.config == read_config(folder)
    batch = batch_of(*random_sequences(2, 15), [3, 9])
    before, after = module(batch), loaded(batch)
    assert torch.equal(after.logits_BAKW, before.logits_BAKW)
    assert after.auxiliary == before.auxiliary
    assert torch.equal(loaded.propose(batch), module.propose(batch))
    assert loaded.training is False
    assert not any(p.requires_grad for p in loaded.parameters())
    drafter = as_drafter(loaded)
    assert isinstance(drafter, DFlashDrafter)
    assert (drafter.name, drafter.target_layer_ids, drafter.max_draft_tokens) == ("dflash", TAPS, 4)


def test_the_layout_is_the_published_one(toy_target_dir: Path, tmp_path: Path):
    save(toy_target_dir, tmp_path / "drafter", "plain")
    assert config_of(tmp_path / "drafter") == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_scaling": None,
        "hidden_size": 32,
        "vocab_size": 260,
        "num_target_layers": 2,
        "block_size": 5,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "layer_types": [FULL, FULL],
        "sliding_window": None,
        "dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 1]},
    }
    per_layer = [f"self_attn.{n}_proj" for n in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    per_layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    names = {f"layers.{i}.{part}.weight" for i in (0, 1) for part in per_layer}
    names |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert set(load_file(tmp_path / "drafter" / "model.safetensors")) == names


def test_the_layout_of_dflash_2_is_the_published_one(toy_target_dir: Path, tmp_path: Path):
    save(toy_target_dir, tmp_path / "drafter", "dflash 2")
    assert config_of(tmp_path / "drafter")["dflash_config"] == {
        "mask_token_id": 255,
        "target_layer_ids": [0, 1],
        "selector_top_k": 4,
        "selector_rank": 6,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
    }
    shapes = {name: tuple(w.shape) for name, w in load_file(tmp_path / "drafter" / "model.safetensors").items()}
    assert {name: shape for name, shape in shapes.items() if "selector" in name or "layers.0.mlp_conv" in name} == {
        "candidate_selector.predecessor_codebook": (260, 6),
        "candidate_selector.successor_codebook": (260, 6),
        "candidate_selector.hidden_projection.weight": (6, 32),
        "layers.0.mlp_conv.base_kernel": (2, 2, 32),
        "layers.0.mlp_conv.kernel_projection.weight": (16, 32),
    }
    assert "layers.1.attention_conv.base_kernel" in shapes


def test_windows_are_said_so_that_others_keep_them(toy_target_dir: Path, tmp_path: Path):
    save(toy_target_dir, tmp_path / "drafter", "sliding")
    config = config_of(tmp_path / "drafter")
    assert config["layer_types"] == [FULL, SLIDING]
    assert (config["sliding_window"], config["use_sliding_window"], config["is_causal"]) == (3, True, False)


def change(folder: Path, **values) -> None:
    """Set keys of config.json, `outer__inner` inside an object; None takes one away."""
    config = config_of(folder)
    for name, value in values.items():
        *outer, key = name.split("__")
        place = config[outer[0]] if outer else config
        place[key] = value
        if value is None:
            del place[key]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        ("plain", {"block_size": None}, "lacks key 'block_size'"),
        ("plain", {"num_target_layers": None}, "lacks key 'num_target_layers'"),
        ("plain", {"dflash_config": None}, "lacks key 'dflash_config'"),
        ("plain", {"dflash_config": [1]}, "has [1] as 'dflash_config'"),
        ("plain", {"dflash_config__mask_token_id": None}, "lacks key 'dflash_config.mask_token_id'"),
        ("plain", {"dflash_config__target_layer_ids": None}, "lacks key 'dflash_config.target_layer_ids'"),
        ("plain", {"dflash_config__mask_token_id": -1}, "has -1 as 'dflash_config.mask_token_id'"),
        ("plain", {"dflash_config__mask_token_id": 260}, "has a mask_token_id outside the vocabulary"),
        ("plain", {"dflash_config__selector_top_k": 4}, "has the unknown key 'dflash_config.selector_top_k'"),
        ("plain", {"dflash_config__output_multiplier": 2.0}, "has the unknown key 'dflash_config.output_multiplier'"),
        ("plain", {"final_logit_softcapping": 30.0}, "has the unknown key 'final_logit_softcapping'"),
        ("plain", {"draftloop": {}}, "has the unknown key 'draftloop'"),
        ("plain", {"architectures": ["DFlash2DraftModel"]}, "lacks key 'dflash_config.conv_group_size'"),
        ("plain", {"architectures": ["DFlash3DraftModel"]}, "names architecture ['DFlash3DraftModel']"),
        ("plain", {"block_size": "5"}, "has '5' as 'block_size'"),
        ("plain", {"block_size": True}, "has True as 'block_size'"),
        ("plain", {"block_size": 1}, "has a block_size below 2"),
        ("plain", {"attention_bias": True}, "has True as 'attention_bias'"),
        ("plain", {"rope_scaling": {"type": "yarn"}}, "as 'rope_scaling'"),
        ("plain", {"is_causal": True}, "has True as 'is_causal'"),
        ("plain", {"layer_types": 1}, "has 1 as 'layer_types'"),
        ("plain", {"layer_types": ["causal", FULL]}, "as 'layer_types'"),
        ("plain", {"layer_types": [FULL]}, "has layer_types of another number of layers"),
        ("plain", {"sliding_window": 3}, "has only one of sliding_window and sliding layer_types"),
        ("sliding", {"is_causal": None}, "lacks key 'is_causal'"),
        ("sliding", {"use_sliding_window": False}, "has False as 'use_sliding_window'"),
        ("dflash 2", {"dflash_config__selector_rank": None}, "lacks key 'dflash_config.selector_rank'"),
        ("dflash 2", {"dflash_config__conv_kernel_size": 0}, "has 0 as 'dflash_config.conv_kernel_size'"),
        ("few tokens", {"draftloop__slot_context": 1}, "has 1 as 'draftloop.slot_context'"),
        ("few tokens", {"draftloop__draft_vocab_size": None}, "lacks key 'draftloop.draft_vocab_size'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_key(kind, values, named, toy_target_dir: Path, tmp_path: Path):
    folder = tmp_path / "drafter"
    save(toy_target_dir, folder, kind)
    change(folder, **values)
    for read in (lambda: load_module(folder, toy_target_dir), lambda: read_config(folder)):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)


def test_keys_that_change_nothing_may_stand_beside_it(toy_target_dir: Path, tmp_path: Path):
    folder = tmp_path / "drafter"
    save(toy_target_dir, folder, "plain")
    before = read_config(folder)
    change(folder, dtype="bfloat16", transformers_version="4.57", max_position_embeddings=40960, is_causal=False)
    assert read_config(folder) == before


def test_tensors_that_are_missing_or_too_many_are_refused(toy_target_dir: Path, tmp_path: Path):
    folder = tmp_path / "drafter"
    save(toy_target_dir, folder, "plain")
    weights = load_file(folder / "model.safetensors")
    for changed in (
        {name: w for name, w in weights.items() if name != "fc.weight"},
        weights | {"lm_head.weight": torch.zeros(260, 32)},
        weights | {"draft_vocab_ids": torch.arange(260)},
        weights | {"tap_scale": torch.ones(2)},
    ):
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be loaded"):
            load_module(folder, toy_target_dir)


@torch.no_grad()
def test_scales_of_the_taps_are_folded_into_the_weights(toy_target_dir: Path, tmp_path: Path):
    module, batch = drafter_of(toy_target_dir), batch_of(*random_sequences(2, 15), [3, 9])
    unlike = batch.features_BTF.clone()
    unlike[..., 32:] *= 100.0
    module.scale_taps(unlike.flatten(0, 1))
    assert module.tap_scale.tolist() == pytest.approx([1.0, 0.01], rel=0.1)
    save_checkpoint(tmp_path / "d", module, {"target_fingerprint": target_fingerprint(toy_target_dir, TAPS)})
    loaded = load_module(tmp_path / "d", toy_target_dir)
    assert isinstance(loaded, DFlashModule)
    assert loaded.tap_scale.tolist() == [1.0, 1.0]
    torch.testing.assert_close(loaded(batch).logits_BAKW, module(batch).logits_BAKW, rtol=1e-3, atol=1e-4)
