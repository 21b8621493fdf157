"""Tiny random targets of every supported family: the slots give the logits of transformers' own forward, and drafting
never changes what `generate` would say. Families that keep state which cannot be rolled back are refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    SmolLM3Config,
)

from drafters.prompt_lookup import PromptLookupDrafter
from serving.engine import torch_rows
from serving.engine.engine import Engine, EngineConfig
from serving.engine.kv_layout import UnsupportedTargetError, kv_layout, kv_numbers
from serving.engine.rows import make_rows
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_target import toy_prompts

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GEMMA4 = {
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 12,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 256,
    "final_logit_softcapping": 5.0,
    **SLIDING,
}

FAMILIES = {
    "llama, own heads": LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=False),
    "llama, one KV head, biases": LlamaConfig(**SHAPE, num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    "llama, scaled rope": LlamaConfig(
        **SHAPE,
        num_key_value_heads=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral, sliding window": MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=12),
    "qwen2, biases": Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3, wide heads": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=24),
    "qwen3, some layers sliding": Qwen3Config(
        **SHAPE, num_key_value_heads=2, head_dim=8, use_sliding_window=True, **SLIDING
    ),
    "smollm3, layers without rope": SmolLM3Config(**SHAPE, num_key_value_heads=2, no_rope_layers=[1, 1, 1, 0]),
    "gemma": GemmaConfig(**SHAPE, num_key_value_heads=1, head_dim=16),
    "gemma2, soft-capping and sliding": Gemma2Config(
        **SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        **SLIDING,
    ),
    "gemma3, two ropes and sliding": Gemma3TextConfig(
        **SHAPE, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, **SLIDING
    ),
    "gemma4, wide full layers, keys as values": Gemma4TextConfig(**SHAPE, **GEMMA4, attention_k_eq_v=True),
    "gemma4, last layers share keys and values": Gemma4TextConfig(
        **SHAPE, **(GEMMA4 | {"hidden_size_per_layer_input": 8}), num_kv_shared_layers=2
    ),
    "glm4, experts, biases, half rotated": Glm4MoeConfig(
        **SHAPE, **EXPERTS, num_key_value_heads=2, head_dim=8, attention_bias=True, use_qk_norm=True
    ),
    "deepseek3, latent attention and experts": DeepseekV3Config(
        **SHAPE,
        **EXPERTS,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=10,
        qk_rope_head_dim=4,
        v_head_dim=6,
    ),
    "gpt-oss, sinks and experts": GptOssConfig(
        **SHAPE, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, **SLIDING
    ),
}


def make(config):
    """The family's model with fixed random weights; eager attention, which every family has."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        for name, parameter in model.named_parameters():
            if "sinks" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("family", list(FAMILIES))
def test_rows_equal_the_models_own_forward(family):
    prompts = toy_prompts(3, low=20, high=45)
    reference = make(FAMILIES[family])
    with torch.inference_mode():
        expected = [reference(torch.tensor([p]), use_cache=False).logits[0] for p in prompts]
    rows = TorchRows(make(FAMILIES[family]), num_slots=5, max_len=64)
    assert rows.kv_bytes() == kv_numbers(FAMILIES[family]) * 5 * 64 * 4
    slots = [0, 4, 1]
    # most of each prompt, some of it wrong as after a rejected draft, then the rest in a mixed pass
    first = rows.forward(make_rows([(s, 0, p[:-4]) for s, p in zip(slots, prompts, strict=True)]))
    got = list(first.logits_NV.clone().split([len(p) - 4 for p in prompts]))
    rows.forward(make_rows([(s, len(p) - 4, [7, 7, 7, 7]) for s, p in zip(slots, prompts, strict=True)]))
    parts = [(0, len(prompts[0]) - 4, prompts[0][-4:]), (1, len(prompts[2]) - 4, prompts[2][-4:])]
    second = rows.forward(make_rows([*parts, (4, len(prompts[1]) - 4, prompts[1][-4:-2])])).logits_NV.clone()
    third = rows.forward(make_rows([(4, len(prompts[1]) - 2, prompts[1][-2:])])).logits_NV
    got = [
        torch.cat([got[0], second[:4]]),
        torch.cat([got[1], second[8:], third]),
        torch.cat([got[2], second[4:8]]),
    ]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_drafted_output_equals_generate(family):
    prompts = [p + p for p in toy_prompts(4, low=4, high=14)]
    reference = make(FAMILIES[family])
    expected = [
        reference.generate(torch.tensor([p]), max_new_tokens=30, do_sample=False)[0, len(p) :].tolist() for p in prompts
    ]
    rows = TorchRows(make(FAMILIES[family]), num_slots=3, max_len=80)
    engine = Engine(rows, PromptLookupDrafter(max_ngram=2, min_ngram=1), config=EngineConfig(max_prefill_rows=9))
    completions = engine.generate(prompts, Sampling(max_new_tokens=30))
    assert [c.token_ids for c in completions] == expected
    assert engine.stats.acceptance.proposed > 0


@pytest.mark.parametrize(
    ("family", "numbers"),
    [
        ("gemma2, soft-capping and sliding", 4 * 2 * (8 + 8)),
        ("gemma4, wide full layers, keys as values", 2 * 2 * (8 + 8) + 2 * 1 * (12 + 12)),
        ("gemma4, last layers share keys and values", 2 * (8 + 8) + 2 * (12 + 12)),  # two of four keep any
        ("deepseek3, latent attention and experts", 4 * 4 * (14 + 6)),
    ],
)
def test_what_a_token_leaves_behind_in_the_slots(family, numbers):
    assert kv_numbers(FAMILIES[family]) == numbers


def test_an_assistant_is_no_target():
    config = Gemma4TextConfig(**SHAPE, **GEMMA4, num_kv_shared_layers=4)
    with pytest.raises(UnsupportedTargetError, match="it is an assistant"):
        kv_numbers(config)


def test_a_layer_that_keeps_something_else_than_its_config_says_is_refused(monkeypatch):
    config = FAMILIES["deepseek3, latent attention and experts"]
    as_said = kv_layout(config)
    monkeypatch.setattr(torch_rows, "kv_layout", lambda _: [kv._replace(value_dim=7) for kv in as_said])
    rows = TorchRows(make(config), num_slots=1, max_len=8)
    with pytest.raises(UnsupportedTargetError, match=r"layer 0 has keys .* choose another target"):
        rows.forward(make_rows([(0, 0, [1, 2])]))


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4),
        Qwen3NextConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8
        ),
    ],
)
def test_state_that_cannot_be_rolled_back_is_refused_by_name(config):
    model = torch.nn.Module()
    model.config = config
    with pytest.raises(UnsupportedTargetError, match=config.model_type):
        TorchRows(model, num_slots=1, max_len=8)
