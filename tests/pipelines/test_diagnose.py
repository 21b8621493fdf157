"""Each fault that is planted in a drafter is named; a sound drafter has none, and a weak one is called weak."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.checkpoint import CheckpointError, load_module, save_checkpoint
from drafters.dflash import DFlashModule
from drafters.drafter_module import DrafterModule
from drafters.mtp import make_mtp
from drafters.target import (
    chat_template_hash,
    fingerprint_of,
    fingerprinted,
    part_digests,
    shared_weights,
    target_fingerprint,
)
from pipelines.diagnose import DiagnoseConfig, diagnose
from pipelines.diagnose_answers import Answer, decode_answers
from pipelines.diagnose_changes import causal_blocks
from pipelines.diagnose_prompts import PromptsTrial
from pipelines.diagnose_report import Diagnosis
from pipelines.diagnose_trials import Trial
from pipelines.expected_acceptance import expected_acceptance
from pipelines.prompts import PromptRow
from pipelines.step_config import StepConfig
from serving.chat_options import ChatOptions
from serving.engine.build import build_engine
from tests.toy_dflash import toy_dflash_config
from tests.toy_echo import save_echo_target, save_one_token_drafter
from tests.toy_folder import PAD_ID, save_toy_target
from tests.toy_mtp import tokens_of, toy_mtp_config, toy_trainer

TAPS, STEPS, MASK = (1, 2), 4, 259  # of the toy drafters here
COUNT, LENGTH = 6, 40


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy_target(tmp_path_factory.mktemp("diagnose") / "target", num_hidden_layers=4)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_prompts(tmp_path_factory.mktemp("diagnose"), [f"{i} tells of {i * i}" for i in range(COUNT)])


def write_prompts(folder: Path, texts: list[str], **more: Any) -> str:
    file = folder / "prompts.jsonl"
    rows = [{"id": f"row-{i}", "category": text[-1], "prompt": text} | more for i, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def answers(target_dir: Path, prompts: str) -> list[Answer]:
    engine = build_engine(target_dir, backend="torch", max_len=128, target_layer_ids=(0, 1, 2, 3))
    texts = [json.loads(line)["prompt"] for line in Path(prompts).read_text().splitlines()]
    return decode_answers(engine, [PromptRow(t, list(t.encode()), "", 1) for t in texts], LENGTH)


def learned(
    module: DrafterModule, target_dir: Path, answers: list[Answer], folder: Path, change: Callable = nullcontext, **more
) -> Path:
    """A drafter that knows the answers by heart, saved."""
    module.bind(shared_weights(target_dir, torch.float32))
    module.start_from_target()
    sequences = [answer.sequence(answer.tapped(TAPS)) for answer in answers]
    options = {"epochs": 40, "tokens_per_step": tokens_of(sequences) // 2, "learning_rate": 2e-2, "evaluations": 1}
    with change(module):
        for _ in toy_trainer(module, sequences, [], StepConfig(**options | more)).run():
            pass
        tau = expected_acceptance(module.eval(), sequences, STEPS).tau
    provenance = {"target_fingerprint": target_fingerprint(target_dir, TAPS), "expected_tau": tau}
    save_checkpoint(folder, module, provenance)
    return folder


def fresh(kind: str, **changes: Any) -> DrafterModule:
    fields: dict[str, Any] = {"vocab_size": 260, "draft_vocab_size": 260, "target_layer_ids": TAPS} | changes
    if kind == "independent":
        fields |= {"own_lm_head": True}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "dflash":
            block = {"num_target_layers": 4, "mask_token_id": MASK, "block_size": STEPS + 1, "num_hidden_layers": 1}
            return DFlashModule(toy_dflash_config(**block | fields))
        return make_mtp(toy_mtp_config(kind, num_draft_tokens=STEPS, **fields))


@pytest.fixture(scope="module")
def saved(target_dir: Path, answers: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sound drafters by kind."""
    root = tmp_path_factory.mktemp("sound")
    return {kind: learned(fresh(kind), target_dir, answers, root / kind) for kind in ("dflash", "independent")}


