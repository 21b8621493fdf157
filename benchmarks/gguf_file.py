"""A Llama-architecture target folder in; a GGUF file of the very same weights, which llama.cpp reads, out.

Benchmarks run llama.cpp on what our own engine runs. The tokenizer goes along because llama.cpp demands one.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from safetensors import safe_open

from drafters.target import Target, TargetError, load_target
from drafters.target_source import weight_files

_FORMATS = {
    "float32": (LlamaFileType.ALL_F32, GGMLQuantizationType.F32),
    "float16": (LlamaFileType.MOSTLY_F16, GGMLQuantizationType.F16),
    "bfloat16": (LlamaFileType.MOSTLY_BF16, GGMLQuantizationType.BF16),
}


def write_gguf(folder: Path, file: Path, dtype: str = "float32") -> None:
    """Write the target in `folder` as `file`, whole or not at all; its matrices in `dtype`, its norms in float32.

    `dtype` is float32, float16 or bfloat16. Raises TargetError if llama.cpp's "llama" architecture is another model.
    """
    target = load_target(str(folder))
    reason = _unsupported_reason(target)
    if dtype not in _FORMATS:
        reason = f"dtype {dtype!r} is none of {', '.join(_FORMATS)}"
    if reason:
        raise TargetError(f"target {folder} cannot be written as GGUF: {reason}")
    file.parent.mkdir(parents=True, exist_ok=True)
    temp = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    writer = GGUFWriter(temp, "llama")
    try:
        _add_hyperparameters(writer, target.config, dtype)
        _add_tokenizer(writer, target)
        _add_tensors(writer, target, _FORMATS[dtype][1])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(temp, file)
    finally:
        temp.unlink(missing_ok=True)


def _unsupported_reason(target: Target) -> str | None:
    """Why the file would be another model than the target, in a few words; None if it is the same."""
    config = target.config
    if config.model_type != "llama":
        return f"its model type is {config.model_type}, only llama is written"
    if config.rope_parameters.get("rope_type", "default") != "default":
        return f"its rope type is {config.rope_parameters['rope_type']}, only the default is written"
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        return "it has biases, or another activation than silu"
    if not (target.path / "tokenizer.json").exists():
        return "it has no tokenizer.json"
    model = json.loads((target.path / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        return "its tokenizer is no byte-level BPE"
    return None


def _add_hyperparameters(writer: GGUFWriter, config: Any, dtype: str) -> None:
    writer.add_file_type(_FORMATS[dtype][0])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(writer: GGUFWriter, target: Target) -> None:
    tokenizer, size = target.tokenizer, target.config.vocab_size
    names = {i: name for name, i in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    types = [TokenType.NORMAL if i in names else TokenType.UNUSED for i in range(size)]
    for i, token in added.items():
        types[i] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    merges = json.loads((target.path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")  # how text is split; benchmarks give token ids, so that it never matters
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    # llama.cpp ends a sequence at each of these, and at tokens that it knows by name, such as <|endoftext|>
    ends = sorted(target.eos_token_ids, key=lambda i: i != tokenizer.eos_token_id)
    for add, i in zip((writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), ends, strict=False):
        add(i)
    for add, i in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if i is not None:
            add(i)


def _add_tensors(writer: GGUFWriter, target: Target, kind: GGMLQuantizationType) -> None:
    config = target.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for weights in weight_files(target.path):
        with safe_open(weights, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - the opened file is no dict
                if "rotary_emb" in name or (name.startswith("lm_head.") and config.tie_word_embeddings):
                    continue  # computed from the hyperparameters; the embedding once more
                gguf_name = names.get_name(name, try_suffixes=(".weight",))
                if gguf_name is None:
                    raise TargetError(f"target {target.path} cannot be written as GGUF: {name} is no tensor of a Llama")
                tensor = opened.get_tensor(name).to(torch.float32).numpy()
                if ".q_proj." in name:
                    tensor = _interleave_halves(tensor, config.num_attention_heads)
                elif ".k_proj." in name:
                    tensor = _interleave_halves(tensor, config.num_key_value_heads)
                stored = GGMLQuantizationType.F32 if tensor.ndim == 1 else kind
                writer.add_tensor(gguf_name, gguf.quants.quantize(tensor, stored), raw_dtype=stored)


def _interleave_halves(weight_OI: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder each head's outputs: llama.cpp's rope turns pairs (2i, 2i + 1), that of transformers (i, i + half)."""
    outputs, inputs = weight_OI.shape
    halves = weight_OI.reshape(num_heads, 2, outputs // num_heads // 2, inputs)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(outputs, inputs)
