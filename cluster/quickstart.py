"""`draftloop quickstart`: the whole loop once, on a real model, with small settings. A second run reuses all it can."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import Console

from cluster import show
from cluster.ask import ask
from drafters.checkpoint import CheckpointError, read_provenance
from drafters.target import load_target
from pipelines.evaluate import EvaluateConfig, Evaluation, evaluate, versions
from pipelines.generate import GenerateConfig, generate
from pipelines.ray_session import start_ray
from pipelines.rollout_store import open_rollouts
from pipelines.step_config import StepConfig
from pipelines.train import train
from pipelines.train_config import TrainConfig, TrainError
from serving.serve_app import run_app, shutdown
from serving.serve_config import ServeConfig

QUESTION = "A baker makes 12 trays of 8 rolls and sells 70 of them. How many rolls are left?"
ANSWER_TOKENS = 128


def quickstart(console: Console, target: str, output: Path, prompts: int, epochs: float, port: int) -> None:
    """generate, train, evaluate, serve. Raises the stages' own errors."""
    with show.stage(console, f"1 of 5  target {target}", quiet=False) as stage:
        found = load_target(target, on_progress=stage.say)
        stage.say(f"{found.config.model_type}, {found.num_layers} layers of width {found.width}, in {found.path}")
    drafter = first_drafter(console, target, output, prompts, epochs, ("2 of 5", "3 of 5")).drafter

    with show.stage(
        console, "4 of 5  evaluate: held-out questions, with the drafter and without", quiet=False
    ) as stage:
        measuring = EvaluateConfig(target=target, drafter=str(drafter))
        evaluation = _measured_already(measuring)
        if evaluation:
            stage.say(f"{drafter / 'evaluation.json'} is of this drafter: reused")
        else:
            evaluation = evaluate(measuring, stage.evaluate)
    console.print(show.evaluation_table(evaluation))

    with show.stage(console, "5 of 5  serve: one question over HTTP", quiet=False) as stage:
        _serve_once(console, stage, ServeConfig(target=target, drafter=str(drafter), port=free_port(port)))
    console.print("\n[bold]next[/bold]")
    for command in (
        f"draftloop serve --target {target} --drafter {drafter}",
        f"draftloop evaluate --target {target} --drafter {drafter} --batch 4",
        f"draftloop generate --target {target} --prompts YOUR.jsonl --output my-rollouts",
    ):
        console.print(f"  {command}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class FirstDrafter:
    """A drafter of GSM8K, and what it was trained on."""

    rollouts: Path
    drafter: Path


def first_drafter(
    console: Console, target: str, output: Path, prompts: int, epochs: float, steps: tuple[str, str]
) -> FirstDrafter:
    """Generate and train, what is there already left as it is. `steps` number both on the terminal."""
    rollouts, drafter = output / "rollouts", output / "drafter"
    with show.stage(console, f"{steps[0]}  generate: the target answers {prompts} questions", quiet=False) as stage:
        config = GenerateConfig(target=target, prompts="gsm8k_train", limit=prompts, output=str(rollouts), batch=16)
        made = generate(config, stage.generate)
    console.print(show.generate_table(made))
    training = TrainConfig(
        target=target, rollouts=(str(rollouts),), output=str(drafter), steps=StepConfig(epochs=epochs)
    )
    what = "train: a recursive MTP drafter on the target's own answers"
    with show.stage(console, f"{steps[1]}  {what}", quiet=False) as stage:
        if _trained_already(training):
            stage.say(f"the drafter in {drafter} is from these rollouts and options: reused")
        else:
            report = train(training, stage.train)
            console.print(show.train_table(report))
            if report.parity_passed is False:
                raise TrainError(f"{report.parity_verdict}; run the same command to train anew")
    return FirstDrafter(rollouts, drafter)


def _trained_already(config: TrainConfig) -> bool:
    """Whether the drafter in the output folder came from the same options and rollouts, and serves as it trained."""
    try:
        provenance = read_provenance(Path(config.output))
    except CheckpointError:
        return False
    rollouts = [entry["manifest_sha256"] for entry in provenance.get("rollouts", [])]
    same = provenance.get("config") == json.loads(json.dumps(asdict(config)))
    sound = provenance.get("parity", {"passed": False})["passed"] is not False
    return same and sound and rollouts == [open_rollouts(uri).manifest_sha256 for uri in config.rollouts]


def _measured_already(config: EvaluateConfig) -> Evaluation | None:
    """The evaluation beside the drafter, if it was made with the same options after the drafter was."""
    file = Path(config.drafter) / "evaluation.json"
    try:
        facts = json.loads(file.read_text())
        known = Evaluation(**{field.name: facts[field.name] for field in fields(Evaluation)})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    asked = (config.prompts, config.limit, config.batch, config.dtype, config.max_new_tokens)
    have = (known.prompt_set, known.prompts, known.batch, known.dtype, known.max_new_tokens)
    same_drafts = (config.num_draft_tokens, config.tree_nodes) == (known.num_draft_tokens, known.tree_nodes)
    same_place = known.device == config.device and known.backend != "torch" and known.versions == versions()
    return known if asked == have and same_drafts and same_place else None


def free_port(port: int) -> int:
    """The port, or any free one if something listens there: ten minutes of work should not end on that."""
    for candidate in (port, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return port


def _serve_once(console: Console, stage: show.Stage, config: ServeConfig) -> None:
    start_ray()
    base_url = run_app(config)
    try:
        stage.say(f"POST {base_url}/chat/completions: {QUESTION}")
        answer = ask(
            base_url,
            config.served_name,
            QUESTION,
            ANSWER_TOKENS,
            lambda text: console.print(text, end="", style="green", highlight=False, markup=False, soft_wrap=True),
        )
        console.print()
        tau = answer.acceptance.get("tau")
        shown = "no verify round" if tau is None else f"tau {tau:.2f}"
        stage.say(f"{answer.completion_tokens} tokens, {shown}, drafter {answer.acceptance.get('drafter')}")
    finally:
        shutdown()
