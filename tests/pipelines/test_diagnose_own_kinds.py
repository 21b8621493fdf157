"""Drafters that came with a target: sound on their own target, and told apart from it on any other one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drafters.checkpoint import save_checkpoint
from drafters.target import SharedWeights, fingerprint_of, fingerprinted, load_target, target_fingerprint
from pipelines.diagnose import DiagnoseConfig, diagnose
from pipelines.diagnose_answers import EMBEDDING, Answer, decode_answers
from pipelines.diagnose_fingerprint import fingerprint_check
from pipelines.diagnose_report import Diagnosis
from pipelines.diagnose_trials import Known, trials_for
from pipelines.prompts import PromptRow
from pipelines.step_config import StepConfig
from serving.engine.build import build_engine
from tests.toy_folder import save_toy_target
from tests.toy_gemma import toy_assistant
from tests.toy_mtp import tokens_of, toy_trainer
from tests.toy_own_mtp import LAST, own_mtp, save_own_mtp_target

COUNT, LENGTH = 4, 24


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i} tells of {i * i}"}) + "\n" for i in range(COUNT)))
    return str(file)


@pytest.fixture(scope="module")
def own(tmp_path_factory, prompts) -> tuple[Path, Path]:
    """(a target with an MTP layer, that layer after it learned the target's answers by heart)."""
    folder = tmp_path_factory.mktemp("own")
    target = save_own_mtp_target(folder / "target", "glm4", vocab_size=260, initializer_range=0.1)
    module = own_mtp(target).requires_grad_(True)
    engine = build_engine(target, backend="torch", max_len=96, target_layer_ids=LAST)
    texts = [json.loads(line)["prompt"] for line in Path(prompts).read_text().splitlines()]
    answers = decode_answers(engine, [PromptRow(t, list(t.encode()), "", 1) for t in texts], LENGTH)
    sequences = [answer.sequence(answer.tapped(LAST)) for answer in answers]
    config = StepConfig(epochs=16, tokens_per_step=tokens_of(sequences) // 2, learning_rate=2e-2, evaluations=1)
    for _ in toy_trainer(module, sequences, [], config).run():
        pass
    save_checkpoint(folder / "drafter", module, {"target_fingerprint": target_fingerprint(target, LAST)})
    return target, folder / "drafter"


def found(drafter: Path, target: Path, prompts: str) -> Diagnosis:
    options = {"backend": "torch", "max_new_tokens": LENGTH, "limit": COUNT}
    return diagnose(DiagnoseConfig(drafter=str(drafter), target=str(target), prompts=prompts, **options))


def test_a_target_s_own_layers_are_sound_on_it(own, prompts):
    target, drafter = own
    result = found(drafter, target, prompts)
    assert (result.verdict, result.findings) == ("sound", []), result.headline
    assert result.tau > 1.8, "a drafter that knows little proves little"
    assert abs(result.served_tau - result.tau) < 0.2, "in the engine too"


@pytest.mark.parametrize("other", ["without MTP layers", "wider", "with two of them", "with fewer layers"])
def test_own_layers_on_another_target(other, own, prompts, tmp_path):
    if other == "without MTP layers":
        target = save_toy_target(tmp_path / "t")
    elif other == "with fewer layers":
        target = save_toy_target(tmp_path / "t", num_hidden_layers=1)
    else:
        changes = {"hidden_size": 48} if other == "wider" else {"num_mtp_layers": 2}
        target = save_own_mtp_target(tmp_path / "t", "glm4", vocab_size=260, **changes)
    result = found(own[1], target, prompts)
    assert result.verdict == "fault"
    assert [finding.cause for finding in result.findings] == ["fingerprint"]
    assert "it was made for another target" in result.headline
    assert all("\n" not in check.evidence for check in result.checks)


# -- mends that such a drafter can take -------------------------------------------------------------------------------


def test_other_layers_mean_another_target(tmp_path):
    target_dir, _, assistant = toy_assistant(tmp_path, "last layers share")
    target, layers = load_target(str(target_dir)), assistant.config.target_layer_ids
    trained = tuple(layer - 1 for layer in layers)
    recorded = {"target_fingerprint": fingerprint_of(fingerprinted(target_dir), trained)}
    check = fingerprint_check(assistant.config, recorded, target)
    assert (check.cause, check.grade) == ("layers", "fault")
    known = Known(assistant, SimpleNamespace(), target)
    tapped = [t for t in trials_for(known) if t.cause == "layers" and "layers " in t.name]
    assert len(tapped) > 2
    for mend in [check.mend, *(trial.mend for trial in tapped)]:
        assert mend == "import it again for its own target with `draftloop import`"


def test_the_embedding_as_a_tap_is_the_one_that_the_target_reads():
    embedding_VD = torch.arange(8.0).reshape(4, 2)
    shared = SharedWeights(embedding_VD, embedding_VD, torch.ones(2), 1e-6, embedding_scale=3.0)
    answer = Answer(
        prompt_id="a", category="", ids_T=torch.tensor([2, 1, 3]), prompt_len=1, layers=(0,),
        features_TLD=torch.zeros(2, 1, 2),
    )  # fmt: skip
    assert answer.tapped([EMBEDDING, 0], shared).tolist() == [[12, 15, 0, 0], [6, 9, 0, 0]]
