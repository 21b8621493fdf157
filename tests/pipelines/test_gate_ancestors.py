"""A challenger may lose a little against the champion, and no more than that against the best of its line."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from drafters.registry import Version
from pipelines.gate_ancestors import ANCESTORS, with_ancestors
from pipelines.gate_lines import HELD_OUT, REGRESSION
from pipelines.gate_report import GateLine, GateReport

HERE = {"regression set": "5e7", "target": "7a6", "decoding": {"tree_nodes": 7}, "versions": {"torch": "2.13"}}


def report(conditions: dict[str, Any] | None = HERE, **taus: float) -> GateReport:
    """Of a challenger with these taus on the regression set; `all` is the whole set."""
    lines = [
        GateLine(
            name=REGRESSION if part == "all" else f"{REGRESSION}, {part}",
            champion=None, challenger=tau, threshold=None, passed=True, says="",
        )
        for part, tau in taus.items()
    ]  # fmt: skip
    figures = {} if conditions is None else {"conditions": conditions}
    config = {"regression_tolerance": 0.05}
    return GateReport(challenger="c", champion="p", lines=tuple(lines), figures=figures, config=config)


def version(name: str, gate: GateReport | None) -> Version:
    evaluation = None if gate is None else {"tau": 2.0, "gate": gate.as_json()}
    at = datetime(2026, 11, 30, tzinfo=UTC)
    return Version(name=name, created_at=at, target_fingerprint="7a6", files={}, uri=name, evaluation=evaluation)


def line_of(judged: GateReport) -> GateLine:
    assert judged.lines[-1].name == ANCESTORS
    return judged.lines[-1]


@pytest.mark.parametrize("kept", [10, 1], ids=["all there", "older ones pruned"])
def test_ten_times_two_percent_are_stopped_at_five(kept: int):
    line: list[Version] = []
    tau, judged = 2.0, report(all=2.0)
    for number in range(10):
        judged = with_ancestors(report(all=tau, chat=2.0), line[:kept])
        if not judged.passed:
            break
        line.insert(0, version(f"v{number}", judged))
        tau *= 0.98
    assert len(line) == 3, "2.00, 1.96, 1.92"
    found = line_of(judged)
    assert (found.champion, found.challenger, found.threshold) == (2.0, tau, pytest.approx(1.9))
    assert "all 1.88 against 2.00 of v0, which is too little; chat 2.00 against 2.00 of" in judged.reason()


def test_each_category_has_its_own_best_ancestor():
    line = [version("v1", report(chat=1.95, code=1.80)), version("v0", report(chat=2.0, code=1.5))]
    found = line_of(with_ancestors(report(chat=1.93, code=1.70), line))
    assert (found.passed, found.champion, found.challenger) == (False, 1.80, 1.70)
    assert found.says.endswith("chat 1.93 against 2.00 of v0; code 1.70 against 1.80 of v1, which is too little")
    assert line_of(with_ancestors(report(chat=1.93, code=1.72), line)).passed


@pytest.mark.parametrize("key", HERE)
def test_figures_under_other_conditions_are_none(key: str):
    other = with_ancestors(report(HERE | {key: "other"}, all=9.0), [])
    found = line_of(with_ancestors(report(all=1.0), [version("v1", other), version("by hand", None)]))
    assert (found.passed, found.champion) == (True, None)
    assert found.says == f"none of 1 reports is comparable: with v1, the latest, differ {key}"


def test_a_line_without_reports_and_a_report_without_figures():
    found = line_of(with_ancestors(report(all=1.0), [version("by hand", None), version("old", report(None, all=2.0))]))
    assert (found.passed, found.champion) == (True, None)
    assert found.says.endswith("with old, the latest, differ regression set, target, decoding, versions")
    assert "no version of the champion's line" in line_of(with_ancestors(report(all=1.0), [])).says
    failed = replace(report(), lines=(GateLine(
        name=HELD_OUT, champion=None, challenger=None, threshold=None, passed=False, says="too few",
    ),))  # fmt: skip
    assert with_ancestors(failed, [version("v0", report(all=2.0))]) == failed