def planted(
    sound: Path,
    folder: Path,
    config: Callable[[dict], object] | None = None,
    tensors: Callable[[dict[str, Tensor]], object] | None = None,
    **provenance: Any,
) -> Path:
    """A copy of a sound drafter with something changed in place."""
    shutil.copytree(sound, folder)
    for name, change in (("config.json", config), ("provenance.json", lambda values: values.update(provenance))):
        values = json.loads((folder / name).read_text())
        if change:
            change(values)
        (folder / name).write_text(json.dumps(values))
    if tensors:
        state = load_file(folder / "model.safetensors")
        tensors(state)
        save_file(state, folder / "model.safetensors")
    return folder


def found(drafter: Path, target_dir: Path, prompts: str, **options: Any) -> Diagnosis:
    options = {"backend": "torch", "max_new_tokens": LENGTH, "limit": COUNT} | options
    return diagnose(DiagnoseConfig(drafter=str(drafter), target=str(target_dir), prompts=prompts, **options))


# -- nothing planted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dflash", "independent"])
def test_a_sound_drafter_has_no_fault(kind, saved, target_dir, prompts):
    result = found(saved[kind], target_dir, prompts)
    assert (result.verdict, result.findings, result.kind) == ("sound", [], kind)
    assert result.headline.startswith(f"nothing wrong found: tau {result.tau:.2f}")
    assert result.tau > 1.8, "a drafter that knows little proves little"
    assert abs(result.served_tau - result.tau) < 0.05
    assert len(result.acceptance_by_position) == STEPS
    assert len(result.trials) > 8


def test_progress_reaches_its_end(saved, target_dir, prompts):
    told: list[tuple[int, int, str]] = []
    config = DiagnoseConfig(
        drafter=str(saved["independent"]), target=str(target_dir), prompts=prompts, max_new_tokens=16, limit=4
    )
    diagnose(config, lambda *step: told.append(step))
    assert told == sorted(told, key=lambda step: step[0])
    assert told[-1] == (told[0][1], told[0][1], "done")


# -- faults in what it reads ------------------------------------------------------------------------------------------


def test_tapped_layers_off_by_one(saved, target_dir, prompts, tmp_path):
    def lower(config: dict) -> None:
        config["dflash_config"]["target_layer_ids"] = [0, 1]

    shifted = planted(saved["dflash"], tmp_path / "shifted", lower)
    with pytest.raises(CheckpointError, match="another target"):
        load_module(shifted, target_dir)
    result = found(shifted, target_dir, prompts)
    first = result.findings[0]
    assert (result.verdict, first.cause) == ("fault", "layers")
    assert result.headline.startswith("likely: tapped layers off by one (layers +1 (1, 2): tau ")
    assert any("fingerprint fits with layers [1, 2]" in line for line in first.evidence)
    assert "[1, 2]" in first.mend

    # one whose fingerprint says nothing of it: acceptance alone tells
    silent = planted(shifted, tmp_path / "silent", target_fingerprint=target_fingerprint(target_dir, (0, 1)))
    assert found(silent, target_dir, prompts).findings[0].cause == "layers"


def test_a_mask_token_that_fell_back_to_padding(saved, target_dir, prompts, tmp_path):
    def pad(config: dict) -> None:
        config["dflash_config"]["mask_token_id"] = PAD_ID

    result = found(planted(saved["dflash"], tmp_path / "pad", pad), target_dir, prompts)
    assert result.findings[0].cause == "mask"
    assert f"mask token {MASK}" in result.headline
    (mask,) = [check for check in result.checks if check.name == "mask token"]
    assert (mask.grade, "it is the pad token" in mask.evidence) == ("note", True)
    told = planted(tmp_path / "pad", tmp_path / "told", mask_token_id=MASK)
    told_result = found(told, target_dir, prompts)
    assert any(f"the provenance {MASK}" in line for line in told_result.findings[0].evidence)


