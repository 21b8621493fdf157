"""Going on from a drafter: its kind, shape, vocabulary and weights are the run's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafters.checkpoint import CheckpointError, save_checkpoint
from drafters.drafter_module import DrafterModule
from drafters.target import load_model, target_fingerprint
from pipelines.online_setup import tapped_layers
from pipelines.train_config import DFlashOptions, IndependentOptions, OnlineOptions, TrainConfig, TrainError
from pipelines.warm_start import as_started, check_start, started_module, started_vocabulary
from tests.toy_dflash import FEW_TOKENS, toy_dflash
from tests.toy_gemma import target_of, toy_assistant
from tests.toy_mtp import TAPS, toy_mtp

CONFIG = TrainConfig(rollouts=("r",), output="o")
MAKERS = {
    "recursive": lambda model, **size: toy_mtp(model, **size),
    "independent": lambda model, **size: toy_mtp(model, "independent", anchor_embedding=True, **size),
    "dflash": lambda model, **size: toy_dflash(model, selector_top_k=4, conv_kernel_size=2, **size),
}
OPTIONS = {
    "recursive": {"num_draft_tokens": 3},
    "independent": {"num_draft_tokens": 3, "independent": IndependentOptions(anchor_embedding=True)},
    "dflash": {},
}


def saved(kind: str, target: Path, folder: Path, vocab_ids=tuple(FEW_TOKENS)) -> tuple[TrainConfig, DrafterModule]:
    model = load_model(target, torch.float32)
    module = MAKERS[kind](model, vocab_size=260, vocab_ids=vocab_ids)
    save_checkpoint(folder, module, {"target_fingerprint": target_fingerprint(target, TAPS)})
    return replace(CONFIG, init_from=str(folder)), module


@pytest.mark.parametrize("kind", list(MAKERS))
def test_kind_and_shape_are_the_drafters(kind, toy_target_dir: Path, tmp_path: Path):
    config, module = saved(kind, toy_target_dir, tmp_path / "d")
    started = as_started(config)
    assert started.kind == kind
    assert started.drafts() == module.config.num_draft_tokens
    assert started.draft_vocab_size == len(FEW_TOKENS)
    for name, value in OPTIONS[kind].items():
        assert getattr(started, name) == value
    if kind == "dflash":
        made: DFlashOptions = started.dflash
        assert (made.selector_top_k, made.conv_kernel_size, made.slot_context) == (4, 2, False)
        assert (made.num_hidden_layers, made.block_size) == (module.config.num_hidden_layers, module.config.block_size)
    assert as_started(CONFIG) == CONFIG


def test_another_shape_than_the_drafter_s_is_refused(toy_target_dir: Path, tmp_path: Path):
    config, _ = saved("dflash", toy_target_dir, tmp_path / "d")
    as_started(replace(config, kind="dflash", dflash=as_started(config).dflash))  # the same, said twice
    for change, name in (
        ({"kind": "independent"}, "kind is independent, but init_from .* has dflash; leave kind out"),
        ({"draft_vocab_size": 9}, f"draft_vocab_size is 9, but init_from .* has {len(FEW_TOKENS)}"),
        ({"kind": "dflash", "dflash": DFlashOptions(block_size=3)}, "dflash is .*block_size=3"),
    ):
        with pytest.raises(TrainError, match=name):
            as_started(replace(config, **change))


@pytest.mark.parametrize("kind", list(MAKERS))
def test_weights_and_vocabulary_are_the_drafters(kind, toy_target_dir: Path, tmp_path: Path):
    config, module = saved(kind, toy_target_dir, tmp_path / "d")
    found = started_module(config.init_from, toy_target_dir)
    assert found.training
    assert all(p.requires_grad for p in found.parameters())
    vocabulary = started_vocabulary(config)
    assert vocabulary.tolist() == list(FEW_TOKENS) == found.draft_vocab_ids.tolist()
    for name, tensor in module.named_parameters():
        if name != "fc.weight":  # the scale of the taps is folded into it
            assert torch.equal(dict(found.named_parameters())[name], tensor), name


def test_a_whole_vocabulary_is_found_whole(toy_target_dir: Path, tmp_path: Path):
    config, _ = saved("dflash", toy_target_dir, tmp_path / "d", vocab_ids=tuple(range(260)))
    assert started_vocabulary(config).tolist() == list(range(260))
    assert started_vocabulary(CONFIG) is None


def test_other_layers_and_no_drafter_are_refused(toy_target_dir: Path, tmp_path: Path):
    config, _ = saved("recursive", toy_target_dir, tmp_path / "d")
    check_start(config, TAPS)
    check_start(CONFIG, (7,))
    with pytest.raises(TrainError, match=r"reads the target's layers 0, 1, the features are of 1; generate"):
        check_start(config, (1,))
    with pytest.raises(CheckpointError):
        as_started(replace(CONFIG, init_from=str(tmp_path / "nowhere")))


def test_an_assistant_goes_on_with_the_layers_that_it_reads(tmp_path: Path):
    target, _, module = toy_assistant(tmp_path, "last layers share")
    layers = module.config.target_layer_ids
    save_checkpoint(tmp_path / "d", module, {"target_fingerprint": target_fingerprint(target, layers)})
    config = as_started(replace(CONFIG, init_from=str(tmp_path / "d"), online=OnlineOptions()))
    assert (config.kind, config.drafts(), config.draft_vocab_size) == ("gemma-assistant", 3, 260)
    assert tapped_layers(config, target_of(target), None) == layers
    check_start(config, layers)
    with pytest.raises(TrainError, match=r"--layers 1,2,5"):
        check_start(config, (1, 3, 5))
    found = started_module(config.init_from, target)
    assert all(p.requires_grad for p in found.parameters())
    assert sum(p.numel() for p in found.parameters()) == sum(p.numel() for p in module.parameters())
    assert started_vocabulary(config).tolist() == list(range(260))
    with pytest.raises(TrainError, match="or --init-from what `draftloop import` made"):
        replace(CONFIG, kind="gemma-assistant")
