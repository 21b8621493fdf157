"""One window, killed before and after every file that it writes: it ends with one promotion and one version.

Reading, training and the gate are stand-ins here, so that hundreds of kills take seconds; tests/ray and tests/e2e have
the real ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafters.atomic_files import AtomicFolder
from drafters.registry import Registry
from drafters.target import load_target
from pipelines import redistill as stage
from pipelines.gate import GateConfig, GateLine, GateReport
from pipelines.gate_ancestors import ancestors
from pipelines.gate_lines import REGRESSION
from pipelines.redistill import next_window, redistill, replay_weights
from pipelines.redistill_config import RedistillConfig, RedistillError
from pipelines.run_lease import LeaseHeldError, RunLease
from pipelines.traffic_window import WindowConfig
from pipelines.window_folder import BEGINNING
from serving.chat_options import ChatTemplate
from serving.traffic_schema import TrafficMetadata
from tests.pipelines.test_traffic_window import WINDOW, row, write_log
from tests.toy_mtp import save_toy_drafter

ROWS = 30


class Killed(BaseException):
    """Nobody catches it."""


@dataclass
class Trained:
    steps: int = 8
    seconds: float = 1.0
    expected_tau: float | None = 2.0


@dataclass
class Rollouts:
    rows: int
    taps: tuple[int, ...] = (0, 1)

    @property
    def manifest(self) -> Rollouts:
        return self

    @property
    def metadata(self) -> Any:
        return SimpleNamespace(**dict.fromkeys(stage.ALIKE, self.taps))


@pytest.fixture
def config(tmp_path: Path, toy_target_dir: Path) -> RedistillConfig:
    """A log of 30 requests, and a registry with a champion."""
    registry = Registry(str(tmp_path / "registry"))
    first = registry.publish(save_toy_drafter(tmp_path / "first", toy_target_dir), name="first")
    registry.promote(first.name, by="test", why="to begin with", expected=None)
    config = RedistillConfig(
        target=str(toy_target_dir),
        traffic=str(tmp_path / "traffic"),
        registry=str(tmp_path / "registry"),
        work=str(tmp_path / "work"),
        since=WINDOW.since,
        until=WINDOW.until,
        min_rows=10,
        held_out_limit=6,
        window=WindowConfig(held_out=0.2),
        gate=GateConfig(min_prompts=5),
    )
    write_log(tmp_path / "traffic", [row(i) for i in range(ROWS)], origin_of(config))
    return config


def origin_of(config: RedistillConfig) -> TrafficMetadata:
    target = load_target(config.target)
    return TrafficMetadata.of(config.target, target, ChatTemplate(target))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that were really at work; their stand-ins leave the files of the real ones."""
    made: list[str] = []

    def write_rollouts(rows, target, uri, config) -> None:
        made.append("read")
        AtomicFolder(uri).write("manifest.json", str(len(rows)).encode())

    def train(config) -> Trained:
        made.append("train")
        shutil.copytree(config.init_from, config.output, dirs_exist_ok=True)
        (Path(config.output) / "version.json").unlink(missing_ok=True)
        provenance = json.loads((Path(config.output) / "provenance.json").read_text())
        (Path(config.output) / "provenance.json").write_text(json.dumps(provenance | {"window": config.output}))
        return Trained()

    def hold_gate(task, **_: Any) -> GateReport:
        made.append("gate")
        return verdict(passed=True, challenger=task.challenger, champion=task.champion)

    def open_rollouts(uri: str) -> Rollouts:
        return Rollouts(rows=int(AtomicFolder(uri).read("manifest.json")))

    for name, stand_in in (
        ("write_rollouts", write_rollouts), ("train", train), ("hold_gate", hold_gate),
        ("open_rollouts", open_rollouts), ("regression_prompts", lambda *a, **k: []),
    ):  # fmt: skip
        monkeypatch.setattr(stage, name, stand_in)
    return made


def verdict(passed: bool, decided: bool = True, challenger: str = "c", champion: str | None = "p") -> GateReport:
    line = GateLine(
        name="held-out tau", champion=1.5, challenger=2.0, threshold=1.6, passed=passed, says="1.50 against 2.00",
        decided=decided,
    )  # fmt: skip
    return GateReport(challenger=challenger, champion=champion, lines=(line,), figures={}, config={})


def ended_well(config: RedistillConfig) -> None:
    """One promotion, one version of the window, and the registry and the report agree."""
    registry = Registry(config.registry)
    assert [change.version for change in registry.history()] == ["first", WINDOW.id]
    assert [version.name for version in registry.versions()] == ["first", WINDOW.id]
    version = registry.version(WINDOW.id)
    assert (version.parent, version.data["window"]) == ("first", WINDOW.id)
    report = json.loads((Path(config.work) / "windows" / WINDOW.id / "report.json").read_text())
    assert (report["verdict"], report["version"], report["previous"]) == ("promoted", WINDOW.id, "first")
    assert report["counts"]["read"] == ROWS


