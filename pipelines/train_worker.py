"""What runs on every Ray Train worker: rollouts in, saved states and at last the finished drafter out."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from ray import train as ray_train
from ray.train import Checkpoint
from ray.train.torch import get_device

from drafters.checkpoint import save_checkpoint
from drafters.losses import FinalNorm
from drafters.target import shared_weights
from pipelines.draft_vocabulary import coverage_of
from pipelines.fresh_drafter import fresh_drafter
from pipelines.parity import parity_cases
from pipelines.rollout_schema import Rollout
from pipelines.rollout_store import RolloutSet, open_rollouts
from pipelines.train_config import TrainConfig, TrainError
from pipelines.training import CurvePoint, Trainer, TrainingSequence

STATE, DRAFTER, REPORT, PARITY = "trainer.pt", "drafter", "report.json", "parity.json"
SHOW_EVERY = 5  # steps between points sent to the driver


def train_worker(arguments: dict[str, Any]) -> None:
    """Train this worker's share of every step; rank 0 saves. It starts fast: it never loads transformers."""
    config: TrainConfig = arguments["config"]
    context = ray_train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(config.threads_per_worker or max(1, (os.cpu_count() or 1) // world))
    rollouts = open_rollouts(arguments["rollouts"])  # absolute: a worker runs in a folder of its own
    training, held_out = split(read_sequences(rollouts), config.held_out)
    target_path, layers = Path(arguments["target_path"]), rollouts.metadata.target_layer_ids
    module = fresh_drafter(config, target_path, layers, training, arguments["mask_token_id"]).to(get_device())
    forward: torch.nn.Module = module
    if world > 1:  # the borrowed weights are large and equal everywhere: never broadcast buffers
        forward = torch.nn.parallel.DistributedDataParallel(module, broadcast_buffers=False)
    norm = _final_norm(target_path) if config.steps.loss.kind == "kl" else None
    trainer = Trainer(
        module, training, held_out, config.steps, rank=rank, world=world, forward=forward, final_norm=norm
    )
    curve = _restore(trainer)
    for point in trainer.run():
        last = point.step == point.total_steps
        if rank == 0 and (last or point.evaluated or point.step % SHOW_EVERY == 0):
            arguments["board"].put.remote(point)
        if point.evaluated:
            curve.append(point)
        if last or point.step % config.save_every_steps == 0:  # reporting is a barrier: all workers, same step
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if rank == 0:
                    state = trainer.state_dict() | {"curve": [asdict(point) for point in curve]}
                    torch.save(state, Path(folder) / STATE)
                    if last:
                        _finish(Path(folder), trainer, rollouts, curve, arguments)
                    checkpoint = Checkpoint.from_directory(folder)
                ray_train.report({"step": point.step, "loss": point.loss}, checkpoint=checkpoint)


def read_sequences(rollouts: RolloutSet) -> list[TrainingSequence]:
    """All rollouts with a response long enough to draft in."""
    sequences = []
    for rollout in rollouts.rollouts():
        if rollout.features_TF is not None and is_usable(rollout):
            ids = torch.tensor(rollout.prompt_ids + rollout.response_ids)
            greedy = rollout.temperature == 0
            prompt_len, features = len(rollout.prompt_ids), rollout.features_TF
            sequences.append(TrainingSequence(ids, prompt_len, features, rollout.category, greedy))
    return sequences


def is_usable(rollout: Rollout) -> bool:
    """Whether the response is long enough to draft in: the first token is the anchor's, and two must follow it."""
    return len(rollout.response_ids) >= 3


def split(sequences: list[TrainingSequence], held_out: float) -> tuple[list[TrainingSequence], list[TrainingSequence]]:
    """(training, held out): every n-th sequence is held out, so that both see all parts of the set."""
    if not 0 < held_out < 1:
        raise TrainError(f"held_out must be between 0 and 1, got {held_out}")
    if len(sequences) < 2:
        raise TrainError(f"{len(sequences)} usable rollouts are too few to train on; generate more")
    every = max(2, min(round(1 / held_out), len(sequences)))
    chosen = [s for i, s in enumerate(sequences) if i % every == every - 1]
    return [s for i, s in enumerate(sequences) if i % every != every - 1], chosen


def _final_norm(target_path: Path) -> FinalNorm:
    shared = shared_weights(target_path, torch.float32)
    return FinalNorm(shared.final_norm_D, shared.rms_eps)


def _restore(trainer: Trainer) -> list[CurvePoint]:
    """Go on from the last saved state, if this run has one; returns the curve so far."""
    checkpoint = ray_train.get_checkpoint()
    if checkpoint is None:
        return []
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / STATE, weights_only=True, map_location="cpu")
    if not torch.equal(state["module"]["draft_vocab_ids"], trainer.module.draft_vocab_ids.cpu()):
        raise TrainError("the interrupted run drafted other tokens than this version would; give another --output")
    trainer.load_state_dict(state)
    return [CurvePoint(**point) for point in state["curve"]]


def _finish(
    folder: Path, trainer: Trainer, rollouts: RolloutSet, curve: list[CurvePoint], arguments: dict[str, Any]
) -> None:
    """Write the finished drafter and the run's report into the last checkpoint."""
    config: TrainConfig = arguments["config"]
    module, last = trainer.module, curve[-1]
    vocabulary = {
        "draft_vocab_size": len(module.draft_vocab_ids),
        "draft_vocab_coverage": coverage_of(module.draft_vocab_ids, trainer.held_out) or 0.0,
    }
    report = {
        "kind": config.kind,
        "parameters": sum(p.numel() for p in module.parameters()),
        "training_sequences": len(trainer.sequences),
        "held_out_sequences": len(trainer.held_out),
        "response_tokens": sum(len(s.ids) - s.prompt_len for s in trainer.sequences),
        "steps": last.step,
        "loss": last.loss,
        "accuracy_by_position": last.accuracy_by_position,
        "expected_tau": last.expected_tau,
        "acceptance_by_position": last.acceptance_by_position,
        "tau_by_category": last.tau_by_category,
        **vocabulary,
    }
    provenance = {
        "target": rollouts.metadata.target,
        "target_fingerprint": rollouts.metadata.target_fingerprint,
        "chat_template_hash": rollouts.metadata.chat_template_hash,
        "rollouts": [{"uri": rollouts.uri, "manifest_sha256": rollouts.manifest_sha256}],
        "command": "draftloop train",
        "config": asdict(config),
        "mask_token_id": arguments["mask_token_id"],
        "seed": config.steps.seed,
        "precision": "bfloat16" if trainer.in_bfloat16 else "float32",
        **vocabulary,  # the coverage is that of the held-out responses
        "draft_vocab_training_coverage": coverage_of(module.draft_vocab_ids, trainer.sequences),
        "expected_tau": last.expected_tau,
        "expected_acceptance_by_position": last.acceptance_by_position,
        "training_curve": [asdict(point) for point in curve],
        "versions": arguments["versions"],
    }
    save_checkpoint(folder / DRAFTER, module, provenance)
    (folder / REPORT).write_text(json.dumps(report))
    cases = parity_cases(module, trainer.held_out, trainer.num_draft_tokens, config.parity_prompts)
    (folder / PARITY).write_text(json.dumps([asdict(case) for case in cases]))
