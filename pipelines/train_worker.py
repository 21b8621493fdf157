"""What runs on every Ray Train worker: rollouts in, saved states and at last the finished drafter out."""

from __future__ import annotations

import json
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
from pipelines.cores import usable_cores
from pipelines.draft_vocabulary import coverage_of
from pipelines.fresh_drafter import fresh_drafter
from pipelines.parity import parity_cases
from pipelines.rollout_store import RolloutSet
from pipelines.train_config import TrainConfig, TrainError
from pipelines.training import CurvePoint, Trainer
from pipelines.training_data import open_sets, read_sequences, split

STATE, DRAFTER, REPORT, PARITY = "trainer.pt", "drafter", "report.json", "parity.json"
SHOW_EVERY = 5  # steps between points sent to the driver


def train_worker(arguments: dict[str, Any]) -> None:
    """Train this worker's share of every step; rank 0 saves. It starts fast: it never loads transformers."""
    config: TrainConfig = arguments["config"]
    context = ray_train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(config.threads_per_worker or max(1, usable_cores() // world))
    sets = open_sets(arguments["rollouts"])  # absolute: a worker runs in a folder of its own
    training, held_out = split(read_sequences(sets), config.held_out)
    target_path, layers = Path(arguments["target_path"]), sets[0].metadata.target_layer_ids
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
                        _finish(Path(folder), trainer, sets, curve, arguments)
                    checkpoint = Checkpoint.from_directory(folder)
                ray_train.report({"step": point.step, "loss": point.loss}, checkpoint=checkpoint)


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
    folder: Path, trainer: Trainer, sets: list[RolloutSet], curve: list[CurvePoint], arguments: dict[str, Any]
) -> None:
    """Write the finished drafter and the run's report into the last checkpoint."""
    config: TrainConfig = arguments["config"]
    module, last, metadata = trainer.module, curve[-1], sets[0].metadata
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
        "target": metadata.target,
        "target_fingerprint": metadata.target_fingerprint,
        "chat_template_hash": metadata.chat_template_hash,
        "rollouts": [{"uri": rollouts.uri, "manifest_sha256": rollouts.manifest_sha256} for rollouts in sets],
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
