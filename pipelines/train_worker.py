"""What runs on every Ray Train worker: chunks of rollouts in, saved states and at last the finished drafter out."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ray import train as ray_train
from ray.train import Checkpoint
from ray.train.torch import get_device
from torch import Tensor

from drafters.checkpoint import save_checkpoint
from drafters.drafter_module import DrafterModule
from drafters.losses import FinalNorm
from drafters.target import shared_weights, target_fingerprint
from pipelines.cores import usable_cores
from pipelines.fresh_drafter import fresh_drafter, scale_taps
from pipelines.joint_setup import TRUNK, joint_module, save_trunk
from pipelines.joint_trainer import JointTrainer
from pipelines.pack_source import Fetch, PackSource
from pipelines.parity import parity_cases
from pipelines.rollout_store import RolloutSet
from pipelines.step_order import StepOrder
from pipelines.train_config import TrainConfig, TrainError
from pipelines.training import CurvePoint, Team, Trainer
from pipelines.training_data import TrainingData, fetch_from, first_sequences, open_sets
from pipelines.training_log import write_log
from pipelines.warm_start import started_module

if TYPE_CHECKING:
    from pipelines.online_features import OnlineSource

STATE, COMPLETE = "trainer.pt", "complete.json"  # of a saved state; the latter comes last and holds a checksum
DRAFTER, REPORT, PARITY = "drafter", "report.json", "parity.json"  # what the last one also has
SCORE = "expected_tau"  # of saved states
UNKNOWN_SCORE = 0.0  # where it was not measured; any tau is at least 1
FIRST_SHOWN = 50  # steps that are all shown: a drafter learns fastest there
SHOW_EVERY = 5  # steps between points after that
LOSS_POINTS = 10  # the report's loss is the mean over the last ones
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
    sets = open_sets(arguments.rollouts, tokens_only=config.tokens_only)
    trainer = _trainer(arguments, sets, rank, world)
    story = _restore(trainer)
    for point in trainer.run():
        last = point.step == point.total_steps
        if last or point.evaluated or point.step <= FIRST_SHOWN or point.step % SHOW_EVERY == 0:
            story.add(point, trainer.module)
            if rank == 0:
                arguments.board.put.remote(point)
        if last or point.evaluated or point.step % config.save_every_steps == 0:
            _save(trainer, story, arguments, sets, point)


def _save(
    trainer: Trainer, story: Story, arguments: WorkerArguments, sets: list[RolloutSet], point: CurvePoint
) -> None:
    """Hand the state over to Ray; with the last step, the finished drafter too. A barrier: all workers, same step."""
    with tempfile.TemporaryDirectory() as name:
        checkpoint, folder = None, Path(name)
        last = point.step == point.total_steps
        ntp_loss = trainer.held_out_loss() if last and isinstance(trainer, JointTrainer) else None
        if trainer.team.rank == 0:
            torch.save(trainer.state_dict() | story.state_dict(), folder / STATE)
            if last:
                _finish(folder, trainer, sets, story, arguments, ntp_loss)
            digest = hashlib.sha256((folder / STATE).read_bytes()).hexdigest()
            (folder / COMPLETE).write_text(json.dumps({"step": point.step, "sha256": digest}))
            checkpoint = Checkpoint.from_directory(name)
        score = point.expected_tau if point.expected_tau is not None else UNKNOWN_SCORE
        ray_train.report({"step": point.step, "loss": point.loss, SCORE: score}, checkpoint=checkpoint)


@dataclass
class Story:
    """What a run remembers beside the trainer's own state: the points that were shown, and its best drafter."""

    points: list[CurvePoint] = field(default_factory=list)
    best: CurvePoint | None = None  # of highest expected tau, the latest of equal ones; where none is known, the last
    best_weights: dict[str, Tensor] = field(default_factory=dict)  # of the module at that point

    def add(self, point: CurvePoint, module: DrafterModule) -> None:
        self.points.append(point)
        if not point.evaluated:
            return
        if self.best is None or (point.expected_tau or 0.0) >= (self.best.expected_tau or 0.0):
            self.best = point
            self.best_weights = {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}

    @property
    def curve(self) -> list[CurvePoint]:
        """The points at which expected tau was measured."""
        return [point for point in self.points if point.evaluated]

    @property
    def late_loss(self) -> float | None:
        """Mean over the last points; None if every step was skipped."""
        losses = [point.loss for point in self.points if point.loss is not None][-LOSS_POINTS:]
        return statistics.mean(losses) if losses else None

    def state_dict(self) -> dict[str, Any]:
        best = self.best and asdict(self.best)
        return {"points": [asdict(point) for point in self.points], "best": best, "best_weights": self.best_weights}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Story:
        best = state["best"] and CurvePoint(**state["best"])
        return cls([CurvePoint(**point) for point in state["points"]], best, state["best_weights"])


