"""Where `draftloop train` puts a drafter: an output path in, checked, and a finished checkpoint moved there whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from drafters.checkpoint import is_drafter
from pipelines.joint_setup import TRUNK
from pipelines.train_config import TrainError
from pipelines.training_log import METRICS, PLOT, TENSORBOARD

DRAFTER_FILES = {
    "config.json", "model.safetensors", "provenance.json", "evaluation.json", METRICS, TENSORBOARD, PLOT, TRUNK,
}  # fmt: skip


def check_output(output: Path) -> None:
    """Refuse to replace anything but an older drafter, such as a target's folder. Raises TrainError."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        names = {p.name for p in output.iterdir() if not p.name.startswith(".")} if output.exists() else set()
    except OSError as error:
        raise TrainError(f"output {output} cannot be used ({error.strerror}); give a new or empty folder") from None
    foreign = sorted(names - DRAFTER_FILES)
    if names and not foreign and not is_drafter(output):
        foreign = ["config.json"]
    if foreign:
        raise TrainError(f"output {output} holds other files ({foreign[0]}); give a new or empty folder")
    if not os.access(output.parent, os.W_OK):
        raise TrainError(f"output {output} cannot be written; give a folder that you may write to")


def install(folder: Path, output: Path) -> None:
    """Move a finished checkpoint to its place, whole."""
    output.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    shutil.copytree(folder, staged / "new")
    if output.exists():
        os.replace(output, staged / "old")
        for hidden in (staged / "old").glob(".*"):  # a file browser's or an editor's: no part of the drafter
            os.replace(hidden, staged / "new" / hidden.name)
    os.replace(staged / "new", output)
    shutil.rmtree(staged)
