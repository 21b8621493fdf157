"""Small losses must not add up: the challenger's tau on the regression set against the best of its ancestors' there.

In: the gate's report, and the versions that its challenger descends from with the reports of their own gates. Out: the
report with one line more. Nothing is decoded: the same prompts, decoded greedily under the same conditions, give the
same tau on any day, so that old figures still hold. Those of S do not: it depends on the machine and on what else runs
there, and is compared within one run only, with the champion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drafters.registry import Registry, Version
from drafters.target import Target, target_fingerprint
from pipelines.evaluate import versions
from pipelines.gate_config import GateConfig, GateError
from pipelines.gate_lines import REGRESSION
from pipelines.gate_prompts import GatePrompt
from pipelines.gate_report import GateLine, GateReport

ANCESTORS = "best ancestor"
DECODES = ("num_draft_tokens", "tree_nodes", "batch", "max_new_tokens", "dtype", "device", "cuda_graphs")
LIBRARIES = ("draftloop", "torch", "transformers")


@dataclass(frozen=True)
class _Best:
    tau: float
    version: str


def conditions(target: Target, regression: Sequence[GatePrompt], config: GateConfig, backend: str) -> dict[str, Any]:
    """All that tau on the regression set depends on, beside the drafter, as plain values."""
    digest = hashlib.sha256()
    for prompt in regression:
        digest.update(f"{prompt.category}\n{[*map(int, prompt.prompt_ids)]}\n".encode())
    found = versions()
    return {
        "regression set": digest.hexdigest()[:32],
        "target": target_fingerprint(target.path),
        "decoding": {name: getattr(config, name) for name in DECODES} | {"backend": backend},
        "versions": {name: found[name] for name in LIBRARIES if name in found},
    }


def ancestors(registry: Registry, version: str | None) -> list[Version]:
    """A version and what it descends from, itself first, as far back as they are still there."""
    known = {each.name: each for each in registry.versions()}
    found = []
    while version is not None and version in known:
        found.append(known.pop(version))
        version = found[-1].parent
    return found


def with_ancestors(report: GateReport, line_of_descent: Sequence[Version]) -> GateReport:
    """The report with the line on them, and with their best figures: a version that is pruned has left its own there.

    A report that has no figures of the regression set stays as it is.
    """
    mine, here = _taus(report), report.figures.get("conditions")
    if not mine or here is None:
        return report
    gates = list(_gates(line_of_descent))
    best: dict[str, _Best] = {}
    for name, gate in gates:
        if gate.figures.get("conditions") == here:
            for part, found in _known(name, gate):
                if part not in best or found.tau > best[part].tau:
                    best[part] = found
    line = _line(mine, best, report.config["regression_tolerance"]) or _not_compared(here, gates)
    kept = {part: [found.tau, found.version] for part, found in best.items()}
    return replace(report, lines=(*report.lines, line), figures=report.figures | {"best": kept})


def _taus(gate: GateReport) -> dict[str, float]:
    """The challenger's tau on the regression set and on its categories."""
    lines = (line for line in gate.lines if line.name.startswith(REGRESSION))
    return {line.name: line.challenger for line in lines if line.challenger is not None}


def _gates(line_of_descent: Sequence[Version]) -> Iterator[tuple[str, GateReport]]:
    """The versions that a gate has measured, and its reports."""
    for version in line_of_descent:
        values = (version.evaluation or {}).get("gate")
        if isinstance(values, dict):
            try:
                yield version.name, GateReport.from_json(values)
            except GateError:
                continue  # an older or a newer one's


def _known(name: str, gate: GateReport) -> Iterator[tuple[str, _Best]]:
    """What a version's report says of it and of its own ancestors."""
    yield from ((part, _Best(tau, name)) for part, tau in _taus(gate).items())
    yield from ((part, _Best(*found)) for part, found in gate.figures.get("best", {}).items())


def _line(mine: dict[str, float], best: dict[str, _Best], tolerance: float) -> GateLine | None:
    """The figures of the part that has lost most; None if there is nothing to compare."""
    shares = {part: mine[part] / best[part].tau for part in mine if part in best}
    if not shares:
        return None
    told = [
        f"{part.removeprefix(REGRESSION).removeprefix(', ') or 'all'} {mine[part]:.2f} against {best[part].tau:.2f} of "
        f"{best[part].version}" + ("" if share >= 1 - tolerance else ", which is too little")
        for part, share in shares.items()
    ]
    worst = min(shares, key=lambda part: shares[part])
    return GateLine(
        name=ANCESTORS,
        champion=best[worst].tau,
        challenger=mine[worst],
        threshold=best[worst].tau * (1 - tolerance),
        passed=shares[worst] >= 1 - tolerance,
        says=f"regression tau may lie {tolerance:.0%} below the best of the champion's line: {'; '.join(told)}",
    )


def _not_compared(here: dict[str, Any], gates: Sequence[tuple[str, GateReport]]) -> GateLine:
    """A line that passes, since there is nothing that it could be held against."""
    says = "no version of the champion's line has a gate's report"
    if gates:
        name, gate = gates[0]
        there = gate.figures.get("conditions") or {}
        differing = [key for key, value in here.items() if there.get(key) != value] or ["its categories"]
        says = f"none of {len(gates)} reports is comparable: with {name}, the latest, differ {', '.join(differing)}"
    return GateLine(name=ANCESTORS, champion=None, challenger=None, threshold=None, passed=True, says=says)
