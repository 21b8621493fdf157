"""A toy target that repeats the last token of its prompt for ever, and drafters that propose one token, always.

So a drafter is right in every draft or in none, as live text has it: whatever its evaluation says.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from drafters.checkpoint import save_checkpoint
from drafters.mtp import MtpConfig, make_mtp
from drafters.target import load_target, target_fingerprint
from tests.toy_folder import save_toy_target


def save_echo_target(folder: Path, **changes) -> Path:
    """A whole target in `folder` whose layers add nothing to the embedding of the token they read.

    `changes` override fields of its config.
    """
    save_toy_target(folder, **({"eos_token_id": None, "max_position_embeddings": 2048} | changes))
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    return folder


def save_one_token_drafter(
    folder: Path, target_dir: Path, token: str, taps: tuple[int, ...] | None = None, **changes
) -> Path:
    """A drafter whose vocabulary is this token, by the last layer if `taps` names no others.

    `changes` override fields of its provenance.
    """
    target = load_target(str(target_dir))
    taps = taps or (target.num_layers - 1,)
    config = MtpConfig(
        hidden_size=target.width, vocab_size=target.config.vocab_size, draft_vocab_size=1, target_layer_ids=taps,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, intermediate_size=32, num_draft_tokens=3,
    )  # fmt: skip
    module = make_mtp(config)
    module.draft_vocab_ids.copy_(torch.tensor([ord(token)]))
    save_checkpoint(folder, module, {"target_fingerprint": target_fingerprint(target.path, taps)} | changes)
    return folder
