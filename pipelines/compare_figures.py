"""The figures of a comparison, as compare.json holds them: of drafters, of rounds by shape, of timed decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.compare_config import Shape


@dataclass(frozen=True, kw_only=True)
class DrafterFacts:
    """What a drafter is, whatever it drafts for."""

    name: str  # in all tables
    kind: str  # as its serving side calls itself
    address: str | None  # None: prompt lookup, which has no checkpoint
    sha256: str  # of its config and weights
    parameters: int
    training_minutes: float | None  # of its last training; None: not known
    weights_bytes: int  # as loaded, with its own copies of what it borrows
    slot_bytes: int  # its state of one sequence of `slot_tokens`
    slot_tokens: int  # the target's context
    shares: list[str] | None  # what it takes from the target; None: it could not be asked


@dataclass(frozen=True, kw_only=True)
class LengthFigures:
    """Rounds of one shape along the target's greedy answers to all prompts of a set."""

    depth: int
    nodes: int  # 0: a chain
    rounds: int
    tau: float | None
    acceptance_by_position: list[float]  # of a tree by depth
    offered: list[float]  # share of the rounds that verified 0, 1, 2 .. drafts
    s_predicted: list[float | None] = field(default_factory=list)  # by batch: T_base * tau / (T_draft + T_verify)

    @property
    def shape(self) -> Shape:
        return Shape(self.depth, self.nodes)


@dataclass(frozen=True, kw_only=True)
class SpeedFigures:
    """Timed decodes of one batch size, with plain decoding of the same prompts taking turns with them."""

    batch: int
    depth: int
    nodes: int  # 0: a chain
    prompts: int  # decoded, those that were decoded twice counted twice
    tau: float | None  # of these decodes
    tau_counted: float | None  # of the same prompts, as counted along the plain answers: the same, but for rounding
    s_measured: float  # tokens/s over plain decoding's, wall clock, prefill included
    ratios: list[float]  # the same by group of `batch` prompts
    tokens_per_s: float
    tokens_per_s_plain: float
    t_base_s: float | None  # medians of these very decodes
    t_draft_s: float | None
    t_verify_s: float | None
    equal: int  # outputs that are token for token those of plain decoding
    near_ties: int = 0  # others, where rounding explains all that differs; looked for in float32 on the torch backend

    @property
    def shape(self) -> Shape:
        return Shape(self.depth, self.nodes)


@dataclass(frozen=True, kw_only=True)
class PairFigures:
    """One drafter on one prompt set."""

    drafter: str
    prompt_set: str
    prompts: int  # that tau is counted on
    lengths: list[LengthFigures]
    rejections: int  # rounds of the longest chain in which a draft was refused
    path_mismatch_share: float | None  # of those refused for their token boundaries alone; None: there are none
    speeds: list[SpeedFigures]  # by batch

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PairFigures:
        lengths = [LengthFigures(**one) for one in values["lengths"]]
        speeds = [SpeedFigures(**one) for one in values["speeds"]]
        return cls(**{**values, "lengths": lengths, "speeds": speeds})

    def longest_chain(self) -> LengthFigures:
        return max((one for one in self.lengths if not one.nodes), key=lambda one: one.depth)

    def length(self, shape: Shape) -> LengthFigures:
        return next(one for one in self.lengths if one.shape == shape)

    def speed(self, batch: int) -> SpeedFigures:
        return next(one for one in self.speeds if one.batch == batch)


@dataclass(frozen=True, kw_only=True)
class ShapeTimes:
    """Median seconds of one shape's rounds."""

    depth: int
    nodes: int  # 0: a chain
    t_draft_s: float | None
    t_verify_s: float | None  # of passes in which every sequence brings all of its drafts


