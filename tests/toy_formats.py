"""A toy target deep enough to leave its last layer untapped, drafters for it, and checkpoints in others' layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.checkpoint import load_module, save_checkpoint
from drafters.drafter_module import DrafterModule
from drafters.formats import FormatError
from drafters.formats.exchange import export_checkpoint, import_checkpoint
from drafters.target import load_model, target_fingerprint
from drafters.training_batch import TrainingBatch
from tests.toy_dflash import batch_of, toy_dflash
from tests.toy_folder import save_toy_target
from tests.toy_mtp import features_of, toy_mtp

LAYERS = 4
TAPPED = (0, 2)  # of DFlash drafters
ALL_TOKENS = 260
FEW_TOKENS = [3, 99, 120, 258, 259]
IDS = list(b"The same tokens for everybody, 24.")


def save_deep_target(folder: Path) -> Path:
    return save_toy_target(folder, num_hidden_layers=LAYERS)


def dflash_of(target: Path, **changes: Any) -> DrafterModule:
    shape = {"vocab_size": ALL_TOKENS, "draft_vocab_size": ALL_TOKENS, "num_target_layers": LAYERS}
    return toy_dflash(load_model(target, torch.float32), **(shape | {"target_layer_ids": TAPPED} | changes))


def heads_of(target: Path, **changes: Any) -> DrafterModule:
    """Independent heads on the last of two tapped layers."""
    shape = {"vocab_size": ALL_TOKENS, "draft_vocab_size": ALL_TOKENS, "target_layer_ids": (1, LAYERS - 1)}
    return toy_mtp(load_model(target, torch.float32), "independent", **(shape | changes))


def saved(module: DrafterModule, target: Path, folder: Path) -> Path:
    """An ordinary checkpoint."""
    save_checkpoint(folder, module, {"target_fingerprint": target_fingerprint(target, module.config.target_layer_ids)})
    return folder


def exported(module: DrafterModule, target: Path, layout: str, folder: Path) -> Path:
    """A checkpoint in another layout, without the provenance that says where it comes from."""
    output = folder / layout
    export_checkpoint(str(saved(module, target, folder / "drafter")), str(target), layout, output)
    (output / "provenance.json").unlink()
    return output


def imported(source: Path, target: Path, folder: Path) -> tuple[DrafterModule, dict[str, str]]:
    """What comes back as an ordinary checkpoint, and what was taken for keys that were not there."""
    report = import_checkpoint(str(source), str(target), folder / "imported")
    return load_module(folder / "imported", target), report.taken


def real_batch(target: Path, taps: tuple[int, ...]) -> TrainingBatch:
    """Two anchors of one text, with the target's own features."""
    features_TF = features_of(load_model(target, torch.float32), IDS, taps)
    return batch_of(torch.tensor([IDS]), features_TF[None], [6, 15])


def hidden_states(target: Path) -> tuple[Tensor, ...]:
    """[1, T, D] as transformers counts them: the embeddings first, the last one behind the final norm."""
    with torch.no_grad():
        return load_model(target, torch.float32)(torch.tensor([IDS]), output_hidden_states=True).hidden_states


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change(folder: Path, **values: Any) -> None:
    """Set keys of config.json, `outer__inner` inside an object; None takes one away."""
    config = config_of(folder)
    for name, value in values.items():
        *outer, key = name.split("__")
        place = config[outer[0]] if outer else config
        place[key] = value
        if value is None:
            del place[key]
    (folder / "config.json").write_text(json.dumps(config))


def refusal(source: Path, target: Path, folder: Path, values: dict[str, Any]) -> str:
    """What the import of a source says whose config.json has these values instead; it is as before afterwards."""
    config = (source / "config.json").read_text()
    try:
        change(source, **values)
        with pytest.raises(FormatError) as caught:
            imported(source, target, folder)
    finally:
        (source / "config.json").write_text(config)
    return str(caught.value)
