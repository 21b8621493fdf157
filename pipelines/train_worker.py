"""What runs on every Ray Train worker: chunks of rollouts in, saved states and at last the finished drafter out."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train as ray_train
from ray.train import Checkpoint
from ray.train.torch import get_device
from torch import Tensor

from drafters.dflash import DFlashModule
from drafters.drafter_module import DrafterModule
from drafters.losses import FinalNorm
from drafters.target import shared_weights, target_on_this_node
from pipelines.cores import usable_cores
from pipelines.curve_point import CurvePoint
from pipelines.finished_drafter import write_finished
from pipelines.fresh_drafter import fresh_drafter, scale_taps
from pipelines.joint_setup import joint_module
from pipelines.joint_trainer import JointTrainer
from pipelines.pack_source import Fetch, PackSource
from pipelines.rollout_store import RolloutSet
from pipelines.step_order import Chunk, StepOrder, every_nth_row
from pipelines.train_config import TrainError
from pipelines.training import Team, Trainer, TrainingFailedError
from pipelines.training_data import fetch_from, first_sequences, open_sets
from pipelines.training_sequence import TrainingSequence
from pipelines.training_story import TrainingStory
from pipelines.warm_start import started_module
from pipelines.worker_arguments import WorkerArguments

STATE, COMPLETE = "trainer.pt", "complete.json"  # of a saved state; the latter comes last and holds a checksum
SCORE = "expected_tau"  # of saved states
UNKNOWN_SCORE = 0.0  # where it was not measured; any tau is at least 1
FIRST_SHOWN = 50  # steps that are all shown: a drafter learns fastest there
SHOW_EVERY = 5  # steps between points after that
BOARD_DEADLINE_S = 60.0  # for an answer of the board
TAP_SEQUENCES = 64  # training sequences that the scale of the taps is read off


def train_worker(packed: dict[str, WorkerArguments]) -> None:
    """Train this worker's share of every step; rank 0 saves. It starts fast: it never loads transformers."""
    told = packed["arguments"]
    config = told.config
    target = target_on_this_node(config.target, told.target_path, told.target_layer_ids, told.target_fingerprint)
    arguments = replace(told, target_path=str(target))
    context = ray_train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(config.threads_per_worker or max(1, usable_cores() // context.get_local_world_size()))
    sets = open_sets(arguments.rollouts, tokens_only=config.tokens_only)
    trainer = _trainer(arguments, sets, rank, world)
    story = _restore(trainer)
    try:
        _train(trainer, story, arguments, sets)
    except TrainingFailedError as error:  # on all workers alike; the run would fail there again
        if rank == 0:
            ray.get(arguments.board.give_up.remote(str(error)), timeout=BOARD_DEADLINE_S)


def _train(trainer: Trainer, story: TrainingStory, arguments: WorkerArguments, sets: list[RolloutSet]) -> None:
    config = arguments.config
    for point in trainer.run():
        last = point.step == point.total_steps
        if last or point.evaluated or point.step <= FIRST_SHOWN or point.step % SHOW_EVERY == 0:
            story.add(point, trainer.module)
            if trainer.team.rank == 0:
                arguments.board.put.remote(point)
        if last or point.evaluated or point.step % config.save_every_steps == 0:
            _save(trainer, story, arguments, sets, point)


def _save(
    trainer: Trainer, story: TrainingStory, arguments: WorkerArguments, sets: list[RolloutSet], point: CurvePoint
) -> None:
    """Hand the state over to Ray; with the last step, the finished drafter too. A barrier: all workers, same step."""
    with tempfile.TemporaryDirectory() as name:
        checkpoint, folder = None, Path(name)
        last = point.step == point.total_steps
        if last and isinstance(trainer, JointTrainer):
            story.held_out_ntp_loss = trainer.held_out_loss()
        if trainer.team.rank == 0:
            torch.save(trainer.state_dict() | story.state_dict(), folder / STATE)
            if last:
                write_finished(folder, trainer, story, arguments, sets)
            digest = hashlib.sha256((folder / STATE).read_bytes()).hexdigest()
            (folder / COMPLETE).write_text(json.dumps({"step": point.step, "sha256": digest}))
            checkpoint = Checkpoint.from_directory(name)
        score = point.expected_tau if point.expected_tau is not None else UNKNOWN_SCORE
        ray_train.report({"step": point.step, "loss": point.loss, SCORE: score}, checkpoint=checkpoint)


def _trainer(arguments: WorkerArguments, sets: list[RolloutSet], rank: int, world: int) -> Trainer:
    """A trainer with a fresh drafter, and its rows where they lie."""
    config, data = arguments.config, arguments.data
    target_path, layers = Path(arguments.target_path), arguments.target_layer_ids
    held_out_share = every_nth_row(data.held_out, world, rank)
    fetch = _fetch(arguments, sets, [*data.training, *held_out_share])
    if config.init_from:
        module = started_module(config.init_from, target_path)
    else:
        vocabulary = torch.tensor(data.draft_vocab_ids)
        module = fresh_drafter(config, target_path, layers, vocabulary, arguments.mask_token_id)
        if isinstance(module, DFlashModule):
            scale_taps(module, first_sequences(fetch, data.training, TAP_SEQUENCES))
    module.to(get_device())
    joint = joint_module(module, target_path, get_device()) if config.joint else None
    forward: torch.nn.Module = joint or module
    if world > 1:  # the borrowed weights are large and equal everywhere: never broadcast buffers
        forward = torch.nn.parallel.DistributedDataParallel(forward, broadcast_buffers=False)
    last_chunks = range(len(data.training), len(data.training) + len(held_out_share))
    held_out = [sequence for _, rows in fetch(last_chunks) for sequence in rows]
    source = PackSource(
        StepOrder(data.training, config.steps.order(config.num_workers)),
        fetch,
        keep_tokens=config.cache_bytes / max(1, _bytes_per_token(held_out, module)),
    )
    team = Team(rank, world, _sum_over_workers, _union_over_workers) if world > 1 else Team()
    if joint is not None and config.joint is not None:
        options = {"beta": config.joint.beta, "trunk_learning_rate": config.joint.trunk_learning_rate}
        return JointTrainer(joint, source, held_out, config.steps, team=team, forward=forward, **options)
    norm = _final_norm(target_path) if config.steps.loss.kind == "kl" else None
    return Trainer(module, source, held_out, config.steps, team=team, forward=forward, final_norm=norm)


def _bytes_per_token(held_out: Sequence[TrainingSequence], module: DrafterModule) -> int:
    """Of features as they are read."""
    if held_out:
        features = held_out[0].features
        return features.element_size() * features.shape[1]
    return torch.bfloat16.itemsize * len(module.config.target_layer_ids) * module.lm_head_WD.shape[1]


def _fetch(arguments: WorkerArguments, sets: list[RolloutSet], chunks: Sequence[Chunk]) -> Fetch:
    if arguments.online is None:
        return fetch_from(sets, chunks, with_features=not arguments.config.tokens_only)
    from pipelines.online_features import fetch_online

    return fetch_online(arguments.online, chunks)


def _sum_over_workers(tensor: Tensor) -> Tensor:
    summed = tensor.to(get_device(), copy=True)  # nccl knows GPUs only
    torch.distributed.all_reduce(summed)
    return summed.to(tensor.device)


def _union_over_workers(values: set[str]) -> set[str]:
    gathered: list[set[str]] = [set() for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, values)
    return set().union(*gathered)


def _final_norm(target_path: Path) -> FinalNorm:
    shared = shared_weights(target_path, torch.float32)
    return FinalNorm(shared.final_norm_D, shared.rms_eps, shared.logit_softcap)


def _restore(trainer: Trainer) -> TrainingStory:
    """Go on from the last saved state, if this run has one; returns what it remembers."""
    checkpoint = ray_train.get_checkpoint()
    if checkpoint is None:
        return TrainingStory()
    with checkpoint.as_directory() as folder:
        state = _read_state(Path(folder))
    if not torch.equal(state["module"]["draft_vocab_ids"], trainer.module.draft_vocab_ids.cpu()):
        raise TrainError("the interrupted run drafted other tokens than this version would; give another --output")
    trainer.load_state_dict(state)
    return TrainingStory.from_state(state)


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
