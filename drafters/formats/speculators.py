"""DFlash and DFlash 2 as vllm-project/speculators saves them, which vLLM loads by the folder alone.

Layers count from the embeddings (0), so that `aux_hidden_state_layer_ids` are our ids + 1. A reduced draft vocabulary
is the LM head's rows, `t2d` [V] (whether a token can be drafted) and `d2t` [W] (token = index + d2t[index]).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters import config_keys as keys
from drafters import dflash_layout
from drafters.dflash import SLIDING
from drafters.drafter_module import DrafterModule
from drafters.formats.dflash_fields import (
    OF_TRANSFORMERS,
    PARTS,
    exportable,
    made_module,
    read_layers,
    refuse_scaled_embeddings,
    written_layers,
)
from drafters.formats.foreign_config import ForeignConfig, FormatError
from drafters.formats.foreign_folder import (
    Layout,
    check_draft_tokens,
    read_config_file,
    read_tensors,
    take_borrowed,
)
from drafters.target import SharedWeights, Target, shared_weights

NAME = "the speculators layout"
VERSION = "0.9.0"  # of the package whose layout this is
PLAIN, SECOND = "dflash", "dflash2"
_CLASSES = {PLAIN: "DFlashDraftModel", SECOND: "DFlash2DraftModel"}
_OF_TRAINING = (  # what its trainer keeps there, or what only a correction head of another drafter reads
    *("architectures", "auf", "emb_dim", "gru_hidden_dim", "lambda_base_decay_ratio", "lambda_base_start"),
    *("max_anchors", "model_type", "pure_draft_prefix_len", "speculators_version"),
)
_OTHER = "it makes another drafter of it, which Draftloop does not have"


def contents(module: DrafterModule, target: Target, target_name: str) -> Layout:
    """The folder's contents. Raises FormatError if the layout cannot say the drafter."""
    module = exportable(module, target, NAME, few_tokens=True)
    refuse_scaled_embeddings(shared_weights(target.path, torch.float32), target)
    config = module.config
    kind = SECOND if config.selector_top_k else PLAIN
    raw: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_draft_tokens}],
            "verifier": {"name_or_path": target_name, "architectures": list(target.config.architectures or [])},
        },
        "transformer_layer_config": written_layers(config, target),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        # vLLM makes all layers causal where this is false, full-attention ones too
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    tensors, notes = dflash_layout.saved_tensors(module), []
    ids_W = tensors.pop("draft_vocab_ids", None)
    if kind == SECOND:
        raw |= {name: getattr(config, name) for name in PARTS}
        notes.append("not every vLLM that reads dflash2 in z-lab's layout reads it in this one")
    if config.sliding_window:
        notes.append("speculators' own trainer counts a window from the anchor; vLLM, as we do, from every slot")
    if ids_W is not None:
        tensors |= {"lm_head.weight": module.lm_head_WD} | vocabulary_maps(ids_W, config.vocab_size)
    return Layout(
        config=raw,
        tensors=tensors,
        target_layer_ids=config.target_layer_ids,
        draft_tokens=config.num_draft_tokens,
        notes=tuple(notes),
    )


