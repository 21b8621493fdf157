"""The gate: champion, challenger and prompts in, the verdict whether the challenger may serve out.

All of it is measured by real decoding, both drafters and plain decoding on the same prompts in the same run: tau on the
fresh held-out slice, tau on a frozen regression set, S_measured, outputs token for token, served against expected tau.
`draftloop redistill` holds it before it promotes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from drafters.checkpoint import load_module
from drafters.drafter import Drafter
from drafters.drafter_module import DrafterModule
from drafters.remote import first_line
from drafters.target import Target
from pipelines.evaluate import versions
from pipelines.gate_ancestors import conditions
from pipelines.gate_config import GateConfig, GateError
from pipelines.gate_decoding import BatchTimes, PromptResult, SideBySide, Way, parted_answers
from pipelines.gate_lines import (
    LOADS,
    enough_prompts,
    failed_line,
    fallback_line,
    held_out_line,
    lossless_line,
    parity_line,
    regression_lines,
    speed_line,
)
from pipelines.gate_prompts import GatePrompt, UsablePrompts, regression_prompts, usable_prompts
from pipelines.gate_report import PLAIN, GateLine, GateReport
from pipelines.parity import EXTRA_ROOM, ParityResult
from serving.engine.build import build_engine, load_drafter_for
from serving.engine.engine import Engine, EngineConfig

__all__ = [
    "GateConfig",
    "GateError",
    "GateLine",
    "GateProgress",
    "GatePrompt",
    "GateReport",
    "regression_prompts",
    "run_gate",
]


@dataclass(frozen=True)
class GateProgress:
    """After each batch."""

    prompts_done: int
    prompts_total: int


@dataclass(frozen=True)
class _Loaded:
    """What is known of the drafters before there is an engine."""

    module: DrafterModule  # the challenger as training knows it
    taps: set[int]  # layers that either drafter reads

    def spare(self, config: GateConfig) -> int:
        """Tokens of context behind an answer, so that no round's drafts are cut."""
        return max(config.num_draft_tokens, config.tree_nodes, self.module.config.num_draft_tokens) + EXTRA_ROOM


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """All that was found by decoding."""

    held_out: list[PromptResult]
    regression: list[PromptResult]
    times: list[BatchTimes]  # of the held-out prompts
    fallbacks: dict[Way, dict[str, int]]
    parity: ParityResult
    rounding: torch.dtype | None  # that answers may part by; None: it is the same in any pass
    backend: str


def run_gate(
    target: Target,
    champion: Path | None,
    challenger: Path,
    held_out: Sequence[GatePrompt],
    regression: Sequence[GatePrompt],
    config: GateConfig,
    on_progress: Callable[[GateProgress], None] | None = None,
) -> GateReport:
    """Measure the challenger against the champion; None: against plain decoding.

    A challenger that cannot be loaded and sets that are too small are failed lines. Raises GateError, TargetError or
    EngineBuildError where nothing can be measured, whatever the challenger is.
    """
    paths: dict[Way, Path] = {} if champion is None else {"champion": champion}
    paths["challenger"] = challenger
    loaded, told = _load(paths, target)
    if loaded is None:
        return _report(paths, told, {}, config)
    sets = _usable(target, held_out, regression, config, loaded.spare(config))
    figures: dict[str, Any] = {"held_out": str(sets[0]), "regression": str(sets[1])}
    lines = enough_prompts(*sets, config)
    if lines:
        return _report(paths, lines, figures, config)
    found = _measure(target, paths, loaded, sets, config, on_progress)
    if isinstance(found, GateLine):
        return _report(paths, [found], figures, config)
    results = [*found.held_out, *found.regression]
    parted = parted_answers(results, target.path, rounding=found.rounding, device=config.device)
    lines = [
        *told,
        held_out_line(found.held_out, config),
        *regression_lines(found.regression, config),
        speed_line(found.times, config),
        lossless_line(results, parted, exact=found.rounding is None),
        parity_line(found.parity),
        fallback_line(found.fallbacks),
    ]
    figures |= {"tokens_per_s": _rates(found.times), "backend": found.backend, "versions": versions()}
    figures["conditions"] = conditions(target, sets[1].prompts, config, found.backend)
    return _report(paths, lines, figures, config)


def _report(
    paths: dict[Way, Path], lines: Sequence[GateLine], figures: dict[str, Any], config: GateConfig
) -> GateReport:
    champion = paths.get("champion")
    return GateReport(
        challenger=str(paths["challenger"]),
        champion=None if champion is None else str(champion),
        lines=tuple(lines),
        figures=figures,
        config=asdict(config),
    )


