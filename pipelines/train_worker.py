"""What runs on every Ray Train worker: chunks of rollouts in, saved states and at last the finished drafter out."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ray import train as ray_train
from ray.train import Checkpoint
from ray.train.torch import get_device
from torch import Tensor

from drafters.checkpoint import save_checkpoint
from drafters.losses import FinalNorm
from drafters.target import shared_weights
from pipelines.cores import usable_cores
from pipelines.fresh_drafter import fresh_drafter, scale_taps
from pipelines.pack_source import Fetch, PackSource
from pipelines.parity import parity_cases
from pipelines.rollout_store import RolloutSet
from pipelines.step_order import StepOrder
from pipelines.train_config import TrainConfig, TrainError
from pipelines.training import CurvePoint, Team, Trainer
from pipelines.training_data import TrainingData, fetch_from, first_sequences, open_sets

if TYPE_CHECKING:
    from pipelines.online_features import OnlineSource

STATE, DRAFTER, REPORT, PARITY = "trainer.pt", "drafter", "report.json", "parity.json"
SHOW_EVERY = 5  # steps between points sent to the driver
TAP_SEQUENCES = 64  # training sequences that the scale of the taps is read off


@dataclass(frozen=True, kw_only=True)
class WorkerArguments:
    """What every worker is told. Paths are absolute: a worker runs in a folder of its own."""

    config: TrainConfig
    target_path: str
    target_layer_ids: tuple[int, ...]
    target_fingerprint: str  # with these layers
    rollouts: list[str]
    online: OnlineSource | None  # None: features are read from the rollouts
    data: TrainingData
    mask_token_id: int | None
    board: Any  # actor that shows progress
    versions: dict[str, str]


def train_worker(packed: dict[str, WorkerArguments]) -> None:
    """Train this worker's share of every step; rank 0 saves. It starts fast: it never loads transformers."""
    arguments = packed["arguments"]
    config = arguments.config
    context = ray_train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(config.threads_per_worker or max(1, usable_cores() // world))
    sets = open_sets(arguments.rollouts, online=arguments.online is not None)
    trainer = _trainer(arguments, sets, rank, world)
    curve = _restore(trainer)
    for point in trainer.run():
        last = point.step == point.total_steps
        if rank == 0 and (last or point.evaluated or point.step % SHOW_EVERY == 0):
            arguments.board.put.remote(point)
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


def _trainer(arguments: WorkerArguments, sets: list[RolloutSet], rank: int, world: int) -> Trainer:
    """A trainer with a fresh drafter, and its rows where they lie."""
    config, data = arguments.config, arguments.data
    target_path, layers = Path(arguments.target_path), arguments.target_layer_ids
    fetch = _fetch(arguments, sets)
    vocabulary = torch.tensor(data.draft_vocab_ids)
    module = fresh_drafter(config, target_path, layers, vocabulary, arguments.mask_token_id)
    scale_taps(module, first_sequences(fetch, data.training, TAP_SEQUENCES))
    module.to(get_device())
    forward: torch.nn.Module = module
    if world > 1:  # the borrowed weights are large and equal everywhere: never broadcast buffers
        forward = torch.nn.parallel.DistributedDataParallel(module, broadcast_buffers=False)
    last_chunks = range(len(data.training), len(data.training) + len(data.held_out))
    held_out = [sequence for _, rows in fetch(last_chunks) for sequence in rows]
    features = held_out[0].features
    source = PackSource(
        StepOrder(data.training, config.steps.order(config.num_workers)),
        fetch,
        keep_tokens=config.cache_bytes / max(1, features.element_size() * features.shape[1]),
    )
    norm = _final_norm(target_path) if config.steps.loss.kind == "kl" else None
    team = Team(rank, world, _sum_over_workers if world > 1 else lambda tensor: tensor)
    return Trainer(module, source, held_out, config.steps, team=team, forward=forward, final_norm=norm)


def _fetch(arguments: WorkerArguments, sets: list[RolloutSet]) -> Fetch:
    """Training chunks come first, held-out ones after them."""
    chunks = [*arguments.data.training, *arguments.data.held_out]
    if arguments.online is None:
        return fetch_from(sets, chunks)
    from pipelines.online_features import fetch_online

    return fetch_online(arguments.online, chunks)


def _sum_over_workers(tensor: Tensor) -> Tensor:
    summed = tensor.to(get_device(), copy=True)  # nccl knows GPUs only
    torch.distributed.all_reduce(summed)
    return summed.to(tensor.device)


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
    folder: Path, trainer: Trainer, sets: list[RolloutSet], curve: list[CurvePoint], arguments: WorkerArguments
) -> None:
    """Write the finished drafter and the run's report into the last checkpoint."""
    config, data = arguments.config, arguments.data
    module, last, metadata = trainer.module, curve[-1], sets[0].metadata
    vocabulary = {
        "draft_vocab_size": len(module.draft_vocab_ids),
        "draft_vocab_coverage": data.held_out_coverage or 0.0,
    }
    report = {
        "kind": config.kind,
        "parameters": sum(p.numel() for p in module.parameters()),
        "training_sequences": data.training_rows,
        "held_out_sequences": data.held_out_rows,
        "response_tokens": data.response_tokens,
        "steps": last.step,
        "skipped_steps": last.skipped_steps,
        "skipped_sequences": last.skipped_sequences,
        "loss": last.loss,
        "accuracy_by_position": last.accuracy_by_position,
        "expected_tau": last.expected_tau,
        "acceptance_by_position": last.acceptance_by_position,
        "tau_by_category": last.tau_by_category,
        **vocabulary,
    }
    provenance = {
        "target": metadata.target,
        "target_fingerprint": arguments.target_fingerprint,
        "chat_template_hash": metadata.chat_template_hash,
        "rollouts": [{"uri": rollouts.uri, "manifest_sha256": rollouts.manifest_sha256} for rollouts in sets],
        "command": "draftloop train",
        "config": asdict(config),
        "mask_token_id": arguments.mask_token_id,
        "seed": config.steps.seed,
        "precision": "bfloat16" if trainer.in_bfloat16 else "float32",
        **vocabulary,  # the coverage is that of the held-out responses
        "draft_vocab_training_coverage": data.training_coverage,
        "expected_tau": last.expected_tau,
        "expected_acceptance_by_position": last.acceptance_by_position,
        "training_curve": [asdict(point) for point in curve],
        "versions": arguments.versions,
    }
    save_checkpoint(folder / DRAFTER, module, provenance)
    (folder / REPORT).write_text(json.dumps(report))
    cases = parity_cases(module, trainer.held_out, trainer.num_draft_tokens, config.parity_prompts)
    (folder / PARITY).write_text(json.dumps([asdict(case) for case in cases]))
