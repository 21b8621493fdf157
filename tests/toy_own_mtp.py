"""Tiny random targets that ship MTP layers, as folders under their family's key names; and what transformers drafts."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, MellumConfig
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from drafters.formats.own_mtp import read
from drafters.own_mtp_layers import cache_widths
from drafters.own_mtp_module import OwnMtpConfig, OwnMtpModule
from drafters.target import load_target
from tests.toy_folder import toy_tokenizer
from tests.toy_mtp import shared_of

SHAPE: dict[str, Any] = {
    "vocab_size": 6,  # so few that some random drafts are right
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 10}
_DEEPSEEK = SHAPE | _ROUTED | _LATENT | {"n_group": 2, "topk_group": 1, "num_key_value_heads": 4}
CONFIGS = {
    "glm4": lambda **more: Glm4MoeConfig(**(SHAPE | _ROUTED | {"num_key_value_heads": 2, "head_dim": 8} | more)),
    "deepseek": lambda **more: DeepseekV3Config(**(_DEEPSEEK | more)),
    "deepseek, two layers": lambda **more: DeepseekV3Config(**(_DEEPSEEK | {"num_mtp_layers": 2} | more)),
    "deepseek, three layers": lambda **more: DeepseekV3Config(**(_DEEPSEEK | {"num_mtp_layers": 3} | more)),
    "mellum, sliding": lambda **more: MellumConfig(
        **SHAPE
        | {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "sliding_window": 7, "num_mtp_layers": 1}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | more
    ),
}
LAST = (1,)  # the layer that all of these tap
EXPERTS = "mtp_block.mlp.experts."


def save_own_mtp_target(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """Model, tokenizer and MTP layers with random weights everywhere; `changes` override fields of the config."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = CONFIGS[family](**changes)
        main = AutoModelForCausalLM.from_config(config).eval()
        torch.nn.init.normal_(main.model.norm.weight.data, mean=1.0, std=0.3)  # ones would hide that it is left out
        layers = MtpModel(main, config.num_mtp_layers).layers
        for name, tensor in [*layers.named_parameters(), *layers.named_buffers()]:
            around = 1.0 if tensor.dim() == 1 and "bias" not in name else 0.0
            torch.nn.init.normal_(tensor.data, mean=around, std=0.3)
    main.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    own = {new: part for name, tensor in layers.state_dict().items() for new, part in _published(name, tensor, config)}
    own = {name: tensor.contiguous().clone() for name, tensor in own.items()}
    save_file(load_file(folder / "model.safetensors") | own, folder / "model.safetensors", {"format": "pt"})
    return folder


def _published(name: str, tensor: torch.Tensor, config: Any) -> list[tuple[str, torch.Tensor]]:
    """The names that the family's checkpoints have for a weight of `MtpModel.layers`, experts one by one."""
    index, _, rest = name.partition(".")
    if rest.startswith(EXPERTS):
        parts = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}[rest.removeprefix(EXPERTS)]
        pieces = [(e, part, piece) for e, expert in enumerate(tensor) for part, piece in _split(parts, expert)]
        return [(_key(index, f"{EXPERTS}{e}.{part}.weight", config), piece) for e, part, piece in pieces]
    return [(_key(index, rest, config), tensor)]


def _split(parts: list[str], expert: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return list(zip(parts, expert.chunk(len(parts)), strict=True))


def _key(index: str, rest: str, config: Any) -> str:
    block = rest.removeprefix("mtp_block.")
    if config.model_type != "mellum":
        layer = f"model.layers.{config.num_hidden_layers + int(index)}"
        return f"{layer}.{block.replace('post_norm.', 'shared_head.norm.') if block == rest else block}"
    above = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
    first, _, leaf = rest.partition(".")
    return f"mtp.{above[first]}.{leaf}" if first in above else f"mtp.layers.{index}.{block}"


def own_mtp(folder: Path) -> OwnMtpModule:
    """The drafter of a target's own layers."""
    return read(Path("own"), load_target(str(folder)))


def plain_model(folder: Path) -> Any:
    """The target by transformers, which finds the MTP layers of families whose published sizes are others."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    first = model.config.num_hidden_layers
    own = [rf"model\.layers\.{n}\." for n in range(first, first + model.config.num_mtp_layers)]
    model._keys_to_ignore_on_load_unexpected = [*own, r"^mtp\."]
    return model


def reference(model: Any, prompts: Sequence[Sequence[int]], new: int) -> list[tuple[list[int], dict[int, list[int]]]]:
    """Of each prompt: what `generate(use_mtp=True)` says, and the drafts of each round by the place of its anchor."""
    found: list[tuple[list[int], dict[int, list[int]]]] = []
    with pytest.MonkeyPatch.context() as patch:
        candidates = MTPCandidateGenerator.get_candidates
        rounds: dict[int, list[int]] = {}

        def overheard(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
            result = candidates(self, input_ids, **options)
            drafts = result[0][0, input_ids.shape[1] :].tolist()
            if drafts:
                rounds[input_ids.shape[1] - 1] = drafts
            return result

        patch.setattr(MTPCandidateGenerator, "get_candidates", overheard)
        for prompt in prompts:
            rounds.clear()
            ids = torch.tensor([list(prompt)])
            said = model.generate(
                ids, attention_mask=torch.ones_like(ids), use_mtp=True, do_sample=False, max_new_tokens=new
            )
            found.append((said[0].tolist(), dict(rounds)))
    return found


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of a saved config."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def random_own_mtp(model: Any, layers: int = 1, seed: int = 0) -> OwnMtpModule:
    """MTP layers with random weights for a toy target of any family, bound to it."""
    config = copy.deepcopy(model.config)
    config.num_mtp_layers = layers
    made = OwnMtpConfig(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        target_layer_ids=(config.num_hidden_layers - 1,),
        num_draft_tokens=layers,
        draft_vocab_size=config.vocab_size,
        num_mtp_layers=layers,
        cache_widths=cache_widths(config),
    )
    module = OwnMtpModule(made, config)
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {"draft_vocab_ids": module.draft_vocab_ids}
    for name, tensor in module.state_dict().items():
        if name not in state:
            state[name] = 0.3 * torch.randn(tensor.shape, generator=generator) + (tensor.dim() == 1)
    module.load_state_dict(state)
    module.bind(shared_of(model))
    return module.eval()
