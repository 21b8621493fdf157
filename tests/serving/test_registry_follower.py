"""A replica without a cluster follows a real registry: swaps under streams, roll-backs by live tau, bad starts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drafters.registry import Registry
from drafters.target import NUM_TAPS
from pipelines.generate_config import GenerateConfig
from pipelines.redistill_config import RedistillConfig
from serving.engine.sampling import Sampling
from serving.metrics import engine_snapshot
from serving.replica import Replica
from serving.rollout_guard import GuardAwayError
from serving.serve_config import ServeConfig
from tests.toy_echo import save_echo_target, save_one_token_drafter

ReplicaClass = Replica.__mro__[1]  # the class that Serve's ingress wraps
DEADLINE_S = 60.0
PROMPT = [ord(letter) for letter in "hello"]
RIGHT, WRONG = "o", "x"  # what the target says after that, and what it never says


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory) -> Path:
    return save_echo_target(tmp_path_factory.mktemp("echo") / "toy")


@pytest.fixture
def registry(tmp_path) -> Registry:
    return Registry(str(tmp_path / "registry"))


@pytest.fixture
def publish(registry, target_dir, tmp_path) -> Callable[[str, str], str]:
    def publish(name: str, token: str) -> str:
        folder = save_one_token_drafter(tmp_path / f"trained-{name}", target_dir, token)
        return registry.publish(folder, name=name, evaluation={"tau": 4.0}).name

    return publish


class Away:
    """A guard that nobody can reach."""

    def ask(self, report, *, starting=False):
        raise GuardAwayError("the guard is gone")

    def leave(self, replica):
        raise GuardAwayError("the guard is gone")


def promote(registry: Registry, name: str) -> int:
    return registry.promote(name, by="a test", why="it looks good", expected=registry.champion()).number


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextmanager
def replica_of(target_dir: Path, registry: Registry, **changes) -> Iterator[Replica]:
    following = {"uri": registry.uri, "poll_s": 0.05, "observe_s": 0.3, "min_rounds": 20, "max_observe_s": 60}
    config = {
        "target": str(target_dir), "registry": following, "num_slots": 2, "max_len": 512, "threads": 1,
        "num_draft_tokens": 3, "tree_nodes": 0, "adapt_draft_length": False,
    }  # fmt: skip
    made = ReplicaClass(ServeConfig.model_validate(config | changes))
    try:
        yield made
    finally:
        made._follower.close()
        assert made._engine.close(0)


@contextmanager
def traffic(replica: Replica) -> Iterator[None]:
    """Streams one after another, each with the tokens that plain decoding gives."""
    over, failures = threading.Event(), []

    async def stream() -> list[int]:
        tokens: list[int] = []
        async for progress in replica._engine.stream(PROMPT, Sampling(max_new_tokens=200)):
            tokens += progress.token_ids
        return tokens

    def keep_asking() -> None:
        while not over.is_set():
            if asyncio.run(stream()) != [ord(RIGHT)] * 200:
                failures.append("other tokens")

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(DEADLINE_S)
    assert not failures


def card(replica: Replica) -> dict:
    return replica.model.drafter["registry"]


def served(replica: Replica) -> str | None:
    serves = card(replica)["serves"]
    return serves and serves["version"]


def metrics(replica: Replica) -> str:
    return replica.model.metrics.render(replica._engine.between_rounds(engine_snapshot).result(DEADLINE_S)).decode()


def figure(replica: Replica, name: str) -> float:
    """The sum of a counter's series."""
    lines = [line for line in metrics(replica).splitlines() if line.startswith(name + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_promotions_are_followed_under_streams_and_one_that_does_badly_goes_back(registry, publish, target_dir):
    promote(registry, publish("first", RIGHT))
    with replica_of(target_dir, registry) as replica, traffic(replica):
        assert served(replica) == "first"
        wait(lambda: figure(replica, "spec_decode_num_drafts_total") > 20, "nothing to compare with")
        promote(registry, publish("second", RIGHT))
        wait(lambda: served(replica) == "second", "it was not taken")
        wait(lambda: card(replica)["rollout"] == "steady", "the roll-out does not end")
        change = promote(registry, publish("third", WRONG))
        wait(lambda: registry.champion().action == "rollback", "the registry was not told")
        wait(lambda: served(replica) == "second" and card(replica)["rollout"] == "steady", "it did not go back")
        wait(lambda: registry.serving()[replica._follower._replica].version == "second", "it did not report")
        last = registry.champion()
        assert (last.previous, last.version, last.by) == ("third", "second", "draftloop serve, app draftloop")
        assert last.why.startswith("live tau 1.00 against 4.00 before, ")
        assert [entry["change"] for entry in card(replica)["rolled_back"]] == [change]
        page = metrics(replica)
    assert 'drafter_rollbacks_total{model_name="toy",reason="tau",replica=""} 1.0' in page
    assert 'drafter_swaps_total{model_name="toy",replica="",result="done",source="registry"} 3.0' in page
    assert f'registry_champion_number{{model_name="toy",replica=""}} {last.number}.0' in page
    assert f'registry_followed_number{{model_name="toy",replica=""}} {last.number}.0' in page


def test_user_config_pins_a_drafter_until_it_says_registry(registry, publish, target_dir, tmp_path):
    promote(registry, publish("first", RIGHT))
    pinned = save_one_token_drafter(tmp_path / "pinned", target_dir, RIGHT, seed=1)
    with replica_of(target_dir, registry) as replica:

        def configure(**user_config) -> None:
            asyncio.run(replica.reconfigure(user_config))

        configure(drafter="registry")
        assert replica.model.drafter["last_swap_refused"] is None
        configure(drafter=str(tmp_path / "none"))
        assert card(replica)["following"], "what was refused pins nothing"
        configure(drafter=str(pinned))
        promote(registry, publish("second", RIGHT))
        wait(lambda: card(replica)["champion"]["version"] == "second", "it looks no longer")
        assert (replica.model.drafter["path"], card(replica)["following"]) == (str(pinned), False)
        wait(lambda: registry.serving()[replica._follower._replica].version is None, "it did not report")
        configure()
        wait(lambda: served(replica) == "second", "it does not follow again")
        assert replica.model.drafter["path"] == registry.version("second").uri
    with pytest.raises(ValueError, match="exclude each other"):
        ServeConfig.model_validate({"target": "t", "drafter": "d", "registry": "r"})


@pytest.mark.parametrize("what", ["none yet", "broken champion", "all broken", "away"])
def test_a_replica_starts_whatever_its_registry_holds(registry, publish, target_dir, monkeypatch, what, caplog):
    names = [publish("first", RIGHT), publish("second", RIGHT)]
    for name in names if what != "none yet" else []:
        promote(registry, name)
    for name in {"broken champion": names[1:], "all broken": names}.get(what, []):
        weights = Path(registry.version(name).uri) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    champion = Registry.champion
    if what == "away":
        monkeypatch.setattr(Registry, "champion", lambda self: (_ for _ in ()).throw(ConnectionError("away")))
    with replica_of(target_dir, registry) as replica:
        assert served(replica) == ("first" if what == "broken champion" else None)
        assert replica.model.drafter["path"] == (registry.version("first").uri if served(replica) else None)
        assert ("cannot be served" in caplog.text) == ("broken" in what)
        assert ("decoding plainly" in caplog.text) == (served(replica) is None)
        if what in ("none yet", "away"):
            wait(lambda: what == "none yet" or 'result="failed"} 2' in metrics(replica), "failures are not counted")
            monkeypatch.setattr(Registry, "champion", champion)
            if what == "none yet":
                promote(registry, "second")
            wait(lambda: served(replica) == "second", "it was not taken once it was there")


def test_a_guard_that_is_away_changes_nothing(registry, publish, target_dir):
    promote(registry, publish("first", RIGHT))
    with replica_of(target_dir, registry) as replica, traffic(replica):
        guard = replica._follower._guard
        replica._follower._guard = Away()
        promote(registry, publish("second", RIGHT))
        wait(lambda: "guard is gone" in card(replica)["rollout"], "it does not say so")
        wait(lambda: card(replica)["champion"]["version"] == "second", "it does not see the promotion")
        asked = figure(replica, "rollout_guard_away_total")
        wait(lambda: figure(replica, "rollout_guard_away_total") > asked + 1, "it does not ask again")
        assert served(replica) == "first"
        replica._follower._guard = guard
        wait(lambda: served(replica) == "second", "it does not go on")


def test_an_engine_that_lacks_the_layers_of_a_later_champion_asks_to_be_started_anew(registry, tmp_path):
    assert [GenerateConfig.num_taps, RedistillConfig.num_taps] == [NUM_TAPS] * 2
    target_dir = save_echo_target(tmp_path / "deep", num_hidden_layers=5)
    with replica_of(target_dir, registry) as replica:
        tapped = replica._engine.between_rounds(lambda engine: engine.target_layer_ids).result(DEADLINE_S)
        assert tuple(tapped) == (1, 2, 4), "what `generate` taps"
        folder = save_one_token_drafter(tmp_path / "first", target_dir, RIGHT, taps=(3,))
        promote(registry, registry.publish(folder, name="first", evaluation={"tau": 4.0}).name)
        wait(lambda: replica._follower.asks_for_restart, "it does not ask")
        with pytest.raises(RuntimeError, match="taps layers that this engine does not"):
            asyncio.run(replica.check_health())
        assert "[3]" in card(replica)["refused"]["1"]
        asyncio.run(replica.reconfigure({"drafter": None}))
        asyncio.run(replica.check_health())  # whoever wants it so gets no other replica
    with replica_of(target_dir, registry) as replica:
        wait(lambda: served(replica) == "first", "it does not serve what it was started for")
        asyncio.run(replica.check_health())
