"""Drafter checkpoints: what was saved comes back, and whatever does not fit is refused by name, in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import checkpoint
from drafters.checkpoint import (
    CheckpointError,
    as_drafter,
    load_module,
    read_config,
    read_provenance,
    save_checkpoint,
)
from drafters.drafter_module import DrafterModule
from drafters.target import load_model, target_fingerprint
from tests.toy_folder import save_toy_target
from tests.toy_mtp import TAPS, rows_of, toy_mtp

KINDS = {
    "recursive": {"kind": "recursive"},
    "independent": {"kind": "independent"},
    "own LM heads": {"kind": "independent", "own_lm_head": True},
    "few tokens": {"kind": "recursive", "vocab_ids": [3, 99, 258, 259]},
}


def drafter_of(target: Path, **options) -> DrafterModule:
    return toy_mtp(load_model(target, torch.float32), **({"vocab_size": 260, "draft_vocab_size": 260} | options))


@pytest.fixture(scope="module")
def provenance(toy_target_dir: Path) -> dict:
    return {"target_fingerprint": target_fingerprint(toy_target_dir, TAPS), "seed": 3, "rollouts": ["abc"]}


@pytest.fixture
def saved(toy_target_dir: Path, provenance: dict, tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "drafter", drafter_of(toy_target_dir), provenance)
    return tmp_path / "drafter"


def logits(module: DrafterModule) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 260, (2, 15), generator=generator)
    batch = rows_of(ids, torch.randn(2, 15, 64, generator=generator), torch.tensor([[3, 9], [0, 12]]))
    with torch.no_grad():
        return module(batch).logits_BAKW


@pytest.mark.parametrize("name", list(KINDS))
def test_saved_and_loaded_gives_the_same_logits(name, toy_target_dir: Path, provenance: dict, tmp_path: Path):
    module = drafter_of(toy_target_dir, **KINDS[name])
    save_checkpoint(tmp_path / "a" / "drafter", module, provenance)
    loaded = load_module(tmp_path / "a" / "drafter", toy_target_dir)
    assert type(loaded) is type(module)
    assert loaded.config == module.config
    assert torch.equal(logits(loaded), logits(module))
    assert loaded.training is False
    assert not any(p.requires_grad for p in loaded.parameters())
    assert as_drafter(load_module(tmp_path / "a" / "drafter", toy_target_dir)).target_layer_ids == TAPS


def test_the_folder_holds_three_files_and_no_pickle(saved: Path, provenance: dict):
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors", "provenance.json"]
    assert list(saved.parent.iterdir()) == [saved]
    assert read_provenance(saved) == provenance
    weights = (saved / "model.safetensors").read_bytes()
    names = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
    assert "draft_vocab_ids" in names
    assert not [name for name in names if "embedding_VD" in name or "lm_head_WD" in name], "the target's are borrowed"


def test_provenance_without_fingerprint_is_refused(toy_target_dir: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="target_fingerprint"):
        save_checkpoint(tmp_path / "drafter", drafter_of(toy_target_dir), {"seed": 1})
    assert list(tmp_path.iterdir()) == []


def test_saving_over_an_old_one_replaces_it_whole(saved: Path, toy_target_dir: Path, provenance: dict):
    (saved / "evaluation.json").write_text("{}")  # of the old drafter: it must not outlive it
    other = drafter_of(toy_target_dir, kind="independent", seed=1)
    save_checkpoint(saved, other, provenance | {"seed": 4})
    assert torch.equal(logits(load_module(saved, toy_target_dir)), logits(other))
    assert read_provenance(saved)["seed"] == 4
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors", "provenance.json"]
    assert list(saved.parent.iterdir()) == [saved]


def test_failed_save_leaves_the_old_one(saved: Path, toy_target_dir: Path, provenance: dict, monkeypatch):
    before = logits(load_module(saved, toy_target_dir))

    def full(*_args, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(saved, drafter_of(toy_target_dir, seed=1), provenance)
    assert torch.equal(logits(load_module(saved, toy_target_dir)), before)
    assert list(saved.parent.iterdir()) == [saved]


def test_another_target_is_refused(saved: Path, tmp_path: Path):
    other = save_toy_target(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="made for another target") as caught:
        load_module(saved, other)
    assert "\n" not in str(caught.value)


def change(folder: Path, **values) -> None:
    """Set keys of config.json; None takes one away."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"head_dim": None}, "lacks key 'head_dim'"),
        ({"num_heads": 3}, "has the unknown key 'num_heads'"),
        ({"architectures": ["DFlashDraftModel"]}, "lacks key 'block_size'"),
        ({"architectures": None}, "names architecture None"),
        ({"kind": "tree"}, "has 'tree' as 'kind'"),
        ({"num_draft_tokens": "5"}, "has '5' as 'num_draft_tokens'"),
        ({"num_draft_tokens": 0}, "has 0 as 'num_draft_tokens'"),
        ({"own_lm_head": 1}, "has 1 as 'own_lm_head'"),
        ({"target_layer_ids": 1}, "has 1 as 'target_layer_ids'"),
        ({"rope_theta": "x"}, "has 'x' as 'rope_theta'"),
        ({"num_key_value_heads": 3}, "has heads that its KV heads do not divide"),
        ({"head_dim": 7}, "has an odd head_dim"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_key(values, named, saved: Path, toy_target_dir: Path):
    change(saved, **values)
    for read in (lambda: load_module(saved, toy_target_dir), lambda: read_config(saved)):
        with pytest.raises(CheckpointError, match=named) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_weights_of_another_shape_are_refused(saved: Path, toy_target_dir: Path):
    change(saved, intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be loaded") as caught:
        load_module(saved, toy_target_dir)
    assert "\n" not in str(caught.value)


def test_draft_tokens_outside_the_vocabulary_are_refused(saved: Path, toy_target_dir: Path):
    weights = load_file(saved / "model.safetensors")
    weights["draft_vocab_ids"][0] = -1
    save_file(weights, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match="drafts tokens outside the vocabulary"):
        load_module(saved, toy_target_dir)


@pytest.mark.parametrize("change", ["twice", "out of order"])
def test_a_draft_vocabulary_that_does_not_ascend_is_refused(change, saved: Path, toy_target_dir: Path):
    """A tree could have equal siblings."""
    weights = load_file(saved / "model.safetensors")
    ids = weights["draft_vocab_ids"]
    weights["draft_vocab_ids"] = torch.cat([ids[:1], ids[:-1]]) if change == "twice" else ids.flip(0)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match="draft_vocab_ids that do not ascend"):
        load_module(saved, toy_target_dir)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_weights_are_refused(keep, saved: Path, toy_target_dir: Path):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be loaded") as caught:
        load_module(saved, toy_target_dir)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "provenance.json"])
