"""The joint MTP regime: a trunk (any Hugging Face causal LM) and its MTP module trained together on the same tokens.

In: a batch of sequences, one a row (`pad_documents`), with anchors. Out: L = L_NTP + beta * L_MTP with gradients for
both. The module is the one of the frozen regime (`pipelines/training.py`), and serves like it once the trunk is saved
as its target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.drafter_module import DrafterModule
from drafters.losses import DraftLoss, FinalNorm, LossConfig, draft_loss, supervise
from drafters.target import SharedWeights, gemma_family
from drafters.training_batch import IGNORED, TrainingBatch


class JointLoss(NamedTuple):
    """Loss of one batch and its parts."""

    loss: Tensor  # scalar: ntp + beta * (mtp + the module's further losses)
    ntp: Tensor  # scalar: mean cross-entropy of the trunk's next token over all positions
    mtp: DraftLoss


def joint_loss(
    model: nn.Module,
    module: DrafterModule,
    batch: TrainingBatch,
    beta: float,
    config: LossConfig | None = None,
    *,
    step_tokens: Tensor | None = None,
) -> JointLoss:
    """The joint loss. The features of `batch` are not read: the trunk puts them out anew, with gradients.

    L_MTP reaches the trunk through its tapped hidden states. Embedding and LM head, which the module borrows as they
    are at each call, learn from L_NTP alone, as in the frozen regime they learn from nothing. Parts of a step whose
    `step_tokens` (tokens to foresee) and `step_labels_K` are the step's have losses that add up to the whole's.
    """
    if beta < 0:
        raise ValueError(f"beta must be 0 or more, got {beta}")
    config = config or LossConfig()
    shared = trunk_weights(model)
    module.bind(shared)
    module.to(batch.ids_BT.device)  # what `bind` made anew
    logits_BTV, features_BTF = tapped_forward(model, batch.ids_BT, module.config.target_layer_ids)
    ntp = next_token_loss(logits_BTV, batch.ids_BT, lengths_of(batch), step_tokens)
    batch = replace(batch, features_BTF=features_BTF)
    output = module(batch)
    # kl is towards the trunk as it is: a drafter's target is no part of what is trained
    norm = FinalNorm(shared.final_norm_D, shared.rms_eps, shared.logit_softcap) if config.kind == "kl" else None
    mtp = draft_loss(config, output.logits_BAKW.flatten(0, 1), supervise(module, batch, norm))
    return JointLoss(ntp + beta * (mtp.loss + sum(output.auxiliary.values())), ntp, mtp)


def lengths_of(batch: TrainingBatch) -> Tensor:
    """[B] tokens of the one document of each row."""
    return batch.positions_BT.amax(dim=1) + 1


def next_token_loss(logits_BTV: Tensor, ids_BT: Tensor, lengths_B: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of the token at t + 1 given those up to t, over all known positions or so many tokens."""
    labels_N = next_tokens(ids_BT, lengths_B).flatten()
    logits_NV = logits_BTV[:, :-1].flatten(0, 1).float()
    total = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
    return total / ((labels_N != IGNORED).sum() if tokens is None else tokens)


def next_tokens(ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """[B, T - 1] the token at t + 1; IGNORED in the padding."""
    following = ids_BT[:, 1:]
    place = following.new_ones(following.shape).cumsum(dim=1)
    return following.masked_fill(place >= lengths_B[:, None], IGNORED)


def tapped_forward(model: Any, ids_BT: Tensor, layer_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(logits [B, T, V], features [B, T, taps * D]) of right-padded sequences, with the gradients that are switched on.

    Features are the outputs of decoder layers, the last one's before the final norm. Causal attention keeps padding
    from all that comes before it.
    """
    caught: dict[int, Tensor] = {}

    def note(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            caught[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    layers = model.get_decoder().layers
    hooks = [layers[layer].register_forward_hook(note(layer)) for layer in layer_ids]
    try:
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits_BTV, torch.cat([caught[layer] for layer in layer_ids], dim=-1)


def trunk_weights(model: Any) -> SharedWeights:
    """What a module borrows from a trunk in memory: without gradients, and in the same storage where it is the same."""
    norm = model.get_decoder().norm
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6))
    config = model.config.get_text_config()
    family, embedding = gemma_family(config.model_type), model.get_input_embeddings().weight.detach()
    return SharedWeights(
        embedding,
        model.get_output_embeddings().weight.detach(),
        norm.weight.detach() + 1 if family.norms_add_one else norm.weight.detach(),
        float(eps),
        embedding.shape[1] ** 0.5 if family.scales_embeddings else 1.0,
        getattr(config, "final_logit_softcapping", None),
    )
