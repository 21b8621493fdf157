"""A target's own MTP layers are fine-tuned on its rollouts as any drafter is: tau rises, in figures and in the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafters.checkpoint import as_drafter, save_checkpoint
from drafters.target import load_model, target_fingerprint
from pipelines.expected_acceptance import expected_acceptance
from pipelines.step_config import StepConfig
from pipelines.train_config import TrainConfig, TrainError
from pipelines.training_sequence import TrainingSequence
from pipelines.warm_start import as_started, check_start, started_module, started_vocabulary
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_mtp import features_of, tokens_of, toy_trainer
from tests.toy_own_mtp import LAST, own_mtp, plain_model, save_own_mtp_target

CONFIG = TrainConfig(rollouts=("r",), output="o")
VOCAB, NEW, DRAFTS = 24, 24, 3


def saved(folder: Path, family: str, **changes) -> tuple[Path, str]:
    """(target, drafter)."""
    target = save_own_mtp_target(folder / "t", family, **changes)
    path = folder / "d"
    save_checkpoint(path, own_mtp(target), {"target_fingerprint": target_fingerprint(target, LAST)})
    return target, str(path)


def test_going_on_from_the_target_s_own_layers(tmp_path: Path):
    target, path = saved(tmp_path, "deepseek, two layers")
    started = as_started(replace(CONFIG, init_from=path))
    assert (started.kind, started.drafts(), started.draft_vocab_size) == ("own-mtp", 2, 6)
    check_start(started, LAST)
    with pytest.raises(TrainError, match=r"reads the target's layers 1, the features are of 0, 1; generate rollouts"):
        check_start(started, (0, 1))
    assert started_vocabulary(started).tolist() == list(range(6))
    module = started_module(path, target)
    assert all(p.requires_grad for p in module.parameters())
    borrowed = {"embedding_VD", "lm_head_WD", "final_norm_D"}
    assert borrowed <= {name for name, _ in module.named_buffers()}, "what is the target's own stays as it is"
    with pytest.raises(TrainError, match="kind is own-mtp; give recursive or independent or dflash"):
        replace(CONFIG, kind="own-mtp")


@pytest.mark.learning
@pytest.mark.parametrize("family", ["glm4", "deepseek, three layers"])
def test_tau_rises(family, tmp_path: Path):
    target, path = saved(tmp_path, family, vocab_size=VOCAB, initializer_range=0.15)
    model = plain_model(target)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (6,), generator=generator).tolist() for _ in range(40)]
    sequences = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0].tolist()
        sequences.append(TrainingSequence(torch.tensor(ids), len(prompt), features_of(model, ids, LAST)[:-1]))
    held_out, sequences = sequences[:8], sequences[8:]

    def served_tau(module) -> float:
        rows = TorchRows(load_model(target, torch.float32), num_slots=4, max_len=64, target_layer_ids=LAST)
        engine = Engine(rows, as_drafter(module), config=EngineConfig(num_draft_tokens=DRAFTS))
        engine.generate(prompts[:8], Sampling(max_new_tokens=NEW))
        return engine.stats.acceptance.tau

    module = started_module(path, target)
    before = expected_acceptance(module, held_out, DRAFTS).tau, served_tau(module)
    module.train()
    config = StepConfig(epochs=25, tokens_per_step=tokens_of(sequences) // 4, learning_rate=5e-3, evaluations=1)
    for _ in toy_trainer(module, sequences, [], config).run():
        pass
    after = expected_acceptance(module, held_out, DRAFTS).tau, served_tau(module)
    print(f"{family}: expected and served tau {before} before, {after} after")
    assert before[0] < 1.4
    assert after[0] > before[0] + 0.5
    assert after[1] > before[1] + 0.5
