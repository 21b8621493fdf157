"""Imports run one way: cluster -> pipelines -> serving -> drafters; drafters and the engine live without Ray."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["drafters", "serving", "pipelines", "cluster"]  # each may import those before it
NEVER_RAY = ["drafters", "serving/engine"]


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def dotted(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_names(source: str, package: str) -> set[str]:
    """Every module that a file imports, at its top, in a function, or by name through importlib."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            names.add(".".join([*above, *([node.module] if node.module else [])]))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return names


def roots_of(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_names(file.read_text(), dotted(file.parent / "__init__.py"))}


@pytest.mark.parametrize("package", ORDER)
def test_no_package_imports_one_that_stands_above_it(package):
    above = set(ORDER[ORDER.index(package) + 1 :]) | {"tests"}
    files = modules(package)
    assert files, f"{package} is gone: mend this test"
    wrong = [f"{dotted(file)} imports {name}" for file in files for name in sorted(roots_of(file) & above)]
    assert wrong == []


@pytest.mark.parametrize("folder", NEVER_RAY)
def test_no_module_there_imports_ray(folder):
    assert [dotted(file) for file in modules(folder) if "ray" in roots_of(file)] == []


def test_all_ways_to_import_are_seen():
    source = (
        "import a.b\nfrom c import d\nfrom . import e\ndef f():\n  from g.h import i\n  importlib.import_module('j.k')"
    )
    assert imported_names(source, "x.y") == {"a.b", "c", "x.y", "g.h", "j.k"}
    assert imported_names("from ..z import q", "x.y") == {"x.z"}


# A child process in which `import ray` fails, as on a GPU machine without it.
WITHOUT_RAY = """
import importlib, sys

class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name == "ray" or name.startswith("ray."):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, NoRay())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not [name for name in sys.modules if name.split(".")[0] == "ray"]
"""


def test_drafters_engines_and_training_step_import_without_ray():
    names = [dotted(file) for folder in NEVER_RAY for file in modules(folder)]
    names += ["serving.text_engine", "pipelines.training", "pipelines.draft_vocabulary"]
    assert {"drafters", "drafters.mtp", "serving.engine", "serving.engine.engine"} <= set(names)
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, *names], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr


def test_a_board_s_process_starts_without_torch():
    """A run's board has a process to itself, which would otherwise load as much as a worker does."""
    code = "import sys, pipelines.progress_board; assert not {'torch', 'transformers'} & set(sys.modules)"
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
