"""Drafters at home elsewhere: a file for each layout, with what it writes and what it reads.

A layout's file has `read(source, target)`, which gives a module (or a module and what was taken for keys that the
source lacks) and, where drafters can be exported to it, `contents(module, target, target_name)`. The files are
imported when they are needed: whoever serves a drafter needs none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from drafters.drafter_module import DrafterModule
from drafters.formats.foreign_config import FormatError
from drafters.formats.foreign_folder import Layout, read_config_file
from drafters.target import Target

__all__ = ["FORMATS", "OWN", "Format", "FormatError", "recognise"]

OWN = "own"  # the target's own MTP layers; also the word for their source


@dataclass(frozen=True)
class Format:
    """A layout by its file."""

    module: str
    recognises: Callable[[Mapping[str, Any]], bool]  # from the source's config.json
    writes: bool = False

    def _file(self) -> ModuleType:
        return importlib.import_module(self.module)

    def read(self, source: Path, target: Target) -> tuple[DrafterModule, dict[str, str]]:
        """The module in a folder, bound to its target, and what was taken for keys that it lacks. Raises ValueError."""
        made = self._file().read(source, target)
        return made if isinstance(made, tuple) else (made, {})

    def contents(self, module: DrafterModule, target: Target, target_name: str) -> Layout:
        """The module in this layout. Raises FormatError if the layout cannot say it."""
        layout: Layout = self._file().contents(module, target, target_name)
        return layout


FORMATS: dict[str, Format] = {
    "z-lab": Format(
        "drafters.formats.z_lab",
        lambda raw: "dflash_config" in raw or raw.get("architectures") in (["DFlashDraftModel"], ["DFlash2DraftModel"]),
        writes=True,
    ),
    "speculators": Format("drafters.formats.speculators", lambda raw: "speculators_model_type" in raw, writes=True),
    "medusa": Format("drafters.formats.medusa", lambda raw: raw.get("model_type") == "medusa", writes=True),
    OWN: Format("drafters.formats.own_mtp", lambda raw: False),  # it is known by its folder, the target's
    "gemma4-assistant": Format(
        "drafters.formats.gemma4_assistant", lambda raw: raw.get("model_type") == "gemma4_assistant"
    ),
}
_ORDER = ("speculators", "medusa", "gemma4-assistant", "z-lab")  # speculators' configs name z-lab's architectures


def recognise(source: Path, target: Path) -> str:
    """The format of a folder. Raises FormatError if it is none that can be read."""
    if source == target:
        return OWN
    raw = read_config_file(source)
    named = raw.get("architectures")
    if isinstance(named, list) and any(str(name).startswith("Draftloop") for name in named):
        raise FormatError(f"{source} is a drafter of Draftloop's own; evaluate, serve or train it as it is")
    for name in _ORDER:
        if FORMATS[name].recognises(raw):
            return name
    raise FormatError(
        f"{source} is in no layout that Draftloop reads (architectures {named}, model_type {raw.get('model_type')}); "
        f"give one of {', '.join(FORMATS)}"
    )