def _load(paths: dict[Way, Path], target: Target) -> tuple[_Loaded | None, list[GateLine]]:
    """What is loaded, and a line for each drafter that is none of this target's.

    A challenger that cannot be loaded fails. A champion that cannot leaves `paths`: it would keep out all others.
    """
    taps, module, told = set[int](), None, list[GateLine]()
    for way, path in list(paths.items()):
        try:
            module = load_module(path, target.path)
        except Exception as error:  # a folder that is broken in whatever way must not serve, and that is a verdict
            if way == "challenger":
                return None, [_cannot_load(way, error)]
            says = f"the champion cannot be loaded: {first_line(error)}; the challenger is held against {PLAIN}"
            told.append(replace(failed_line(LOADS, says), passed=True, decided=True))
            del paths[way]
        else:
            taps |= set(module.config.target_layer_ids)
    assert module is not None
    return _Loaded(module, taps), told  # the challenger's comes last


def _cannot_load(way: Way, error: Exception) -> GateLine:
    mend = "" if way == "challenger" else "; roll back or promote another"
    says = f"the {way} cannot be loaded: {first_line(error)}{mend}"
    return failed_line(LOADS, says, decided=way == "challenger")


def _usable(
    target: Target, held_out: Sequence[GatePrompt], regression: Sequence[GatePrompt], config: GateConfig, spare: int
) -> tuple[UsablePrompts, UsablePrompts]:
    room = min(config.max_len, target.max_len - spare) - config.max_new_tokens
    if room < 1:
        raise GateError(
            f"max_new_tokens {config.max_new_tokens} leaves no room for prompts in max_len {config.max_len} and the "
            f"target's {target.max_len} tokens of context; give less of it"
        )
    vocab_size = int(target.config.get_text_config().vocab_size)
    return usable_prompts(held_out, room, vocab_size), usable_prompts(regression, room, vocab_size)


def _measure(
    target: Target,
    paths: dict[Way, Path],
    loaded: _Loaded,
    sets: tuple[UsablePrompts, UsablePrompts],
    config: GateConfig,
    on_progress: Callable[[GateProgress], None] | None,
) -> _Measured | GateLine:
    """Everything that takes an engine; a failed line for a drafter that it cannot be given."""
    held_out, regression = (usable.prompts for usable in sets)
    longest = max(len(prompt.prompt_ids) for prompt in [*held_out, *regression])
    engine = _engine(target, loaded.taps, longest + config.max_new_tokens + loaded.spare(config), config)
    drafters: dict[Way, Drafter] = {}
    for way, path in paths.items():
        try:
            drafters[way] = load_drafter_for(engine.backend, path, target.path)
        except Exception as error:  # as in `_load`
            return _cannot_load(way, error)
    done, total = 0, len(held_out) + len(regression)

    def on_batch(prompts: int) -> None:
        nonlocal done
        done += prompts
        if on_progress:
            on_progress(GateProgress(done, total))

    both = SideBySide(engine, drafters, config.max_new_tokens)
    fresh, times = both.decode(held_out, config.batch, on_batch)
    frozen, _ = both.decode(regression, config.batch, on_batch)
    parity = both.parity(loaded.module.to(config.device), fresh, config.parity_prompts)
    return _Measured(
        held_out=fresh,
        regression=frozen,
        times=times,
        fallbacks={way: dict(reasons) for way, reasons in both.fallbacks.items()},
        parity=parity,
        rounding=None if engine.backend.name == "native" else getattr(torch, config.dtype),
        backend=engine.backend.name,
    )


def _engine(target: Target, taps: set[int], max_len: int, config: GateConfig) -> Engine:
    """A plain engine that taps what either drafter reads."""
    return build_engine(
        target.path,
        dtype=config.dtype,
        backend=config.backend,
        device=config.device,
        num_slots=config.batch,
        max_len=max_len,
        target_layer_ids=sorted(taps),
        num_threads=config.num_threads,
        cuda_graphs=config.cuda_graphs,
        # each prompt is decoded several times: none may find in its slot what another one fed
        config=EngineConfig(
            num_draft_tokens=config.num_draft_tokens, tree_nodes=config.tree_nodes, reuse_prefixes=False
        ),
    )


def _rates(times: Sequence[BatchTimes]) -> dict[Way, float]:
    """Tokens per second of each way, over all held-out batches."""
    ways = times[0].seconds
    return {way: sum(b.tokens[way] for b in times) / sum(b.seconds[way] for b in times) for way in ways}
