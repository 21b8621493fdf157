"""A drafter in a process of its own: a swap that finds the process dead, and one that has no memory for the drafter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import drafter_actor, drafter_supervisor
from serving.draft_link import DrafterInfo, DraftLink
from serving.drafter_actor import DrafterActor, DrafterMemoryError, DrafterSettings
from serving.drafter_supervisor import DrafterSupervisor
from serving.serve_config import Disaggregation
from tests.toy_mtp import save_toy_drafter

INFO = DrafterInfo(name="toy", target_layer_ids=(1,), max_draft_tokens=3, max_tree_nodes=0)


def settings(target: Path) -> DrafterSettings:
    return DrafterSettings(target=str(target), dtype="float32", device="cpu", threads=1, num_slots=2, max_len=64)


@pytest.fixture
def supervisor(toy_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DrafterSupervisor]:
    """Its actors are numbers; `ended` lists those that were ended."""
    supervisor = DrafterSupervisor(Disaggregation(), settings(toy_target_dir), "127.0.0.1")
    made, supervisor.ended = iter(range(1, 10)), []  # type: ignore[attr-defined]  # a note of the test

    def start_actor() -> None:
        supervisor._actor = next(made)
        supervisor._peer = b"%d" % supervisor._actor

    def end_actor() -> None:
        supervisor.ended.append(supervisor._actor)  # type: ignore[attr-defined]
        supervisor._actor = None

    monkeypatch.setattr(supervisor, "_start_actor", start_actor)
    monkeypatch.setattr(supervisor, "_end_actor", end_actor)
    yield supervisor
    supervisor.link.close()


def loads(supervisor: DrafterSupervisor, monkeypatch: pytest.MonkeyPatch, dead: set[int]) -> None:
    """Loading works but in the actors that are dead."""

    def load(actor: int, peer: bytes, address: str) -> drafter_supervisor.RemoteDrafter:
        if actor in dead:
            raise drafter_supervisor._ActorDiedError("the drafter's process ended while it loaded")
        return drafter_supervisor.RemoteDrafter(supervisor.link, peer, address, INFO)

    monkeypatch.setattr(supervisor, "_load", load)


def test_a_swap_that_finds_the_process_dead_loads_in_another(supervisor, monkeypatch):
    loads(supervisor, monkeypatch, dead=set())
    first = supervisor.load("first")
    supervisor._drafter = first
    loads(supervisor, monkeypatch, dead={1})
    second = supervisor.load("second")
    assert (second.session, second.peer) == ("second", b"2")
    assert (first.away, supervisor.restarts, supervisor.ended) == ("dead", {"dead": 1}, [1])


def test_a_drafter_that_kills_its_process_is_refused(supervisor, monkeypatch):
    loads(supervisor, monkeypatch, dead={1, 2, 3})
    with pytest.raises(RuntimeError, match="ended while it loaded"):
        supervisor.load("deadly")
    assert supervisor.ended == [1]  # the other attempt's process is found dead by whoever comes next


def test_a_drafter_without_room_is_refused_with_its_figures(toy_target_dir, tmp_path, monkeypatch):
    drafter = save_toy_drafter(tmp_path / "drafter", toy_target_dir, "recursive")
    link = DraftLink("127.0.0.1")
    actor = DrafterActor(link.keys, b"peer", settings(toy_target_dir))
    try:
        said = actor.load("session", str(drafter)).memory
        assert said.startswith("drafter ")
        assert "2 slots x 64 tokens" in said
        monkeypatch.setattr(drafter_actor, "available_bytes", lambda device: 1000)
        with pytest.raises(DrafterMemoryError, match=r"does not fit .*0 MB are free\); give fewer num_slots"):
            actor.load("other", str(drafter))
    finally:
        actor._server.close()
        link.close()
