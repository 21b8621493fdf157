"""Which cluster a command joins, and what it may count on there."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import ray

from pipelines import ray_session


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `ray.init` was called with; nothing is started."""
    seen: list[dict[str, Any]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: seen.append(options))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(ray_session, "silence_ray_data", lambda: None)
    return seen


def test_alone_it_starts_a_cluster_that_never_grows(calls):
    ray_session.start_ray(num_cpus=4)
    assert calls[0]["num_cpus"] == 4
    assert ray_session.lacking_resource({"CPU": 4, "GPU": 1}) == ("GPU", 0)
    assert ray_session.lacking_resource({"CPU": 4}) is None


def test_a_cluster_that_was_named_is_joined_as_it_is(calls, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    ray_session.start_ray(num_cpus=4)
    assert "num_cpus" not in calls[0]
    assert ray_session.lacking_resource({"GPU": 1}) is None, "it may grow"


def test_a_cluster_that_runs_here_is_joined_too(calls, monkeypatch: pytest.MonkeyPatch):
    """As Ray 2.60 says it when `ray start` was run on this machine."""

    def init(**options: Any) -> None:
        if "num_cpus" in options:
            raise ValueError("When connecting to an existing cluster, num_cpus and num_gpus must not be provided.")
        calls.append(options)

    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setattr(ray, "init", init)
    ray_session.start_ray(num_cpus=4)
    assert len(calls) == 1
    assert ray_session.lacking_resource({"GPU": 1}) is None


def test_other_errors_are_not_taken_for_that(calls, monkeypatch: pytest.MonkeyPatch):
    def init(**options: Any) -> None:
        raise ValueError("no such address")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match="no such address"):
        ray_session.start_ray()


@pytest.mark.parametrize("note", ["answers", "silent", "damaged", "absent"])
def test_a_cluster_that_was_killed_is_not_waited_for(calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, note: str):
    """Ray notes the latest cluster of a machine, and `ray.init` waits for its server, for minutes if it is gone."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if note == "answers":
            server.listen()
        if note != "absent":
            (tmp_path / "ray").mkdir()
            text = "127.0.0.1:" + ("x" if note == "damaged" else str(server.getsockname()[1]))
            (tmp_path / "ray" / "ray_current_cluster").write_text(text)
        ray_session.start_ray(num_cpus=4)
    assert calls[0].get("address") == ("local" if note == "silent" else None)


def test_the_note_is_looked_for_where_ray_leaves_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from ray._common.utils import get_default_system_temp_dir

    for name in ("RAY_TMPDIR", "TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    for name in (
        "TMP",
        "TMPDIR",
        "RAY_TMPDIR",
    ):  # each goes before the one before it, but for TMP, which is none of Ray's
        monkeypatch.setenv(name, str(tmp_path / name))
        assert ray_session.note_of_cluster() == Path(get_default_system_temp_dir()) / "ray" / "ray_current_cluster"
