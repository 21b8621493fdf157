"""A checkpoint on an object store is fetched once for each version of its files, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from drafters.checkpoint import CheckpointError
from drafters.remote_checkpoint import FILES, local_checkpoint
from drafters.target import TargetError, resolve_target, target_fingerprint

URI = "memory://bucket/drafter"


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    upload(fs, "first")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def upload(fs: fsspec.AbstractFileSystem, text: str) -> None:
    for name in FILES:
        fs.pipe_file(f"/bucket/drafter/{name}", f"{text} {name}".encode())


def test_a_path_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert local_checkpoint("drafter") == tmp_path / "drafter"
    assert local_checkpoint(f"file://{tmp_path}/drafter") == tmp_path / "drafter"


def test_every_version_is_fetched_once(memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fetched: list[str] = []
    plain = type(memory).get_file
    monkeypatch.setattr(
        type(memory), "get_file", lambda self, path, *rest, **options: (fetched.append(path), plain(self, path, *rest))
    )
    first = local_checkpoint(URI, cache_dir=tmp_path)
    assert local_checkpoint(f"{URI}/", cache_dir=tmp_path) == first
    assert [(first / name).read_text() for name in FILES] == [f"first {name}" for name in FILES]
    assert len(fetched) == len(FILES)
    upload(memory, "another")
    second = local_checkpoint(URI, cache_dir=tmp_path)
    assert (second / FILES[0]).read_text() == f"another {FILES[0]}"
    assert (first / FILES[0]).read_text() == f"first {FILES[0]}", "who reads the older one is not disturbed"
    assert sorted(tmp_path.iterdir()) == sorted([first, second]), "and nothing else is left"


def test_one_that_changes_while_it_is_read_is_refused(memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = type(memory).get_file

    def get(self, path, *rest, **options):
        plain(self, path, *rest)
        upload(memory, "longer than the first")

    monkeypatch.setattr(type(memory), "get_file", get)
    with pytest.raises(CheckpointError, match="was replaced while it was read; try again"):
        local_checkpoint(URI, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_or_unknown_is_one_line(memory, tmp_path: Path):
    memory.rm_file(f"/bucket/drafter/{FILES[-1]}")
    for address, message in (
        (URI, "no drafter at memory://bucket/drafter"),
        ("memory://bucket/none", "no drafter at memory://bucket/none"),
        ("nowhere://drafter", "drafter nowhere://drafter cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            local_checkpoint(address, cache_dir=tmp_path)
        assert "\n" not in str(caught.value)


def test_a_target_is_fetched_too(memory, toy_target_dir: Path, tmp_path: Path):
    for file in toy_target_dir.iterdir():
        memory.put_file(str(file), f"/bucket/models/toy/{file.name}")
    path = resolve_target("memory://bucket/models/toy", cache_dir=tmp_path)
    assert target_fingerprint(path) == target_fingerprint(toy_target_dir)
    assert resolve_target("memory://bucket/models/toy/", cache_dir=tmp_path) == path
    for address, message in (
        ("memory://bucket/models/none", "there is no target at memory://bucket/models/none; give a model folder"),
        ("nowhere://toy", "target nowhere://toy cannot be read"),
    ):
        with pytest.raises(TargetError, match=message):
            resolve_target(address, cache_dir=tmp_path)
