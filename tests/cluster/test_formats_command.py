"""`draftloop export` and `draftloop import`: what they show, what machines get, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.formats_command import export, import_drafter
from drafters.checkpoint import read_provenance
from drafters.formats import FORMATS
from drafters.target import target_fingerprint
from tests.toy_folder import save_toy_target
from tests.toy_formats import TAPPED, dflash_of, heads_of, save_deep_target, saved
from tests.toy_mtp import save_toy_drafter


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def facts(*arguments: object) -> dict:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def one_line(result) -> str:
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    return line


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_deep_target(tmp_path_factory.mktemp("targets") / "deep")


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(dflash_of(target), target, tmp_path_factory.mktemp("drafters") / "dflash")


@pytest.mark.parametrize("layout", ["z-lab", "speculators", "medusa"])
def test_out_and_back_again(layout, target: Path, drafter: Path, tmp_path: Path):
    if layout == "medusa":
        drafter = saved(heads_of(target, medusa_heads=True), target, tmp_path / "heads")
    there, back = tmp_path / "there", tmp_path / "back"
    wrote = facts("export", drafter, "--format", layout, "--target", target, "--output", there)
    assert [file["name"] for file in wrote["files"]] == ["config.json", "model.safetensors", "provenance.json"]
    assert all(len(file["sha256"]) == 64 and file["bytes"] > 0 for file in wrote["files"])
    assert str(there) in wrote["commands"]["vLLM"]
    assert read_provenance(there)["exported"]["format"] == layout
    read = facts("import", there, "--target", target, "--output", back)
    assert (read["format"], read["read"]) == (layout, wrote["files"])
    assert read["draft_tokens"] == wrote["draft_tokens"] == (3 if layout == "medusa" else 4)
    provenance = read_provenance(back)
    assert provenance["target_fingerprint"] == target_fingerprint(target, read["target_layer_ids"])
    assert provenance["imported"]["files"] == {file["name"]: file["sha256"] for file in read["read"]}
    again = facts("export", back, "--format", layout, "--target", target, "--output", there)
    before, after = ({f["name"]: f["sha256"] for f in report["files"]} for report in (wrote, again))
    assert [after[name] for name in ("config.json", "model.safetensors")] == [
        before[name] for name in ("config.json", "model.safetensors")
    ]


def test_people_see_files_and_the_next_command(target: Path, drafter: Path, tmp_path: Path):
    there = tmp_path / "there"
    shown = run("export", drafter, "--format", "z-lab", "--target", target, "--output", there)
    assert shown.exit_code == 0, shown.output
    for text in ("model.safetensors", "sha256", "SGLang", "--speculative-num-draft-tokens 5"):
        assert text in " ".join(shown.stdout.split())
    spec = f'{{"method": "dflash", "model": "{there}", "num_speculative_tokens": 4}}'
    assert f"next: vllm serve {target} --speculative-config '{spec}'" in shown.stdout
    shown = run("import", there, "--target", target, "--output", tmp_path / "back")
    assert "taken: anchor" in shown.stdout
    assert f"next: draftloop evaluate --target {target} --drafter {tmp_path / 'back'}" in shown.stdout


def test_mistakes(target: Path, drafter: Path, tmp_path: Path):
    to = ("--target", target, "--output", tmp_path / "out")
    heads = saved(heads_of(target), target, tmp_path / "heads")
    assert "residual MLPs" in one_line(run("export", heads, "--format", "medusa", *to))
    recursive = save_toy_drafter(tmp_path / "recursive", target)
    assert "this is an MTP drafter" in one_line(run("export", recursive, "--format", "z-lab", *to))
    assert "no drafter at" in one_line(run("export", tmp_path / "none", "--format", "z-lab", *to))
    assert "no drafter at ./nothing" in one_line(run("import", "./nothing", *to))
    assert "is a drafter of Draftloop's own" in one_line(run("import", heads, *to))
    assert "is in no layout that Draftloop reads" in one_line(run("import", save_toy_target(tmp_path / "other"), *to))
    same = ("--target", target, "--output", drafter)
    assert "is what is read" in one_line(run("export", drafter, "--format", "z-lab", *same))
    assert "holds other files" in one_line(
        run("export", drafter, "--format", "z-lab", "--target", target, "--output", tmp_path)
    )
    assert run("export", drafter, "--format", "eagle", *to).exit_code == 2
    assert not (tmp_path / "out").exists()


def test_another_target_is_refused_on_both_ways(target: Path, drafter: Path, tmp_path: Path):
    other = save_toy_target(tmp_path / "other", seed=1, num_hidden_layers=4)
    to_other = ("--target", other, "--output", tmp_path / "out")
    assert "made for another target" in one_line(run("export", drafter, "--format", "z-lab", *to_other))
    facts("export", drafter, "--format", "z-lab", "--target", target, "--output", tmp_path / "there")
    assert "was exported for another target" in one_line(run("import", tmp_path / "there", *to_other))
    assert not (tmp_path / "out").exists()


def test_a_dflash_checkpoint_of_ours_is_itself_in_the_published_layout(target: Path, drafter: Path, tmp_path: Path):
    read = facts("import", drafter, "--target", target, "--output", tmp_path / "back")
    assert (read["format"], read["target_layer_ids"]) == ("z-lab", list(TAPPED))


def test_every_layout_can_be_named():
    def choices(command) -> set[str]:
        return set(get_args(get_args(get_type_hints(command, include_extras=True)["layout"])[0]))

    assert choices(import_drafter) == {"auto", *FORMATS}
    assert choices(export) == {name for name, layout in FORMATS.items() if layout.writes}
