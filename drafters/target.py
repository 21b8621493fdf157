"""The target: its config, tokenizer and weights from a local folder, and the fingerprint that ties drafters to it.

In: a spec as `resolve_target` takes it, or the folder that it returns. Out: `Target` (no weights), the model itself, or
the few tensors that drafters borrow. Every stage of the command line starts here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.remote import first_line
from drafters.target_source import (
    Progress,
    TargetError,
    quiet_transformers,
    resolve_target,
    safetensors_header,
    sampled_digest,
    tokenizer_files,
    weight_files,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

__all__ = [
    "NUM_TAPS",
    "SharedWeights",
    "Target",
    "TargetError",
    "chat_template_hash",
    "check_shareable",
    "dflash_target_layer_ids",
    "fingerprint_of",
    "fingerprinted",
    "load_model",
    "load_target",
    "mtp_target_layer_ids",
    "part_digests",
    "resolve_target",
    "shared_weights",
    "target_fingerprint",
    "tokenizer_hash",
]

# Keys of config.json that say how a file was written and not what the model computes.
_UNRELATED_KEYS = ("transformers_version", "dtype", "torch_dtype", "use_cache", "name_or_path", "quantization_config")

_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight")
_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out)\.weight")
_FINAL_NORM = re.compile(
    r"((model|transformer|gpt_neox|language_model|decoder)\.)*(norm|ln_f|final_layer_?norm)\.weight"
)
_LAYER = re.compile(r"(.*\.)?layers\.(\d+)\.")


@dataclass(frozen=True)
class Target:
    """A target without its weights."""

    path: Path  # local folder
    config: PretrainedConfig
    tokenizer: Any  # of transformers
    eos_token_ids: tuple[int, ...]  # ascending; each ends a sequence
    generation_config: GenerationConfig

    @property
    def max_len(self) -> int:
        """Tokens that the target's positions cover."""
        return int(self.config.get_text_config().max_position_embeddings)

    @property
    def num_layers(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def width(self) -> int:
        return int(self.config.get_text_config().hidden_size)


def load_target(spec: str, *, cache_dir: Path | None = None, on_progress: Progress | None = None) -> Target:
    """Config and tokenizer of a target; cheap, since no weights are read. Raises TargetError."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    path = resolve_target(spec, cache_dir=cache_dir, on_progress=on_progress)
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(path)
            tokenizer = AutoTokenizer.from_pretrained(path)
        except Exception as error:  # transformers raises a dozen kinds for files that it cannot make sense of
            reason = first_line(error)
            raise TargetError(f"target {path} cannot be loaded ({reason}); check the folder's config") from error
        if (path / "generation_config.json").exists():
            generation = GenerationConfig.from_pretrained(path)
        else:
            generation = GenerationConfig.from_model_config(config)
    return Target(path, config, tokenizer, _eos_token_ids(generation, config, tokenizer), generation)


def _eos_token_ids(generation: Any, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """What the generation config names (else the config), and the tokenizer's own: templates end a turn with that."""
    named = generation.eos_token_id
    if named is None:
        named = config.get_text_config().eos_token_id
    ids = set(named if isinstance(named, (list, tuple)) else [named]) | {tokenizer.eos_token_id}
    return tuple(sorted(int(i) for i in ids if i is not None))


def load_model(path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The whole target, in eval mode and without gradients."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


def tokenizer_hash(path: Path) -> str:
    """sha256 over the files that define token ids."""
    digest = hashlib.sha256()
    for file in tokenizer_files(path):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:32]


def chat_template_hash(path: Path) -> str:
    """sha256 over the chat template, wherever the folder keeps it; of the empty text if there is none."""
    template: Any = ""
    jinja, config = path / "chat_template.jinja", path / "tokenizer_config.json"
    if jinja.exists():
        template = jinja.read_text(encoding="utf-8")
    elif config.exists():
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") or ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def target_fingerprint(path: Path, target_layer_ids: Sequence[int] = ()) -> str:
    """Hash of what makes a drafter valid for a target: config, tokenizer, chat template, weights, tapped layers.

    Weights count by tensor names, shapes, dtypes and bytes sampled over each file, so that 140 GB take a moment.
    """
    return fingerprint_of(fingerprinted(path), target_layer_ids)


def fingerprinted(path: Path) -> dict[str, Any]:
    """What of a target folder goes into its fingerprint, part by part: config, tokenizer, chat_template, weights."""
    weights = []
    for file in weight_files(path):
        header, start = safetensors_header(file)
        tensors = sorted((name, entry["dtype"], entry["shape"]) for name, entry in header.items())
        weights.append([tensors, sampled_digest(file, start)])
    return {
        "config": _normalised(json.loads((path / "config.json").read_text(encoding="utf-8"))),
        "tokenizer": tokenizer_hash(path),
        "chat_template": chat_template_hash(path),
        "weights": weights,
    }


def fingerprint_of(parts: Mapping[str, Any], target_layer_ids: Sequence[int]) -> str:
    """The fingerprint that these parts and tapped layers give together."""
    return _digest({**parts, "target_layer_ids": list(target_layer_ids)})


def part_digests(path: Path) -> dict[str, str]:
    """A hash for each part of a target's fingerprint: which of them differs when two fingerprints do."""
    return {name: _digest(part) for name, part in fingerprinted(path).items()}


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def target_on_this_node(name: str, path: str, target_layer_ids: Sequence[int], fingerprint: str) -> Path:
    """The folder of a target that another node has at `path`; this node may have a copy of its own elsewhere.

    Raises TargetError if there is none, or if it is another target than `fingerprint` says.
    """
    here = Path(path)
    if not here.exists():
        here = resolve_target(name)
    if target_fingerprint(here, target_layer_ids) != fingerprint:
        raise TargetError(f"target {name} differs between the driver and this node; give both the same files")
    return here


def _normalised(config: Any) -> Any:
    if isinstance(config, dict):
        kept = {key: value for key, value in config.items() if not key.startswith("_") and key not in _UNRELATED_KEYS}
        return {key: _normalised(value) for key, value in kept.items()}
    return [_normalised(item) for item in config] if isinstance(config, list) else config


@dataclass(frozen=True)
class SharedWeights:
    """What drafters borrow from the target, frozen."""

    embedding_VD: Tensor
    lm_head_VD: Tensor  # the same tensor as the embedding where the target ties them
    final_norm_D: Tensor  # what the RMSNorm before the LM head multiplies by
    rms_eps: float
    embedding_scale: float = 1.0  # the target multiplies its embeddings by it
    logit_softcap: float | None = None  # its logits are softcap * tanh(logits / softcap)


def check_shareable(path: Path) -> None:
    """Raise TargetError unless drafters can borrow this target's weights; reads the config and headers only."""
    _shared_tensors(path)


def shared_weights(path: Path, dtype: torch.dtype) -> SharedWeights:
    """Embedding, LM head and final norm, read from the safetensors files without building the model."""
    from safetensors import safe_open

    def read(name: str) -> Tensor:
        with safe_open(files[name], framework="pt") as opened:
            return opened.get_tensor(name).to(dtype)

    config, (embedding_name, head_name, norm_name), files = _shared_tensors(path)
    embedding = read(embedding_name)
    head = embedding if head_name is None else read(head_name)
    family = gemma_family(config["model_type"])
    return SharedWeights(
        embedding,
        head,
        read(norm_name) + 1 if family.norms_add_one else read(norm_name),
        float(config.get("rms_norm_eps", 1e-6)),
        embedding.shape[1] ** 0.5 if family.scales_embeddings else 1.0,
        config.get("final_logit_softcapping"),
    )


@dataclass(frozen=True)
class GemmaFamily:
    """How a target computes with weights that drafters borrow, where Gemma differs from all others."""

    scales_embeddings: bool = False  # by the root of the width
    norms_add_one: bool = False  # an RMSNorm multiplies by 1 + its weight


_GEMMA_FAMILIES = dict.fromkeys(("gemma", "gemma2", "gemma3_text"), GemmaFamily(True, True))
_GEMMA_FAMILIES |= dict.fromkeys(("gemma4_text", "gemma4_unified_text"), GemmaFamily(scales_embeddings=True))


def gemma_family(model_type: str) -> GemmaFamily:
    """Of a text config's model type. Raises KeyError for a Gemma that is not known."""
    return _GEMMA_FAMILIES[model_type] if model_type.startswith("gemma") else GemmaFamily()


def is_mtp_tensor(name: str, num_hidden_layers: int | None) -> bool:
    """Whether a tensor of the target's files belongs to MTP layers: they follow its own, or have a prefix."""
    layer = _LAYER.match(name)
    behind = layer is not None and num_hidden_layers is not None and int(layer.group(2)) >= num_hidden_layers
    return behind or "mtp" in name.split(".")


def _shared_tensors(path: Path) -> tuple[dict[str, Any], tuple[str, str | None, str], dict[str, Path]]:
    """Config, names of embedding, LM head (None: the embedding) and final norm, and the files. Raises TargetError."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config = config | config.get("text_config", {})
    if str(config["model_type"]).startswith("gemma") and config["model_type"] not in _GEMMA_FAMILIES:
        # norms and embeddings of this family differ between versions: borrowed as they are, they may be wrong
        raise TargetError(
            f"target {path} is of the {config['model_type']} family, whose norms drafters do not share yet"
        )
    layers = config.get("num_hidden_layers")
    named = ((name, file) for file in weight_files(path) for name in safetensors_header(file)[0])
    # MTP layers may have copies of their own
    files = {name: file for name, file in named if not is_mtp_tensor(name, layers)}

    def find(pattern: re.Pattern[str]) -> str | None:
        return next((name for name in sorted(files, key=len) if pattern.fullmatch(name)), None)

    embedding, norm = find(_EMBEDDING), find(_FINAL_NORM)
    if embedding is None or norm is None:
        lacking = "embedding" if embedding is None else "final norm"
        raise TargetError(f"target {path} has no {lacking} under a known name; its architecture is not supported")
    head = None if config.get("tie_word_embeddings") else find(_HEAD)
    return config, (embedding, head, norm), files


NUM_TAPS = 3  # layers that are tapped where nobody names them; the default of every stage that taps


def mtp_target_layer_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Layers to tap for MTP heads, which read the last hidden state: the last layer, and others spread below it."""
    count = min(num_taps, num_layers)
    if count <= 1:
        return (num_layers - 1,) * count
    lowest = 1 if num_layers > count else 0
    return tuple(round(lowest + i * (num_layers - 1 - lowest) / (count - 1)) for i in range(count))


def dflash_target_layer_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Layers to tap for DFlash, as its authors do: round(1 + i (L - 4) / (n - 1)); shallow targets have fewer."""
    count = min(num_taps, num_layers)
    if count <= 0:
        return ()
    if count == 1:
        return (num_layers // 2,)
    ids = [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
    if len(set(ids)) < count or not 0 <= min(ids) <= max(ids) < num_layers:
        ids = [round(i * (num_layers - 1) / (count - 1)) for i in range(count)]
    return tuple(sorted(ids))
