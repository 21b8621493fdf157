"""A target's own MTP layers in transformers' classes: built from its config without weights, or read out of its files.

Nothing of the main model is loaded: it stands on the meta device, where transformers learns the layers' classes from.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from drafters.remote import first_line
from drafters.target import is_mtp_tensor
from drafters.target_source import TargetError, quiet_transformers, safetensors_header, weight_files

ATTENTION = {"full_attention", "sliding_attention"}  # what a slot's keys and values are enough for

# By layer: heads and width of the keys that are kept for a token, then those of the values.
CacheWidths = tuple[tuple[int, int, int, int], ...]


def check_own_mtp(path: Path, config: Any) -> None:
    """Raise TargetError unless this target's files hold MTP layers that Draftloop can draft with."""
    text = config.get_text_config()
    count = getattr(text, "num_mtp_layers", None)
    names = [name for file in weight_files(path) for name in safetensors_header(file)[0]]
    has_tensors = any(is_mtp_tensor(name, text.num_hidden_layers) for name in names)
    if not count and has_tensors:
        raise TargetError(
            f"target {path} has MTP layers that this transformers knows nothing of (its config has no num_mtp_layers); "
            "train a drafter for it with `draftloop train`"
        )
    if not count:
        raise TargetError(
            f"target {path} has no MTP layers (num_mtp_layers is {count} in its config); "
            "train a drafter for it with `draftloop train`"
        )
    if getattr(config, "quantization_config", None):
        raise TargetError(f"target {path} is quantised, MTP layers included; give a folder with plain weights")
    types = set(getattr(text, "mtp_layer_types", None) or ()) - ATTENTION
    if types:
        raise TargetError(
            f"target {path} has MTP layers of type {', '.join(sorted(types))}, which slots cannot roll back"
        )
    for key in ("logits_mup_width_multiplier", "unpadded_vocab_size"):
        if getattr(text, key, None) is not None:
            raise TargetError(f"target {path} has {key} in its config, which drafters' logits do not know")
    if not has_tensors:
        raise TargetError(
            f"target {path} says num_mtp_layers {count} and holds no tensor of them; fetch the whole model again"
        )


def empty_layers(config: Any) -> tuple[Any, nn.Module | None]:
    """(transformers' MtpModel with all its weights on the meta device, the rotary embedding as it is used)."""
    count = getattr(config.get_text_config(), "num_mtp_layers", None)
    if not count:
        raise TargetError("the target has no MTP layers; give the drafter's own target")
    main = _main_model(config)
    with torch.device("meta"), quiet_transformers():
        model = _mtp_model()(main, count)
    rotary = model.rotary_emb
    return model, None if rotary is None else type(rotary)(main.get_decoder().config)


def read_layers(path: Path, config: Any) -> Any:
    """transformers' MtpModel with the weights of its layers, in the dtype that the target's config names.

    Raises TargetError for files that lack some of them.
    """
    main, text = _main_model(config), config.get_text_config()
    main.config.name_or_path = str(path)
    main.config.dtype = main.config.dtype or torch.float32
    first, count = text.num_hidden_layers, text.num_mtp_layers
    known = main._keys_to_ignore_on_load_unexpected or []  # a family's list names the layers of its published sizes
    main._keys_to_ignore_on_load_unexpected = [
        *known,
        *(rf"(^|\.)layers\.{n}\." for n in range(first, first + count)),
        r"(^|\.)mtp\.",
    ]
    try:
        with quiet_transformers():
            return _mtp_model().from_pretrained(main)
    except (RuntimeError, ValueError, KeyError, OSError, SafetensorError) as error:
        raise TargetError(
            f"the MTP layers of target {path} cannot be read ({first_line(error)[:300]}); fetch the whole model again"
        ) from error


def _mtp_model() -> Any:
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise TargetError("this version of transformers knows no MTP layers; install 5.24 or a newer one") from None
    return MtpModel


def _main_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), quiet_transformers():
        return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def windows(config: Any, count: int) -> tuple[int | None, ...]:
    """The sliding window of each layer of an MTP config, None where it sees everything."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * count
    found = []
    for i, kind in enumerate(types[:count]):
        own = config.per_layer_config[i] if getattr(config, "is_heterogeneous", False) else config
        found.append(own.sliding_window if kind == "sliding_attention" else None)
    return tuple(found)


def cache_argument() -> str:
    """What a decoder layer calls the object that takes its keys and values; transformers has renamed it."""
    from transformers.modeling_layers import MtpLayer

    return "cache" if "cache" in inspect.signature(MtpLayer.forward).parameters else "past_key_values"


class _EntrySeen(Exception):  # noqa: N818 - no error: it ends a layer's pass where nothing further is wanted
    def __init__(self, widths: tuple[int, int, int, int]):
        super().__init__(widths)
        self.widths = widths


class _Probe:
    """In place of a cache: what a layer wants to keep of one token."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        raise _EntrySeen((key.shape[1], key.shape[3], value.shape[1], value.shape[3]))


def cache_widths(config: Any) -> CacheWidths:
    """What the layers of a target with this config keep. Raises TargetError if that is more than keys and values."""
    model, rotary = empty_layers(config)
    x = torch.empty((1, 1, model.config.hidden_size), device="meta")
    position = torch.zeros((1, 1), dtype=torch.int64)
    found = []
    for i, layer in enumerate(model.layers):
        try:
            angles = None
            if rotary is not None:
                cos, sin = rotary(x.new_empty(x.shape, device="cpu"), position_ids=position, **rope_options(model, i))
                angles = cos.to("meta"), sin.to("meta")
            layer(
                x, x, position_embeddings=angles, attention_mask=None, position_ids=position.to("meta"),
                **{cache_argument(): _Probe()},
            )  # fmt: skip
        except _EntrySeen as seen:
            found.append(seen.widths)
        except (AttributeError, TypeError, KeyError) as error:
            raise TargetError(
                f"the MTP layers of {model.config.model_type} keep other state than keys and values "
                f"({first_line(error)}); train a drafter for this target with `draftloop train`"
            ) from error
    return tuple(found)


def rope_options(model: Any, index: int) -> dict[str, Any]:
    """What the rotary embedding must be told for a layer of an MtpModel."""
    return {"layer_type": model.config.layer_types[index]} if getattr(model, "has_per_layer_rope", False) else {}