def test_a_draft_vocabulary_whose_ids_are_off(target_dir, answers, prompts, tmp_path):
    said_W = torch.cat([answer.ids_T[answer.prompt_len :] for answer in answers]).unique()
    module = fresh("independent", draft_vocab_size=len(said_W))
    module.draft_vocab_ids.copy_(said_W)
    sound = learned(module, target_dir, answers, tmp_path / "sound")

    def as_distances(state: dict[str, Tensor]) -> None:
        state["draft_vocab_ids"] -= torch.arange(len(said_W))

    refused = found(planted(sound, tmp_path / "d2t", tensors=as_distances), target_dir, prompts)
    assert refused.findings[0].cause == "vocabulary"
    assert "draft_vocab_ids + index are ascending token ids" in refused.headline
    assert refused.tau > 1.8, "as mended"

    def one_aside(state: dict[str, Tensor]) -> None:
        state["draft_vocab_ids"] += 1

    aside = found(planted(sound, tmp_path / "aside", tensors=one_aside), target_dir, prompts)
    assert aside.findings[0].cause == "vocabulary"
    assert "(ids - 1: tau" in aside.headline


def test_prompts_made_otherwise_than_in_training(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '=' if enable_thinking else '!' }}"
    target_dir = save_echo_target(tmp_path / "target")
    (target_dir / "chat_template.jinja").write_text(template)
    trained = {"chat_template_hash": chat_template_hash(target_dir), "chat_options": {"thinking": "on"}}
    drafter = save_one_token_drafter(tmp_path / "drafter", target_dir, "=", **trained)
    chats = tmp_path / "chats.jsonl"
    rows = [{"messages": [{"role": "user", "content": text}]} for text in "abcdef"]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = found(drafter, target_dir, str(chats))
    assert result.findings[0].cause == "template"
    assert "prompts of its training: tau 4.00, against 1.00 as it is" in result.headline
    assert any("thinking on; used with thinking default" in line for line in result.findings[0].evidence)
    assert found(drafter, target_dir, str(chats), chat_options=ChatOptions(thinking="on")).verdict == "sound"


def test_other_prompts_without_an_answer_long_enough_prove_nothing():
    trial = PromptsTrial(Trial(cause="template", says="", name="", mend=""), ChatOptions())
    nothing: Any = SimpleNamespace(answers=[])
    assert trial.result(nothing, nothing) is None


# -- faults of its training -------------------------------------------------------------------------------------------


def test_labels_shifted_by_one(saved, target_dir, prompts, tmp_path):
    def next_heads(state: dict[str, Tensor]) -> None:
        for name in sorted(state):  # head k drafts what head k + 1 was to draft
            _, k, rest = name.split(".", 2) if name.startswith("heads.") else ("", "", "")
            if k and int(k) + 1 < STEPS:
                state[name] = state[f"heads.{int(k) + 1}.{rest}"].clone()
        state["lm_heads"] = state["lm_heads"].roll(-1, dims=0)

    result = found(planted(saved["independent"], tmp_path / "shifted", tensors=next_heads), target_dir, prompts)
    assert result.findings[0].cause == "alignment"
    assert "drafts match one place further on" in result.headline


def test_causal_attention_inside_the_block(target_dir, answers, prompts, tmp_path):
    slowly = {"epochs": 50, "learning_rate": 1e-2}
    causal = learned(fresh("dflash"), target_dir, answers, tmp_path / "causal", causal_blocks, **slowly)
    result = found(causal, target_dir, prompts)
    assert result.findings[0].cause == "attention"
    assert "causal inside the block: tau" in result.headline


def test_text_that_was_tokenised_anew(tmp_path):
    target_dir = save_echo_target(tmp_path / "target")  # goes on with "a" for ever, which its tokenizer reads as "aa"
    file = target_dir / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    del vocabulary[next(symbol for symbol, token in vocabulary.items() if token == 255)]
    vocabulary["aa"] = 255
    tokenizer["model"]["merges"] = [["a", "a"]]
    file.write_text(json.dumps(tokenizer))
    drafter = save_one_token_drafter(tmp_path / "drafter", target_dir, chr(255))
    prompts = write_prompts(tmp_path, [f"{i}a" for i in range(6)])
    result = found(drafter, target_dir, prompts)
    assert result.findings[0].cause == "token paths"
    assert result.path_mismatch_share == 1.0
    assert result.findings[0].says == "it was trained on text that was tokenised anew"
    assert "('aa' against 'a'+'a'+'a')" in result.findings[0].evidence[0]


