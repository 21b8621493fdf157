"""Every command of the operations page and of the manifests is one that there is, with options that it has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from cluster.cli import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "cluster" / "OPERATIONS.md").read_text()


def of_page() -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines]


def of_manifests() -> list[str]:
    """Entry points of jobs, and what the CronJob submits."""
    found = []
    for file in sorted((ROOT / "cluster" / "kuberay").glob("*.yaml")):
        text = " ".join(file.read_text().replace("\\\n", " ").split())
        found += re.findall(r"draftloop \w+(?: --[\w-]+(?: [^\s\"]+)?)+", text)
    return found


OURS = [
    line[line.index("draftloop ") :] for line in of_page() if re.search(r"(^| -- +)draftloop ", line)
] + of_manifests()


@pytest.mark.parametrize("line", dict.fromkeys(OURS))
def test_a_command_of_ours_is_there(line):
    command = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"draftloop has no {words[0]}"
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert {word for word in words if word.startswith("--")} <= options


def test_the_page_names_files_that_there_are():
    assert len(OURS) > 15
    named = {word.rstrip(".,;:)") for word in re.findall(r"\b(?:cluster|benchmarks)/[\w./-]+", PAGE)}
    assert len(named) > 8
    for name in named:
        assert (ROOT / name).exists(), name
    for name in re.findall(r"^\| `([\w.-]+\.yaml)`", PAGE, re.MULTILINE):
        assert (ROOT / "cluster" / "kuberay" / name).exists(), name
    tabled = set(re.findall(r"`([\w.-]+\.yaml)`", PAGE))
    assert {file.name for file in (ROOT / "cluster" / "kuberay").glob("*.yaml")} <= tabled, "each manifest is explained"


def test_the_rules_become_a_prometheus_rule():
    """The page's one-line Python program, whose output goes to kubectl."""
    (program,) = (shlex.split(line)[2] for line in of_page() if line.startswith("python -c"))
    said: list[str] = []
    file = ROOT / "cluster" / "monitoring" / "alerts.yaml"
    source = program.replace("import sys, yaml; ", "").replace("sys.stdin", "file")
    exec(source, {"yaml": yaml, "file": file.open(), "print": said.append})
    resource = yaml.safe_load(said[0])
    assert (resource["apiVersion"], resource["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert resource["spec"] == yaml.safe_load(file.read_text())