def vocabulary_maps(ids_W: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`t2d` and `d2t` of a draft vocabulary."""
    drafted_V = torch.zeros(vocab_size, dtype=torch.bool)
    drafted_V[ids_W] = True
    return {"t2d": drafted_V, "d2t": ids_W - torch.arange(len(ids_W))}


def read(source: Path, target: Target) -> tuple[DrafterModule, dict[str, str]]:
    """The module of a folder, and what was taken for keys that it lacks. Raises FormatError."""
    said = ForeignConfig(source, read_config_file(source))
    kind = said.need("speculators_model_type", lambda value: isinstance(value, str))
    if kind not in _CLASSES:
        raise said.wrong(f"has {kind!r} as 'speculators_model_type'", f"give a {PLAIN} or {SECOND}")
    layers = said.inner("transformer_layer_config")
    fields = read_layers(layers)
    layers.nothing_left()
    fields["block_size"] = said.need("block_size", keys.is_count)
    fields["mask_token_id"] = said.need("mask_token_id", keys.is_natural)
    fields["draft_vocab_size"] = said.need("draft_vocab_size", keys.is_count)
    fields["target_layer_ids"] = _taps(said)
    if kind == SECOND:
        fields |= {name: said.need(name, keys.is_count) for name in PARTS}
    _check_anchor(said, fields["block_size"])
    _check_causal(said, SLIDING in fields["layer_types"])
    if fields["sliding_window"]:
        said.facts["sliding_window"] = "counted from every slot, as vLLM does; speculators' trainer: from the anchor"
    said.only("projector_type", "dflash", mend=_OTHER)
    said.only("shift_label", False, mend=_OTHER)
    said.only("target_hidden_size", fields["hidden_size"], mend=_OTHER)
    said.ignore(*_OF_TRAINING, *OF_TRANSFORMERS)
    said.nothing_left()
    shared = shared_weights(target.path, torch.float32)
    tensors = _our_names(said, fields, shared)
    refuse_scaled_embeddings(shared, target)
    return made_module(said, fields, tensors, target, shared), said.facts


def _taps(said: ForeignConfig) -> tuple[int, ...]:
    ids = said.need("aux_hidden_state_layer_ids", keys.is_list_of(keys.is_natural))
    if 0 in ids:
        raise said.wrong(f"has {ids} as 'aux_hidden_state_layer_ids', 0 being the embeddings", "give another drafter")
    return tuple(layer - 1 for layer in ids)


def _check_anchor(said: ForeignConfig, block_size: int) -> None:
    """Slot 0 must be the anchor, which is given. Files from before the key say so by how much they propose."""
    from_anchor = said.given("sample_from_anchor", keys.is_flag)
    whole = said.given("speculators_config", keys.is_object)
    if whole is None:
        raise said.wrong("lacks key 'speculators_config'")
    methods = whole.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    proposed = first.get("speculative_tokens")
    if from_anchor is None and proposed not in (block_size - 1, block_size):
        raise said.wrong("lacks key 'sample_from_anchor'")
    if from_anchor is None:
        from_anchor = proposed == block_size
        said.facts["sample_from_anchor"] = f"{from_anchor}: {proposed} of a block's {block_size} slots are proposed"
    elif proposed is not None and proposed > block_size - (not from_anchor):
        raise said.wrong(
            f"contradicts itself: {proposed} speculative_tokens from blocks of {block_size}, "
            f"sample_from_anchor is {from_anchor}"
        )
    if from_anchor:
        raise said.wrong(
            "drafts in slot 0 of a block ('sample_from_anchor' is true)",
            "in Draftloop's blocks slot 0 is the anchor, which is given: give another drafter",
        )


def _check_causal(said: ForeignConfig, sliding: bool) -> None:
    """Blocks must attend both ways. The key is of sliding layers; full-attention ones always do."""
    both_ways = said.given("sliding_window_non_causal", keys.is_flag)
    if sliding and not both_ways:
        how = "lacks key" if both_ways is None else "has False as"
        raise said.wrong(
            f"{how} 'sliding_window_non_causal': its sliding layers are causal",
            "Draftloop's blocks attend both ways: give a drafter whose blocks do",
        )
    if not both_ways:
        said.facts["sliding_window_non_causal"] = "of no effect: there are no sliding layers"


def _our_names(said: ForeignConfig, fields: dict[str, Any], shared: SharedWeights) -> dict[str, Tensor]:
    """The source's tensors under our names; what is borrowed from the target is left out."""
    tensors, vocab_size = read_tensors(said.source), len(shared.embedding_VD)
    ids_W = _draft_vocabulary(said, fields, tensors)
    take_borrowed(said.source, tensors, "embed_tokens.weight", shared.embedding_VD, said.facts)
    take_borrowed(said.source, tensors, "verifier_norm.weight", shared.final_norm_D, said.facts)
    if ids_W is None:
        rows_WD = shared.lm_head_VD
    else:
        check_draft_tokens(said.source, ids_W, vocab_size, "d2t")
        rows_WD = shared.lm_head_VD[ids_W]
        tensors["draft_vocab_ids"] = ids_W
    for name in ("lm_head.weight", "verifier_lm_head.weight"):
        take_borrowed(said.source, tensors, name, rows_WD, said.facts)
    return tensors


def _draft_vocabulary(said: ForeignConfig, fields: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor | None:
    """Token ids [W] from `d2t`, which must agree with `t2d` and the config; None: all of them."""
    drafted_V, offsets_W = tensors.pop("t2d", None), tensors.pop("d2t", None)
    size = fields["draft_vocab_size"]
    if offsets_W is None and drafted_V is None and size == fields["vocab_size"]:
        return None
    if offsets_W is None or drafted_V is None:
        raise FormatError(
            f"{said.source} lacks tensor {'d2t' if offsets_W is None else 't2d'}, and drafts {size:,} of "
            f"{fields['vocab_size']:,} tokens; fetch the drafter again"
        )
    ids_W = offsets_W.long() + torch.arange(len(offsets_W))
    if len(ids_W) != size or not torch.equal(drafted_V.nonzero().flatten(), ids_W.sort().values):
        raise FormatError(
            f"{said.source}: d2t, t2d and draft_vocab_size {size:,} are of different vocabularies; "
            "fetch the drafter again"
        )
    return ids_W
