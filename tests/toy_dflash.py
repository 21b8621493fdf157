"""DFlash drafters for the toy target, in all their variants, with batches and requests to try them on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from drafters.dflash import FULL, SLIDING, DFlashConfig, DFlashModule
from drafters.drafter import DraftRequest
from drafters.training_batch import TrainingBatch
from tests.toy_mtp import TAPS, rows_of, shared_of

BLOCK = 5
SLOTS = BLOCK - 1  # K
MASK = 255
DFLASH2 = {"selector_top_k": 4, "selector_rank": 6, "conv_kernel_size": 2, "conv_group_size": 8}
FEW_TOKENS = range(0, 256, 3)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"num_hidden_layers": 1},
    "sliding": {"sliding_window": 4, "layer_types": (FULL, SLIDING)},
    "narrow window": {"sliding_window": 2, "layer_types": (SLIDING, SLIDING)},
    "dflash 2": DFLASH2,
    "selector": {"selector_top_k": 4, "selector_rank": 6},
    "everything": {**DFLASH2, "confidence_head": True, "slot_context": True, "vocab_ids": FEW_TOKENS},
}


def toy_dflash_config(**changes: Any) -> DFlashConfig:
    """Fits `tests.toy_target.toy_model`; `changes` override fields."""
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "vocab_size": 256,
        "num_target_layers": 2,
        "target_layer_ids": TAPS,
        "mask_token_id": MASK,
        "draft_vocab_size": 256,
        "block_size": BLOCK,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
    }
    return DFlashConfig(**(fields | changes))


def toy_dflash(
    model: LlamaForCausalLM, vocab_ids: Sequence[int] | None = None, seed: int = 0, **changes: Any
) -> DFlashModule:
    """A drafter with random weights everywhere, bound to `model`."""
    if vocab_ids is not None:
        changes["draft_vocab_size"] = len(vocab_ids)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = DFlashModule(toy_dflash_config(**changes))
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    if vocab_ids is not None:
        module.draft_vocab_ids.copy_(torch.tensor(list(vocab_ids)))
    module.bind(shared_of(model))
    return module.eval()


def random_sequences(count: int, length: int, seed: int = 0, taps: int = len(TAPS)) -> tuple[Tensor, Tensor]:
    """(ids [B, T], features [B, T, taps * 32]), unrelated to each other."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (count, length), generator=generator)
    return ids, torch.randn(count, length, 32 * taps, generator=generator)


def batch_of(ids_BT: Tensor, features_BTF: Tensor, anchors: Sequence[int] | Tensor) -> TrainingBatch:
    """The same anchors in every sequence, or a tensor [B, A] of them."""
    anchors_BA = anchors if isinstance(anchors, Tensor) else torch.tensor([list(anchors)]).expand(len(ids_BT), -1)
    return rows_of(ids_BT, features_BTF, anchors_BA)


def request_of(
    ids_BT: Tensor, features_BTF: Tensor, spans: Sequence[tuple[int, int]], num: int = SLOTS, **changes: Any
) -> DraftRequest:
    """Pairs `spans[b]` = (first p, end) of sequence b, which sits in slot b."""
    fields: dict[str, Any] = {
        "slots": list(range(len(spans))),
        "epochs": [1] * len(spans),
        "counts": [end - start for start, end in spans],
        "starts": [start for start, _ in spans],
        "first_tokens": ids_BT[:, 0].tolist(),
        "tokens_N": torch.cat([ids_BT[b, start + 1 : end + 1] for b, (start, end) in enumerate(spans)]),
        "features_NF": torch.cat([features_BTF[b, start:end] for b, (start, end) in enumerate(spans)]),
        "num_draft_tokens": num,
        "temperatures": [0.0] * len(spans),
        "seeds": list(range(len(spans))),
    }
    return DraftRequest(**(fields | changes))
