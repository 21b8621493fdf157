"""`draftloop export` and `draftloop import`: a checkpoint of ours into another project's layout, and the way back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.checkpoint import CONFIG, PROVENANCE, WEIGHTS, load_module, read_provenance, save_checkpoint, write_folder
from drafters.formats import FORMATS, OWN, recognise
from drafters.formats.foreign_config import FormatError
from drafters.formats.foreign_folder import FileFact, file_facts
from drafters.remote import first_line
from drafters.remote_checkpoint import local_checkpoint
from drafters.target import Target, load_target, part_digests, target_fingerprint

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors"]
_OF_TRAINING = ("chat_options", "chat_template_hash")  # that a drafter's service is compared with


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What `draftloop export` wrote."""

    drafter: str
    target: str  # as servers take it
    format: str
    output: str
    draft_tokens: int  # per round, at most
    files: list[FileFact]
    notes: list[str]
    commands: dict[str, str]  # server -> how it loads the folder


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What `draftloop import` read and wrote."""

    source: str
    target: str
    format: str
    output: str
    kind: str  # the module's class
    parameters: int
    draft_tokens: int  # per round, at most
    target_layer_ids: list[int]
    taken: dict[str, str]  # what was taken for keys that the source lacks, and why
    read: list[FileFact]
    files: list[FileFact]


def export_checkpoint(drafter: str, target_name: str, name: str, output: Path) -> ExportReport:
    """Write a drafter in another project's layout. Raises FormatError if that cannot say it."""
    if not FORMATS[name].writes:
        writes = ", ".join(key for key, known in FORMATS.items() if known.writes)
        raise FormatError(f"drafters are not exported to {name}; give one of {writes}")
    path, target = local_checkpoint(drafter), load_target(target_name)
    _check_output(output, path, target.path)
    served = _as_servers_take_it(target_name, target)
    layout = FORMATS[name].contents(load_module(path, target.path), target, served)
    provenance = read_provenance(path) | {
        "target_fingerprint": target_fingerprint(target.path, layout.target_layer_ids),
        "exported": {"format": name, "drafter": {fact.name: fact.sha256 for fact in file_facts(path)}},
    }
    write_folder(output, layout.config, layout.tensors, provenance, {"format": "pt"})
    return ExportReport(
        drafter=drafter,
        target=served,
        format=name,
        output=str(output),
        draft_tokens=layout.draft_tokens,
        files=file_facts(output),
        notes=list(layout.notes),
        commands=_commands(name, layout.config, served, output, layout.draft_tokens),
    )


def import_checkpoint(source: str, target_name: str, output: Path, name: str = "auto") -> ImportReport:
    """Write a foreign drafter as a checkpoint of ours. Raises FormatError, naming the key or tensor that is wrong."""
    target = load_target(target_name)
    folder = _source_folder(source, target)
    _check_output(output, folder, target.path)
    if name == "auto":
        name = OWN if source == OWN else recognise(folder, target.path)
    module, taken = FORMATS[name].read(folder, target)
    fingerprint = target_fingerprint(target.path, module.config.target_layer_ids)
    read = [] if folder == target.path else file_facts(folder)  # the target is known by its fingerprint
    provenance: dict[str, Any] = {
        "target_fingerprint": fingerprint,
        "target_parts": part_digests(target.path),
        "imported": {
            "source": source,
            "format": name,
            "taken": taken,
            "files": {fact.name: fact.sha256 for fact in read},
        },
    }
    provenance |= _checked_provenance(folder, fingerprint)
    save_checkpoint(output, module, provenance)
    return ImportReport(
        source=source,
        target=target_name,
        format=name,
        output=str(output),
        kind=type(module).__name__,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        draft_tokens=module.config.num_draft_tokens,
        target_layer_ids=list(module.config.target_layer_ids),
        taken=taken,
        read=read,
        files=file_facts(output),
    )


def _source_folder(source: str, target: Target) -> Path:
    """Where a source lies: the target's own folder, another one, or a snapshot of a Hugging Face id."""
    if source == OWN:
        return target.path
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or not _HUB_ID.fullmatch(source):
        raise FormatError(f"no drafter at {source}; give a folder, a Hugging Face id, or the word {OWN}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(source, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise FormatError(
            f"{source} is no folder and could not be fetched from the Hugging Face hub ({first_line(error)[:160]}); "
            "give a folder"
        ) from error


def _check_output(output: Path, source: Path, target: Path) -> None:
    """Refuse to write over what was read, or over anything that is no drafter."""
    if output.resolve() in (source.resolve(), target.resolve()):
        raise FormatError(f"the output {output} is what is read; give another folder")
    if output.exists() and not output.is_dir():
        raise FormatError(f"the output {output} is a file; give a folder")
    known = {CONFIG, WEIGHTS, PROVENANCE, "evaluation.json"}
    others = sorted({file.name for file in output.iterdir()} - known) if output.is_dir() else []
    if others or (output.is_dir() and any(output.iterdir()) and not (output / PROVENANCE).is_file()):
        raise FormatError(f"the output {output} holds other files; give a new folder")


def _checked_provenance(folder: Path, fingerprint: str) -> dict[str, Any]:
    """What a folder that was exported says of its training. Raises FormatError if it was made for another target."""
    if not (folder / PROVENANCE).is_file():
        return {}
    said = read_provenance(folder)
    expected = said.get("target_fingerprint")
    if expected not in (None, fingerprint):
        raise FormatError(
            f"{folder} was exported for another target (fingerprint {expected}, not {fingerprint}); give its own target"
        )
    return {key: said[key] for key in _OF_TRAINING if key in said}


def _as_servers_take_it(spec: str, target: Target) -> str:
    """The name that another server loads the target by: a hub id as it was given, else the folder."""
    is_hub_id = _HUB_ID.fullmatch(spec) is not None and not Path(spec).exists()
    return spec if is_hub_id else str(target.path)


def _commands(name: str, config: dict[str, Any], target: str, output: Path, draft_tokens: int) -> dict[str, str]:
    """Server -> the command line that loads the folder, as its documentation or source has it."""
    method = "medusa" if name == "medusa" else "dflash"
    spec = f'{{"method": "{method}", "model": "{output}", "num_speculative_tokens": {draft_tokens}}}'
    commands = {"vLLM": f"vllm serve {target} --speculative-config '{spec}'"}
    if name == "speculators":
        commands = {"vLLM": f"vllm serve {output}"}
    if name == "z-lab":
        commands["SGLang"] = (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {output} --speculative-num-draft-tokens {draft_tokens + 1}"
        )
        commands["dflash (Python)"] = f'dflash.model.{config["architectures"][0]}.from_pretrained("{output}")'
    return commands
