"""The native backend against Hugging Face, and its hard property: a row's logits never depend on its company."""

import random
import threading

import pytest
import torch
from transformers import (
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from serving.engine import native_build
from serving.engine.native_linear import NativeLinear
from serving.engine.native_rows import NativeRows
from serving.engine.rows import make_rows
from tests.toy_target import toy_model

if native_build.unavailable_reason():
    pytest.skip(native_build.unavailable_reason() or "", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {
    "llama, odd sizes": (
        LlamaForCausalLM,
        LlamaConfig,
        {"vocab_size": 101, "hidden_size": 60, "intermediate_size": 75, "head_dim": 8}
        | {"num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "llama, odd width, head_dim 80": (
        LlamaForCausalLM,
        LlamaConfig,
        {"hidden_size": 45, "head_dim": 80, "tie_word_embeddings": True}
        | {"num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "llama, biases, head_dim 16": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "llama, llama3 rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "llama, yarn": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral, head_dim 64": (
        MistralForCausalLM,
        MistralConfig,
        {"sliding_window": None, "head_dim": 64, "num_attention_heads": 5, "num_key_value_heads": 1},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 6}),
}


def build(shape: str, seed: int = 0):
    model_class, config_class, changes = SHAPES[shape]
    fields = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**(fields | changes))).eval()
    for name, parameter in model.named_parameters():  # HF starts biases at 0 and norms at 1, which would hide them
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model


def native(model, dtype=torch.float32, **changes) -> NativeRows:
    return NativeRows(model, **({"dtype": dtype, "num_slots": 4, "max_len": 150, "num_threads": 2} | changes))


def tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=count)


