"""The options of `draftloop train`: what is refused, by name, and what they make of a fresh drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.dflash import DFlashModule
from drafters.losses import LossConfig
from drafters.mtp import IndependentHeads, MedusaHead
from drafters.target import load_model, load_target
from pipelines.fresh_drafter import fresh_drafter
from pipelines.mask_token import mask_token
from pipelines.rollout_schema import Rollout
from pipelines.step_config import StepConfig
from pipelines.train_config import DFlashOptions, IndependentOptions, TrainConfig, TrainError
from tests.toy_folder import PAD_ID, TURN_END_ID, save_toy_target

CONFIG = TrainConfig(rollouts=("r",), output="o")


def with_loss(**changes: Any) -> dict[str, Any]:
    return {"steps": StepConfig(loss=LossConfig(**changes))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "tree"}, "kind is tree; give recursive or independent or dflash"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0; give at least 1"),
        ({"parity_prompts": 0}, "parity_prompts is 0; give at least 1"),
        ({"draft_vocab_size": -1}, "draft_vocab_size is -1; give 0 for all tokens, or more"),
        (
            {"independent": IndependentOptions(own_lm_head=True)},
            "own_lm_head is True; give it to kind independent only, not to recursive",
        ),
        (
            {"independent": IndependentOptions(shared_trunk=True), "kind": "dflash"},
            "shared_trunk is True; give it to kind independent only, not to dflash",
        ),
        (
            {"dflash": DFlashOptions(slot_context=False)},
            "slot_context is False; give it to kind dflash only, not to recursive",
        ),
        (
            {"dflash": DFlashOptions(block_size=16), "kind": "independent"},
            "block_size is 16; give it to kind dflash only, not to independent",
        ),
        ({"dflash": DFlashOptions(block_size=1), "kind": "dflash"}, "block_size is 1; give at least 2"),
        (
            {"num_draft_tokens": 4, "kind": "dflash"},
            "num_draft_tokens is 4; give block_size instead: one less is drafted",
        ),
        (with_loss(kind="l1"), "loss is l1; give cross_entropy or kl"),
        (with_loss(weights="flat"), "loss_weights is flat; give geometric or exponential or dpace"),
        (with_loss(rho=1.5), "rho is 1.5; give more than 0 and at most 1"),
        (with_loss(weights="exponential", gamma=0.0), "gamma is 0.0; give more than 0"),
        (with_loss(weights="dpace", rho=0.5), "rho is 0.5; give it to geometric loss weights only"),
        (with_loss(weights="geometric", gamma=4.0), "gamma is 4.0; give it to exponential loss weights only"),
        (with_loss(smoothing=0.1), "smoothing is 0.1; give it to dpace loss weights only"),
    ],
)
def test_a_wrong_option_is_named(change, message):
    with pytest.raises(TrainError) as caught:
        replace(CONFIG, **change)
    assert str(caught.value) == message


def test_drafts_follow_from_the_kind():
    assert CONFIG.drafts() == 5
    assert replace(CONFIG, num_draft_tokens=3, kind="independent").drafts() == 3
    assert replace(CONFIG, kind="dflash").drafts() == 7
    assert replace(CONFIG, kind="dflash", dflash=DFlashOptions(block_size=16)).drafts() == 15


# -- fresh drafters ---------------------------------------------------------------------------------------------------

VOCABULARY = torch.arange(5, 25)


def test_independent_options_reach_the_module(toy_target_dir):
    options = IndependentOptions(shared_trunk=True, anchor_embedding=True, own_lm_head=True, medusa_heads=True)
    config = replace(CONFIG, kind="independent", independent=options, draft_vocab_size=3, num_draft_tokens=2)
    module = fresh_drafter(config, toy_target_dir, (0, 1), VOCABULARY)
    assert isinstance(module, IndependentHeads)
    assert module.trunk is not None
    assert module.anchor_proj is not None
    assert all(isinstance(head, MedusaHead) for head in module.heads)
    assert module.draft_vocab_ids.tolist() == VOCABULARY.tolist()
    assert torch.equal(module.lm_heads[1], module.lm_head_WD)


def test_dflash_options_reach_the_module(toy_target_dir):
    options = DFlashOptions(
        block_size=4,
        num_hidden_layers=2,
        selector_top_k=99,
        conv_kernel_size=2,
        confidence_head=True,
        slot_context=True,
    )
    config = replace(CONFIG, kind="dflash", dflash=options)
    module = fresh_drafter(config, toy_target_dir, (0, 1), VOCABULARY, mask_token_id=259)
    assert isinstance(module, DFlashModule)
    made = module.config
    assert (made.block_size, made.num_hidden_layers, made.conv_kernel_size, made.mask_token_id) == (4, 2, 2, 259)
    assert (made.confidence_head, made.slot_context, made.num_target_layers) == (True, True, 2)
    assert made.selector_top_k == 20  # never more than can be drafted


def test_dflash_can_start_as_the_targets_last_layers(toy_target_dir):
    options = DFlashOptions(num_hidden_layers=1, init_from_target_layers=True)
    config = replace(CONFIG, kind="dflash", dflash=options)
    module = fresh_drafter(config, toy_target_dir, (0, 1), VOCABULARY, mask_token_id=259)
    last = load_model(toy_target_dir, torch.float32).model.layers[-1]
    assert torch.equal(module.layers[0].self_attn.k_proj.weight, last.self_attn.k_proj.weight)
    assert torch.equal(module.layers[0].mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert module.config.num_key_value_heads == 2
    too_many = replace(config, dflash=replace(options, num_hidden_layers=3))
    with pytest.raises(TrainError, match="num_hidden_layers is 3; the target has 2"):
        fresh_drafter(too_many, toy_target_dir, (0, 1), VOCABULARY, mask_token_id=259)


def test_kl_needs_the_last_layers_features():
    from types import SimpleNamespace

    from pipelines.train import check_taps

    target: Any = SimpleNamespace(num_layers=30)
    kl = replace(CONFIG, **with_loss(kind="kl"))
    check_taps(kl, target, (1, 15, 29))
    check_taps(CONFIG, target, (1, 15, 26))
    with pytest.raises(TrainError, match=r"last layer \(29\), and the rollouts tap 1, 15, 26; generate them with"):
        check_taps(kl, target, (1, 15, 26))


# -- the mask token ---------------------------------------------------------------------------------------------------


class Rollouts:
    """A rollout set in memory."""

    def __init__(self, *responses: list[int]):
        self.responses = responses

    def rollouts(self, with_features: bool) -> list[Rollout]:
        assert not with_features
        fixed: dict[str, Any] = {"finish_reason": "stop", "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
        return [
            Rollout(id=str(i), category="", prompt_ids=[1], response_ids=r, max_new_tokens=9, **fixed)
            for i, r in enumerate(self.responses)
        ]


def with_tokens(folder: Path, **changes: Any) -> Path:
    """The toy target with another vocabulary, further special tokens, or a mask token."""
    extra, mask = changes.pop("extra", []), changes.pop("mask", None)
    save_toy_target(folder, **changes)
    target = load_target(str(folder))
    target.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *extra]})
    if mask:
        target.tokenizer.add_special_tokens({"mask_token": mask})
    target.tokenizer.save_pretrained(folder)
    return folder


def test_rows_past_the_tokenizer_come_before_special_tokens(toy_target_dir):
    assert mask_token(load_target(str(toy_target_dir)), [Rollouts([2, 3])], None) == 259  # 259 tokens, 260 rows


def test_an_unused_special_token_that_neither_ends_nor_pads_nor_is_in_the_template(tmp_path):
    folder = with_tokens(tmp_path / "t", vocab_size=262, extra=["<file>", "<repo>", "<issue>"])
    target = load_target(str(folder))
    assert len(target.tokenizer) == 262
    assert mask_token(target, [Rollouts([2, 3])], None) == 261
    assert mask_token(target, [Rollouts([2, 261])], None) == 260
    with pytest.raises(TrainError, match="no token that is never used"):
        mask_token(target, [Rollouts([259, 260, 261])], None)  # what is left starts a turn, ends it, or pads


def test_the_tokenizers_own_mask_token_comes_first(tmp_path):
    folder = with_tokens(tmp_path / "t", vocab_size=265, extra=["<mask>", "<repo>"], mask="<mask>")
    assert mask_token(load_target(str(folder)), [Rollouts([2])], None) == 259


@pytest.mark.parametrize(
    ("wanted", "message"),
    [(260, "below the vocabulary's 260"), *((used, "occurs in text") for used in (3, TURN_END_ID, PAD_ID))],
)
def test_a_mask_token_that_is_given_must_be_unused(wanted, message, toy_target_dir):
    target = load_target(str(toy_target_dir))
    with pytest.raises(TrainError, match=f"mask_token_id is {wanted}.*{message}"):
        mask_token(target, [Rollouts([2, 3])], wanted)
    assert mask_token(target, [Rollouts([2, 3])], 77) == 77


def test_options_are_plain_json():
    from dataclasses import asdict

    assert json.loads(json.dumps(asdict(CONFIG)))["dflash"]["block_size"] == 8
