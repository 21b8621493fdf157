"""What `draftloop compare` is told: drafters, prompt sets, the draft lengths and batches to look at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from serving.chat_options import ChatOptions

LOOKUP = "prompt lookup"
NAMED = re.compile(r"([\w. -]+)=(.+)")  # NAME=ADDRESS


class CompareError(ValueError):
    """A comparison that cannot be made; the message is one line with cause and mend."""


@dataclass(frozen=True)
class Shape:
    """What a round drafts: a chain of `depth` tokens, or a tree of `nodes`, at most `depth` deep."""

    depth: int
    nodes: int = 0  # 0: a chain

    @property
    def drafts(self) -> int:
        """Rows that a verify pass has beside the anchor's."""
        return self.nodes or self.depth

    @property
    def name(self) -> str:
        return f"tree of {self.nodes}" if self.nodes else f"chain of {self.depth}"


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What is compared, and how."""

    target: str = "smollm2"  # a shipped name, a Hugging Face id, a folder, a .gguf file
    drafters: tuple[str, ...] = ()  # folders or URIs of checkpoints, with NAME= before them if they are to have another
    prompt_lookup: bool = True  # it takes part
    prompts: tuple[str, ...] = ("gsm8k_test",)  # sets: shipped names, files or URIs; never what a drafter learned from
    output: str = "draftloop-out/compare"  # folder, path or URI
    limit: int = 40  # prompts of each set that tau is counted on
    speed_limit: int = 6  # prompts of each set that are timed, the first ones; more where that is too few groups
    chat: bool = False  # wrap raw `prompt` rows into a user turn
    chat_options: ChatOptions = field(default_factory=ChatOptions)
    max_new_tokens: int = 96  # per prompt
    batches: tuple[int, ...] = (1, 4, 8)  # sequences decoded at a time, of the timed decodes
    num_draft_tokens: int = 8  # the longest chain; every shorter one is looked at too
    trees: tuple[int, ...] = (3, 7, 15)  # nodes of trees, for the drafters that make them
    dtype: str = "float32"  # or bfloat16
    backend: str = "auto"  # auto, native, torch
    device: str = "cpu"  # or cuda
    cuda_graphs: bool = False  # with cuda: capture decoding passes and replay them
    num_threads: int | None = None  # of torch; None leaves its own choice

    def check(self) -> None:
        """Raises CompareError."""
        for name in ("limit", "speed_limit", "max_new_tokens", "num_draft_tokens"):
            if getattr(self, name) < 1:
                raise CompareError(f"{name} is {getattr(self, name)}; give at least 1")
        for name, values in (("batches", self.batches), ("trees", self.trees)):
            if any(value < 1 for value in values):
                raise CompareError(f"{name} are {', '.join(map(str, values))}; give numbers of at least 1")
        if not self.batches:
            raise CompareError("there is no batch to time; give batches, such as 1,4,8")
        if list(self.batches) != sorted(set(self.batches)):
            raise CompareError(f"batches are {', '.join(map(str, self.batches))}; give each once, ascending")
        if not self.drafters and not self.prompt_lookup:
            raise CompareError("there is nothing to compare; give a drafter, or leave prompt lookup in")
        for what, given in (("drafter", self.drafters), ("prompt set", self.prompts)):
            twice = next((one for one in given if given.count(one) > 1), None)
            if twice is not None:
                raise CompareError(f"{what} {twice} is given twice; give it once")

    def measuring(self) -> dict[str, Any]:
        """The options that a figure of one drafter on one set depends on."""
        others = ("drafters", "prompt_lookup", "prompts", "output")
        return {name: value for name, value in asdict(self).items() if name not in others}

    def shapes(self, max_draft_tokens: int, max_tree_nodes: int) -> list[Shape]:
        """Chains of every length, then trees, as far as a drafter goes."""
        depth = min(self.num_draft_tokens, max_draft_tokens)
        trees = sorted({nodes for nodes in self.trees if nodes <= max_tree_nodes})
        return [Shape(k) for k in range(1, depth + 1)] + [Shape(depth, nodes) for nodes in trees]


def names_of(addresses: Sequence[str]) -> list[str]:
    """What tables call them: what stands before a `=`, else the last part of the path, and more of it where two
    would be called alike."""
    given = [NAMED.fullmatch(address) for address in addresses]
    paths = [PurePosixPath(address.rstrip("/")) for address in addresses]
    names: list[str] = []
    for i, path in enumerate(paths):
        match = given[i]
        parts = next(
            (n for n in range(1, len(path.parts)) if [p.parts[-n:] for p in paths].count(path.parts[-n:]) == 1),
            len(path.parts),
        )
        name = match[1].strip() if match else "/".join(path.parts[-parts:]).removesuffix(".jsonl")
        while name in names or name == LOOKUP:
            name += "'"
        names.append(name)
    return names


def address_of(drafter: str) -> str:
    """The address without the name before it."""
    match = NAMED.fullmatch(drafter)
    return match[2] if match else drafter