def test_a_missing_file_is_named(name, saved: Path, toy_target_dir: Path):
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_module(saved, toy_target_dir)


@pytest.mark.parametrize("name", ["config.json", "provenance.json"])
@pytest.mark.parametrize("text", ["", "[1]", '{"architectures": ', "\xff"])
def test_damaged_json_is_named(name, text, saved: Path, toy_target_dir: Path):
    (saved / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=name) as caught:
        load_module(saved, toy_target_dir)
    assert "\n" not in str(caught.value)


def test_what_is_no_drafter_folder_is_refused(toy_target_dir: Path, saved: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="no drafter at"):
        load_module(tmp_path / "nowhere", toy_target_dir)
    with pytest.raises(CheckpointError, match="no drafter at"):
        load_module(saved / "config.json", toy_target_dir)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM"):
        load_module(toy_target_dir, toy_target_dir)
    moved = shutil.copytree(saved, tmp_path / "moved")
    load_module(Path(moved), toy_target_dir)


def test_a_drafter_of_another_version_is_still_known_as_one(tmp_path):
    """So that training may replace it, where a target's folder must be left alone."""
    for name, content, expected in (
        ("older", '{"architectures": ["DraftloopMtpModel"], "num_steps": 5}', True),
        ("target", '{"architectures": ["LlamaForCausalLM"]}', False),
        ("damaged", '{"architectures": ["Draft', False),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
        assert checkpoint.is_drafter(tmp_path / name) is expected
    assert not checkpoint.is_drafter(tmp_path)
    assert not checkpoint.is_drafter(tmp_path / "nothing")