@dataclass(frozen=True, kw_only=True)
class BatchTimes:
    """What rounds of one batch size cost, all shapes in turns."""

    batch: int
    t_base_s: float | None  # of plain decoding, in turns with this drafter
    shapes: list[ShapeTimes]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BatchTimes:
        return cls(**{**values, "shapes": [ShapeTimes(**one) for one in values["shapes"]]})

    def of(self, shape: Shape) -> ShapeTimes | None:
        return next((t for t in self.shapes if (t.depth, t.nodes) == (shape.depth, shape.nodes)), None)

    def verify_s(self, shape: Shape, offered: list[float]) -> float | None:
        """Mean T_verify of rounds that bring so many drafts: a round in which nothing is offered is a plain step."""
        whole = self.of(shape)
        if whole is None or whole.t_verify_s is None:
            return None
        total = 0.0
        for drafts, share in enumerate(offered):
            fewer = None if drafts in (0, shape.drafts) or shape.nodes else self.of(Shape(drafts))
            seconds = self.t_base_s if not drafts else (fewer and fewer.t_verify_s) or whole.t_verify_s
            total += share * (whole.t_verify_s if seconds is None else seconds)
        return total

    def s_predicted(self, length: LengthFigures) -> float | None:
        """T_base * tau / (T_draft + T_verify); None where one of them is not known."""
        times, verify = self.of(length.shape), self.verify_s(length.shape, length.offered)
        if not times or times.t_draft_s is None or not verify or not self.t_base_s or length.tau is None:
            return None
        return self.t_base_s * length.tau / (times.t_draft_s + verify)


@dataclass(frozen=True, kw_only=True)
class DrafterTimes:
    """What one drafter's rounds cost, by batch."""

    drafter: str
    batches: list[BatchTimes]

    @property
    def complete(self) -> bool:
        """Whether everything was timed that there is to time."""
        return all(
            None not in (one.t_base_s, *(t for shape in one.shapes for t in (shape.t_draft_s, shape.t_verify_s)))
            for one in self.batches
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DrafterTimes:
        return cls(drafter=values["drafter"], batches=[BatchTimes.from_json(one) for one in values["batches"]])

    def at(self, batch: int) -> BatchTimes:
        return next(one for one in self.batches if one.batch == batch)


@dataclass(frozen=True, kw_only=True)
class SetFacts:
    """One prompt set."""

    name: str
    prompts: int  # that tau is counted on
    sha256: str  # of its files
    mean_prompt_tokens: float


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A drafter that does not take part, or not to the end."""

    name: str
    reason: str  # one line


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Which drafter to choose, and why."""

    drafter: str | None  # None: decode plainly
    serve: str | None  # the best of those that `draftloop serve` takes
    shape: str  # "chain of 5"; "" without a drafter
    batch: int  # the smallest that was timed
    speed: float | None  # geometric mean over the timed prompts of all sets of tokens/s over plain decoding
    runner_up: str | None
    margin: list[float]  # of its speed over the runner-up's, minus 1: mean, and the ends of the 95% interval
    told_apart: bool  # the margin is outside the noise
    line: str
    others: list[str]  # where it is otherwise: larger batches, single prompt sets


@dataclass(frozen=True, kw_only=True)
class CompareReport:
    """All of a comparison."""

    output: str
    target: str
    backend: str  # native or torch
    exact: bool  # outputs must be those of plain decoding, near-ties aside: float32, or the native backend
    config: dict[str, Any]
    versions: dict[str, str]
    commit: str | None  # of the code, if it lies in a git tree
    sets: list[SetFacts]
    drafters: list[DrafterFacts]
    times: list[DrafterTimes]
    pairs: list[PairFigures]
    left_out: list[LeftOut]
    unequal: list[str]  # drafters whose outputs are not those of plain decoding, where they must be
    advice: Advice

    def pair(self, drafter: str, prompt_set: str) -> PairFigures:
        return next(p for p in self.pairs if (p.drafter, p.prompt_set) == (drafter, prompt_set))

    def errors(self) -> list[str]:
        """What makes the command fail, although the rest of the figures stands."""
        found = [f"{out.name} was left out: {out.reason}" for out in self.left_out]
        for name in self.unequal:
            equal, ties, prompts = self.equal_outputs(name)
            beside = f", {ties} part at near-ties" if ties else ""
            found.append(
                f"{name}: only {equal} of {prompts} outputs are those of plain decoding{beside}; do not serve it"
            )
        return found

    def equal_outputs(self, drafter: str) -> tuple[int, int, int]:
        """(equal to plain decoding, parted from it at near-ties, all) of its timed outputs."""
        speeds = [speed for pair in self.pairs if pair.drafter == drafter for speed in pair.speeds]
        return sum(s.equal for s in speeds), sum(s.near_ties for s in speeds), sum(s.prompts for s in speeds)
