"""`draftloop train`: rollout sets in, a drafter checkpoint with its provenance and training curve out, and a verdict.

Ray Train runs `training.Trainer` on one or more workers (`train_worker.py`). A worker that dies is replaced and goes on
from the last saved step; the same command after a killed driver goes on too. On CPUs the weights are those of an
undisturbed run. At the end the real engine decodes held-out prompts (`parity.py`).
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer

from drafters.target import Target, load_target, target_fingerprint
from pipelines.curve_point import CurvePoint
from pipelines.evaluate import versions
from pipelines.finished_drafter import DRAFTER, PARITY, REPORT
from pipelines.joint_setup import TRUNK, own_cases
from pipelines.mask_token import mask_token
from pipelines.online_setup import online_source, tapped_layers
from pipelines.parity import ParityCase, ParityResult, run_parity
from pipelines.progress_board import CurveBoard
from pipelines.ray_session import lacking_resource, start_ray
from pipelines.rollout_store import RolloutSet
from pipelines.run_plan import run_name, run_plan, take_up
from pipelines.train_config import TrainConfig, TrainError
from pipelines.train_storage import TrainStorage, train_storage
from pipelines.train_worker import SCORE, train_worker
from pipelines.training_data import check_sets, training_data
from pipelines.training_log import LiveLog
from pipelines.warm_start import as_started, check_start
from pipelines.worker_arguments import WorkerArguments

BOARD_DEADLINE_S = 60.0  # for an answer of the board
FETCH_EVERY_S = 0.5  # how often the driver looks for progress
READING_CPUS = 1.0  # that Ray Data needs beside its actors
LOOK_EVERY_S = 0.5  # how often Ray Train looks after its workers
MAX_FAILED_STARTS = 10  # times that the workers may fail to start, such as for a cluster that grows too slowly


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """What a finished run made."""

    output: str
    kind: str
    parameters: int
    training_sequences: int
    held_out_sequences: int
    response_tokens: int  # of the training sequences
    steps: int
    skipped_steps: int  # whose gradient was not finite
    skipped_sequences: int  # whose features were not finite, repeats counted
    seconds: float  # Ray's start included
    best_step: int  # at which expected tau was best: the drafter is of that step
    ntp_loss: float | None  # joint regime: of the trained trunk on the held-out sequences
    loss: float | None  # mean of the last steps; None: all were skipped
    accuracy_by_position: list[float]
    expected_tau: float | None  # on the held-out sequences
    acceptance_by_position: list[float]
    draft_vocab_size: int
    draft_vocab_coverage: float  # share of the held-out response tokens that can be drafted
    tau_by_category: dict[str, float]  # expected tau of the held-out sequences by category
    served_tau: float | None  # in the real engine, on the prompts of the parity gate
    parity_passed: bool | None  # whether that is the tau expected on these prompts; None: it could not be measured
    parity_verdict: str  # both figures in one line


OnProgress = Callable[[CurvePoint], None]


def train(config: TrainConfig, on_progress: OnProgress | None = None) -> TrainReport:
    """Train a drafter, save it and hold it against the engine. Raises TargetError, RolloutError or TrainError.

    One that fails the parity gate is kept; the report and its provenance say so.
    """
    started = time.monotonic()
    config = as_started(config)
    target = load_target(config.target)
    sets = check_sets(config.rollouts, target, tokens_only=config.tokens_only)
    layers = tapped_layers(config, target, sets[0])
    check_taps(config, target, layers)
    check_start(config, layers)
    arguments = _arguments(config, target, sets, layers)
    storage, plan = train_storage(config.output), run_plan(config, sets)
    storage.check()
    start_ray()
    check_resources(config)
    take_up(storage.state, plan)
    board = CurveBoard.remote()  # type: ignore[attr-defined]  # of ray.remote
    log = LiveLog(storage.live_log) if storage.live_log else None
    with _Relay(board, [on_progress, log.add if log else None]):
        checkpoint = _fit(config, replace(arguments, board=board), storage, run_name(plan))
    if log:
        log.close()
    if reason := _given_up(board):
        raise TrainError(f"training ended early: {reason}")
    if checkpoint is None:
        raise TrainError("training ended without a checkpoint; run the same command again")
    report, parity = _deliver(config, checkpoint, target, storage)
    storage.clear()  # not before: the same command goes on at the gate, if that was interrupted
    return TrainReport(
        **report,
        output=storage.uri,
        seconds=time.monotonic() - started,
        served_tau=parity.served,
        parity_passed=parity.passed,
        parity_verdict=parity.verdict(),
    )


def _arguments(
    config: TrainConfig, target: Target, sets: Sequence[RolloutSet], layers: tuple[int, ...]
) -> WorkerArguments:
    """What the workers are told, without the board. Raises RolloutError or TrainError."""
    data, uris = training_data(config, sets, target), [rollouts.uri for rollouts in sets]
    fresh_blocks = config.kind == "dflash" and config.init_from is None
    return WorkerArguments(
        config=config,
        target_path=str(target.path.absolute()),
        target_layer_ids=layers,
        target_fingerprint=target_fingerprint(target.path, layers),
        rollouts=uris,
        online=online_source(config, target, layers, uris, data),
        data=data,
        mask_token_id=mask_token(target, sets, config.dflash.mask_token_id) if fresh_blocks else None,
        versions=versions(),
    )


def _deliver(
    config: TrainConfig, checkpoint: Checkpoint, target: Target, storage: TrainStorage
) -> tuple[dict[str, Any], ParityResult]:
    """Hold the finished drafter against the engine and put it into its place; returns the worker's report too."""
    device = "cuda" if config.use_gpu and torch.cuda.is_available() else "cpu"
    staged = storage.staging_folder()
    try:
        drafter = staged / DRAFTER
        with checkpoint.as_directory() as folder:
            shutil.copytree(Path(folder) / DRAFTER, drafter)
            report = json.loads((Path(folder) / REPORT).read_text())
            cases = [ParityCase(**case) for case in json.loads((Path(folder) / PARITY).read_text())]
        served = target.path
        if config.joint is not None:
            served = drafter / TRUNK
            prompts = [case.prompt_ids for case in cases]
            cases = own_cases(served, drafter, prompts, config.drafts(), device)
        parity = run_parity(served, drafter, cases, config.drafts(), device)
        storage.install(drafter)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return report, parity


