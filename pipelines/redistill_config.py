"""The options of `draftloop redistill`, and what a run of it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from pipelines.gate import GateConfig
from pipelines.step_config import StepConfig
from pipelines.traffic_window import WindowConfig
from pipelines.train_config import DrafterKind
from serving.chat_options import ChatOptions

Verdict = Literal["promoted", "rejected", "skipped"]


class RedistillError(ValueError):
    """A run that cannot be made; the message is one line with cause and mend."""


@dataclass(frozen=True, kw_only=True)
class RedistillConfig:
    """From which traffic a challenger learns, what it must beat, and where everything lies."""

    target: str = "smollm2"  # a shipped name, a Hugging Face id, a folder, a .gguf file
    traffic: str  # the service's traffic log: folder or s3:// address
    registry: str  # of the target's drafters
    work: str  # folder or s3:// address of the windows' rollouts, challengers and reports
    since: datetime | None = None  # with a time zone; None: where the newest used window ends, at first 1970
    until: datetime | None = None  # requests before this; None: `settle_s` ago, or the end of an interrupted run
    settle_s: float = 300.0  # that an answer and its way into the log may take: what arrived since waits
    min_rows: int = 200  # fewer usable requests for training are no reason to train: they wait for the next window
    chat_options: ChatOptions = field(default_factory=ChatOptions)  # the service's: other traffic is refused
    replay: tuple[str, ...] = ()  # rollout sets of earlier trainings, so that what they taught is not forgotten
    replay_windows: int = 3  # rollouts of so many earlier windows are replayed too
    replay_share: float = 0.5  # of the training rows, where there are so many to replay
    kind: DrafterKind = "recursive"  # of the first drafter; later ones are of their champion's kind and shape
    num_taps: int = 3  # of the first drafter, spread up to the last layer
    regression: tuple[str, ...] = ("gsm8k_test",)  # prompt sets that a challenger must not be worse on
    regression_limit: int = 40  # prompts of each category of each
    held_out_limit: int = 64  # prompts of the newest traffic that champion and challenger decode
    window: WindowConfig = field(default_factory=WindowConfig)  # which requests are good to learn from
    steps: StepConfig = field(default_factory=lambda: StepConfig(epochs=3.0, learning_rate=1e-3))
    gate: GateConfig = field(default_factory=GateConfig)  # what a challenger must show
    dtype: str = "float32"  # of the target that reads the traffic
    features_dtype: str = "bfloat16"  # of stored features
    batch: int = 8  # sequences that an actor reads at once
    num_actors: tuple[int, int] = (1, 1)  # least and most actors that read
    num_workers: int = 1  # Ray Train workers
    use_gpu: bool = False  # one GPU for each actor and worker
    cpus_per_worker: float = 1.0  # logical CPUs that Ray sets aside for each

    def __post_init__(self) -> None:
        for name, good, mend in (
            ("min_rows", self.min_rows >= 1, "at least 1"),
            ("replay_windows", self.replay_windows >= 0, "0 or more"),
            ("replay_share", 0 <= self.replay_share < 1, "a share from 0 and below 1"),
            ("regression_limit", self.regression_limit >= 1, "at least 1"),
            ("held_out_limit", self.held_out_limit >= self.least_held_out, f"at least {self.least_held_out}"),
            ("settle_s", self.settle_s >= 0, "0 or more"),
            ("since", self.since is None or self.since.tzinfo is not None, "a time with its zone"),
            ("until", self.until is None or self.until.tzinfo is not None, "a time with its zone"),
        ):
            if not good:
                raise RedistillError(f"{name} is {getattr(self, name)}; give {mend}")

    @property
    def least_held_out(self) -> int:
        """Held-out prompts without which the gate cannot tell anything."""
        return max(self.gate.min_prompts, self.gate.min_batches * self.gate.batch)


@dataclass(frozen=True, kw_only=True)
class RedistillReport:
    """How a window ended. What `report.json` of the window holds."""

    window: str  # its id
    verdict: Verdict
    why: str  # one line
    version: str | None  # of the challenger in the registry; None: none was made
    previous: str | None  # the champion that it was held against
    counts: dict[str, Any]  # requests read, by what became of them
    gate: dict[str, Any] | None  # the gate's report
    training: dict[str, Any] | None  # the challenger's
    finished_at: str  # UTC
    repeated: bool = False  # the window was done before, and nothing was done now