@torch.inference_mode()
def reference(model, ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """HF logits [T, V], and the output of every decoder layer [T, D]."""
    outputs: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: outputs.append(out)) for layer in model.model.layers]
    logits = model(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, [(out[0] if isinstance(out, tuple) else out).reshape(len(ids), -1) for out in outputs]


def step(rows: NativeRows, *runs: tuple[int, int, list[int]]) -> torch.Tensor:
    return rows.forward(make_rows(list(runs))).logits_NV.clone()


@pytest.mark.parametrize("isa", native_build.runnable_isas())
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_taps_equal_hugging_face(shape, isa):
    model = build(shape)
    ids = tokens(140, model.config.vocab_size)
    logits, layers = reference(model, ids)
    rows = native(model, target_layer_ids=(2, 0), isa=isa)
    out = rows.forward(make_rows([(1, 0, ids)]))
    torch.testing.assert_close(out.logits_NV, logits, atol=2e-3, rtol=1e-4)
    assert out.features_RF is not None
    torch.testing.assert_close(out.features_RF, torch.cat([layers[2], layers[0]], dim=-1), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("isa", native_build.runnable_isas())
@pytest.mark.parametrize("shape", ["llama, odd sizes", "llama, odd width, head_dim 80", "qwen3"])
def test_bfloat16_is_close_to_float32(shape, isa):
    model = build(shape)
    ids = tokens(60, model.config.vocab_size)
    logits, _ = reference(model.to(torch.bfloat16).float(), ids)
    out = step(native(model, torch.bfloat16, isa=isa), (0, 0, ids))
    assert (out - logits).norm() / logits.norm() < 0.03


@pytest.mark.parametrize("isa", native_build.runnable_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["llama, odd sizes", "mistral, head_dim 64", "qwen3"])
def test_a_row_never_depends_on_its_company(shape, dtype, isa):
    """Random passes of 1-100 rows over four slots give, bit for bit, what each sequence gives token by token."""
    model = build(shape)
    vocab = model.config.vocab_size
    sequences = [tokens(120, vocab, seed) for seed in range(4)]
    alone = native(model, dtype, num_slots=1, num_threads=1, isa=isa)
    solo = [torch.cat([step(alone, (0, p, [t])) for p, t in enumerate(seq)]) for seq in sequences]
    for seed in range(4):
        rng = random.Random(seed)
        rows = native(model, dtype, num_threads=rng.choice([1, 2, 3]), isa=isa)
        done = [0, 0, 0, 0]
        while min(done) < 120:
            slots = rng.sample([s for s in range(4) if done[s] < 120], k=rng.randint(1, sum(d < 120 for d in done)))
            sizes = [min(120 - done[s], rng.choice([1, 1, 2, 5, 9, 30])) for s in slots]
            out = step(
                rows, *((s, done[s], sequences[s][done[s] : done[s] + n]) for s, n in zip(slots, sizes, strict=True))
            )
            want = torch.cat([solo[s][done[s] : done[s] + n] for s, n in zip(slots, sizes, strict=True)])
            assert torch.equal(out, want)
            for s, n in zip(slots, sizes, strict=True):
                done[s] += n - rng.choice([0, 0, min(n - 1, 2)])  # some rows come again, as after a rejected draft


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_in_chunks_equals_prefill_at_once(dtype):
    model = build("qwen2")
    ids = tokens(149, model.config.vocab_size)
    whole = step(native(model, dtype), (2, 0, ids))
    rows = native(model, dtype, num_threads=1)
    parts = [step(rows, (0, start, ids[start : start + 37])) for start in range(0, 149, 37)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rejected_draft_leaves_no_trace(dtype):
    model = toy_model()
    rows = native(model, dtype)
    ids = tokens(30, 256)
    want = step(native(model, dtype), (0, 0, ids))
    step(rows, (3, 0, [*ids[:10], 7, 8, 9, 10, 11, 12]))
    assert torch.equal(step(rows, (3, 10, ids[10:])), want[10:])


@pytest.mark.parametrize("threads", [1, 3])
def test_of_equal_logits_the_first_is_the_best(threads: int):
    model = toy_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[150:] = model.lm_head.weight[:106].clone()
    rows = native(model, num_threads=threads)
    out = rows.forward(make_rows([(0, 0, tokens(140, 256))]))
    assert torch.equal(out.best_N, out.logits_NV.argmax(dim=-1))
    assert int(out.best_N.max()) < 150


def test_only_wanted_logits_are_computed():
    rows = native(toy_model())
    ids = tokens(140, 256)  # more than one chunk
    full = step(rows, (0, 0, ids))
    for wanted in ([139], [0, 3, 95, 96, 130], []):
        out = rows.forward(make_rows([(0, 0, ids)], wanted))
        assert torch.equal(out.logits_NV, full[wanted])
        assert torch.equal(out.best_N, full[wanted].argmax(dim=-1))
        assert out.features_RF is None


def test_features_are_left_out_where_nobody_wants_them():
    """In a pass that is longer than the rows that go through the layers together, too."""
    rows = native(build("llama, odd sizes"), target_layer_ids=(0, 1), num_slots=1, max_len=250)
    ids = [i % 90 for i in range(230)]
    with_features = rows.forward(make_rows([(0, 0, ids)]))
    logits = with_features.logits_NV.clone()
    assert with_features.features_RF.shape[0] == 230
    without = rows.forward(make_rows([(0, 0, ids)], with_features=False))
    assert without.features_RF is None
    assert torch.equal(without.logits_NV, logits)


def test_many_threads_and_instances_at_once():
    """More threads than cores, called from several Python threads: slow perhaps, but right."""
    model = build("llama, odd sizes")
    ids = tokens(40, model.config.vocab_size)
    want = step(native(model, num_threads=1), (0, 0, ids))
    wrong = []

    def work(num_threads: int) -> None:
        rows = native(model, num_threads=num_threads)
        wrong.extend(i for i in range(5) if not torch.equal(step(rows, (0, 0, ids)), want))

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in (1, 2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


@pytest.mark.parametrize(
    ("runs", "wanted", "message"),
    [
        ([(0, 0, [5, 256])], None, "row 1: token id 256"),
        ([(0, 0, [-1])], None, "row 0: token id -1"),
        ([(0, 0, [1]), (4, 0, [1])], None, "row 1: slot 4"),
        ([(-1, 0, [1])], None, "row 0: slot -1"),
        ([(0, 149, [1, 1])], None, "row 1: position 150"),
        ([(0, -1, [1])], None, "row 0: position -1"),
        ([(0, 0, [1]), (1, 0, [1]), (0, 1, [1])], None, "row 2: the rows of slot 0"),
        ([(0, 0, [1]), (0, 2, [1])], None, "row 1: the rows of slot 0"),
        ([(0, 0, [1, 2])], [2], "logit row 2"),
        ([(0, 0, [1, 2])], [1, 0], "logit row 0"),
    ],
)
def test_rows_out_of_range_are_refused_by_name(runs, wanted, message):
    rows = native(toy_model())
    before = step(rows, (0, 0, [3, 4]))
    with pytest.raises(ValueError, match=message):
        rows.forward(make_rows(runs, wanted))
    assert torch.equal(step(rows, (0, 1, [4])), before[1:])


def test_an_empty_pass_gives_nothing():
    assert native(toy_model()).forward(make_rows([])).logits_NV.shape == (0, 256)


def test_attributes():
    rows = native(toy_model(), target_layer_ids=(1,))
    assert (rows.name, rows.vocab_size, rows.max_len, rows.num_slots) == ("native", 256, 150, 4)
    assert (
        rows.kv_bytes() == 2 * 4 * 2 * 160 * (8 + 16) * 4
    )  # layers, slots, KV heads, positions, keys and values, fp32


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GemmaConfig(), "model type gemma"),
        (Qwen3MoeConfig(), "model type qwen3_moe"),
        (LlamaConfig(hidden_act="gelu"), "activation gelu"),
        (MistralConfig(sliding_window=4096, max_position_embeddings=8192), "sliding-window"),
        (Qwen3Config(use_sliding_window=True, sliding_window=64, max_window_layers=1), "sliding-window"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "rope type dynamic"),
        (LlamaConfig(final_logit_softcapping=30.0), "soft-capping"),
        (LlamaConfig(quantization_config={"quant_method": "awq"}), "quantised weights"),
    ],
)
def test_unsupported_targets_are_named(config, reason):
    assert reason in NativeRows.unsupported_reason(config)


def test_supported_targets():
    for config in (LlamaConfig(), Qwen2Config(), Qwen3Config(), MistralConfig(sliding_window=None)):
        assert NativeRows.unsupported_reason(config) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float16}, "float16"),
        ({"num_slots": 0}, "num_slots 0"),
        ({"target_layer_ids": (2,)}, "layers of 0 to 1"),
        ({"target_layer_ids": (1, 1)}, "different layers"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        native(toy_model(), **changes)


@pytest.mark.parametrize("isa", native_build.runnable_isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_equals_torch_and_never_depends_on_company(dtype, isa):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(77, 53), torch.randn(77), torch.randn(130, 53)
    linear = NativeLinear(weight, bias, dtype=dtype, num_threads=2, isa=isa)
    want = torch.nn.functional.linear(x.to(dtype).double(), weight.to(dtype).double(), bias.double())
    out = linear(x)
    torch.testing.assert_close(out, want.float(), atol=1e-4, rtol=1e-4)
    for start, end in ((0, 1), (5, 7), (40, 53), (3, 130)):
        assert torch.equal(linear(x[start:end]), out[start:end])
    with pytest.raises(ValueError, match="53 inputs"):
        linear(x[:, :5])


def test_no_compiler_is_one_line(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    native_build.load.cache_clear()
    native_build.unavailable_reason.cache_clear()
    try:
        assert native_build.unavailable_reason() == "the C++ compiler that CXX names is not there: no-such-compiler"
    finally:
        native_build.load.cache_clear()
        native_build.unavailable_reason.cache_clear()


def test_an_unknown_isa_is_refused():
    with pytest.raises(native_build.NativeBuildError, match="not avx1024"):
        native_build.load("avx1024")
