"""The end of a training run: the best drafter, what is known of it, and the cases of the parity gate, as files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafters.checkpoint import save_checkpoint
from drafters.target import part_digests, target_fingerprint
from pipelines.curve_point import CurvePoint
from pipelines.joint_setup import TRUNK, save_trunk
from pipelines.joint_trainer import JointTrainer
from pipelines.parity import parity_cases, prompt_cases
from pipelines.rollout_store import RolloutSet
from pipelines.training import Trainer
from pipelines.training_log import write_log
from pipelines.training_story import TrainingStory
from pipelines.worker_arguments import WorkerArguments

DRAFTER, REPORT, PARITY = "drafter", "report.json", "parity.json"  # beside the last saved state


def write_finished(
    folder: Path, trainer: Trainer, story: TrainingStory, arguments: WorkerArguments, sets: Sequence[RolloutSet]
) -> None:
    """Write the run's drafter into the folder, its report and the cases of the parity gate."""
    module, best, fingerprint = trainer.module, story.best, arguments.target_fingerprint
    assert best is not None, "the last step is evaluated"
    joint, made_for = isinstance(trainer, JointTrainer), Path(arguments.target_path)
    if isinstance(trainer, JointTrainer):  # the trunk is that of the last step, and so is its module
        best = story.points[-1]
        save_trunk(trainer.joint.trunk, Path(arguments.target_path), folder / TRUNK)
        made_for = folder / TRUNK
        fingerprint = target_fingerprint(made_for, arguments.target_layer_ids)
    else:
        module.load_state_dict(story.best_weights)
    provenance = _provenance(trainer, story, best, arguments, sets)
    provenance |= {"target_fingerprint": fingerprint, "target_parts": part_digests(made_for)}
    save_checkpoint(folder / DRAFTER, module, provenance)
    write_log(folder / DRAFTER, story.points)
    (folder / REPORT).write_text(json.dumps(_report(trainer, story, best, arguments)))
    limit = arguments.config.parity_prompts
    cases = (
        prompt_cases(trainer.held_out, limit)
        if joint
        else parity_cases(module, trainer.held_out, trainer.num_draft_tokens, limit)
    )
    (folder / PARITY).write_text(json.dumps([asdict(case) for case in cases]))
    if joint:
        os.replace(folder / TRUNK, folder / DRAFTER / TRUNK)


def _vocabulary(trainer: Trainer, arguments: WorkerArguments) -> dict[str, Any]:
    coverage = arguments.data.held_out_coverage or 0.0  # of the held-out responses
    return {"draft_vocab_size": len(trainer.module.draft_vocab_ids), "draft_vocab_coverage": coverage}


def _report(trainer: Trainer, story: TrainingStory, best: CurvePoint, arguments: WorkerArguments) -> dict[str, Any]:
    """The worker's part of a `TrainReport`."""
    last, data = story.points[-1], arguments.data
    return {
        "kind": arguments.config.kind,
        "parameters": sum(p.numel() for p in trainer.module.parameters()),
        "training_sequences": data.training_rows,
        "held_out_sequences": data.held_out_rows,
        "response_tokens": data.response_tokens,
        "steps": last.step,
        "best_step": best.step,
        "skipped_steps": last.skipped_steps,
        "skipped_sequences": last.skipped_sequences,
        "ntp_loss": story.held_out_ntp_loss,
        "loss": story.late_loss,
        "accuracy_by_position": best.accuracy_by_position,
        "expected_tau": best.expected_tau,
        "acceptance_by_position": best.acceptance_by_position,
        "tau_by_category": best.tau_by_category,
    } | _vocabulary(trainer, arguments)


def _provenance(
    trainer: Trainer,
    story: TrainingStory,
    best: CurvePoint,
    arguments: WorkerArguments,
    sets: Sequence[RolloutSet],
) -> dict[str, Any]:
    """Where the drafter comes from."""
    config, metadata = arguments.config, sets[0].metadata
    return {
        "target": metadata.target,
        "chat_template_hash": metadata.chat_template_hash,
        "chat_options": metadata.chat_options.as_json(),
        "rollouts": [{"uri": rollouts.uri, "manifest_sha256": rollouts.manifest_sha256} for rollouts in sets],
        "command": "draftloop train",
        "config": asdict(config),
        "mask_token_id": arguments.mask_token_id,
        "seed": config.steps.seed,
        "precision": "bfloat16" if trainer.in_bfloat16 else "float32",
        **_vocabulary(trainer, arguments),
        "draft_vocab_training_coverage": arguments.data.training_coverage,
        "expected_tau": best.expected_tau,
        "expected_acceptance_by_position": best.acceptance_by_position,
        "training_curve": [asdict(point) for point in story.curve],
        "versions": arguments.versions,
    }
