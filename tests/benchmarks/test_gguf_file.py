"""GGUF files of a target: what is written is read back as the same model."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.gguf_file import write_gguf
from drafters.target import Target, TargetError, load_model, load_target
from tests.toy_folder import TURN_END_ID, save_toy_target

MERGED_ID = 259  # the first one after the toy's special tokens
SHAPES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "wide heads": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}},
    "no grouping": {"num_key_value_heads": 4},
}


def save_target(folder: Path, **changes) -> Path:
    """A toy target whose norms are no ones, and whose tokenizer merges a pair, as those of GGUF files have to."""
    save_toy_target(folder, **changes)
    weights = load_file(folder / "model.safetensors")
    for i, name in enumerate(sorted(name for name in weights if "norm" in name)):
        weights[name] = torch.linspace(0.7, 1.3 + i / 100, len(weights[name]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokenizer["model"]["vocab"]["ab"] = MERGED_ID
    tokenizer["model"]["merges"] = [["a", "b"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("gguf") / "toy")


def logits_of(folder: Path) -> torch.Tensor:
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        return load_model(folder, torch.float32)(ids).logits


def read_back(file: Path, cache: Path) -> Target:
    """The file as transformers reads it, converted into a folder."""
    return load_target(str(file), cache_dir=cache)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_transformers_reads_the_same_model(tmp_path: Path, changes: dict):
    folder = save_target(tmp_path / "toy", **changes)
    write_gguf(folder, tmp_path / "toy.gguf")
    again = read_back(tmp_path / "toy.gguf", tmp_path / "cache")
    assert torch.equal(logits_of(again.path), logits_of(folder))
    assert again.tokenizer.encode("cab<|im_end|>") == [ord("c"), MERGED_ID, TURN_END_ID]
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []


def test_tokenizer_and_end_tokens_go_along(tmp_path: Path):
    target = load_target(str(save_target(tmp_path / "toy", vocab_size=262)))
    write_gguf(target.path, tmp_path / "toy.gguf")
    fields = gguf.GGUFReader(tmp_path / "toy.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    assert len(tokens) == len(types) == target.config.vocab_size == 262
    assert tokens[:260] == target.tokenizer.convert_ids_to_tokens(list(range(260)))
    assert tokens[260:] == ["[PAD260]", "[PAD261]"]
    kinds = gguf.TokenType
    assert types[255:] == [kinds.NORMAL, *[kinds.CONTROL] * 3, kinds.NORMAL, kinds.UNUSED, kinds.UNUSED]
    assert fields["tokenizer.ggml.merges"].contents() == ["a b"]
    assert (fields["tokenizer.ggml.eos_token_id"].contents(),) == target.eos_token_ids
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_formats_round_the_matrices_and_keep_the_norms(target_dir: Path, tmp_path: Path, dtype: str):
    write_gguf(target_dir, tmp_path / "half.gguf", dtype)
    weights = load_model(target_dir, torch.float32).state_dict()
    again = load_model(read_back(tmp_path / "half.gguf", tmp_path / "cache").path, torch.float32).state_dict()
    assert again.keys() == weights.keys()
    for name, tensor in weights.items():
        rounded = tensor if tensor.ndim == 1 else tensor.to(getattr(torch, dtype)).float()
        assert torch.equal(again[name], rounded), name


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"model_type": "mistral"}, "model type is mistral"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope type is linear"),
        ({"attention_bias": True}, "biases"),
    ],
)
def test_other_models_are_refused_in_one_line(target_dir: Path, tmp_path: Path, changes: dict, cause: str):
    folder = Path(shutil.copytree(target_dir, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(TargetError, match=cause) as caught:
        write_gguf(folder, tmp_path / "other.gguf")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.glob("*.gguf")) == []


def test_an_unknown_dtype_is_refused(target_dir: Path, tmp_path: Path):
    with pytest.raises(TargetError, match="dtype 'int8' is none of float32"):
        write_gguf(target_dir, tmp_path / "toy.gguf", "int8")