def _fit(config: TrainConfig, arguments: WorkerArguments, storage: TrainStorage, name: str) -> Checkpoint | None:
    """Run the workers, from where a run of this name has stopped; returns the last checkpoint. Raises TrainError."""
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(LOOK_EVERY_S))  # 2 s by itself: a run ends with it
    workers, least = config.num_workers, config.min_workers or config.num_workers
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"arguments": arguments},
        scaling_config=ScalingConfig(
            num_workers=workers if least == workers else (least, workers),  # type: ignore[arg-type]  # stub of older
            use_gpu=config.use_gpu,
            resources_per_worker={"CPU": config.cpus_per_worker}
            | ({"GPU": 1} if config.use_gpu else {})
            | dict(config.resources),
        ),
        run_config=RunConfig(
            name=name,
            **storage.run_options,
            failure_config=_failure_config(config.max_failures),
            checkpoint_config=CheckpointConfig(
                num_to_keep=config.keep_checkpoints, checkpoint_score_attribute=SCORE, checkpoint_score_order="max"
            ),
        ),
    )
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        raise TrainError(f"training failed ({_cause(error)}); mend that and run the same command again") from error
    return result.checkpoint


def check_taps(config: TrainConfig, target: Target, taps: tuple[int, ...]) -> None:
    """Raise TrainError if the loss needs the target's logits, which only its last layer's features give."""
    last = target.num_layers - 1
    if config.steps.loss.kind == "kl" and taps[-1] != last:
        raise TrainError(
            f"loss is kl, which needs the features of the target's last layer ({last}), and the rollouts tap "
            f"{', '.join(map(str, taps))}; generate them with that layer, or give the cross_entropy loss"
        )


def check_resources(config: TrainConfig) -> None:
    """Raise TrainError if the workers can never start."""
    name = "min_workers" if config.min_workers else "num_workers"
    workers = config.min_workers or config.num_workers
    need = Counter({"GPU": float(workers if config.use_gpu else 0), "CPU": workers * config.cpus_per_worker})
    need.update({name: workers * amount for name, amount in config.resources})
    if (online := config.online) is not None:
        actors = workers * online.num_actors[0]
        need.update({"GPU": actors * online.gpus_per_actor, "CPU": actors * online.cpus_per_actor + READING_CPUS})
        need.update({name: actors * amount for name, amount in online.resources})
        if lacking := lacking_resource(need):
            raise TrainError(
                f"{name} is {workers}, each with {online.num_actors[0]} target actors: {need[lacking[0]]:g} "
                f"{lacking[0]}s, Ray has {lacking[1]:g}; lower {name}, cpus_per_worker or the online cpus_per_actor"
            )
    if lacking := lacking_resource(need):
        resource, have = lacking
        option, way = {
            "GPU": ("use_gpu is on", "leave use_gpu off"),
            "CPU": (f"cpus_per_worker is {config.cpus_per_worker:g}", "cpus_per_worker"),
        }.get(resource, (f"each needs {dict(config.resources).get(resource, 0):g} of {resource}", "resource"))
        raise TrainError(
            f"{name} is {workers} and {option}: {need[resource]:g} {resource}s, Ray has {have:g}; lower {name} or {way}"
        )


def _failure_config(max_failures: int) -> FailureConfig:
    """How often what may fail; older versions of Ray know no limit for failed starts."""
    options: dict[str, Any] = {"max_failures": max_failures}
    if "controller_failure_limit" in inspect.signature(FailureConfig).parameters:
        options["controller_failure_limit"] = MAX_FAILED_STARTS
    return FailureConfig(**options)


def _cause(error: BaseException) -> str:
    """The innermost worker error, in one line: what stands first after the last frame of its traceback."""
    failures = getattr(error, "worker_failures", None)
    inner = next(iter(failures.values())) if failures else error.__cause__ or error
    lines = str(inner).splitlines()
    frames = [i for i, line in enumerate(lines) if line.lstrip().startswith('File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    message = next((line for line in after if line and not line[0].isspace()), "")
    kind = type(inner).__name__
    return message if frames or (message and isinstance(inner, ValueError)) else f"{kind}: {message}".removesuffix(": ")


def _given_up(board: Any) -> str | None:
    """Why the workers ended early. A lost board does not cost a finished run its drafter."""
    try:
        return ray.get(board.given_up.remote(), timeout=BOARD_DEADLINE_S)
    except ray.exceptions.RayError:
        return None


class _Relay:
    """Fetches points in a thread while the driver waits for the trainer."""

    def __init__(self, board: Any, listeners: list[OnProgress | None]):
        self._board, self._stop = board, threading.Event()
        self._listeners = [listener for listener in listeners if listener]
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._fetch()

    def _run(self) -> None:
        while not self._stop.wait(FETCH_EVERY_S):
            self._fetch()

    def _fetch(self) -> None:
        try:
            points = ray.get(self._board.take.remote(), timeout=5)
        except ray.exceptions.RayError:  # progress only: the trainer itself reports what goes wrong
            return
        for point in points:
            for tell in self._listeners:
                tell(point)
