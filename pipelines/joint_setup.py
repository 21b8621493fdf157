"""The joint regime around its trainer: a target's folder in, a trunk to train; a trained one out, as a folder again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from drafters.checkpoint import load_module
from drafters.drafter_module import DrafterModule
from drafters.target import load_model
from pipelines.joint_trainer import JointModule
from pipelines.parity import ParityCase, parity_cases
from pipelines.training_sequence import TrainingSequence

TRUNK = "trunk"  # folder beside the drafter's files
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf", "*.pt", "*.pth")
OWN_TOKENS = 128  # that the trunk writes to each prompt of the parity gate


def joint_module(module: DrafterModule, target_path: Path, device: torch.device) -> JointModule:
    """The target as a trunk with gradients, and its module."""
    trunk: Any = load_model(target_path, torch.float32, device)
    return JointModule(trunk.requires_grad_(True), module)


def save_trunk(trunk: Any, target_path: Path, folder: Path) -> None:
    """A Hugging Face folder: the trunk's weights, and everything else as the target has it."""
    shutil.copytree(target_path, folder, ignore=shutil.ignore_patterns(*WEIGHTS, ".*"))
    config = (folder / "config.json").read_bytes()
    trunk.save_pretrained(folder, safe_serialization=True)
    (folder / "config.json").write_bytes(config)  # the same model: nothing but its weights has changed


def own_cases(
    trunk_path: Path, drafter_path: Path, prompts: Sequence[Sequence[int]], num_draft_tokens: int, device: str = "cpu"
) -> list[ParityCase]:
    """Cases for the parity gate on what the trunk writes now: the rollouts are those of the target that it was."""
    from serving.engine.build import build_engine
    from serving.engine.sampling import Sampling

    module = load_module(drafter_path, trunk_path)
    layers = module.config.target_layer_ids
    longest = max(map(len, prompts), default=1) + OWN_TOKENS
    engine = build_engine(trunk_path, device=device, max_len=longest, target_layer_ids=layers)
    sequences = []
    for completion in engine.generate(prompts, Sampling(max_new_tokens=OWN_TOKENS), keep_features=True):
        ids = torch.tensor(completion.prompt_ids + completion.token_ids)
        assert completion.features_TF is not None
        sequences.append(TrainingSequence(ids, len(completion.prompt_ids), completion.features_TF))
    return parity_cases(module, sequences, num_draft_tokens, len(sequences))
