"""A foreign checkpoint's folder: config.json and safetensors in, tensors by name out; and a layout's folder written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafters.checkpoint import CONFIG, PROVENANCE, WEIGHTS
from drafters.drafter_module import DrafterModule
from drafters.formats.foreign_config import FormatError
from drafters.target import SharedWeights
from drafters.target_source import TargetError, weight_files


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A drafter as another project lays it out."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target_layer_ids: tuple[int, ...]  # that it taps once it is read back
    draft_tokens: int  # per round, at most
    notes: tuple[str, ...] = ()  # what to know of servers that read it


@dataclass(frozen=True, kw_only=True)
class FileFact:
    """A file that was written or read."""

    name: str
    bytes: int
    sha256: str  # in hex


def read_config_file(source: Path) -> dict[str, Any]:
    """config.json of a folder. Raises FormatError."""
    try:
        value = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(f"{source} has no {CONFIG}; give the folder of a drafter") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{source}/{CONFIG} cannot be read ({error}); fetch the drafter again") from None
    if not isinstance(value, dict):
        raise FormatError(f"{source}/{CONFIG} is not a JSON object; fetch the drafter again")
    return value


def read_tensors(source: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, floats as float32. Raises FormatError."""
    try:
        tensors = {name: tensor for file in weight_files(source) for name, tensor in load_file(file).items()}
    except TargetError:
        raise FormatError(
            f"{source} lacks safetensors weights; fetch the drafter again, or save it as {WEIGHTS}"
        ) from None
    except (OSError, SafetensorError) as error:
        raise FormatError(f"weights of {source} cannot be read ({error}); fetch the drafter again") from None
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def is_borrowed(own: Tensor, borrowed: Tensor) -> bool:
    """Whether a tensor is the target's own, perhaps rounded to a shorter dtype when it was saved."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return own.shape == borrowed.shape and any(torch.equal(own, borrowed.to(dtype).float()) for dtype in dtypes)


def take_borrowed(source: Path, tensors: dict[str, Tensor], name: str, borrowed: Tensor, facts: dict[str, str]) -> None:
    """Drop a copy of what drafters borrow from the target. Raises FormatError if it is another tensor."""
    own = tensors.pop(name, None)
    if own is None:
        return
    if not is_borrowed(own, borrowed):
        raise FormatError(
            f"{source} has {name} of its own, not the target's; Draftloop's drafters borrow it: give the target that "
            "this drafter was made for"
        )
    facts[name] = "left out: it is the target's own"


def load_into(module: DrafterModule, tensors: Mapping[str, Tensor], shared: SharedWeights, source: Path) -> None:
    """Fill the module with tensors by its own names and bind it to its target. Raises FormatError, naming a tensor."""
    wanted = module.state_dict()
    for problem, names in (
        ("lacks tensor", set(wanted) - set(tensors)),
        ("has tensor", set(tensors) - set(wanted)),
    ):
        if names:
            what = "which its config does not speak of" if problem == "has tensor" else "which its config speaks of"
            raise FormatError(f"{source} {problem} {min(names)}, {what}; fetch the drafter again, or mend its config")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise FormatError(
                f"{source}: {name} is {tuple(tensor.shape)}, its config makes it {tuple(wanted[name].shape)}; "
                "fetch the drafter again, or mend its config"
            )
    module.load_state_dict(dict(tensors))
    module.bind(shared)
    module.eval().requires_grad_(False)


def check_draft_tokens(source: Path, ids_W: Tensor, vocab_size: int, named: str) -> None:
    """Refuse a draft vocabulary that does not ascend or leaves the target's."""
    if len(ids_W) == 0 or int(ids_W.min()) < 0 or int(ids_W.max()) >= vocab_size:
        raise FormatError(f"{source}: {named} names tokens outside the target's {vocab_size}; give its own target")
    if not bool((ids_W.diff() > 0).all()):
        raise FormatError(f"{source}: tokens of {named} do not ascend; sort them, and the LM head's rows with them")


def file_facts(folder: Path) -> list[FileFact]:
    """Name, size and digest of the files that make up a checkpoint."""
    names = sorted({CONFIG, PROVENANCE, *(file.name for file in folder.glob("*.safetensors*"))})
    return [_file_fact(folder / name) for name in names if (folder / name).is_file()]


def _file_fact(file: Path) -> FileFact:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileFact(name=file.name, bytes=file.stat().st_size, sha256=digest)
