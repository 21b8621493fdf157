"""What the layouts of DFlash share: Qwen3's fields of its layers, taps, and what a layout cannot say.

In: a config of ours, or a foreign one. Out: the fields as both z-lab and speculators write them, or ours again.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from drafters import config_keys as keys
from drafters.dflash import FULL, SLIDING, DFlashConfig, DFlashModule
from drafters.drafter_module import DrafterModule
from drafters.formats.foreign_config import ForeignConfig, FormatError
from drafters.formats.foreign_folder import load_into
from drafters.target import SharedWeights, Target

PARTS = ("selector_top_k", "selector_rank", "conv_kernel_size", "conv_group_size")  # of DFlash 2
CODEBOOKS = ("predecessor_codebook", "successor_codebook")
_SIZES = (
    *("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size"),
)
OF_TRANSFORMERS = (  # what its configs hold beside it, and no layer of a drafter computes with
    *("attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id"),
    *("id2label", "initializer_range", "is_encoder_decoder", "label2id", "max_position_embeddings"),
    *("max_window_layers", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type"),
    *("return_dict", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache"),
)
PLAIN_ANGLES = "Draftloop's DFlash turns by plain rotary angles only: give another drafter"


def exportable(module: DrafterModule, target: Target, layout: str, *, few_tokens: bool) -> DFlashModule:
    """The module, if a layout can say it. `few_tokens`: it has reduced draft vocabularies. Raises FormatError."""
    if not isinstance(module, DFlashModule):
        raise FormatError(f"this is an MTP drafter, and {layout} is for DFlash; train one with --kind dflash")
    config = module.config
    has_selector, has_conv = config.selector_top_k > 0, config.conv_kernel_size > 0
    reduced = config.draft_vocab_size < config.vocab_size
    elsewhere = "" if few_tokens or has_selector else ", or export --format speculators"
    last = target.num_layers - 1
    for wrong, what, mend in (
        (config.slot_context, "slot_context", "train with --no-slot-context"),
        (config.confidence_head, "a confidence head", "train without --confidence-head"),
        (has_selector and not has_conv, "a selector without convolutions", "train with both, or --selector-top-k 0"),
        (has_conv and not has_selector, "convolutions without a selector", "train with both, or --conv-kernel-size 0"),
        (
            reduced and not (few_tokens and not has_selector),
            f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
            + (" beside a selector" if few_tokens else ""),
            f"train with --draft-vocab-size 0{elsewhere}",
        ),
        (
            last in config.target_layer_ids,
            f"the target's last layer, {last}, among its taps: z-lab's decoder reads that one behind the final norm, "
            "SGLang not at all",
            "generate rollouts with --layers that leave it out, and train on those",
        ),
    ):
        if wrong:
            raise FormatError(f"the drafter has {what}, which {layout} cannot say; {mend}")
    return module


def refuse_scaled_embeddings(shared: SharedWeights, target: Target) -> None:
    """For a layout without a key for the factor of the target's embeddings. Raises FormatError."""
    if shared.embedding_scale != 1:
        raise FormatError(
            f"target {target.path} scales its embeddings by {shared.embedding_scale:g}, which this layout cannot say; "
            "take --format z-lab"
        )


