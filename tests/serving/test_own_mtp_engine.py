"""The engine drafts with the target's own MTP layers: transformers' drafts and words, its memory, its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafters.checkpoint import save_checkpoint
from drafters.target import load_model, target_fingerprint
from serving.engine import native_build
from serving.engine.build import build_engine
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.serving.test_memory_plan import tensors
from tests.toy_mtp import Overheard
from tests.toy_own_mtp import LAST, own_mtp, plain_model, reference, save_own_mtp_target

NEW = 24
SEED = 2  # of targets whose layers are right now and then


@pytest.mark.parametrize("family", ["glm4", "deepseek, three layers"])
def test_drafts_and_words_are_those_of_transformers(family, tmp_path: Path):
    folder = save_own_mtp_target(tmp_path, family, seed=SEED)
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 9, 40, 4, 17, 6, 8]
    prompts = [torch.randint(0, 6, (n,), generator=generator).tolist() for n in lengths]
    said = reference(plain_model(folder), prompts, NEW)
    module = own_mtp(folder)
    number = module.config.num_mtp_layers
    overheard = Overheard(module)
    rows = TorchRows(load_model(folder, torch.float32), num_slots=3, max_len=80, target_layer_ids=LAST)
    engine = Engine(rows, overheard, config=EngineConfig(num_draft_tokens=number, max_prefill_rows=11))
    completions = engine.generate(prompts, Sampling(max_new_tokens=NEW))
    assert engine.stats.fallbacks == {}
    compared = 0
    for completion, prompt, (ids, rounds) in zip(completions, prompts, said, strict=True):
        assert prompt + completion.token_ids == ids
        for anchor, drafts in overheard.rounds_of(ids):
            if anchor + 1 in rounds:  # the engine asks for fewer at the end of an answer, transformers does not
                assert drafts == rounds[anchor + 1][: len(drafts)]
                compared += len(drafts)
    assert compared > 5 * NEW
    assert engine.stats.acceptance.accepted > 10


@pytest.mark.parametrize("form", ["packed", "plain"])
def test_the_plan_is_what_is_allocated(form, tmp_path: Path, monkeypatch):
    if form == "plain":
        monkeypatch.setattr(native_build, "unavailable_reason", lambda *_: "no compiler")
    elif native_build.unavailable_reason():
        pytest.skip(str(native_build.unavailable_reason()))
    folder = save_own_mtp_target(tmp_path / "t", "deepseek, two layers", vocab_size=260)
    path = tmp_path / "d"
    save_checkpoint(path, own_mtp(folder), {"target_fingerprint": target_fingerprint(folder, LAST)})
    engine = build_engine(folder, num_slots=3, max_len=100, num_threads=1, drafter_path=path)
    drafter, plan = engine.drafter, engine.memory
    state = [*drafter._keys, *drafter._values, drafter._hidden, drafter._tokens]
    assert plan.drafter_kv_bytes == sum(t.nbytes for t in state)
    assert plan.drafter_bytes == pytest.approx(tensors(drafter.module), rel=0.03)
    assert plan.target_bytes == pytest.approx(tensors(engine.backend.model), rel=0.03)
    completions = engine.generate([[1, 2, 3], [4] * 50], Sampling(max_new_tokens=10))
    assert engine.stats.fallbacks == {}
    assert [len(c.token_ids) for c in completions] == [10, 10]
