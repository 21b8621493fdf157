"""Independent heads as vLLM's `medusa` loads them: h + SiLU(Linear(h)), then an LM head, shared or one for each.

h is the target's last hidden state behind its final norm, at the position whose own LM head gave the anchor: there
vLLM's head 0 drafts the token behind the anchor, as our step 1 does at pair p (the token at p + 2). The LM head is in
the file. `token_map` [W] has the tokens of a reduced draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafters import config_keys as keys
from drafters.drafter_module import DrafterModule
from drafters.formats.dflash_fields import OF_TRANSFORMERS
from drafters.formats.foreign_config import ForeignConfig, FormatError
from drafters.formats.foreign_folder import (
    Layout,
    check_draft_tokens,
    is_borrowed,
    load_into,
    read_config_file,
    read_tensors,
)
from drafters.mtp import IndependentHeads, MtpConfig
from drafters.target import Target, shared_weights

NAME = "vLLM's medusa layout"
ARCHITECTURE = "MedusaModel"
_OTHER = "Draftloop has no such heads: give another drafter"


def contents(module: DrafterModule, target: Target, target_name: str) -> Layout:
    """The folder's contents. Raises FormatError if the layout cannot say the heads."""
    module = _exportable(module, target)
    config = module.config
    own, reduced = module.lm_heads is not None, config.draft_vocab_size < config.vocab_size
    raw = {  # vLLM takes any key with "num" and "heads" or "layers" in it for one of these two: no other may have them
        "architectures": [ARCHITECTURE],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_draft_tokens,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": not own,
        "logit_scale": 1.0,
        "dtype": "float32",
    }
    tensors: dict[str, Tensor] = {}
    for k, head in enumerate(module.heads):
        for name, tensor in head.state_dict().items():
            tensors[name.replace("linear.", f"blocks.{k}.layers.0.")] = tensor
    if module.lm_heads is None:
        tensors["lm_head.weight"] = module.lm_head_WD
    else:
        tensors |= {f"lm_heads.{k}.weight": head_WD.clone() for k, head_WD in enumerate(module.lm_heads)}
    if reduced:
        tensors["token_map"] = module.draft_vocab_ids
    return Layout(
        config=raw,
        tensors=tensors,
        target_layer_ids=config.target_layer_ids[-1:],
        draft_tokens=config.num_draft_tokens,
    )


def _exportable(module: DrafterModule, target: Target) -> IndependentHeads:
    if not isinstance(module, IndependentHeads):
        raise FormatError(
            f"{NAME} is for independent heads; train some with --kind independent --medusa-heads, "
            "or export a DFlash drafter --format z-lab"
        )
    config, last = module.config, target.num_layers - 1
    eps = shared_weights(target.path, torch.float32).rms_eps
    for wrong, what, mend in (
        (not config.medusa_heads, "residual MLPs for heads", "train with --medusa-heads"),
        (config.shared_trunk, "a shared trunk", "train without --shared-trunk"),
        (config.anchor_embedding, "heads that read the anchor's embedding", "train without --anchor-embedding"),
        (
            config.target_layer_ids[-1] != last,
            f"heads on layer {config.target_layer_ids[-1]}, not on the last, {last}",
            "generate rollouts without --layers, and train on those",
        ),
        (config.rms_eps != eps, f"an rms_eps of {config.rms_eps}, the target's norm {eps}", "train it anew"),
    ):
        if wrong:
            raise FormatError(f"the drafter has {what}, which {NAME} cannot say; {mend}")
    return module


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What the config says."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    drafted: int  # tokens that can be drafted
    biased: bool
    shared_head: bool  # one LM head for all


def read(source: Path, target: Target) -> tuple[DrafterModule, dict[str, str]]:
    """The module of a folder, and what was taken for keys that it lacks. Raises FormatError."""
    said = ForeignConfig(source, read_config_file(source))
    shape = _shape(said)
    shared = shared_weights(target.path, torch.float32)
    for key, own, theirs in (
        ("hidden_size", shape.hidden_size, target.width),
        ("vocab_size", shape.vocab_size, len(shared.embedding_VD)),
    ):
        if own != theirs:
            raise said.wrong(f"has {own} as {key!r}, the target has {theirs}", "give the drafter's own target")
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in read_tensors(source).items()}
    ids_W = _draft_vocabulary(said, tensors, shape)
    lm_heads = _lm_heads(said, tensors, 0 if shape.shared_head else shape.num_heads, ids_W)
    tied = shape.shared_head and is_borrowed(lm_heads[0], shared.lm_head_VD[ids_W])
    ours = _our_names(said, tensors, shape) | {"draft_vocab_ids": ids_W}
    if not tied:
        ours["lm_heads"] = torch.stack(lm_heads * shape.num_heads if shape.shared_head else lm_heads)
    said.facts["LM head"] = "the target's own" if tied else "of the heads' own"
    module = IndependentHeads(
        MtpConfig(
            kind="independent", medusa_heads=True, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size,
            target_layer_ids=(target.num_layers - 1,), num_draft_tokens=shape.num_heads,
            draft_vocab_size=shape.drafted, own_lm_head=not tied, rms_eps=shared.rms_eps,
        )
    )  # fmt: skip
    load_into(module, ours, shared, source)
    return module, said.facts


