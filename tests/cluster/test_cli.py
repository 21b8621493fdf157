"""The command line: help, exit codes, one line for every mistake, and nothing left that a rerun would trust."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from tests.toy_folder import save_toy_target


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def one_line(result) -> str:
    """The error's text, if the command ended as a user's mistake must."""
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, result.output
    return lines[0]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"count from {i}"}) + "\n" for i in range(4)))
    return str(file)


@pytest.mark.parametrize(
    "command",
    ["generate", "train", "evaluate", "compare", "diagnose", "export", "import", "serve", "quickstart"],
)
def test_every_command_explains_itself(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--target" in result.output


@pytest.mark.parametrize(
    "arguments",
    [[], ["generate", "--frobnicate"], ["serve", "--port", "99999"], ["serve", "--traffic-sample", "2"], ["fly"]],
)
def test_wrong_use_is_exit_code_2(arguments):
    assert run(*arguments).exit_code == 2


def test_a_bad_range_of_actors_is_exit_code_2():
    assert run("generate", "--num-actors", "4:2").exit_code == 2


def test_unknown_target(tmp_path):
    assert "no-such-model" in one_line(
        run("generate", "--target", "./no-such-model", "--output", str(tmp_path / "out"))
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "do not exist"),
        ("", "empty"),
        ("\n\n", "empty"),
        ('{"id": "a"}\n', "no text"),
        ('{"prompt": "%s"}\n' % ("long " * 500), "tokens"),
    ],
)
def test_bad_prompt_files(content, word, tmp_path, toy_target_dir):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    output = tmp_path / "out"
    result = run("generate", "--target", str(toy_target_dir), "--prompts", str(file), "--output", str(output))
    assert word in one_line(result)
    assert not output.exists()


def test_an_output_that_holds_other_files(tmp_path, toy_target_dir, prompts):
    result = run("generate", "--target", str(toy_target_dir), "--prompts", prompts, "--output", str(tmp_path))
    assert "holds other files" in one_line(result)


def test_too_little_room_for_the_features(tmp_path, toy_target_dir, prompts):
    output = tmp_path / "out"
    result = run(
        "generate", "--target", str(toy_target_dir), "--prompts", prompts, "--output", str(output), "--max-bytes", "100"
    )
    assert "max" in one_line(result)
    assert not (output / "manifest.json").exists()


def test_train_on_a_folder_that_is_no_rollout_set(tmp_path, toy_target_dir):
    result = run(
        "train", "--target", str(toy_target_dir), "--rollouts", str(tmp_path), "--output", str(tmp_path / "drafter")
    )
    assert "not a rollout set" in one_line(result)
    assert not (tmp_path / "drafter").exists()


def test_train_takes_the_size_of_the_draft_vocabulary_or_its_coverage(tmp_path, toy_target_dir):
    result = run("train", "--rollouts", str(tmp_path), "--draft-vocab-size", "0", "--draft-vocab-coverage", "0.9")
    assert one_line(result) == "error: draft_vocab_size is 0 and draft_vocab_coverage is 0.9; give one of the two"
    one_line(run("train", "--rollouts", str(tmp_path), "--draft-vocab-coverage", "95"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "dflash", "--own-lm-head"], "own_lm_head is True; give it to kind independent only, not to dflash"),
        (["--shared-trunk"], "shared_trunk is True; give it to kind independent only, not to recursive"),
        (["--block-size", "16"], "block_size is 16; give it to kind dflash only, not to recursive"),
        (
            ["--kind", "independent", "--confidence-head"],
            "confidence_head is True; give it to kind dflash only, not to",
        ),
        (["--kind", "dflash", "--num-draft-tokens", "4"], "num_draft_tokens is 4; give block_size instead"),
        (["--kind", "dflash", "--rho", "0.5"], "rho is 0.5; give it to geometric loss weights only"),
        (["--loss-weights", "geometric", "--gamma", "4"], "gamma is 4.0; give it to exponential loss weights only"),
        (["--rho", "2"], "rho is 2.0; give more than 0 and at most 1"),
    ],
)
def test_train_refuses_options_of_another_kind_by_name(arguments, message, tmp_path):
    assert message in one_line(run("train", "--rollouts", str(tmp_path), *arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beta", "0.1"], "beta belongs to --regime joint"),
        (["--trunk-learning-rate", "1e-5"], "trunk_learning_rate belongs to --regime joint"),
        (["--dtype", "bfloat16"], "dtype belongs to --online"),
        (["--num-actors", "2"], "num_actors belongs to --online"),
        (["--actor-resource", "target_node=1"], "actor_resource belongs to --online"),
        (["--taps", "5"], "taps belongs to --online or --regime joint"),
        (["--layers", "1,2"], "layers belongs to --online"),
    ],
)
def test_train_refuses_options_without_what_they_belong_to(arguments, message, tmp_path):
    result = run("train", "--rollouts", str(tmp_path), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("arguments", [["--kind", "tree"], ["--loss", "l1"], ["--loss-weights", "flat"]])
def test_train_knows_no_other_kinds_and_losses(arguments):
    assert run("train", *arguments).exit_code == 2


def trained_report(**changes):
    from pipelines.train import TrainReport

    facts = {
        "output": "here", "kind": "dflash", "parameters": 10**6, "training_sequences": 9, "held_out_sequences": 1,
        "response_tokens": 99, "steps": 5, "seconds": 1.0, "loss": 1.0, "accuracy_by_position": [0.5],
        "expected_tau": 2.5, "acceptance_by_position": [0.5], "draft_vocab_size": 7, "draft_vocab_coverage": 0.9,
        "skipped_steps": 0, "skipped_sequences": 0, "best_step": 5, "ntp_loss": None,
        "tau_by_category": {"code": 2.0, "maths": 3.0}, "served_tau": 2.46, "parity_passed": True,
        "parity_verdict": "served tau 2.46, expected 2.50 on 9 held-out prompts: within 5%",
    }  # fmt: skip
    return TrainReport(**facts | changes)


def test_train_ends_with_both_taus_and_fails_where_they_differ(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipelines.train.train", lambda config, on_progress: trained_report())
    passed = run("train", "--kind", "dflash")
    assert passed.exit_code == 0
    assert "served tau 2.46, expected 2.50" in passed.stdout
    assert "code 2.00  maths 3.00" in passed.stdout

    verdict = "served tau 1.00, expected 2.50 on 9 held-out prompts: more than 5% apart"
    failed_report = trained_report(served_tau=1.0, parity_passed=False, parity_verdict=verdict)
    monkeypatch.setattr("pipelines.train.train", lambda config, on_progress: failed_report)
    failed = run("train", "--kind", "dflash")
    assert one_line(failed) == f"error: {verdict} (kept in here)"
    assert "1.0 M parameters" in failed.stdout, "the report is shown all the same"
    machine = run("train", "--kind", "dflash", "--json")
    assert machine.exit_code == 1
    facts = json.loads(machine.stdout)
    assert (facts["served_tau"], facts["parity_passed"]) == (1.0, False)


def test_layers_reach_online_training(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr("pipelines.train.train", lambda config, on_progress: seen.append(config) or trained_report())
    assert run("train", "--kind", "dflash", "--online", "--layers", "0, 2").exit_code == 0
    assert seen[0].online.target_layer_ids == (0, 2)


def test_train_takes_the_loss_weights_of_the_kind_unless_told(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(
        "pipelines.train.train", lambda config, on_progress: seen.append(config) or trained_report(kind=config.kind)
    )
    blocks = ["--kind", "dflash"]
    for arguments in ([], blocks, [*blocks, "--loss-weights", "geometric", "--loss", "kl"], [*blocks, "--gamma", "3"]):
        assert run("train", *arguments).exit_code == 0
    resolved = [c.steps.loss.resolved(blocks=c.kind == "dflash").weights for c in seen]
    assert resolved == ["geometric", "dpace", "geometric", "exponential"]
    assert [c.steps.loss.kind for c in seen] == ["cross_entropy", "cross_entropy", "kl", "cross_entropy"]
    assert [c.drafts() for c in seen] == [5, 7, 7, 7]


def test_evaluate_without_a_drafter(tmp_path, toy_target_dir, prompts):
    arguments = ("evaluate", "--target", str(toy_target_dir), "--prompts", prompts, "--drafter")
    assert "no drafter" in one_line(run(*arguments, str(tmp_path / "nothing")))
    assert "is not a drafter" in one_line(run(*arguments, str(tmp_path)))


def test_evaluate_a_drafter_of_another_target(tmp_path, toy_target_dir, prompts):
    from tests.toy_mtp import save_toy_drafter

    drafter = save_toy_drafter(tmp_path / "drafter", toy_target_dir)
    other = save_toy_target(tmp_path / "other", seed=1)
    arguments = ("evaluate", "--target", str(other), "--prompts", prompts, "--drafter", str(drafter))
    assert "made for another target" in one_line(run(*arguments))
    assert not (drafter / "evaluation.json").exists()


def test_evaluate_tells_machines_the_same_facts(tmp_path, toy_target_dir, prompts):
    from tests.toy_mtp import save_toy_drafter

    drafter = save_toy_drafter(tmp_path / "drafter", toy_target_dir)
    result = run(
        "evaluate", "--target", str(toy_target_dir), "--prompts", prompts, "--drafter", str(drafter),
        "--max-new-tokens", "16", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts == json.loads((drafter / "evaluation.json").read_text())
    assert facts["equal"] == facts["prompts"] == 4
    assert facts["tau"] >= 1
    for key in (
        "acceptance_by_position",
        "t_base_s",
        "t_draft_s",
        "t_verify_s",
        "s_predicted",
        "s_measured",
        "versions",
    ):
        assert facts[key], key


def test_options_of_drafting_have_the_stages_own_defaults():
    """They stand in the command line as figures, so that `--help` need not load the engine."""
    from cluster import cli
    from pipelines.evaluate import EvaluateConfig
    from serving.serve_config import ServeConfig

    for name in ("num_draft_tokens", "tree_nodes"):
        assert inspect.signature(cli.evaluate).parameters[name].default == EvaluateConfig(drafter="x").__dict__[name]
        assert inspect.signature(cli.serve).parameters[name].default == getattr(ServeConfig(target="smollm2"), name)


def test_options_of_compare_have_the_stages_own_defaults():
    from cluster.compare_command import compare, numbers
    from pipelines.compare_config import CompareConfig

    options = {name: parameter.default for name, parameter in inspect.signature(compare).parameters.items()}
    stage = CompareConfig()
    for name in ("target", "output", "prompt_lookup", "limit", "speed_limit", "num_draft_tokens", "dtype", "device"):
        assert options[name] == getattr(stage, name)
    assert options["tokens"] == stage.max_new_tokens
    assert tuple(options["prompts"]) == stage.prompts
    assert (numbers(options["batches"]), numbers(options["trees"])) == (stage.batches, stage.trees)
