"""What the gate asks of a challenger, and how it decodes to find out."""

from __future__ import annotations

from dataclasses import dataclass

from serving.engine.drafting import TREE_DEPTH, TREE_NODES


class GateError(ValueError):
    """A gate that cannot be held at all; one line with cause and mend. A challenger's faults are lines of a report."""


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """How it decodes, then what it demands. Shares are of the champion's figure."""

    # Drafts have a fixed size here: what service chooses by cost depends on the machine's mood, and would let each
    # drafter pick the rounds that its tau is counted over.
    num_draft_tokens: int = TREE_DEPTH  # drafts per round, or a tree's greatest depth
    tree_nodes: int = TREE_NODES  # most nodes of each sequence's draft tree, where the drafter makes trees; 0: chains
    batch: int = 1  # prompts decoded at a time
    max_new_tokens: int = 128  # per prompt
    max_len: int = 2048  # tokens of a sequence, prompt included; cut to the target's own context
    dtype: str = "float32"  # or bfloat16
    backend: str = "auto"  # auto, native, torch
    device: str = "cpu"  # or cuda
    cuda_graphs: bool = False  # with cuda: capture decoding passes and replay them
    num_threads: int | None = None  # of torch; None leaves its own choice
    parity_prompts: int = 32  # held-out prompts on which served and expected tau are compared, at most

    margin: float = 0.02  # held-out tau must be better by more than this share
    min_prompts: int = 20  # held-out prompts to decide on
    regression_tolerance: float = 0.05  # by which share tau may fall on the regression set and on its categories
    min_category_prompts: int = 8  # a category with fewer is not judged by itself
    speed_tolerance: float = 0.03  # by which share S_measured may fall; more where the run's own noise is more
    most_speed_tolerance: float = 0.10  # beyond that the run is too noisy to tell anything of S
    min_batches: int = 6  # held-out batches to measure S on: one in each order of plain, champion and challenger

    confidence: float = 0.95  # of intervals
    bootstrap_samples: int = 10_000  # draws of all prompts for an interval
    seed: int = 0  # of these draws

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "batch", "max_new_tokens", "parity_prompts", "min_batches"):
            self._demand(name, getattr(self, name) >= 1, "at least 1")
        self._demand("tree_nodes", self.tree_nodes >= 0, "0 for chains, or more")
        for name in ("min_prompts", "min_category_prompts"):
            self._demand(name, getattr(self, name) >= 2, "at least 2: one prompt tells nothing of noise")
        for name in ("margin", "regression_tolerance", "speed_tolerance", "most_speed_tolerance"):
            self._demand(name, 0 <= getattr(self, name) < 1, "a share, 0 or more and below 1")
        least = self.speed_tolerance
        self._demand("most_speed_tolerance", self.most_speed_tolerance >= least, f"speed_tolerance, {least}, or more")
        self._demand("confidence", 0.5 <= self.confidence < 1, "0.5 or more and below 1")
        self._demand("bootstrap_samples", self.bootstrap_samples >= 1000, "at least 1000")

    def _demand(self, name: str, met: bool, mend: str) -> None:
        if not met:
            raise GateError(f"{name} is {getattr(self, name)}; give {mend}")
