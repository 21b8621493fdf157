"""The registry: versions whole or not there, one champion whoever writes at a time, nothing in use ever removed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from drafters import registry_log, registry_versions
from drafters.atomic_files import AtomicFolder
from drafters.checkpoint import CheckpointError
from drafters.registry import PLAIN, ChampionChangedError, Change, Registry, RegistryError
from drafters.remote_checkpoint import FILES, local_checkpoint
from serving.drafter_version import drafter_version
from tests.toy_mtp import save_toy_drafter

WRITERS = 8
AGO = 2 * registry_versions.LEFTOVER_AFTER_S


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, toy_target_dir: Path) -> Path:
    return save_toy_drafter(tmp_path_factory.mktemp("drafters") / "drafter", toy_target_dir)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(str(tmp_path / "registry"))


def other(drafter: Path, number: int, **provenance: object) -> Path:
    """The same drafter with another training behind it."""
    copy = drafter.parent / f"other-{number}-{'-'.join(provenance)}"
    if not copy.exists():
        shutil.copytree(drafter, copy)
        facts = json.loads((copy / "provenance.json").read_text())
        (copy / "provenance.json").write_text(json.dumps(facts | {"seed": number} | provenance))
    return copy


def fill(registry: Registry, drafter: Path, *names: str) -> None:
    for name in names:
        registry.publish(other(drafter, ord(name[0])), name=name)


def promote(registry: Registry, *names: str) -> Change:
    for name in names:
        change = registry.promote(name, by="ann", why=f"{name} is better", expected=registry.champion())
    return change


def rollback(registry: Registry, to: str | None = None) -> str | None:
    return registry.rollback(by="ann", why="slow", expected=registry.champion(), to=to).version


def names(registry: Registry) -> list[str]:
    return [version.name for version in registry.versions()]


def in_processes(work: Callable[[int], None], count: int) -> list[int | None]:
    """Exit codes of processes that did this at the same time; None of one that hangs, which is ended."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=work, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    codes = []
    for process in processes:
        process.join(timeout=60)
        codes.append(process.exitcode)
        process.kill()
        process.join()
    return codes


# -- versions ---------------------------------------------------------------------------------------------------------


def test_a_version_holds_the_checkpoint_and_what_is_known_of_it(registry: Registry, drafter: Path):
    source = other(drafter, 1)
    (source / "evaluation.json").write_text('{"tau": 2.5}')
    made = registry.publish(source, parent="older", data={"since": "2026-11-30T00:00:00+00:00", "rows": (1, 2)})
    folder = local_checkpoint(made.uri)
    assert [(folder / name).read_bytes() for name in FILES] == [(source / name).read_bytes() for name in FILES]
    assert drafter_version(made.uri, folder).startswith(f"{made.name}@")
    assert (made.parent, made.evaluation) == ("older", {"tau": 2.5})
    assert made.data == {"since": "2026-11-30T00:00:00+00:00", "rows": [1, 2]}, "as everybody else reads it"
    assert datetime.now(UTC) - made.created_at < timedelta(minutes=1)
    assert made.name.startswith(f"{made.created_at:%Y%m%dT%H%M%S}-")
    assert registry.publish(source) == made, "the same drafter again is no second version"
    given = registry.publish(other(drafter, 2), name="second", evaluation={"tau": 3})
    assert given.evaluation == {"tau": 3}
    assert Registry(registry.uri).versions() == [made, given]
    assert registry.version("second") == given


def test_versions_are_immutable(registry: Registry, drafter: Path):
    made = registry.publish(other(drafter, 1), name="a", data={"rows": 1})
    assert registry.publish(other(drafter, 1), name="a", data={"rows": 2}) == made, "what is there stays"
    with pytest.raises(RegistryError, match="version a is there already with other files; publish under another name"):
        registry.publish(other(drafter, 2), name="a")
    assert registry.versions() == [made]
    assert json.loads((Path(made.uri) / "provenance.json").read_text())["seed"] == 1


