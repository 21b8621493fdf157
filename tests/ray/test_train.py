"""Train on a local Ray cluster: rollouts in, a drafter that decodes losslessly out; a killed worker costs nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafters.checkpoint import load_module, read_provenance
from drafters.losses import LossConfig
from drafters.target import target_fingerprint
from pipelines import train as train_stage
from pipelines.curve_point import CurvePoint
from pipelines.evaluate import EvaluateConfig, evaluate
from pipelines.generate import generate
from pipelines.generate_config import GenerateConfig
from pipelines.rollout_store import RolloutError, RolloutStore, open_rollouts, shard_name
from pipelines.step_config import StepConfig
from pipelines.train import TrainReport, train
from pipelines.train_config import DFlashOptions, IndependentOptions, JointOptions, TrainConfig, TrainError
from pipelines.training import Trainer
from pipelines.worker_arguments import WorkerArguments
from tests.in_process_training import in_process
from tests.toy_folder import save_toy_target

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

STEPS = 12  # optimiser steps of the runs here


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    lines = [json.dumps({"id": f"r{i}", "category": "toy", "prompt": f"{i} plus {i * 7} is"}) for i in range(24)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def make_rollouts(work: Path, target: Path) -> str:
    """By relative paths: the cluster was started from another folder."""
    config = GenerateConfig(
        target=os.path.relpath(target, work),
        prompts="prompts.jsonl",
        output="rollouts",
        max_new_tokens=24,
        rows_per_shard=24,
        backend="torch",
        target_layer_ids=(0, 1),
        cpus_per_actor=1,
        stall_timeout_s=120,
    )
    with contextlib.chdir(work):
        generate(config)
    return str(work / "rollouts")


@pytest.fixture(scope="module")
def config(work: Path, toy_target_dir: Path, ray_cluster: None) -> TrainConfig:
    """A run of some steps; `output` is set by each test."""
    return TrainConfig(
        target=str(toy_target_dir),
        rollouts=(make_rollouts(work, toy_target_dir),),
        output="",
        num_draft_tokens=3,
        draft_vocab_size=150,
        held_out=0.2,
        steps=StepConfig(epochs=4.8, tokens_per_step=320, anchors_per_sequence=8, learning_rate=1e-2, evaluations=3),
        threads_per_worker=1,
        save_every_steps=4,
    )


@pytest.fixture(scope="module")
def trained(config: TrainConfig, work: Path) -> tuple[TrainReport, list[CurvePoint]]:
    """An undisturbed run, by relative paths."""
    points: list[CurvePoint] = []
    here = replace(config, target=os.path.relpath(config.target, work), rollouts=("rollouts",), output="drafter")
    with contextlib.chdir(work):
        return train(here, points.append), points


def test_generate_takes_a_drafter_by_a_relative_path(trained, toy_target_dir: Path, work: Path):
    config = GenerateConfig(
        target=str(toy_target_dir),
        prompts=str(work / "prompts.jsonl"),
        output="drafted",
        limit=2,
        max_new_tokens=8,
        with_features=False,
        drafter="drafter",
        backend="torch",
        cpus_per_actor=1,
    )
    with contextlib.chdir(work):
        assert generate(config).rows == 2
    assert len(open_rollouts(str(work / "drafted"))) == 2


def test_a_trained_drafter_decodes_losslessly(trained, config: TrainConfig, work: Path, toy_target_dir: Path):
    report, points = trained
    folder = Path(report.output)
    assert (report.kind, report.steps) == ("recursive", STEPS)
    assert report.training_sequences + report.held_out_sequences == 24
    assert (points[-1].step, points[-1].total_steps) == (STEPS, STEPS)
    assert points[-1].loss < points[0].loss
    assert report.expected_tau == points[-1].expected_tau
    assert not list(work.glob(".*")), "nothing is left behind"

    module = load_module(folder, toy_target_dir)
    assert report.parameters == sum(p.numel() for p in module.parameters())
    assert len(module.draft_vocab_ids) == report.draft_vocab_size == 150
    provenance = read_provenance(folder)
    assert provenance["target_fingerprint"] == open_rollouts(config.rollouts[0]).metadata.target_fingerprint
    assert provenance["rollouts"][0]["manifest_sha256"] == open_rollouts(config.rollouts[0]).manifest_sha256
    assert provenance["seed"] == 0
    assert (provenance["draft_vocab_size"], provenance["draft_vocab_coverage"]) == (150, report.draft_vocab_coverage)
    assert 0.5 < report.draft_vocab_coverage <= provenance["draft_vocab_training_coverage"] <= 1
    assert [p["step"] for p in provenance["training_curve"]] == [4, 8, 12]
    assert provenance["training_curve"][-1]["tau_by_category"] == {"toy": report.expected_tau}
    assert provenance["parity"]["served"] == report.served_tau
    assert provenance["parity"]["prompts"] == report.held_out_sequences, "all of them, being few"
    assert report.parity_passed is provenance["parity"]["passed"] is True
    assert "within 5%" in report.parity_verdict

    evaluation = evaluate(
        EvaluateConfig(
            target=str(toy_target_dir),
            drafter=str(folder),
            prompts=str(work / "prompts.jsonl"),
            limit=6,
            max_new_tokens=24,
            batch=3,
            num_draft_tokens=3,
            backend="torch",
        )
    )
    assert evaluation.equal == evaluation.prompts == 6
    assert evaluation.fallbacks == {}
    assert evaluation.tau is not None
    assert evaluation.tau >= 1
    assert json.loads((folder / "evaluation.json").read_text())["equal"] == 6


def disturbed(packed: dict[str, WorkerArguments]) -> None:
    """The worker, killed before it takes note of step 7, and failing before step 11, once each; 4 and 8 are saved."""
    from pipelines import train_worker as stage

    folder = Path(packed["arguments"].config.output).parent

    class Disturbed(Trainer):
        def run(self):
            for point in super().run():
                marker = folder / f"step-{point.step}"
                if point.step in (7, 11) and not marker.exists():
                    marker.write_text("")
                    if point.step == 7:
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise RuntimeError("the disk is on fire\nand more")
                yield point

    stage.Trainer = Disturbed
    try:
        stage.train_worker(packed)
    finally:
        stage.Trainer = Trainer


@pytest.fixture(scope="module")
def interrupted(trained, config: TrainConfig, work: Path) -> tuple[TrainConfig, list[CurvePoint]]:
    """A run that was killed, failed, and was stopped in its gate, and the points after the failure."""
    here = replace(config, output=str(work / "again" / "drafter"))
    points: list[CurvePoint] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_stage, "train_worker", disturbed)  # the kill is one failure; the next one ends the run
        refused(
            replace(here, max_failures=1),
            TrainError,
            r"training failed \(.*the disk is on fire\); mend that and run the same command",
        )
    assert not Path(here.output).exists()

    def stopped(*_: Any) -> None:
        raise RuntimeError("stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_stage, "run_parity", stopped)
        with pytest.raises(RuntimeError, match="stopped"):
            train(here, points.append)
    assert not Path(here.output).exists(), "nothing is put there before it was held against the engine"
    return here, points


def test_a_killed_worker_and_a_failed_run_go_on(interrupted, work: Path):
    assert (work / "again" / "step-7").exists()
    assert (work / "again" / "step-11").exists(), "the killed worker's run did not continue by itself"
    assert interrupted[1][0].step > 8, "the same command began anew"


def test_a_run_that_was_stopped_in_the_gate_goes_on_there_and_nothing_was_lost(interrupted, trained):
    here, _ = interrupted
    points: list[CurvePoint] = []
    report = train(here, points.append)
    assert points == [], "the same command trained again"
    ours, undisturbed = (load_file(Path(r.output) / "model.safetensors") for r in (report, trained[0]))
    assert ours.keys() == undisturbed.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, undisturbed[name]), name
    assert report.expected_tau == trained[0].expected_tau
    provenance = read_provenance(Path(report.output))
    assert [p["step"] for p in provenance["training_curve"]] == [4, 8, 12]
    assert provenance["parity"]["served"] == report.served_tau == trained[0].served_tau


def test_two_workers_train_as_one_does(config: TrainConfig, tmp_path: Path):
    """The same steps in two parts: one worker computes both, or each of two workers one."""
    steps = replace(config.steps, micro_batches=2, precision="float32", epochs=2.5)
    points: dict[int, list[CurvePoint]] = {1: [], 2: []}
    reports = {}
    for workers in (1, 2):
        here = replace(config, output=str(tmp_path / f"by-{workers}"), steps=steps, num_workers=workers)
        with in_process(tmp_path) if workers == 1 else contextlib.nullcontext():
            reports[workers] = train(here, points[workers].append)
    assert reports[1].steps == reports[2].steps >= 5
    assert [p.tokens for p in points[1]] == [p.tokens for p in points[2]]
    assert [p.loss for p in points[1]] == pytest.approx([p.loss for p in points[2]], rel=1e-3)
    one, two = (load_file(Path(reports[n].output) / "model.safetensors") for n in (1, 2))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-2, atol=2e-3)
    assert reports[1].expected_tau == pytest.approx(reports[2].expected_tau, abs=0.1)

    # elastic: of two workers of 5 CPUs each, a cluster of 8 has room for one, which takes the same steps
    here = replace(here, output=str(tmp_path / "elastic"), min_workers=1, cpus_per_worker=5)
    elastic = load_file(Path(train(here).output) / "model.safetensors")
    for name, tensor in one.items():
        assert torch.equal(tensor, elastic[name]), name


def test_the_joint_regime_delivers_a_trunk_and_its_drafter(config: TrainConfig, work: Path, tmp_path: Path):
    here = replace(config, output=str(tmp_path / "drafter"), joint=JointOptions(beta=0.3, num_taps=2))
    report = train(here)
    trunk = tmp_path / "drafter" / "trunk"
    assert report.ntp_loss is not None
    assert (report.parity_passed, report.served_tau) != (False, None), report.parity_verdict
    drafter = load_module(tmp_path / "drafter", trunk)  # refuses another target
    assert drafter.config.target_layer_ids == (0, 1)
    assert target_fingerprint(trunk, (0, 1)) != target_fingerprint(Path(config.target), (0, 1))
    prompts = str(work / "prompts.jsonl")
    assert evaluate(EvaluateConfig(target=str(trunk), drafter=report.output, prompts=prompts, limit=4)).equal == 4


def test_a_run_that_would_only_fail_again_ends_at_once(config: TrainConfig, tmp_path: Path):
    here = replace(config, output=str(tmp_path / "drafter"), steps=replace(config.steps, learning_rate=1e30))
    with in_process(tmp_path):
        refused(here, TrainError, r"training ended early: the gradient was not finite in 10 steps in a row, .*a lower")


def test_responses_too_short_to_measure_tau_on_still_train(config: TrainConfig, tmp_path: Path):
    rollouts = changed_set(config, tmp_path / "short", rows=6, response=3)  # as long as a draft, so no whole round
    steps = replace(config.steps, epochs=1, tokens_per_step=40)
    with in_process(tmp_path):
        report = train(replace(config, rollouts=(rollouts,), output=str(tmp_path / "drafter"), steps=steps))
    assert report.expected_tau is None
    assert report.acceptance_by_position == []
    assert read_provenance(tmp_path / "drafter")["expected_tau"] is None
    assert (report.served_tau, report.parity_passed) == (None, None)
    assert "parity was not measured" in report.parity_verdict


def test_a_drafter_that_is_served_otherwise_fails_the_gate_and_is_kept(
    config: TrainConfig, tmp_path: Path, toy_target_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    def spoiled(*arguments: Any, **options: Any):
        module = load_module(*arguments, **options)
        module.tap_norm.copy_(-module.tap_norm)
        return module

    monkeypatch.setattr("serving.engine.build.load_module", spoiled)
    known = changed_set(config, tmp_path / "known", rows=6, response=24, repeats=4)  # held out, and trained on as well
    steps = replace(config.steps, epochs=20)
    with in_process(tmp_path):
        report = train(replace(config, rollouts=(known,), output=str(tmp_path / "drafter"), steps=steps))
    assert report.expected_tau > 1.5
    assert report.parity_passed is False
    assert "more than 5% apart" in report.parity_verdict
    assert read_provenance(tmp_path / "drafter")["parity"]["passed"] is False
    assert load_module(tmp_path / "drafter", toy_target_dir) is not None


def test_dflash_is_trained_and_served_alike(config: TrainConfig, tmp_path: Path, toy_target_dir: Path):
    occurring = {i for r in open_rollouts(config.rollouts[0]) for i in r.prompt_ids + r.response_ids}
    unused = min(set(range(256)) - occurring)  # a random target writes its special tokens, too
    options = DFlashOptions(block_size=4, selector_top_k=8, confidence_head=True, mask_token_id=unused)
    loss = LossConfig(kind="kl", weights="exponential")
    steps = replace(config.steps, epochs=6, loss=loss)
    output = str(tmp_path / "drafter")
    report = train(replace(config, kind="dflash", num_draft_tokens=None, dflash=options, output=output, steps=steps))
    assert report.kind == "dflash"
    assert report.parity_passed is True, report.parity_verdict
    module = load_module(Path(output), toy_target_dir)
    assert module.config.block_size == 4
    assert module.config.mask_token_id == read_provenance(Path(output))["mask_token_id"] == unused


# -- refused in one line, before anything is started -----------------------------------------------------------------


def refused(config: TrainConfig, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        train(config)
    assert "\n" not in str(caught.value)


def changed_set(
    config: TrainConfig, folder: Path, rows: int, response: int, features: bool = True, repeats: int = 1
) -> str:
    """The first rows of the rollouts, with shorter responses, without features, or several times over."""
    source = open_rollouts(config.rollouts[0])
    metadata = source.metadata
    if not features:
        fingerprint = target_fingerprint(Path(config.target), ())
        metadata = replace(metadata, target_layer_ids=(), target_fingerprint=fingerprint)
    kept = [
        replace(
            rollout,
            response_ids=rollout.response_ids[:response],
            features_TF=rollout.features_TF[: len(rollout.prompt_ids) + response - 1] if features else None,
            loss_mask=[],
        )
        for rollout in islice(source, rows)
    ] * repeats
    store = RolloutStore(str(folder))
    store.begin({})
    store.finish({}, metadata, [store.write_shard(shard_name(0, 1), kept, metadata)], [])
    return str(folder)


def test_what_is_no_usable_rollout_set_is_refused(config: TrainConfig, work: Path, tmp_path: Path):
    here = replace(config, output=str(tmp_path / "drafter"))
    refused(replace(here, rollouts=(str(work),)), RolloutError, "not a rollout set")
    refused(replace(here, rollouts=(str(work / "nowhere"),)), RolloutError, "not a rollout set")
    other = save_toy_target(tmp_path / "other", seed=1)
    refused(replace(here, target=str(other)), RolloutError, "made by another target")
    bare = changed_set(config, tmp_path / "bare", rows=4, response=9, features=False)
    refused(replace(here, rollouts=(bare,)), TrainError, "have no features")
    few = changed_set(config, tmp_path / "few", rows=1, response=9)
    refused(replace(here, rollouts=(few,)), TrainError, "1 usable rollouts are too few")
    short = changed_set(config, tmp_path / "short", rows=5, response=2)
    refused(replace(here, rollouts=(short,)), TrainError, r"0 usable rollouts are too few to train on \(of 5\)")
    shard = Path(changed_set(config, tmp_path / "damaged", rows=4, response=9)) / shard_name(0, 1)
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    refused(replace(here, rollouts=(str(shard.parent),)), RolloutError, r"part-00000-of-00001\.parquet are damaged")
    assert not (tmp_path / "drafter").exists()


def test_workers_that_could_never_start_are_refused(config: TrainConfig, tmp_path: Path):
    here = replace(config, output=str(tmp_path / "drafter"))
    refused(replace(here, num_workers=9), TrainError, r"num_workers is 9 and cpus_per_worker is 1: 9 CPUs, Ray has 8")
    refused(replace(here, use_gpu=True), TrainError, r"use_gpu is on: 1 GPUs, Ray has 0")


def test_output_with_other_files_is_refused(config: TrainConfig, toy_target_dir: Path, tmp_path: Path):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("years of work")
    refused(replace(config, output=str(notes)), TrainError, r"holds other files \(thesis\.txt\)")
    assert (notes / "thesis.txt").exists()
    model = save_toy_target(tmp_path / "model")  # has a config.json, and is no drafter
    refused(replace(config, output=str(model)), TrainError, "holds other files")
    assert (model / "model.safetensors").exists()
    (tmp_path / "file").write_text("")
    refused(replace(config, output=str(tmp_path / "file")), TrainError, "cannot be used")
    refused(replace(config, output=str(tmp_path / "file" / "drafter")), TrainError, "cannot be used")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "tree"},
        {"num_draft_tokens": 0},
        {"draft_vocab_size": -1},
        {"draft_vocab_size": None, "draft_vocab_coverage": 95},
        {"draft_vocab_coverage": 0.95},
        {"independent": IndependentOptions(own_lm_head=True)},
        {"held_out": 1.0},
        {"num_workers": 0},
        {"save_every_steps": 0},
        {"steps": StepConfig(epochs=0)},
        {"steps": StepConfig(loss=LossConfig(rho=1.5))},
        {"steps": StepConfig(micro_batches=1), "num_workers": 2},
    ],
)
def test_a_wrong_option_is_named(config: TrainConfig, change: dict[str, Any]):
    name = {"steps": "epochs|rho|micro_batches", "independent": "own_lm_head"}.get(next(iter(change)), "|".join(change))
    with pytest.raises(TrainError, match=f"({name}) is .*; give "):
        replace(config, **change)
