"""Training that goes on from a drafter: its checkpoint in; the options, vocabulary and module of the run out."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drafters.checkpoint import WEIGHTS, AnyConfig, load_module, read_config
from drafters.dflash import DFlashConfig
from drafters.drafter_module import DrafterModule
from drafters.gemma_assistant import GemmaAssistantConfig
from drafters.mtp import MtpConfig
from drafters.own_mtp_module import OwnMtpConfig
from drafters.remote_checkpoint import local_checkpoint
from pipelines.train_config import DFlashOptions, IndependentOptions, OwnKind, TrainConfig, TrainError

SHAPE = ("kind", "num_draft_tokens", "draft_vocab_size", "draft_vocab_coverage", "dflash", "independent")
UNTOLD = TrainConfig(rollouts=("-",), output="-")  # what a shape is where nobody asked for one


def as_started(config: TrainConfig) -> TrainConfig:
    """The options with kind and shape of the drafter that the run goes on from.

    Raises CheckpointError, or TrainError if the options ask for another shape.
    """
    if config.init_from is None:
        return config
    path = local_checkpoint(config.init_from)
    made = read_config(path)
    started = _as_made(config, made, path)
    for name in SHAPE:
        value = getattr(config, name)
        if value not in (getattr(started, name), getattr(UNTOLD, name)):
            raise TrainError(
                f"{name} is {value}, but init_from {config.init_from} has {getattr(started, name)}; leave {name} out"
            )
    return started


def _as_made(config: TrainConfig, made: AnyConfig, path: Path) -> TrainConfig:
    assert config.init_from is not None
    config = replace(
        config,
        init_from=config.init_from if "://" in config.init_from else str(path),  # workers may run on other nodes
        draft_vocab_size=made.draft_vocab_size,
        draft_vocab_coverage=None,
        kind="recursive",
        num_draft_tokens=None,
        dflash=DFlashOptions(),
        independent=IndependentOptions(),
    )
    if isinstance(made, DFlashConfig):
        same = {f.name: getattr(made, f.name) for f in fields(DFlashOptions) if hasattr(made, f.name)}
        return replace(config, kind="dflash", dflash=DFlashOptions(**same))
    if isinstance(made, (OwnMtpConfig, GemmaAssistantConfig)):
        kind: OwnKind = "own-mtp" if isinstance(made, OwnMtpConfig) else "gemma-assistant"
        return replace(config, kind=kind, num_draft_tokens=made.num_draft_tokens)
    assert isinstance(made, MtpConfig)
    if made.kind == "recursive":
        return replace(config, num_draft_tokens=made.num_draft_tokens)
    same = {f.name: getattr(made, f.name) for f in fields(IndependentOptions)}
    return replace(
        config, kind="independent", num_draft_tokens=made.num_draft_tokens, independent=IndependentOptions(**same)
    )


def check_start(config: TrainConfig, target_layer_ids: tuple[int, ...]) -> None:
    """Raise TrainError if the drafter that the run goes on from reads other layers than the rollouts have."""
    if config.init_from is None:
        return
    taps = read_config(local_checkpoint(config.init_from)).target_layer_ids
    if taps != target_layer_ids:
        raise TrainError(
            f"init_from {config.init_from} reads the target's layers {', '.join(map(str, taps))}, the features are of "
            f"{', '.join(map(str, target_layer_ids))}; generate rollouts with --layers "
            f"{','.join(map(str, taps))}, or train a fresh drafter"
        )


def started_vocabulary(config: TrainConfig) -> Tensor | None:
    """The ascending token ids [W] that the drafter drafts which the run goes on from; None for a fresh one."""
    if config.init_from is None:
        return None
    with safe_open(local_checkpoint(config.init_from) / WEIGHTS, framework="pt") as weights:
        names = [name for name in weights.keys() if name.split(".")[-1] == "draft_vocab_ids"]  # noqa: SIM118 - not a mapping
        if names:
            return weights.get_tensor(names[0])
    return torch.arange(read_config(local_checkpoint(config.init_from)).vocab_size)


def started_module(init_from: str, target_path: Path) -> DrafterModule:
    """The drafter to go on from, with gradients. Raises CheckpointError."""
    return load_module(local_checkpoint(init_from), target_path, dtype=torch.float32).requires_grad_(True).train()