def written_layers(config: DFlashConfig, target: Target) -> dict[str, Any]:
    """The layers' fields, each of them said even where a reader would guess it right."""
    return {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **{key: getattr(config, key) for key in _SIZES},
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "is_neox_style": True,
        "max_position_embeddings": target.max_len,
        "layer_types": list(config.layer_types),
        "use_sliding_window": config.sliding_window > 0,
        "sliding_window": config.sliding_window or None,
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def read_layers(said: ForeignConfig) -> dict[str, Any]:
    """Fields of DFlashConfig from the layers' fields."""
    fields = {key: said.need(key, keys.is_count) for key in _SIZES}
    fields["rms_eps"] = said.need("rms_norm_eps", keys.is_number)
    fields["rope_theta"] = _rope_theta(said)
    mend = "Draftloop's DFlash has Qwen3's layers only: give another drafter"
    said.only("model_type", "qwen3", mend=mend)
    said.only("hidden_act", "silu", mend=mend)
    said.only("attention_bias", False, mend=mend)
    said.only("quantization_config", mend="give the drafter's unquantised weights")
    for key in ("is_neox_style", "rope_is_neox_style"):
        said.only(key, True, mend=PLAIN_ANGLES)
    said.only("partial_rotary_factor", 1.0, mend=PLAIN_ANGLES)
    said.ignore(*OF_TRANSFORMERS)
    return fields | _windows(said, fields["num_hidden_layers"])


def _rope_theta(said: ForeignConfig) -> float:
    """From `rope_theta`, `rope_parameters` or both; angles that are scaled are refused."""
    parameters = said.given("rope_parameters", keys.is_object) or {}
    for key, scaling in (
        ("rope_parameters", parameters),
        ("rope_scaling", said.given("rope_scaling", keys.is_object) or {}),
    ):
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default" or set(scaling) - {"rope_type", "type", "rope_theta"}:
            raise said.wrong(f"has {scaling!r} as {said.inside + key!r}", PLAIN_ANGLES)
    inner = ForeignConfig(said.source, parameters, f"{said.inside}rope_parameters.", said.facts)
    outer, nested = (place.given("rope_theta", keys.is_number) for place in (said, inner))
    if outer is None and nested is None:
        return float(said.need("rope_theta", keys.is_number))
    if None not in (outer, nested) and outer != nested:
        raise said.wrong(f"contradicts itself: rope_theta is {outer}, rope_parameters.rope_theta is {nested}")
    return float(nested if outer is None else outer)


def _windows(said: ForeignConfig, layers: int) -> dict[str, Any]:
    types = said.given("layer_types", keys.is_list_of(keys.is_one_of(FULL, SLIDING)))
    switched, window = said.given("use_sliding_window", keys.is_flag), said.given("sliding_window", keys.is_natural)
    if types is None:
        if switched:
            raise said.wrong(f"lacks key {said.inside + 'layer_types'!r} beside use_sliding_window")
        said.facts[f"{said.inside}layer_types"] = "all full_attention: no layer has a window where the key is not there"
        types = [FULL] * layers
    if SLIDING not in types:
        return {"layer_types": tuple(types), "sliding_window": 0}
    if not switched:  # Qwen3's config then drops the window, and says nothing
        raise said.wrong(f"has sliding layers, but {said.inside + 'use_sliding_window'!r} is {switched}")
    if not window:
        raise said.wrong(f"lacks key {said.inside + 'sliding_window'!r} beside sliding layers")
    return {"layer_types": tuple(types), "sliding_window": window}


def check_taps(said: ForeignConfig, taps: tuple[int, ...], target: Target) -> None:
    """Refuse layers that the target lacks, that do not ascend, or the last one, read in different ways."""
    if any(a >= b for a, b in pairwise(taps)):
        raise said.wrong(f"taps layers {list(taps)}, which do not ascend", "give a drafter whose taps ascend")
    if not taps or taps[-1] >= target.num_layers:
        raise said.wrong(
            f"taps layers {list(taps)}, the target has 0 to {target.num_layers - 1}", "give its own target"
        )
    if taps[-1] == target.num_layers - 1:
        raise said.wrong(
            f"taps the target's last layer, {taps[-1]}, which its reference reads behind the final norm and Draftloop "
            "before it",
            "give a drafter without that tap",
        )


def made_module(
    said: ForeignConfig, fields: dict[str, Any], tensors: dict[str, Tensor], target: Target, shared: SharedWeights
) -> DFlashModule:
    """The module of a source whose keys are all read. `tensors` has our names. Raises FormatError."""
    vocab_size = len(shared.embedding_VD)
    for key, own, theirs in (
        ("hidden_size", fields["hidden_size"], target.width),
        ("vocab_size", fields["vocab_size"], vocab_size),
    ):
        if own != theirs:
            raise said.wrong(f"has {own} as {key!r}, the target has {theirs}", "give the drafter's own target")
    check_taps(said, fields["target_layer_ids"], target)
    try:
        config = DFlashConfig(**(fields | {"num_target_layers": target.num_layers}))
    except ValueError as error:
        raise said.wrong(str(error)) from None
    module = DFlashModule(config)
    added = {"tap_scale": module.tap_scale, "draft_vocab_ids": module.draft_vocab_ids}
    load_into(module, added | tensors, shared, said.source)
    return module
