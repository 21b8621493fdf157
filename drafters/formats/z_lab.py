"""DFlash and DFlash 2 as z-lab publishes them: read by the PyPI package `dflash`, SGLang, vLLM and transformers.

Slot 0 of a block is the anchor, the taps count from 0 at the first layer's output, embedding and LM head are the
target's. Where the four readers look for a key in different places, it is written in all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafters import config_keys as keys
from drafters import dflash_layout
from drafters.dflash import SLIDING
from drafters.dflash_layout import PLAIN, SECOND
from drafters.drafter_module import DrafterModule
from drafters.formats.dflash_fields import (
    CODEBOOKS,
    PARTS,
    exportable,
    made_module,
    read_layers,
    written_layers,
)
from drafters.formats.foreign_config import ForeignConfig, FormatError, agreed
from drafters.formats.foreign_folder import Layout, read_config_file, read_tensors, take_borrowed
from drafters.target import SharedWeights, Target, shared_weights

NAME = "z-lab's layout"
# Factors that the readers know; ours are all 1, but for that of the target's embeddings.
_FACTORS: dict[str, float | None] = {
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
_OTHER = "it makes another drafter of it, which Draftloop does not have"
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # values with which a key of others' variants changes nothing
    "attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,),
    "output_multiplier": (1.0,),
    "projector_type": ("dflash",),
    "sample_from_anchor": (False,),
    "shift_label": (False,),
    "use_aux_hidden_state": (True,),
    "use_swa": (False,),
}


def contents(module: DrafterModule, target: Target, target_name: str) -> Layout:
    """The folder's contents. Raises FormatError if the layout cannot say the drafter."""
    module = exportable(module, target, NAME, few_tokens=False)
    config = module.config
    kind = dflash_layout.architecture(config)
    taps = list(config.target_layer_ids)
    shared = {  # dflash and SGLang look into dflash_config first, transformers and older files have them outside
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": taps,
    }
    block = shared | {"causal": False, "sample_from_anchor": False} | _FACTORS
    block["input_embedding_scale"] = shared_weights(target.path, torch.float32).embedding_scale
    if kind == SECOND:
        block |= {name: getattr(config, name) for name in PARTS}
    raw = {"architectures": [kind]} | written_layers(config, target) | shared
    raw |= {"is_causal": False, "draft_vocab_size": config.vocab_size, "dflash_config": block}
    notes = ("SGLang heeds is_causal from August 2026 on: before, its sliding layers were causal",)
    return Layout(
        config=raw,
        tensors=dflash_layout.saved_tensors(module),
        target_layer_ids=config.target_layer_ids,
        draft_tokens=config.num_draft_tokens,
        notes=notes if config.sliding_window else (),
    )


def read(source: Path, target: Target) -> tuple[DrafterModule, dict[str, str]]:
    """The module of a folder, and what was taken for keys that it lacks. Raises FormatError."""
    said = ForeignConfig(source, read_config_file(source))
    named = said.need("architectures", lambda value: isinstance(value, list))
    if named not in ([PLAIN], [SECOND]):
        raise said.wrong(f"names architecture {named}", f"give a {PLAIN} or {SECOND}")
    block = said.inner("dflash_config")
    fields = read_layers(said)
    fields["block_size"] = agreed("block_size", keys.is_count, block, said)
    fields["mask_token_id"] = agreed("mask_token_id", keys.is_natural, block, said)
    taps = agreed("target_layer_ids", keys.is_list_of(keys.is_natural), block, said)
    fields["target_layer_ids"] = tuple(taps)
    if named == [SECOND]:
        fields |= {name: block.need(name, keys.is_count) for name in PARTS}
    _check_layers(said, block, target)
    borrowed = shared_weights(target.path, torch.float32)
    _check_embedding_scale(said, block, borrowed.embedding_scale)
    _check_causal(said, block, SLIDING in fields["layer_types"])
    fields["draft_vocab_size"] = fields["vocab_size"]
    said.only("draft_vocab_size", fields["vocab_size"], mend=f"{NAME} has no reduced draft vocabulary: give another")
    said.only("target_hidden_size", fields["hidden_size"], mend=_OTHER)
    for place in (said, block):
        for key, values in _NEUTRAL.items():
            place.only(key, *values, mend=_OTHER)
        place.nothing_left()
    said.facts["anchor"] = f"slot 0 of a block: {named[0]} is run so by its reference"
    if (source / "mask_embedding.pt").exists():
        raise FormatError(f"{source} has a mask_embedding.pt; {_OTHER}")
    return made_module(said, fields, _our_names(said, borrowed), target, borrowed), said.facts


def _check_layers(said: ForeignConfig, block: ForeignConfig, target: Target) -> None:
    for place in (said, block):
        layers = place.given("num_target_layers", keys.is_count)
        if layers is not None and layers != target.num_layers:
            raise said.wrong(
                f"has {layers} as {place.inside + 'num_target_layers'!r}, the target has {target.num_layers} layers",
                "give the drafter's own target",
            )


def _check_causal(said: ForeignConfig, block: ForeignConfig, sliding: bool) -> None:
    """Blocks must attend both ways; without a key, the readers decide by the kind of a layer."""
    told = {
        "is_causal": said.given("is_causal", keys.is_flag),
        "dflash_config.causal": block.given("causal", keys.is_flag),
    }
    values = {key: value for key, value in told.items() if value is not None}
    if len(set(values.values())) > 1:
        raise said.wrong(f"contradicts itself: {values}", "keep the one that the drafter was trained with")
    both_ways = "Draftloop's blocks attend both ways: give a drafter whose blocks do"
    for key, value in values.items():
        if value:
            raise said.wrong(f"has True as {key!r}", both_ways)
    if values:
        return
    if sliding:
        raise said.wrong("lacks key 'is_causal', and sliding layers are causal without it", both_ways)
    said.facts["is_causal"] = "False: full-attention layers attend both ways where the key is not there"


def _check_embedding_scale(said: ForeignConfig, block: ForeignConfig, scale: float) -> None:
    """Blocks begin with the target's embeddings as its own layers get them; without a key the readers scale by 1."""
    key, mend = "input_embedding_scale", f"the target scales its embeddings by {scale:g}: give a drafter trained so"
    found = [place.given(key, keys.is_number) for place in (block, said)]
    told = next((value for value in found if value is not None), 1.0)
    if abs(told - scale) > 1e-3 * scale:
        raise said.wrong(f"has {told:g} as {block.inside + key!r}", mend)
    said.only(key, told, mend=mend)


def _our_names(said: ForeignConfig, shared: SharedWeights) -> dict[str, Any]:
    """The source's tensors under our names; copies of what is borrowed are left out."""
    tensors = read_tensors(said.source)
    for name in CODEBOOKS:  # some are saved from an nn.Embedding
        if (weight := tensors.pop(f"candidate_selector.{name}.weight", None)) is not None:
            tensors[f"candidate_selector.{name}"] = weight
    if {"embed_tokens.weight", "lm_head.weight"} & set(tensors):
        take_borrowed(said.source, tensors, "embed_tokens.weight", shared.embedding_VD, said.facts)
        take_borrowed(said.source, tensors, "lm_head.weight", shared.lm_head_VD, said.facts)
    return tensors
