"""Tiny random Gemma 4 targets and assistants, as folders on disk: sliding and full layers of different widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
)

from drafters.formats.gemma4_assistant import read
from drafters.gemma_assistant import GemmaAssistant
from drafters.target import Target
from tests.toy_folder import toy_tokenizer

WINDOW = 6
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS: dict[str, dict[str, Any]] = {
    "own keys and values": {"layer_types": [SLIDING, SLIDING, FULL] * 2},
    "last layers share": {
        "layer_types": [SLIDING, FULL] * 3,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
    },
    "keys as values": {
        "layer_types": [SLIDING, SLIDING, FULL] * 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
}
TAPS = {"own keys and values": (3, 4, 5), "last layers share": (1, 2, 5), "keys as values": (3, 4, 5)}
_SHARED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 12}
_COMMON = {
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000.0},
    },
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def target_config(kind: str, vocab_size: int, **changes: Any) -> Gemma4TextConfig:
    """Six layers of width 32."""
    fields = {
        "vocab_size": vocab_size,
        "vocab_size_per_layer_input": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "final_logit_softcapping": 20.0,
    }
    return Gemma4TextConfig(**(_COMMON | _SHARED | fields | KINDS[kind] | changes))


def save_gemma_target(folder: Path, kind: str, vocab_size: int = 260, seed: int = 0, **changes: Any) -> Path:
    """A whole target; its norms and layer scales are no ones."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Gemma4ForCausalLM(target_config(kind, vocab_size, **changes))
        _roughen(model)
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def save_assistant(
    folder: Path, kind: str, vocab_size: int = 260, *, ordered: bool = False, seed: int = 1, **changes: Any
) -> Path:
    """Three layers of width 16 for a target of that kind. `ordered`: with 20 clusters, of which 4 are looked into."""
    of_keys = ("attention_k_eq_v", "num_global_key_value_heads")
    shape = {name: value for name, value in KINDS[kind].items() if name in of_keys}
    text = {
        "vocab_size": vocab_size,
        "vocab_size_per_layer_input": 0,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "layer_types": [SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 3,
    }
    own = {name: changes.pop(name) for name in ("backbone_hidden_size", "tie_word_embeddings") if name in changes}
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**(_COMMON | _SHARED | text | shape | changes)),
        use_ordered_embeddings=ordered,
        num_centroids=20,
        centroid_intermediate_top_k=4,
        initializer_range=0.3,
        **({"backbone_hidden_size": 32} | own),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Gemma4AssistantForCausalLM(config)
        _roughen(model)
        if ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(vocab_size))
    model.generation_config.num_assistant_tokens = 3
    model.save_pretrained(folder)
    return folder


def _roughen(model: torch.nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name:
            torch.nn.init.normal_(tensor, mean=1.0, std=0.3)
        elif "layer_scalar" in name:
            tensor.fill_(0.9)
        elif name.endswith("weight") and tensor.dim() == 2:
            torch.nn.init.normal_(tensor, std=0.3)


def target_of(folder: Path) -> Target:
    """Without what only text needs."""
    config = Gemma4TextConfig.from_pretrained(folder)
    return Target(folder, config, None, (), GenerationConfig())


def toy_assistant(folder: Path, kind: str, vocab_size: int = 260, **options: Any) -> tuple[Path, Path, GemmaAssistant]:
    """A target's folder, an assistant's, and the assistant as a drafter for that target."""
    target = save_gemma_target(folder / "target", kind, vocab_size)
    source = save_assistant(folder / "assistant", kind, vocab_size, **options)
    return target, source, read(source, target_of(target))