def test_a_weak_drafter_is_called_weak(target_dir, answers, prompts, tmp_path):
    weak = learned(fresh("independent"), target_dir, answers, tmp_path / "weak", epochs=1, learning_rate=1e-3)
    curve = [{"step": step, "loss": 6.0 - step, "tokens": 100 * step} for step in (1, 2, 3)]
    result = found(planted(weak, tmp_path / "told", training_curve=curve), target_dir, prompts)
    assert result.verdict == "weak"
    assert result.headline.startswith("no fault found: it is weak, not broken (tau 1.")
    assert "loss still fell (4.00 to 3.00" in result.headline


def test_other_text_than_it_was_trained_on(tmp_path):
    target_dir = save_echo_target(tmp_path / "target")
    curve = [{"step": 1, "loss": 1.0, "tau_by_category": {"a": 4.0}}]
    drafter = save_one_token_drafter(tmp_path / "drafter", target_dir, "a", expected_tau=4.0, training_curve=curve)
    elsewhere = write_prompts(tmp_path, [f"{i}x" for i in range(6)])
    result = found(drafter, target_dir, elsewhere)
    assert (result.verdict, result.findings[-1].cause) == ("other text", "text")
    mixed = found(drafter, target_dir, write_prompts(tmp_path, [f"{i}{kind}" for i in range(4) for kind in "ax"]))
    assert mixed.tau_by_category == {"a": 4.0, "x": 1.0}
    assert any("far behind: x" in check.evidence for check in mixed.checks)


# -- faults in its files ----------------------------------------------------------------------------------------------


DAMAGES = [
    ("cut", "files", "cut short"),
    ("nan", "tensors", "heads.0.mlp.1.weight of"),
    ("zero", "tensors", "zero throughout"),
    ("no provenance", "files", "provenance.json is missing"),
]


@pytest.mark.parametrize(("damage", "cause", "says"), DAMAGES)
def test_damaged_files(damage, cause, says, saved, target_dir, prompts, tmp_path):
    def spoil(state: dict[str, Tensor]) -> None:
        if damage != "zero":
            state["heads.0.mlp.1.weight"][0, 0] = float("nan")
        else:
            state["heads.0.mlp.1.weight"].zero_()

    broken = planted(saved["independent"], tmp_path / "broken", tensors=spoil if damage in ("nan", "zero") else None)
    if damage == "cut":
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    if damage == "no provenance":
        (broken / "provenance.json").unlink()
    result = found(broken, target_dir, prompts)
    assert result.findings[0].cause == cause
    assert says in result.headline


def test_which_part_of_the_target_differs(saved, target_dir, prompts, tmp_path):
    other = save_toy_target(tmp_path / "other", num_hidden_layers=4, seed=1)
    parts = {"target_parts": part_digests(target_dir)}
    told = planted(saved["independent"], tmp_path / "told", **parts)
    result = found(told, other, prompts)
    (check,) = [check for check in result.checks if check.name == "fingerprint"]
    assert (check.grade, check.evidence) == ("fault", "made for another target; what differs: weights")
    untold = found(saved["independent"], other, prompts)
    assert any("one of config, tokenizer, weights" in c.evidence for c in untold.checks if c.name == "fingerprint")

    changed = fingerprinted(target_dir) | {"chat_template": "0" * 32}
    made = {"target_fingerprint": fingerprint_of(changed, TAPS), "chat_template_hash": "0" * 32}
    template = found(planted(saved["independent"], tmp_path / "template", **made), target_dir, prompts)
    assert template.findings[0].cause == "template"


def test_where_there_is_no_drafter(target_dir, prompts, tmp_path):
    with pytest.raises(CheckpointError, match="no drafter at"):
        found(tmp_path / "nowhere", target_dir, prompts)