def test_a_window_is_promoted_once_and_a_second_run_does_nothing(config, calls):
    report = redistill(config)
    assert (report.verdict, report.repeated) == ("promoted", False)
    ended_well(config)
    assert calls == ["read", "train", "gate"]
    again = redistill(config)
    assert again == replace(report, repeated=True)
    assert calls == ["read", "train", "gate"]
    assert Registry(config.registry).version(WINDOW.id).evaluation["tau"] == 2.0


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_write_the_same_command_ends_as_an_undisturbed_one(config, calls, monkeypatch, after):
    def count_writes(kill_at: int | None) -> Callable[[], int]:
        """Every write of any stage counts; the one at `kill_at` is the last."""
        done = 0

        def wrap(write: Callable[..., Any]) -> Callable[..., Any]:
            def written(self: AtomicFolder, name: str, data: Any) -> Any:
                nonlocal done
                done += 1
                if done == kill_at and not after:
                    raise Killed
                result = write(self, name, data)
                if done == kill_at:
                    raise Killed
                return result

            return written

        for name in ("write", "create"):
            monkeypatch.setattr(AtomicFolder, name, wrap(originals[name]))
        return lambda: done

    # killed within its own process a run leaves a lease that looks alive
    monkeypatch.setattr(stage, "RunLease", partial(RunLease, ttl_s=2.0))
    originals = {name: getattr(AtomicFolder, name) for name in ("write", "create")}
    start = Path(config.work).parent
    saved = start.with_name(f"{start.name}-saved")
    shutil.copytree(start, saved)
    counted = count_writes(None)
    redistill(config)
    writes = counted()
    assert writes >= 12
    for kill_at in range(1, writes + 1):
        shutil.rmtree(start)
        shutil.copytree(saved, start)
        count_writes(kill_at)
        with pytest.raises(Killed):
            redistill(config)
        count_writes(None)
        redistill(config)
        ended_well(config)


def test_a_rejected_challenger_is_kept_with_its_reason_and_service_is_unchanged(config, calls, monkeypatch):
    monkeypatch.setattr(stage, "hold_gate", lambda *a, **k: verdict(passed=False))
    report = redistill(config)
    assert report.verdict == "rejected"
    assert report.why == "failed 1 of 1: held-out tau: 1.50 against 2.00"
    registry = Registry(config.registry)
    assert registry.champion().version == "first"
    assert registry.verdict(WINDOW.id)["why"] == report.why
    assert [version.name for version in registry.versions()] == ["first", WINDOW.id]


def test_too_few_requests_wait_for_the_next_window(config, calls):
    report = redistill(replace(config, min_rows=ROWS))
    assert (report.verdict, report.why) == ("skipped", f"24 usable requests for training, {ROWS} are needed")
    assert calls == []
    later = replace(config, since=None, until=WINDOW.until + timedelta(hours=1), min_rows=10)
    assert next_window(later).since == BEGINNING
    assert redistill(later).verdict == "promoted"
    assert next_window(replace(later, until=None)).since == later.until


def test_a_window_of_another_target_is_rejected_and_says_so(config, calls, tmp_path, toy_target_dir):
    shutil.rmtree(config.traffic)
    target = load_target(str(toy_target_dir))
    origin = replace(TrafficMetadata.of("toy", target, ChatTemplate(target)), target_fingerprint="another")
    write_log(Path(config.traffic), [row(i) for i in range(ROWS)], origin)
    report = redistill(config)
    assert report.verdict == "rejected"
    assert report.why.endswith(f"of {ROWS} were refused {ROWS} another target")
    assert Registry(config.registry).champion().version == "first"


def test_a_champion_that_changes_during_the_gate_is_held_against_too(
    config, calls, monkeypatch, tmp_path, toy_target_dir
):
    registry, seen = Registry(config.registry), []

    def hold_gate(task, **_: Any) -> GateReport:
        seen.append(task.champion)
        if len(seen) == 1:  # an operator takes the drafter out of service meanwhile
            registry.rollback(by="operator", why="by hand", expected=registry.champion(), to="(plain)")
        return verdict(passed=True)

    monkeypatch.setattr(stage, "hold_gate", hold_gate)
    assert redistill(config).previous is None
    assert [bool(champion) for champion in seen] == [True, False]
    assert [change.version for change in registry.history()] == ["first", None, WINDOW.id]


def test_a_gate_that_cannot_tell_leaves_the_requests_to_the_next_window(config, calls, monkeypatch):
    monkeypatch.setattr(stage, "hold_gate", lambda *a, **k: verdict(passed=False, decided=False))
    report = redistill(config)
    assert (report.verdict, report.version) == ("skipped", None)
    assert [version.name for version in Registry(config.registry).versions()] == ["first"]
    assert next_window(replace(config, since=None, until=WINDOW.until + timedelta(hours=1))).since == BEGINNING
    few = replace(config, until=WINDOW.until - timedelta(hours=1), gate=GateConfig(min_prompts=7), held_out_limit=7)
    assert redistill(few).why == "6 held-out prompts, the gate needs 7"


