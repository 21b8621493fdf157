"""Who is compared: addresses of drafters in; checkpoints with what they are, and those that cannot be loaded, out.

What a drafter shares with the target is asked of its module: each of the target's weights is made NaN in turn, and
those that its logits depend on are shared.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from drafters.checkpoint import CONFIG, WEIGHTS, CheckpointError, load_module, read_provenance
from drafters.drafter_module import DrafterModule
from drafters.remote_checkpoint import local_checkpoint
from drafters.target import SharedWeights, Target, TargetError, shared_weights
from drafters.training_batch import Document, pad_documents
from pipelines.compare_config import LOOKUP, CompareConfig, address_of, names_of
from pipelines.compare_figures import LeftOut

SHAREABLE = {"embedding_VD": "embedding", "lm_head_VD": "LM head", "final_norm_D": "final norm"}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One drafter that takes part."""

    name: str
    address: str | None  # None: prompt lookup
    path: Path | None
    sha256: str
    target_layer_ids: tuple[int, ...] = ()
    parameters: int = 0
    training_minutes: float | None = None
    shares: list[str] | None = None


def find_contenders(config: CompareConfig, target: Target) -> tuple[list[Contender], list[LeftOut]]:
    """Those that fit the target, in the order in which they were given, and the others."""
    found, left_out = [], []
    if config.prompt_lookup:
        found.append(Contender(name=LOOKUP, address=None, path=None, sha256="", shares=[]))
    for name, given in zip(names_of(config.drafters), config.drafters, strict=True):
        try:
            found.append(_contender(name, address_of(given), target))
        except (CheckpointError, TargetError, OSError) as error:
            left_out.append(LeftOut(name=name, reason=" ".join(str(error).split())))
    return found, left_out


def _contender(name: str, address: str, target: Target) -> Contender:
    path = local_checkpoint(address)
    module = load_module(path, target.path)
    return Contender(
        name=name,
        address=address,
        path=path,
        sha256=_digest(path),
        target_layer_ids=tuple(module.config.target_layer_ids),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        training_minutes=_training_minutes(path),
        shares=_shares(module, target.path),
    )


def _digest(path: Path) -> str:
    digest = hashlib.sha256((path / CONFIG).read_bytes())
    with (path / WEIGHTS).open("rb") as stream:
        while part := stream.read(1 << 24):
            digest.update(part)
    return digest.hexdigest()[:32]


def _training_minutes(path: Path) -> float | None:
    curve = read_provenance(path).get("training_curve") or [{}]
    seconds = curve[-1].get("seconds")
    return None if seconds is None else seconds / 60


def _shares(module: DrafterModule, target_path: Path) -> list[str] | None:
    """What it takes from the target: weights, and the hidden states of its layers. None if it does not say."""
    try:
        found = borrowed_weights(module, shared_weights(target_path, torch.float32))
    except Exception:  # a module that cannot be run on a batch of three tokens is compared all the same
        return None
    # of a kind that makes some layers' keys and values anew, with the target's weights
    remade = sorted({shared.layer for shared in getattr(module.config, "shared_layers", {}).values()})
    for what, layers in (("keys and values", remade), ("hidden states", module.config.target_layer_ids)):
        if layers:
            found.append(f"{what} of layers {', '.join(map(str, layers))}")
    return found


@torch.no_grad()
def borrowed_weights(module: DrafterModule, shared: SharedWeights) -> list[str]:
    """Which of the target's weights its logits depend on."""
    config = module.config
    features = torch.zeros(3, len(config.target_layer_ids) * config.hidden_size)
    features[:, ::2] = 1.0
    document = Document(
        ids_T=torch.zeros(4, dtype=torch.int64),
        features_TF=features,
        anchors_A=torch.tensor([1]),
        ends_A=torch.tensor([4]),
    )
    batch, found = pad_documents([document]), []
    for name, word in SHAREABLE.items():
        poison: Any = {name: torch.full_like(getattr(shared, name), float("nan"))}
        module.bind(replace(shared, **poison))
        if bool(module(batch).logits_BAKW.isnan().any()):
            found.append(word)
    module.bind(shared)
    return found
