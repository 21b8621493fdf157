"""Files that are created once: of several writers one wins, and its bytes stay."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drafters.atomic_files import AtomicFolder

WRITERS = 16


def test_one_of_many_writers_creates_a_file_and_nothing_is_left_of_the_others(tmp_path: Path):
    folder = AtomicFolder(str(tmp_path), scratch="work")

    def create(number: int) -> bool:
        try:
            folder.create("deep/pointer.json", f"{number}".encode() * 10_000)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as threads:
        won = list(threads.map(create, range(WRITERS)))
    assert sum(won) == 1
    assert folder.read("deep/pointer.json") == f"{won.index(True)}".encode() * 10_000
    assert folder.names("work") == []


def test_a_file_that_exists_is_not_created_but_may_be_replaced(tmp_path: Path):
    folder = AtomicFolder(str(tmp_path))
    folder.write("a", b"old")
    with pytest.raises(FileExistsError):
        folder.create("a", b"new")
    assert folder.read("a") == b"old"
    folder.write("a", b"new")
    assert folder.read("a") == b"new"