def _trainer(arguments: WorkerArguments, sets: list[RolloutSet], rank: int, world: int) -> Trainer:
    """A trainer with a fresh drafter, and its rows where they lie."""
    config, data = arguments.config, arguments.data
    target_path, layers = Path(arguments.target_path), arguments.target_layer_ids
    fetch = _fetch(arguments, sets)
    if config.init_from:
        module = started_module(config.init_from, target_path)
    else:
        vocabulary = torch.tensor(data.draft_vocab_ids)
        module = fresh_drafter(config, target_path, layers, vocabulary, arguments.mask_token_id)
        if not config.joint:
            scale_taps(module, first_sequences(fetch, data.training, TAP_SEQUENCES))
    module.to(get_device())
    joint = joint_module(module, target_path, get_device()) if config.joint else None
    forward: torch.nn.Module = joint or module
    if world > 1:  # the borrowed weights are large and equal everywhere: never broadcast buffers
        forward = torch.nn.parallel.DistributedDataParallel(forward, broadcast_buffers=False)
    last_chunks = range(len(data.training), len(data.training) + len(data.held_out))
    held_out = [sequence for _, rows in fetch(last_chunks) for sequence in rows]
    features = held_out[0].features
    source = PackSource(
        StepOrder(data.training, config.steps.order(config.num_workers)),
        fetch,
        keep_tokens=config.cache_bytes / max(1, features.element_size() * features.shape[1]),
    )
    team = Team(rank, world, _sum_over_workers if world > 1 else lambda tensor: tensor)
    if joint is not None and config.joint is not None:
        options = {"beta": config.joint.beta, "trunk_learning_rate": config.joint.trunk_learning_rate}
        return JointTrainer(joint, source, held_out, config.steps, team=team, forward=forward, **options)
    norm = _final_norm(target_path) if config.steps.loss.kind == "kl" else None
    return Trainer(module, source, held_out, config.steps, team=team, forward=forward, final_norm=norm)


def _fetch(arguments: WorkerArguments, sets: list[RolloutSet]) -> Fetch:
    """Training chunks come first, held-out ones after them."""
    chunks = [*arguments.data.training, *arguments.data.held_out]
    if arguments.online is None:
        return fetch_from(sets, chunks, with_features=not arguments.config.tokens_only)
    from pipelines.online_features import fetch_online

    return fetch_online(arguments.online, chunks)


def _sum_over_workers(tensor: Tensor) -> Tensor:
    summed = tensor.to(get_device(), copy=True)  # nccl knows GPUs only
    torch.distributed.all_reduce(summed)
    return summed.to(tensor.device)


def _final_norm(target_path: Path) -> FinalNorm:
    shared = shared_weights(target_path, torch.float32)
    return FinalNorm(shared.final_norm_D, shared.rms_eps)


def _restore(trainer: Trainer) -> Story:
    """Go on from the last saved state, if this run has one; returns what it remembers."""
    checkpoint = ray_train.get_checkpoint()
    if checkpoint is None:
        return Story()
    with checkpoint.as_directory() as folder:
        state = _read_state(Path(folder))
    if not torch.equal(state["module"]["draft_vocab_ids"], trainer.module.draft_vocab_ids.cpu()):
        raise TrainError("the interrupted run drafted other tokens than this version would; give another --output")
    trainer.load_state_dict(state)
    return Story.from_state(state)


def _read_state(folder: Path) -> dict[str, Any]:
    """Raises TrainError if the files are not those that were saved."""
    try:
        digest = json.loads((folder / COMPLETE).read_text())["sha256"]
        whole = hashlib.sha256((folder / STATE).read_bytes()).hexdigest() == digest
    except (OSError, ValueError, KeyError):
        whole = False
    if not whole:
        raise TrainError(f"the saved state of the interrupted run is damaged ({folder}); give another --output")
    return torch.load(folder / STATE, weights_only=True, map_location="cpu")


def _finish(
    folder: Path,
    trainer: Trainer,
    sets: list[RolloutSet],
    story: Story,
    arguments: WorkerArguments,
    ntp_loss: float | None,
) -> None:
    """Write the best drafter of the run and its report into the last checkpoint."""
    config, data = arguments.config, arguments.data
    module, best, metadata = trainer.module, story.best, sets[0].metadata
    assert best is not None, "the last step is evaluated"
    steps, fingerprint = story.points[-1], arguments.target_fingerprint
    if isinstance(trainer, JointTrainer):  # the trunk is that of the last step, and so is its module
        best = steps
        save_trunk(trainer.joint.trunk, Path(arguments.target_path), folder / TRUNK)
        fingerprint = target_fingerprint(folder / TRUNK, arguments.target_layer_ids)
    else:
        module.load_state_dict(story.best_weights)
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
        "steps": steps.step,
        "best_step": best.step,
        "skipped_steps": steps.skipped_steps,
        "skipped_sequences": steps.skipped_sequences,
        "ntp_loss": ntp_loss,
        "loss": story.late_loss,
        "accuracy_by_position": best.accuracy_by_position,
        "expected_tau": best.expected_tau,
        "acceptance_by_position": best.acceptance_by_position,
        "tau_by_category": best.tau_by_category,
        **vocabulary,
    }
    provenance = {
        "target": metadata.target,
        "target_fingerprint": fingerprint,
        "chat_template_hash": metadata.chat_template_hash,
        "chat_options": metadata.chat_options.as_json(),
        "rollouts": [{"uri": rollouts.uri, "manifest_sha256": rollouts.manifest_sha256} for rollouts in sets],
        "command": "draftloop train",
        "config": asdict(config),
        "mask_token_id": arguments.mask_token_id,
        "seed": config.steps.seed,
        "precision": "bfloat16" if trainer.in_bfloat16 else "float32",
        **vocabulary,  # the coverage is that of the held-out responses
        "draft_vocab_training_coverage": data.training_coverage,
        "expected_tau": best.expected_tau,
        "expected_acceptance_by_position": best.acceptance_by_position,
        "training_curve": [asdict(point) for point in story.curve],
        "versions": arguments.versions,
    }
    save_checkpoint(folder / DRAFTER, module, provenance)
    (folder / REPORT).write_text(json.dumps(report))
    cases = parity_cases(module, trainer.held_out, trainer.num_draft_tokens, config.parity_prompts)
    (folder / PARITY).write_text(json.dumps([asdict(case) for case in cases]))
    write_log(folder / DRAFTER, story.points)
    if isinstance(trainer, JointTrainer):
        os.replace(folder / TRUNK, folder / DRAFTER / TRUNK)
