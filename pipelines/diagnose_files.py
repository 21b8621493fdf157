"""A drafter's files looked at without drafting: whole, finite, and what the provenance says they are.

In: a checkpoint folder, its target, the chat options in use. Out: checks, with what could be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafters.checkpoint import CONFIG, PROVENANCE, WEIGHTS, CheckpointError, read_config, read_provenance
from drafters.drafter_module import DrafterConfig
from drafters.target import Target
from pipelines.diagnose_report import DAMAGED, RECORDED, Check
from serving.chat_options import ChatOptions, ChatTemplate, training_mismatch

MOST_NAMED = 3  # tensors in a line
COPY_AGAIN = "copy the drafter again from where it was trained, or train it anew"
OTHER_PROMPTS = "its prompts are made otherwise than those of its training"
AS_TRAINED = "serve with the template and options of the training, or train on prompts made as in service"


@dataclass
class DrafterFiles:
    """What a checkpoint folder holds; what cannot be read is missing, and a check says so."""

    folder: Path
    config: DrafterConfig | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        """Whether drafting with it would tell nothing."""
        return any(check.grade == "fault" and check.rank >= DAMAGED for check in self.checks)


def read_files(folder: Path) -> DrafterFiles:
    """Everything in the folder. Raises CheckpointError where there is no drafter at all."""
    if not (folder / CONFIG).exists():
        read_config(folder)  # says what is missing
    files, whole = DrafterFiles(folder), True
    try:
        files.config = read_config(folder)
    except CheckpointError as error:
        files.checks.append(_damage(CONFIG, "config", "its config.json cannot be used", str(error)))
        whole = False
    try:
        files.provenance = read_provenance(folder)
    except CheckpointError as error:
        evidence = f"{error}; so nothing says which target, prompts and layers it was trained with"
        says = "its provenance.json is missing or damaged"
        # that spoils nothing that can be measured
        files.checks.append(_damage(PROVENANCE, "files", says, evidence, RECORDED + 1))
        whole = False
    try:
        files.tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        says = "its weights are cut short or missing"
        files.checks.append(_damage(WEIGHTS, "files", says, f"{WEIGHTS} cannot be read ({reason})"))
        whole = False
    if whole:
        files.checks.append(Check(name="files", grade="ok", evidence=f"{CONFIG}, {WEIGHTS} and {PROVENANCE} are whole"))
    if files.tensors:
        files.checks += tensor_checks(files.tensors)
    return files


def _damage(name: str, cause: str, says: str, evidence: str, rank: float = DAMAGED) -> Check:
    return Check(name=name, grade="fault", evidence=evidence, cause=cause, says=says, mend=COPY_AGAIN, rank=rank)


def tensor_checks(tensors: Mapping[str, Tensor]) -> Iterator[Check]:
    """Numbers that are no numbers, and matrices that are zero throughout."""
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    broken = [name for name, tensor in floats.items() if not bool(torch.isfinite(tensor.float()).all())]
    zero = [name for name, tensor in floats.items() if tensor.numel() and not bool(tensor.any())]
    matrices = [name for name in zero if floats[name].dim() > 1]
    if broken:
        evidence = f"{_names(broken)} of {len(tensors)} tensors hold NaN or infinity"
        yield _damage("tensors", "tensors", "weights that are not finite", evidence)
    if matrices:
        evidence = f"{_names(matrices)} of {len(tensors)} tensors are zero throughout"
        yield _damage("zero tensors", "tensors", "weights that are zero throughout: lost, or never trained", evidence)
    elif zero:
        evidence = f"{_names(zero)} are zero throughout, as before any training"
        yield Check(name="zero tensors", grade="note", evidence=evidence)
    if not broken and not matrices:
        dtypes = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in floats.values()}))
        numbers = sum(tensor.numel() for tensor in floats.values())
        evidence = f"{len(tensors)}, {numbers / 1e6:.1f} M numbers in {dtypes}, all finite"
        yield Check(name="tensors", grade="ok", evidence=evidence)


def _names(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def template_check(provenance: Mapping[str, Any], target: Target, options: ChatOptions) -> Check:
    """The prompts that it was trained with, and those that it meets."""
    name = "chat template"
    if "chat_template_hash" not in provenance and "chat_options" not in provenance:
        return Check(name=name, grade="note", evidence="the provenance does not say which prompts it was trained with")
    differs = training_mismatch(provenance, ChatTemplate(target, options))
    if differs is None:
        return Check(name=name, grade="ok", evidence="template, system turn and thinking are those of the training")
    return Check(
        name=name,
        grade="fault",
        evidence=differs,
        cause="template",
        says=OTHER_PROMPTS,
        mend=AS_TRAINED,
        rank=RECORDED,
    )


def recorded_checks(config: DrafterConfig, provenance: Mapping[str, Any]) -> Iterator[Check]:
    """What config.json says and the provenance says otherwise."""
    differing = {
        key: (getattr(config, key), recorded)
        for key, recorded in _recorded(config, provenance).items()
        if getattr(config, key) != recorded
    }
    for key, (now, recorded) in differing.items():
        yield Check(
            name=key,
            grade="fault",
            evidence=f"config.json says {now}, the provenance {recorded}",
            cause="mask" if key == "mask_token_id" else "config",
            says=f"{key} is not that of its training",
            mend=f"set {key} to {recorded} in config.json",
            rank=RECORDED + 2,
        )
    if not differing:
        evidence = (
            "config.json agrees with the provenance" if provenance else "no provenance to compare config.json with"
        )
        yield Check(name="config", grade="ok" if provenance else "note", evidence=evidence)


def _recorded(config: DrafterConfig, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What the provenance knows of the config's own fields."""
    found = {key: provenance.get(key) for key in ("mask_token_id", "draft_vocab_size")}
    trained = provenance.get("config")
    if isinstance(trained, Mapping) and not trained.get("init_from"):  # else the shape was that drafter's
        kind = trained.get("kind")
        found |= {"kind": kind, "num_draft_tokens": trained.get("num_draft_tokens")}
        options = trained.get(kind) if isinstance(kind, str) else None
        if isinstance(options, Mapping):
            found |= {key: value for key, value in options.items() if key != "mask_token_id"}
        selector = found.get("selector_top_k")
        if isinstance(selector, int):
            found["selector_top_k"] = min(selector, config.draft_vocab_size)
    return {key: value for key, value in found.items() if value is not None and hasattr(config, key)}