@pytest.mark.parametrize("missing", [*FILES, "version.json"])
def test_a_version_that_lacks_a_file_is_not_listed_until_it_is_published_again(
    registry: Registry, drafter: Path, missing: str
):
    made = registry.publish(drafter, name="a")
    (Path(made.uri) / missing).unlink()
    assert registry.versions() == []
    with pytest.raises(RegistryError, match="has no version a"):
        promote(registry, "a")
    again = registry.publish(drafter, name="a")
    assert (Path(again.uri) / missing).exists()
    assert registry.versions() == [again]
    assert again.files == made.files


def test_a_publication_that_is_killed_anywhere_leaves_no_version_and_may_be_repeated(registry: Registry, drafter: Path):
    plain = AtomicFolder.create

    def killed_before(number: int) -> None:
        """In a process of its own: the file of this number is not written."""
        written: list[str] = []

        def create(self: AtomicFolder, name: str, data: object) -> None:
            if len(written) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            written.append(name)
            plain(self, name, data)

        AtomicFolder.create = create  # type: ignore[method-assign]  # this process ends here
        registry.publish(drafter, name=f"killed-{number}")

    files = len(FILES) + 1
    assert in_processes(killed_before, files) == [-signal.SIGKILL] * files
    assert [len(list((Path(registry.uri) / "versions").glob(f"killed-{n}/*"))) for n in range(files)] == [0, 1, 2, 3]
    assert registry.versions() == []
    for number in range(files):
        with pytest.raises(RegistryError, match="has no version"):
            promote(registry, f"killed-{number}")
        registry.publish(drafter, name=f"killed-{number}")
    assert len(registry.versions()) == files
    with pytest.raises(RegistryError, match="is there already with other files"):
        registry.publish(other(drafter, 1), name="killed-1")


def test_of_two_trainings_under_one_name_one_is_published(registry: Registry, drafter: Path):
    sources = [other(drafter, number) for number in range(WRITERS)]

    def publish(source: Path) -> str:
        try:
            return Registry(registry.uri).publish(source, name="a").name
        except RegistryError as error:
            return str(error)

    with ThreadPoolExecutor(WRITERS) as threads:
        told = list(threads.map(publish, sources))
    assert sum("publish under another name" in text for text in told) == WRITERS - 1
    (version,) = registry.versions()
    winner = sources[told.index("a")]
    assert all((Path(version.uri) / name).read_bytes() == (winner / name).read_bytes() for name in FILES)