def _shape(said: ForeignConfig) -> _Shape:
    said.only("architectures", [ARCHITECTURE], mend=_OTHER)
    said.only("model_type", "medusa", mend=_OTHER)
    hidden_size, vocab_size = (said.need(key, keys.is_count) for key in ("hidden_size", "vocab_size"))
    num_heads = _either(said, "num_heads", "medusa_num_heads")
    if (layers := _either(said, "num_hidden_layers", "medusa_num_layers")) != 1:
        raise said.wrong(f"has {layers} as 'num_hidden_layers'", _OTHER)
    drafted = said.given("truncated_vocab_size", keys.is_count)
    if drafted is None:
        drafted = vocab_size
        said.facts["truncated_vocab_size"] = f"{drafted:,}: all tokens, where the key is not there"
    shape = _Shape(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=num_heads,
        drafted=drafted,
        biased=_flag(said, "medusa_fc_bias"),
        shared_head=_flag(said, "original_lm_head"),
    )
    said.only("logit_scale", 1.0, mend=_OTHER)
    said.ignore("max_paths", "topk", "max_seq_len", "num_lookahead_tokens", *OF_TRANSFORMERS)
    said.nothing_left()
    said.facts["indexing"] = "head 1 drafts the token at t + 2 from the normed state at t, as vLLM runs it"
    return shape


def _either(said: ForeignConfig, key: str, older: str) -> int:
    """A count under vLLM's name for it, or under the one that vLLM renames."""
    found: int | None = said.given(older, keys.is_count)
    if found is None:
        return int(said.need(key, keys.is_count))
    if (value := said.given(key, keys.is_count)) not in (None, found):
        raise said.wrong(f"contradicts itself: {key!r} is {value}, {older!r} is {found}", "keep the right one")
    return found


def _flag(said: ForeignConfig, key: str) -> bool:
    value = said.given(key, keys.is_flag)
    if value is None:
        said.facts[key] = "False: vLLM's own default where the key is not there"
    return bool(value)


def _draft_vocabulary(said: ForeignConfig, tensors: dict[str, Tensor], shape: _Shape) -> Tensor:
    """Token ids [W]."""
    ids_W = tensors.pop("token_map", None)
    if shape.drafted == shape.vocab_size:
        return torch.arange(shape.vocab_size)  # vLLM reads no map then
    if ids_W is None or len(ids_W) != shape.drafted:
        found = "no token_map" if ids_W is None else f"a token_map of {len(ids_W):,}"
        raise FormatError(f"{said.source} drafts {shape.drafted:,} tokens and has {found}; fetch the drafter again")
    check_draft_tokens(said.source, ids_W, shape.vocab_size, "token_map")
    return ids_W.long()


def _lm_heads(said: ForeignConfig, tensors: dict[str, Tensor], own: int, ids_W: Tensor) -> list[Tensor]:
    """LM heads [W, D] over the draft vocabulary: `own` of them, or (0) the one that all heads share."""
    names = [f"lm_heads.{k}.weight" for k in range(own)]
    if not own:
        names = [next((name for name in ("lm_head.weight", "lm_heads.0.weight") if name in tensors), "lm_head.weight")]
    if missing := [name for name in names if name not in tensors]:
        raise FormatError(f"{said.source} lacks tensor {missing[0]}, which its config speaks of; fetch it again")
    found = [tensors.pop(name) for name in names]
    return [head if len(head) == len(ids_W) else head[ids_W] for head in found]


def _our_names(said: ForeignConfig, tensors: dict[str, Tensor], shape: _Shape) -> dict[str, Tensor]:
    """The heads' tensors under our names; those without a bias get one of zeros."""
    ours: dict[str, Tensor] = {}
    for k in range(shape.num_heads):
        for part in ("weight", "bias") if shape.biased else ("weight",):
            name = f"blocks.{k}.layers.0.{part}"
            if name not in tensors:
                raise FormatError(f"{said.source} lacks tensor {name}, which its config speaks of; fetch it again")
            ours[f"heads.{k}.linear.{part}"] = tensors.pop(name)
        if not shape.biased:
            ours[f"heads.{k}.linear.bias"] = torch.zeros(len(ours[f"heads.{k}.linear.weight"]))
    if tensors:
        raise FormatError(
            f"{said.source} has tensor {min(tensors)}, which its config does not speak of; mend its config"
        )
    return ours
