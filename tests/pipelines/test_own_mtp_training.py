"""A target's own MTP layers are fine-tuned on its rollouts as any drafter is: tau rises, expected and served."""

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
VOCAB, NEW = 12, 24


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
@pytest.mark.parametrize("family", ["glm4", "deepseek, two layers"])
def test_tau_rises(family, tmp_path: Path):
    target, path = saved(tmp_path, family, vocab_size=VOCAB, initializer_range=0.1)
    model = plain_model(target)
    prompts = torch.randint(0, VOCAB, (72, 6), generator=torch.Generator().manual_seed(3))
    sequences = [
        TrainingSequence(ids, 6, features_of(model, ids.tolist(), LAST)[:-1])
        for ids in model.generate(prompts, max_new_tokens=NEW, do_sample=False)
    ]
    held_out, sequences = sequences[:8], sequences[8:]
    module = started_module(path, target)
    number = module.config.num_draft_tokens

    def taus() -> tuple[float, float]:
        """Expected on held-out sequences, and of the engine on their prompts."""
        rows = TorchRows(load_model(target, torch.float32), num_slots=4, max_len=64, target_layer_ids=LAST)
        engine = Engine(rows, as_drafter(module), config=EngineConfig(num_draft_tokens=number))
        engine.generate(prompts[:8].tolist(), Sampling(max_new_tokens=NEW))
        return expected_acceptance(module, held_out, number).tau, engine.stats.acceptance.tau

    before = taus()
    config = StepConfig(epochs=12, tokens_per_step=tokens_of(sequences) // 4, learning_rate=2e-2, evaluations=1)
    for _ in toy_trainer(module, sequences, [], config).run():
        pass
    after = taus()
    for was, now in zip(before, after, strict=True):
        assert was < 1.3
        assert now > was + 0.5