def test_what_is_no_drafter_for_this_registry_is_refused_by_name(registry: Registry, drafter: Path, tmp_path: Path):
    registry.publish(drafter, name="a")
    with pytest.raises(RegistryError, match=r"other-1-target_fingerprint was made for another target.* than version a"):
        registry.publish(other(drafter, 1, target_fingerprint="0" * 32))
    with pytest.raises(CheckpointError, match="no drafter at"):
        registry.publish(tmp_path / "nothing")
    cut = shutil.copytree(drafter, tmp_path / "cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(RegistryError, match=r"cut is not whole \(.*\); train it anew"):
        registry.publish(cut)
    with pytest.raises(RegistryError, match=r"'\.\./a' is no name for a version"):
        registry.publish(drafter, name="../a")
    with pytest.raises(RegistryError, match="cannot be opened"):
        Registry("nowhere://registry")
    assert names(registry) == ["a"]


def test_broken_and_foreign_files_cost_a_warning(registry: Registry, drafter: Path, caplog: pytest.LogCaptureFixture):
    fill(registry, drafter, "a", "b")
    promote(registry, "a")
    registry.report_serving("replica", "a")
    root = Path(registry.uri)
    shutil.copytree(root / "versions/a", root / "versions/a-copy")
    for broken in ("versions/b/version.json", "champion/00000007.json", "serving/x.json"):
        (root / broken).write_text("{")
    for foreign in ("versions/notes.txt", "versions/.hidden/version.json", "champion/notes.txt", "serving/y.json"):
        (root / foreign).parent.mkdir(exist_ok=True)
        (root / foreign).write_text("[]")
    for _ in range(3):
        assert names(registry) == ["a"]
        champion = registry.champion()
        assert champion is not None
        assert champion.version == "a"
        assert list(registry.serving()) == ["replica"]
    warned = [record.getMessage().split(" is passed over: ")[0] for record in caplog.records]
    assert sorted(os.path.relpath(path, root) for path in warned) == [
        "champion/00000007.json", "champion/notes.txt", "serving/x.json", "serving/y.json",
        "versions/.hidden/version.json", "versions/a-copy/version.json", "versions/b/version.json",
        "versions/notes.txt",
    ], "each once"  # fmt: skip
    fill(registry, drafter, "c")
    assert promote(registry, "c").number == 8, "a number is never used twice"


# -- the champion -----------------------------------------------------------------------------------------------------


def test_every_change_is_in_the_history_with_who_when_and_why(registry: Registry, drafter: Path):
    fill(registry, drafter, "a", "b")
    assert registry.champion() is None
    first = registry.promote("a", by="ann", why="the first", expected=None)
    second = registry.promote("b", by="gate", why="tau 2.5 against 2.1", expected=first)
    third = registry.rollback(by="guard", why="live tau fell", expected=second)
    changes = registry.history()
    assert changes == [first, second, third]
    assert Registry(registry.uri).champion() == third
    told = [(c.number, c.action, c.version, c.previous, c.by, c.why) for c in changes]
    assert told == [
        (1, "promote", "a", None, "ann", "the first"),
        (2, "promote", "b", "a", "gate", "tau 2.5 against 2.1"),
        (3, "rollback", "a", "b", "guard", "live tau fell"),
    ]
    assert all(datetime.now(UTC) - change.at < timedelta(minutes=1) for change in changes)
    assert promote(registry, "a") == third, "it is champion already"
    assert registry.history() == changes
    for by, why in (("", "reason"), ("ann", " ")):
        with pytest.raises(RegistryError, match="needs who and why"):
            registry.promote("b", by=by, why=why, expected=third)
    with pytest.raises(RegistryError, match=r"has no version bb; did you mean b\?"):
        registry.promote("bb", by="ann", why="typing", expected=third)


def test_who_expects_an_older_champion_changes_nothing(registry: Registry, drafter: Path):
    fill(registry, drafter, "a", "b", "c")
    first = promote(registry, "a")
    promote(registry, "b")
    for expected in (None, first):
        with pytest.raises(ChampionChangedError, match=r"meanwhile it is b \(change 2, by ann: b is better\)"):
            registry.promote("c", by="x", why="y", expected=expected)
        with pytest.raises(ChampionChangedError):
            registry.rollback(by="x", why="y", expected=expected)
    assert [change.version for change in registry.history()] == ["a", "b"]
    rollback(registry)
    with pytest.raises(ChampionChangedError):
        registry.promote("c", by="x", why="a is champion again, by another change", expected=first)


def test_of_writers_that_expect_the_same_champion_one_wins(registry: Registry, drafter: Path):
    fill(registry, drafter, *"abcd")
    first = promote(registry, "a")

    def lost(number: int, expected: Change, versions: str) -> bool:
        own, by = Registry(registry.uri), str(number)
        try:
            if number % 4:
                own.promote(versions[number % 2], by=by, why="faster", expected=expected)
            else:
                own.rollback(by=by, why="slower", expected=expected)
        except ChampionChangedError:
            return True
        return False

    with ThreadPoolExecutor(WRITERS) as threads:
        results = list(threads.map(lambda number: lost(number, first, "bc"), range(1, WRITERS + 1)))
    assert results.count(False) == 1
    second = registry.champion()
    assert second is not None
    assert second.by == str(results.index(False) + 1)
    codes = in_processes(lambda number: os._exit(lost(4 * number + 1, second, "dd")), WRITERS)
    assert (codes.count(0), codes.count(1)) == (1, WRITERS - 1)
    assert [change.number for change in registry.history()] == [1, 2, 3]


def test_a_lost_answer_of_the_server_is_a_success(registry: Registry, drafter: Path, monkeypatch: pytest.MonkeyPatch):
    """The writer tries again and meets its own file."""
    plain = AtomicFolder.create

    def create(self: AtomicFolder, name: str, data: object) -> None:
        plain(self, name, data)
        plain(self, name, data)

    monkeypatch.setattr(AtomicFolder, "create", create)
    fill(registry, drafter, "a", "b")
    promote(registry, "a", "b")
    rollback(registry)
    registry.reject("b", by="ann", why="slow", report={})
    assert [(change.action, change.version) for change in registry.history()] == [
        ("promote", "a"), ("promote", "b"), ("rollback", "a"),
    ]  # fmt: skip
    assert registry.prune(keep=0) == []
    promote(registry, "b")
    assert names(registry) == ["a", "b"]


def test_two_equal_promotions_at_one_moment_are_two(registry: Registry, drafter: Path, monkeypatch: pytest.MonkeyPatch):
    """Same version, same words, same time: a writer must not take the other's file for its own."""

    class Stopped(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 11, 30, tzinfo=UTC)

    monkeypatch.setattr("drafters.registry.datetime", Stopped)
    fill(registry, drafter, "a")

    def won(_: int) -> bool:
        try:
            Registry(registry.uri).promote("a", by="ann", why="better", expected=None)
        except ChampionChangedError:
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as threads:
        assert sum(threads.map(won, range(WRITERS))) == 1


def test_a_rollback_of_a_rollback_goes_further_back(registry: Registry, drafter: Path):
    fill(registry, drafter, "a", "b", "c", "d", "e")
    with pytest.raises(RegistryError, match="nothing to roll back to"):
        rollback(registry)
    promote(registry, "a", "b", "c")
    assert rollback(registry) == "b"
    assert rollback(registry) == "a", "and not to c, which was rolled back"
    promote(registry, "d")
    assert rollback(registry) == "a"
    assert rollback(registry) is None, "before the first promotion there was no drafter"
    with pytest.raises(RegistryError, match="nothing to roll back to"):
        rollback(registry)
    promote(registry, "a", "b", "a", "c")
    assert rollback(registry, to="e") == "e", "one that was never champion takes the place of the one rolled back"
    assert rollback(registry) == "a"
    assert rollback(registry) == "b"
    assert rollback(registry, to=PLAIN) is None
    assert [change.previous for change in registry.history()][-3:] == ["e", "a", "b"]


def test_the_champion_is_one_listing_and_one_small_file(
    registry: Registry, drafter: Path, monkeypatch: pytest.MonkeyPatch
):
    fill(registry, drafter, "a", "b", "c", "d")
    promote(registry, "a", "b", "c")
    asked: list[str] = []
    for method in ("names", "read", "size", "open"):
        plain = getattr(AtomicFolder, method)
        monkeypatch.setattr(
            AtomicFolder,
            method,
            lambda self, name="", method=method, plain=plain: (asked.append(f"{method} {name}"), plain(self, name))[1],
        )
    champion = registry.champion()
    assert asked == ["names champion", "read champion/00000003.json"]
    registry.prune(keep=0)
    asked.clear()
    assert registry.champion() == champion, "a removal does not change it"
    assert asked == ["names champion", "read champion/00000004.json"]


# -- verdicts and replicas --------------------------------------------------------------------------------------------


def test_a_rejected_challenger_is_kept_with_its_reason(registry: Registry, drafter: Path):
    fill(registry, drafter, "a", "b")
    assert registry.verdict("b") is None
    registry.reject("b", by="gate", why="code 1.9 against 2.1", report={"lines": [1]})
    registry.reject("b", by="gate", why="said again", report={})
    verdict = registry.verdict("b")
    assert verdict is not None
    assert (verdict["by"], verdict["why"], verdict["report"]) == ("gate", "code 1.9 against 2.1", {"lines": [1]})
    assert names(registry) == ["a", "b"]
    with pytest.raises(RegistryError, match="has no version c"):
        registry.reject("c", by="gate", why="unknown", report={})
    registry.prune(keep=1)
    assert names(registry) == ["a"], "a rejected one counts as older than all others"
    assert registry.verdict("b") == verdict


def test_replicas_say_what_they_serve(registry: Registry):
    registry.report_serving("app#deployment/1", "a")
    registry.report_serving("app#deployment_1", None)
    registry.report_serving("app#deployment/1", "b")
    said = registry.serving()
    assert {name: serving.version for name, serving in said.items()} == {
        "app#deployment/1": "b", "app#deployment_1": None,
    }  # fmt: skip
    assert not any(serving.stale for serving in said.values())


# -- removal ----------------------------------------------------------------------------------------------------------


def said_ago(registry: Registry, replica: str, version: str, ago: timedelta) -> None:
    said = {"replica": replica, "version": version, "at": (datetime.now(UTC) - ago).isoformat()}
    (Path(registry.uri) / f"serving/{replica}.json").write_text(json.dumps(said))


def test_prune_keeps_what_is_needed_and_the_newest(registry: Registry, drafter: Path):
    fill(registry, drafter, *"abcdefghij")
    promote(registry, "a", "b", "d")
    rollback(registry, to="c")  # champion c, before it d; a rollback leads to b
    registry.report_serving("fresh", "e")
    said_ago(registry, "silent", "f", timedelta(minutes=16))
    said_ago(registry, "gone", "f", timedelta(days=2))
    registry.reject("j", by="gate", why="slow", report={})
    assert registry.prune(keep=2, by="ann", why="disk is full") == ["j", "a", "f", "g"]
    assert names(registry) == list("bcdehi")
    assert not (Path(registry.uri) / "versions/a").exists()
    assert sorted(registry.serving()) == ["fresh", "silent"]
    (pruning,) = registry.prunings()
    assert (pruning.removed, pruning.by, pruning.why) == (("j", "a", "f", "g"), "ann", "disk is full")
    assert registry.prune(keep=2) == []
    assert registry.prune(keep=0) == ["h", "i"]
    with pytest.raises(RegistryError, match=r"version a was removed on .* by ann \(disk is full\); publish"):
        promote(registry, "a")
    with pytest.raises(RegistryError, match="version a was removed on"):
        registry.publish(other(drafter, ord("a")), name="a")
    with pytest.raises(RegistryError, match="give 0 or more"):
        registry.prune(keep=-1)
    assert rollback(registry) == "b"
    with pytest.raises(RegistryError, match="a, the champion before b, is gone; name a version"):
        rollback(registry)
    assert rollback(registry, to=PLAIN) is None


def test_prune_leaves_publications_alone_and_removes_what_killed_ones_left(registry: Registry, drafter: Path):
    fill(registry, drafter, "a")
    root = Path(registry.uri)
    for name in ("at-work", "killed"):
        shutil.copytree(root / "versions/a", root / "versions" / name)
        (root / "versions" / name / "version.json").unlink()
        for file in (root / "versions" / name).iterdir():
            os.utime(file, (AGO, datetime.now().timestamp() - AGO))
    (root / "versions/at-work/config.json").touch()
    for name, ago in (("large.tmp", 0), ("old.tmp", AGO)):
        (root / "_work" / name).write_bytes(b"x")
        os.utime(root / "_work" / name, (AGO, datetime.now().timestamp() - ago))
    assert registry.prune(keep=1) == []
    assert sorted(path.name for path in (root / "versions").iterdir()) == ["a", "at-work"]
    assert [path.name for path in (root / "_work").iterdir()] == ["large.tmp"]


def test_a_publication_that_is_taken_up_again_is_young_again(registry: Registry, drafter: Path):
    """Else a prune at the same time would take what it began long ago for a leftover."""
    folder = Path(registry.uri) / "versions/a"
    folder.mkdir(parents=True)
    shutil.copy(drafter / "provenance.json", folder)
    os.utime(folder / "provenance.json", (AGO, datetime.now().timestamp() - AGO))
    plain = AtomicFolder.create

    def create(self: AtomicFolder, name: str, data: object) -> None:
        Registry(registry.uri).prune(keep=0)
        plain(self, name, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AtomicFolder, "create", create)
        registry.publish(drafter, name="a")
    assert names(registry) == ["a"]


def test_the_mark_goes_first_and_a_killed_removal_is_finished_by_the_next(registry: Registry, drafter: Path):
    fill(registry, drafter, "a", "b", "c")
    promote(registry, "c")

    def killed(number: int) -> None:
        def rmtree(path: Path, **options: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        registry_versions.shutil.rmtree = rmtree  # type: ignore[assignment]  # this process ends here
        registry.prune(keep=1)

    assert in_processes(killed, 1) == [-signal.SIGKILL]
    root = Path(registry.uri) / "versions"
    assert sorted(path.name for path in (root / "a").iterdir()) == sorted(FILES), "its mark is gone"
    assert (root / "b/version.json").exists()
    assert names(registry) == ["c"], "b will go: nobody may begin to use it"
    with pytest.raises(RegistryError, match="version b was removed"):
        promote(registry, "b")
    assert registry.prune(keep=1) == ["a", "b"]
    assert sorted(path.name for path in root.iterdir()) == ["c"]
    assert len(registry.prunings()) == 1


def between(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> list[object]:
    """Do something after a writer has looked at the log and before it creates its file; what came of it."""
    plain, done = registry_log.RegistryFiles.create, []

    def create(self, name, values):
        if not done:
            done.append(None)
            done.append(action())
        return plain(self, name, values)

    monkeypatch.setattr(registry_log.RegistryFiles, "create", create)
    return done


def test_a_promotion_that_comes_between_saves_its_version_from_a_prune(
    registry: Registry, drafter: Path, monkeypatch: pytest.MonkeyPatch
):
    fill(registry, drafter, "a", "b", "c")
    promote(registry, "c")
    done = between(monkeypatch, lambda: promote(Registry(registry.uri), "a"))
    assert registry.prune(keep=0) == ["b"]
    assert done, "it did come between"
    assert names(registry) == ["a", "c"]


def test_a_prune_that_comes_between_stops_a_promotion(
    registry: Registry, drafter: Path, monkeypatch: pytest.MonkeyPatch
):
    fill(registry, drafter, "a", "b", "c", "d")
    champion = promote(registry, "c")
    done = between(monkeypatch, lambda: Registry(registry.uri).prune(keep=1))
    with pytest.raises(RegistryError, match="version a was removed") as caught:
        promote(registry, "a")
    assert not isinstance(caught.value, ChampionChangedError)
    assert done[1] == ["a", "b"]
    assert registry.champion() == champion
    done.clear()
    fill(registry, drafter, "e", "f")
    done = between(monkeypatch, lambda: Registry(registry.uri).prune(keep=1))
    assert promote(registry, "f").previous == "c", "the removal of others does not disturb it"
    assert done[1] == ["d", "e"]


def test_a_name_that_a_prune_took_while_it_was_published_twice_is_refused(
    registry: Registry, drafter: Path, monkeypatch: pytest.MonkeyPatch
):
    def publish_and_prune() -> None:
        Registry(registry.uri).publish(drafter, name="a")
        with pytest.MonkeyPatch.context() as killed:
            killed.setattr(registry_versions.VersionFolders, "remove", lambda self, name: None)
            Registry(registry.uri).prune(keep=0)

    between(monkeypatch, publish_and_prune)
    with pytest.raises(RegistryError, match=r"version a was removed on .*; publish its drafter under another name"):
        registry.publish(drafter, name="a")
    assert registry.versions() == []


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_at_a_time_the_champion_is_there(registry: Registry, drafter: Path, seed: int):
    fill(registry, drafter, *"abcd")
    promote(registry, "a")

    def work(number: int) -> None:
        rng, own = random.Random(100 * seed + number), Registry(registry.uri)
        for step in range(6):
            try:
                what = rng.choice(["publish", "promote", "rollback", "prune"])
                if what == "publish":
                    own.publish(other(drafter, rng.randrange(6)), name=f"v{number}-{step}")
                elif what == "promote":
                    promote(own, rng.choice(names(own)))
                elif what == "rollback":
                    rollback(own)
                else:
                    own.prune(keep=rng.randrange(3))
            except RegistryError:
                pass
            champion = own.champion()
            assert champion is not None
            if champion.version is not None:
                weights = local_checkpoint(f"{own.uri}/versions/{champion.version}") / "model.safetensors"
                assert weights.exists() or own.champion() != champion

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    numbers = [entry.number for entry in registry_log.ChampionLog(registry._files).read().entries]
    assert numbers == list(range(1, len(numbers) + 1))