def test_what_somebody_else_did_with_the_challenger_stands(config, calls, monkeypatch):
    """Promoted by hand while the gate ran: it is not held against itself, and not rejected."""
    registry = Registry(config.registry)
    original = registry.publish

    def publish_and_promote(*args: Any, **options: Any) -> Any:
        version = original(*args, **options)
        registry.promote(version.name, by="operator", why="by hand", expected=registry.champion())
        return version

    monkeypatch.setattr(Registry, "publish", lambda self, *a, **k: publish_and_promote(*a, **k))
    report = redistill(config)
    assert (report.verdict, report.why) == ("promoted", "by hand")
    assert calls == ["read", "train", "gate"]
    assert registry.verdict(WINDOW.id) is None


def test_a_work_folder_belongs_to_one_loop(config, calls, tmp_path):
    redistill(config)
    other = replace(config, registry=str(tmp_path / "another"))
    with pytest.raises(RedistillError, match=r"belongs to another registry .* give each loop a folder of its own"):
        redistill(other)


def test_only_rollouts_that_may_be_replayed_stay(config, calls):
    for hours in (1, 2, 3):  # each ends an hour after the one before, and has requests of its own
        until = WINDOW.since + timedelta(hours=hours)
        rows = [row(100 * hours + i, at_s=3600 * hours - 60 + i) for i in range(ROWS)]
        write_log(Path(config.traffic), rows, origin_of(config), writer=f"w{hours}")
        assert redistill(replace(config, replay_windows=1, since=None, until=until)).verdict == "promoted"
    left = sorted(path.parent.name for path in Path(config.work).glob("windows/*/rollouts"))
    assert left == ["20251130T140000Z-20251130T150000Z"]


def test_losses_that_the_champion_would_forgive_are_held_against_the_best_of_its_line(config, calls, monkeypatch):
    taus = iter([2.0, 1.92, 1.85])  # each 4% below the one before, where 5% are allowed

    def hold_gate(task, **_: Any) -> GateReport:
        tau, report = next(taus), verdict(passed=True)
        line = replace(report.lines[0], name=REGRESSION, challenger=tau)
        conditions, limits = {"conditions": {"regression set": "5e7"}}, {"regression_tolerance": 0.05}
        return replace(report, lines=(*report.lines, line), figures=conditions, config=limits)

    monkeypatch.setattr(stage, "hold_gate", hold_gate)
    reports = []
    for hours in (1, 2, 3):
        rows = [row(100 * hours + i, at_s=3600 * hours - 60 + i) for i in range(ROWS)]
        write_log(Path(config.traffic), rows, origin_of(config), writer=f"w{hours}")
        reports.append(redistill(replace(config, since=None, until=WINDOW.since + timedelta(hours=hours))))
    assert [report.verdict for report in reports] == ["promoted", "promoted", "rejected"]
    best, parent, rejected = (report.version for report in reports)
    assert f"all 1.85 against 2.00 of {best}, which is too little" in reports[2].why
    line = ancestors(Registry(config.registry), rejected)
    assert [version.name for version in line] == [rejected, parent, best, "first"]


def test_an_interrupted_window_that_a_later_one_covers_is_not_taken_up(config, calls, monkeypatch):
    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(stage, "train", killed)
        with pytest.raises(Killed):
            redistill(replace(config, since=None, until=WINDOW.until - timedelta(hours=1)))
    assert next_window(replace(config, since=None, until=None)).until == WINDOW.until - timedelta(hours=1)
    monkeypatch.setattr(stage, "RunLease", partial(RunLease, ttl_s=0.3))
    assert redistill(replace(config, since=None)).verdict == "promoted"
    assert next_window(replace(config, since=None, until=None)).since == WINDOW.until


def test_of_two_runs_one_stops_with_a_clear_word(config, calls):
    other = RunLease(AtomicFolder(config.registry), "redistill of another window", ttl_s=3.0)
    with other, pytest.raises(LeaseHeldError, match="redistill of another window"):
        redistill(config)
    assert calls == []
    assert redistill(config).verdict == "promoted"


def test_windows_need_a_log_and_an_end_that_is_over(config):
    with pytest.raises(RedistillError, match="not over yet"):
        next_window(config, now=WINDOW.until - timedelta(hours=1))
    assert next_window(replace(config, since=None)).id == "19700101T000000Z-20251130T180000Z"
    with pytest.raises(RedistillError, match="give a later until"):
        next_window(replace(config, since=WINDOW.until))


def test_replayed_rows_are_a_share_of_all_and_no_set_is_read_more_than_once():
    assert replay_weights(100, {"a": 300, "b": 100}, 0.5) == {"a": 0.25, "b": 0.25}
    assert replay_weights(100, {"a": 50}, 0.5) == {"a": 1.0}
    assert replay_weights(100, {"a": 50}, 0.0) == replay_weights(100, {}, 0.5) == {}
