"""z-lab's layout: what is written, that it comes back bit by bit, and what neither side guesses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from drafters.dflash import FULL, SLIDING, DFlashModule
from drafters.formats import FormatError
from drafters.target import load_model, shared_weights
from tests.toy_dflash import DFLASH2, toy_dflash_config
from tests.toy_formats import (
    ALL_TOKENS,
    FEW_TOKENS,
    TAPPED,
    change,
    config_of,
    dflash_of,
    exported,
    heads_of,
    hidden_states,
    imported,
    real_batch,
    refusal,
)
from tests.toy_gemma import save_gemma_target

KINDS = {
    "plain": {},
    "sliding": {"sliding_window": 3, "layer_types": (FULL, SLIDING)},
    "dflash 2": DFLASH2,
}
SHARED = {"block_size": 5, "mask_token_id": 255, "num_target_layers": 4, "target_layer_ids": [0, 2]}
BLOCK = SHARED | {
    "causal": False,
    "sample_from_anchor": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
LAYER_FIELDS = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_size": 32,
    "vocab_size": 260,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "is_neox_style": True,
    "max_position_embeddings": 512,
    "layer_types": [FULL, FULL],
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 2,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


@pytest.mark.parametrize("kind", list(KINDS))
@torch.no_grad()
def test_a_round_trip_keeps_logits_bit_by_bit(kind, deep_target: Path, tmp_path: Path):
    module = dflash_of(deep_target, **KINDS[kind])
    back, taken = imported(exported(module, deep_target, "z-lab", tmp_path), deep_target, tmp_path)
    assert back.config == module.config
    batch = real_batch(deep_target, TAPPED)
    before, after = module(batch), back(batch)
    assert torch.equal(after.logits_BAKW, before.logits_BAKW)
    assert after.auxiliary == before.auxiliary
    assert torch.equal(back.propose(batch), module.propose(batch))
    assert list(taken) == ["anchor"], "every other key was said"


def test_every_key_that_a_reader_guesses_is_written(deep_target: Path, tmp_path: Path):
    folder = exported(dflash_of(deep_target), deep_target, "z-lab", tmp_path)
    assert config_of(folder) == LAYER_FIELDS | SHARED | {
        "architectures": ["DFlashDraftModel"],
        "is_causal": False,
        "draft_vocab_size": 260,
        "dflash_config": BLOCK,
    }
    per_layer = [f"self_attn.{n}_proj" for n in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    per_layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    names = {f"layers.{i}.{part}.weight" for i in (0, 1) for part in per_layer}
    assert set(load_file(folder / "model.safetensors")) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    header = (folder / "model.safetensors").read_bytes()[:200]
    assert b'"format":"pt"' in header, "older transformers load no file without it"


def test_dflash_2_and_windows_are_said_too(deep_target: Path, tmp_path: Path):
    second = exported(dflash_of(deep_target, **DFLASH2), deep_target, "z-lab", tmp_path / "a")
    assert config_of(second)["architectures"] == ["DFlash2DraftModel"]
    assert config_of(second)["dflash_config"] == BLOCK | DFLASH2
    sliding = config_of(exported(dflash_of(deep_target, **KINDS["sliding"]), deep_target, "z-lab", tmp_path / "b"))
    assert {key: sliding[key] for key in ("layer_types", "use_sliding_window", "sliding_window", "is_causal")} == {
        "layer_types": [FULL, SLIDING],
        "use_sliding_window": True,
        "sliding_window": 3,
        "is_causal": False,
    }


@torch.no_grad()
def test_taps_are_the_layers_outputs_as_transformers_counts_them(deep_target: Path, tmp_path: Path):
    """The context features of a reader that takes hidden_states[id + 1] are ours."""
    module = dflash_of(deep_target)
    folder = exported(module, deep_target, "z-lab", tmp_path)
    weights, config = load_file(folder / "model.safetensors"), config_of(folder)
    states = hidden_states(deep_target)
    taps = torch.cat([states[layer + 1] for layer in config["dflash_config"]["target_layer_ids"]], dim=-1)
    context = F.rms_norm(taps @ weights["fc.weight"].T, (32,), weights["hidden_norm.weight"], config["rms_norm_eps"])
    assert isinstance(module, DFlashModule)
    torch.testing.assert_close(module.fuse(real_batch(deep_target, TAPPED).features_BTF), context)


@pytest.mark.parametrize(
    ("changes", "named", "mend"),
    [
        ({"slot_context": True}, "slot_context", "--no-slot-context"),
        ({"confidence_head": True}, "a confidence head", "without --confidence-head"),
        ({"selector_top_k": 4, "selector_rank": 6}, "a selector without convolutions", "--selector-top-k 0"),
        ({"conv_kernel_size": 2, "conv_group_size": 8}, "convolutions without a selector", "--conv-kernel-size 0"),
        ({"vocab_ids": FEW_TOKENS}, "5 of 260 tokens", "--draft-vocab-size 0, or export --format speculators"),
        ({"target_layer_ids": (0, 3)}, "the target's last layer, 3", "generate rollouts with --layers"),
    ],
)
def test_what_the_layout_cannot_say_is_refused_by_name(changes, named, mend, deep_target: Path, tmp_path: Path):
    with pytest.raises(FormatError) as caught:
        exported(dflash_of(deep_target, **changes), deep_target, "z-lab", tmp_path)
    assert named in str(caught.value)
    assert mend in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "z-lab").exists()


def test_heads_are_no_dflash(deep_target: Path, tmp_path: Path):
    with pytest.raises(FormatError, match="this is an MTP drafter"):
        exported(heads_of(deep_target), deep_target, "z-lab", tmp_path)


REFUSED = [
    ("plain", {"mask_token_id": None, "dflash_config__mask_token_id": None}, "lacks key 'dflash_config.mask_token_id'"),
    ("plain", {"mask_token_id": 4}, "'dflash_config.mask_token_id' is 255, 'mask_token_id' is 4"),
    ("plain", {"mask_token_id": 999, "dflash_config__mask_token_id": 999}, "a mask_token_id outside the vocabulary"),
    ("plain", {"target_layer_ids": None, "dflash_config__target_layer_ids": None}, "lacks key 'dflash_config.target_"),
    ("plain", {"dflash_config__target_layer_ids": [0, 1]}, "contradicts itself: 'dflash_config.target_layer_ids'"),
    ("plain", {"target_layer_ids": [0, 3], "dflash_config__target_layer_ids": [0, 3]}, "taps the target's last layer"),
    ("plain", {"target_layer_ids": [2, 0], "dflash_config__target_layer_ids": [2, 0]}, "do not ascend"),
    ("plain", {"target_layer_ids": [0, 9], "dflash_config__target_layer_ids": [0, 9]}, "the target has 0 to 3"),
    ("plain", {"block_size": None, "dflash_config__block_size": None}, "lacks key 'dflash_config.block_size'"),
    ("plain", {"block_size": 16}, "'dflash_config.block_size' is 5, 'block_size' is 16"),
    ("plain", {"dflash_config": None}, "lacks key 'dflash_config'"),
    ("plain", {"is_causal": True, "dflash_config__causal": True}, "has True as 'is_causal'"),
    ("plain", {"is_causal": True}, "contradicts itself: {'is_causal': True, 'dflash_config.causal': False}"),
    ("sliding", {"is_causal": None, "dflash_config__causal": None}, "lacks key 'is_causal', and sliding layers are"),
    ("sliding", {"use_sliding_window": False}, "'use_sliding_window' is False"),
    ("sliding", {"sliding_window": None}, "lacks key 'sliding_window'"),
    ("plain", {"dflash_config__sample_from_anchor": True}, "has True as 'dflash_config.sample_from_anchor'"),
    ("plain", {"dflash_config__output_multiplier": 2.0}, "has 2.0 as 'dflash_config.output_multiplier'"),
    ("plain", {"dflash_config__projector_type": "domino"}, "has 'domino' as 'dflash_config.projector_type'"),
    ("plain", {"dflash_config__selector_top_k": 4}, "has the unknown key 'dflash_config.selector_top_k'"),
    ("plain", {"num_experts": 4}, "has the unknown key 'num_experts'"),
    ("dflash 2", {"dflash_config__selector_rank": None}, "lacks key 'dflash_config.selector_rank'"),
    ("plain", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "as 'rope_scaling'"),
    ("plain", {"rope_theta": 5.0}, "rope_theta is 5.0, rope_parameters.rope_theta is 10000.0"),
    ("plain", {"rope_theta": None, "rope_parameters": None}, "lacks key 'rope_theta'"),
    ("plain", {"draft_vocab_size": 100}, "has 100 as 'draft_vocab_size'"),
    ("plain", {"num_target_layers": 36}, "has 36 as 'num_target_layers', the target has 4 layers"),
    ("plain", {"vocab_size": 512, "draft_vocab_size": 512}, "has 512 as 'vocab_size', the target has 260"),
    ("plain", {"hidden_size": 64}, "has 64 as 'hidden_size', the target has 32"),
    ("plain", {"num_hidden_layers": 1, "layer_types": [FULL]}, "has tensor layers.1.input_layernorm.weight"),
    ("plain", {"num_hidden_layers": 3, "layer_types": [FULL] * 3}, "lacks tensor layers.2.input_layernorm.weight"),
    ("plain", {"intermediate_size": 96}, "layers.0.mlp.down_proj.weight is (32, 64), its config makes it (32, 96)"),
    ("plain", {"architectures": ["Qwen3ForCausalLM"]}, "names architecture ['Qwen3ForCausalLM']"),
]


@pytest.fixture(scope="module")
def sources(deep_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: exported(dflash_of(deep_target, **KINDS[kind]), deep_target, "z-lab", tmp_path_factory.mktemp("source"))
        for kind in KINDS
    }


@pytest.mark.parametrize(("kind", "values", "named"), REFUSED)
def test_a_source_that_lacks_or_contradicts_is_refused_by_key(
    kind, values, named, sources: dict[str, Path], deep_target: Path, tmp_path: Path
):
    message = refusal(sources[kind], deep_target, tmp_path, values)
    assert named in message
    assert "\n" not in message
    assert not (tmp_path / "imported").exists()


@torch.no_grad()
def test_a_published_folder_is_read_and_what_it_leaves_open_is_told(deep_target: Path, tmp_path: Path):
    """Keys only where z-lab's own files have them, codebooks saved from an nn.Embedding, copies of the target's."""
    module = dflash_of(deep_target, **DFLASH2)
    folder = exported(module, deep_target, "z-lab", tmp_path)
    for_itself = dict.fromkeys(("mask_token_id", "target_layer_ids", "draft_vocab_size", "rope_parameters"))
    nested = dict.fromkeys(f"dflash_config__{key}" for key in BLOCK if key not in ("mask_token_id", "target_layer_ids"))
    change(
        folder, is_causal=None, layer_types=None, use_sliding_window=None, is_neox_style=None, **for_itself, **nested
    )
    change(folder, auto_map={"AutoModel": "dflash.DFlash2DraftModel"}, transformers_version="4.57.1", dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    for name in ("predecessor_codebook", "successor_codebook"):
        weights[f"candidate_selector.{name}.weight"] = weights.pop(f"candidate_selector.{name}")
    embedding = load_model(deep_target, torch.float32).model.embed_tokens.weight.detach()
    save_file(weights | {"embed_tokens.weight": embedding.bfloat16()}, folder / "model.safetensors")
    back, taken = imported(folder, deep_target, tmp_path)
    batch = real_batch(deep_target, TAPPED)
    assert torch.equal(back.propose(batch), module.propose(batch))
    assert torch.equal(back(batch).logits_BAKW, module(batch).logits_BAKW)
    assert set(taken) == {"anchor", "is_causal", "layer_types", "embed_tokens.weight"}
    assert taken["is_causal"].startswith("False")

    save_file(weights | {"embed_tokens.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(FormatError, match=r"has embed_tokens\.weight of its own"):
        imported(folder, deep_target, tmp_path / "b")


@torch.no_grad()
def test_a_target_that_scales_its_embeddings_is_said(tmp_path: Path):
    """The readers take the raw embedding times a factor: without Gemma's, blocks would begin with others."""
    target = save_gemma_target(tmp_path / "gemma", "own keys and values")
    shape = {"vocab_size": ALL_TOKENS, "draft_vocab_size": ALL_TOKENS, "num_target_layers": 6}
    module = DFlashModule(toy_dflash_config(**shape, target_layer_ids=TAPPED)).eval()
    module.bind(shared_weights(target, torch.float32))
    folder = exported(module, target, "z-lab", tmp_path)
    scale = config_of(folder)["dflash_config"]["input_embedding_scale"]
    assert scale == pytest.approx(32**0.5)
    anchors = torch.tensor([7, 99])
    block = torch.full((2, module.config.block_size), module.config.mask_token_id)
    block[:, 0] = anchors
    raw = load_model(target, torch.float32).get_input_embeddings().weight
    torch.testing.assert_close(module.block_input(anchors, torch.zeros(2, 32)), F.embedding(block, raw) * scale)
    assert imported(folder, target, tmp_path)[0].config == module.config
    for value in (None, 1.0):
        change(folder, dflash_config__input_embedding_scale=value)
        with pytest.raises(FormatError, match=r"has 1 as 'dflash_config.input_embedding_scale'; .* by 5\.65"):
            imported(folder, target, tmp_path)
    with pytest.raises(FormatError, match="take --format z-lab"):
        exported(module, target, "speculators", tmp_path / "speculators")
