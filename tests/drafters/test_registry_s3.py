"""The registry on a real S3 server: of writers at one time one wins, and a server's lost answer costs nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drafters.registry import ChampionChangedError, Registry, RegistryError
from drafters.remote_checkpoint import FILES, local_checkpoint
from tests.drafters.test_registry import other, promote
from tests.s3_server import BUCKET, S3Server
from tests.toy_mtp import save_toy_drafter

URI = f"s3://{BUCKET}/registries/toy"
WRITERS = 8


def test_a_registry_on_s3(s3_server: S3Server, toy_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drafter = save_toy_drafter(tmp_path / "drafter", toy_target_dir)
    registry, fs = Registry(URI), s3_server.filesystem()
    assert (registry.champion(), registry.versions(), registry.prune(keep=0)) == (None, [], [])

    # a version that lost a file, one that was half-written, and one that is whole
    for number in range(3):
        registry.publish(other(drafter, number), name=f"v{number}")
    fs.rm_file(f"{BUCKET}/registries/toy/versions/v1/config.json")
    fs.rm_file(f"{BUCKET}/registries/toy/versions/v2/version.json")
    assert [version.name for version in registry.versions()] == ["v0"]
    for number in (1, 2):
        registry.publish(other(drafter, number), name=f"v{number}")
    assert [version.name for version in registry.versions()] == ["v0", "v1", "v2"]
    with pytest.raises(RegistryError, match="version v1 is there already with other files"):
        registry.publish(other(drafter, 5), name="v1")
    fetched = local_checkpoint(registry.version("v1").uri, cache_dir=tmp_path / "cache")
    assert [(fetched / file).read_bytes() for file in FILES] == [
        (other(drafter, 1) / file).read_bytes() for file in FILES
    ]

    # the compare-and-set
    expected = promote(registry, "v0")

    def won(number: int) -> bool:
        own = Registry(URI)
        try:
            own.promote(f"v{number % 2 + 1}", by=str(number), why="faster", expected=expected)
        except ChampionChangedError:
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as threads:
        assert sum(threads.map(won, range(WRITERS))) == 1
    assert [change.number for change in registry.history()] == [1, 2]

    # an answer that is lost: the server has the file, and says so when it is asked again
    plain, lost = registry._files.folder.fs.pipe_file, []

    def pipe_file(path, value, **options):
        plain(path, value, **options)
        if not lost:
            lost.append(path)
            raise ConnectionResetError

    with monkeypatch.context() as patch:
        patch.setattr(registry._files.folder.fs, "pipe_file", pipe_file)
        rolled_back = registry.rollback(by="ann", why="slow", expected=registry.champion())
    assert lost == [f"{BUCKET}/registries/toy/champion/00000003.json"]
    assert registry.history()[2:] == [rolled_back]

    # removal: of the two that were promoted at one moment the other one goes
    registry.report_serving("app#replica/1", "v0")
    gone = {"v1", "v2"} - {rolled_back.previous}
    assert registry.prune(keep=0) == sorted(gone)
    assert registry.champion() == rolled_back
    left = fs.find(f"{BUCKET}/registries/toy/versions")
    assert {path.split("/")[4] for path in left} == {"v0", "v1", "v2"} - gone
    with pytest.raises(RegistryError, match="was removed on"):
        promote(registry, *gone)
    with pytest.raises(FileNotFoundError, match="there is no bucket no-such-bucket"):
        Registry("s3://no-such-bucket/toy").publish(drafter)
