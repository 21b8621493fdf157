"""Each alert fires in its story in `alert_cases.yaml` and not in the others: without promtool and, where it is, with.

`benchmarks/promql.py` evaluates the rules here. Prometheus' own promtool (Debian's package `prometheus`) reads the same
file, and compares the texts too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.promql import Labels, Scrapes, evaluate, parse
from tests.cluster.monitoring_files import ALERTS, MONITORING, ROOT, alerts, rules

CASES = yaml.safe_load((Path(__file__).parent / "alert_cases.yaml").read_text())["tests"]
OPERATIONS = ROOT / "cluster" / "OPERATIONS.md"


def seconds(text: str) -> int:
    parts = re.findall(r"(\d+)([smhd])", text)
    assert "".join(number + unit for number, unit in parts) == text
    return sum(int(number) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit] for number, unit in parts)


def values(notation: str) -> Iterator[float | None]:
    """promtool's notation: `1+2x3` is 1 3 5 7, `_x2` is nothing twice, `1x2` is 1 1 1."""
    for word in notation.split():
        first, step, times = re.fullmatch(r"(_|\d+)(?:\+(\d+))?(?:x(\d+))?", word).groups()
        if first == "_":
            yield from [None] * int(times or 1)
        else:
            yield from (float(first) + n * float(step or 0) for n in range(int(times or 0) + 1))


def samples_of(case: dict[str, Any]) -> Scrapes:
    scrapes, every = Scrapes(), seconds(case["interval"])
    for series in case["input_series"]:
        selector = parse(series["series"])
        labels = {matcher.name: matcher.value for matcher in selector.matchers.matchers} | {"__name__": selector.name}
        for n, value in enumerate(values(series["values"])):
            if value is not None:
                scrapes.put(n * every, labels, value)
    return scrapes


def firing(case: dict[str, Any], name: str, at: int) -> list[dict[str, str]]:
    """Labels of the alerts of that name at a time, as Prometheus evaluates rules: every minute, in order."""
    scrapes, rule = samples_of(case), alerts()[name]
    records = [(r["record"], parse(r["expr"])) for r in rules() if "record" in r and r["record"] in rule["expr"]]
    expression, hold = parse(rule["expr"]), seconds(rule.get("for", "0s"))
    since: dict[Labels, int] = {}
    for now in range(0 if records else max(0, at - hold - 60), at + 1, 60):
        for record, recorded in records:
            for key, value in evaluate(recorded, scrapes, now).items():
                scrapes.put(now, {"__name__": record, **dict(key)}, value)
        if now < at - hold - 60:
            continue
        found = {frozenset(pair for pair in key if pair[0] != "__name__") for key in evaluate(expression, scrapes, now)}
        since = {key: since.get(key, now) for key in found}
    return [dict(key) | rule["labels"] for key, begun in since.items() if at - begun >= hold]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_an_alert_fires_in_its_story(case):
    for test in case["alert_rule_test"]:
        expected = [alert["exp_labels"] for alert in test["exp_alerts"]]
        assert firing(case, test["alertname"], seconds(test["eval_time"])) == expected, test["alertname"]


def test_every_alert_has_a_story_in_which_it_fires_and_one_in_which_it_does_not():
    tests = [test for case in CASES for test in case["alert_rule_test"]]
    assert {test["alertname"] for test in tests if test["exp_alerts"]} == set(alerts())
    assert {test["alertname"] for test in CASES[0]["alert_rule_test"]} == set(alerts()), "a service that is well"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)")
@pytest.mark.parametrize("arguments", [
    ["check", "rules", str(ALERTS)],
    ["check", "config", str(MONITORING / "prometheus.yaml")],
    ["check", "config", str(MONITORING / "prometheus-nodes.yaml")],
    ["test", "rules", str(Path(__file__).parent / "alert_cases.yaml")],
], ids=["rules", "config", "config of nodes", "stories"])  # fmt: skip
def test_promtool_agrees(arguments):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", alerts())
def test_an_alert_says_how_grave_it_is_and_what_to_do(name):
    alert = alerts()[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert set(alert["annotations"]) == {"summary", "runbook"}
    file, anchor = alert["annotations"]["runbook"].split("#")
    assert (ROOT / file) == OPERATIONS
    headings = re.findall(r"^#+ (.+)$", OPERATIONS.read_text(), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
    assert anchor == name.lower()
    wanted = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
    fired = [a for case in CASES for t in case["alert_rule_test"] if t["alertname"] == name for a in t["exp_alerts"]]
    assert fired
    assert all(wanted <= set(a["exp_labels"]) for a in fired), "a summary names labels that the alert has"
    assert seconds(alert.get("for", "0s")) <= 2 * 3600


def test_no_section_of_the_runbook_is_left_over():
    text = OPERATIONS.read_text()
    sections = re.findall(r"^### (\w+)$", text[text.index("\n## Alerts") :], re.MULTILINE)
    assert sorted(sections) == sorted(alerts())
