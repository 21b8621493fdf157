"""What the drill shows and what it does to the loop; the drill itself is a command of more than half an hour."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from http.client import IncompleteRead
from pathlib import Path

import pytest
from rich.console import Console

from cluster import drill
from cluster.drill import DrillConfig
from cluster.drill_faults import POISONS, poison, publish_bad
from cluster.drill_report import WINDOW_S, Event, live_figures, markdown, plot, stretches
from cluster.drill_traffic import Reply
from cluster.show import Stage
from cluster.show_drill import drill_tables
from drafters.checkpoint import load_module
from drafters.registry import Registry
from pipelines.data import SHIPPED, shipped
from pipelines.traffic_window import repeated_share, select
from tests.pipelines.test_traffic_window import ORIGIN, WINDOW, row, write_log
from tests.toy_mtp import save_toy_drafter

EVENTS = [
    Event(at_s=0.0, kind="shift", what="maths"),
    Event(at_s=0.5, kind="serving", what="one@1"),
    Event(at_s=100.0, kind="shift", what="code"),
    Event(at_s=150.0, kind="promoted", what="better"),
    Event(at_s=160.0, kind="serving", what="two@2"),
]


def reply(at_s: float, phase: str, tau: float, error: str | None = None) -> Reply:
    rounds = 0 if error else 10
    return Reply(
        at_s=at_s, phase=phase, tokens=int(rounds * tau), rounds=rounds, proposed=50, accepted=int(rounds * (tau - 1)),
        seconds=2.0, longest_gap_s=0.1, error=error,
    )  # fmt: skip


REPLIES = [
    *(reply(t, "maths", 3.0) for t in range(4, 100, 4)),
    reply(101.0, "maths", 9.0),  # was asked before the shift: of neither stretch
    *(reply(t, "code", 1.5) for t in range(104, 160, 4)),
    reply(161.0, "code", 9.0),  # the swap fell into it
    *(reply(t, "code", 2.0) for t in range(164, 220, 4)),
    reply(221.0, "code", 1.0, error="connection lost"),
]


def test_a_stretch_counts_the_answers_that_belong_to_it_alone():
    found = stretches(REPLIES, EVENTS)
    assert [(s.phase, s.drafter, s.tau, s.failed) for s in found] == [
        ("maths", "one@1", 3.0, 0), ("code", "one@1", 1.5, 0), ("code", "two@2", 2.0, 1),
    ]  # fmt: skip
    assert found[0].tokens_per_s == 15.0


def test_failed_answers_are_told_where_no_answer_was_whole():
    """A stretch that is shorter than an answer, of which one ended there, by an error."""
    swaps = [(230.0, "three@3"), (231.0, "four@4")]
    events = [*EVENTS, *(Event(at_s=at_s, kind="serving", what=what) for at_s, what in swaps)]
    found = stretches([*REPLIES, reply(230.5, "code", 1.0, error="connection lost")], events)
    assert [(s.drafter, s.replies, s.failed, s.tau) for s in found][-1] == ("three@3", 0, 1, None)
    assert "| code | three@3 | 0 | 1 | - |" in markdown(found, [])


def test_looks_at_the_endpoint_survive_whatever_it_answers(monkeypatch: pytest.MonkeyPatch):
    run = drill._Drill(DrillConfig(), Registry("nowhere"), [], Stage(Console(), None, quiet=True))
    answers = [b"{}", b"[]", b"null", b'{"data": []}', b"<html>", b'{"data": [{"metadata": {"drafter": null}}]}']
    left = iter([IncompleteRead(b""), OSError("away"), *answers])

    def open_url(url: str, timeout: float) -> io.BytesIO:
        answer = next(left, None)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            run._over.set()
            return io.BytesIO(b'{"data": [{"metadata": {"drafter": {"version": "one@1"}}}]}')
        return io.BytesIO(answer)

    monkeypatch.setattr("urllib.request.urlopen", open_url)
    monkeypatch.setattr(drill, "LOOK_EVERY_S", 0.0)
    run._watch("http://nowhere")
    assert [(event.kind, event.what) for event in run.events] == [("serving", "one@1")]


def test_a_drill_does_not_begin_on_an_earlier_one_s_registry(
    tmp_path: Path, toy_target_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    begun: list[str] = []

    def begin(*arguments: object) -> None:
        begun.append("trains")
        raise EOFError

    monkeypatch.setattr(drill, "first_drafter", begin)
    registry = Registry(str(tmp_path / "registry"))
    first = registry.publish(save_toy_drafter(tmp_path / "drafter", toy_target_dir), name="first")
    change = registry.promote(first.name, by="draftloop drill", why="the first drafter", expected=None)
    with pytest.raises(EOFError):  # one that was stopped early goes on
        drill.drill(Console(), DrillConfig(output=tmp_path))
    (tmp_path / "redistill" / "windows" / "20261130T120000Z-20261130T180000Z").mkdir(parents=True)
    with pytest.raises(drill.DrillError, match="an earlier drill has been here; give another --output, or remove"):
        drill.drill(Console(), DrillConfig(output=tmp_path))
    shutil.rmtree(tmp_path / "redistill")
    registry.rollback(by="draftloop drill", why="it drafts badly", expected=change)
    with pytest.raises(drill.DrillError, match="an earlier drill"):
        drill.drill(Console(), DrillConfig(output=tmp_path))
    assert begun == ["trains"]


def test_live_figures_follow_the_traffic():
    times, taus, rates = live_figures(REPLIES)
    at = dict(zip(times, zip(taus, rates, strict=True), strict=True))
    assert at[80.0] == (3.0, pytest.approx(30 * WINDOW_S / 4 / WINDOW_S))  # thirty tokens in every four seconds
    assert at[150.0][0] == 1.5
    assert at[200.0][0] == 2.0


def test_what_people_see_has_the_figures():
    compared = [
        {"prompts": "code", "count": 20, "static_tau": 1.5, "static_s": 1.1, "loop_tau": 2.0, "loop_s": 1.3,
         "equal": 40, "of": 40},
        {"prompts": "maths", "count": 0, "static_tau": None, "static_s": 1.0, "loop_tau": None, "loop_s": 1.0,
         "equal": 0, "of": 0},
    ]  # fmt: skip
    rows = stretches(REPLIES, EVENTS)
    assert "| code | two@2 | 15 | 1 | 2.00 |" in markdown(rows, compared)
    assert "| code (20) | 1.50, 1.10 | 2.00, 1.30 | 40 of 40 |" in markdown(rows, compared)
    assert "| maths (0) | -, 1.00 | -, 1.00 | 0 of 0 |" in markdown(rows, compared)
    console = Console(width=160, record=True)
    console.print(drill_tables(rows, compared))
    assert "40 of 40" in console.export_text()
    assert "live tau" in plot(REPLIES, EVENTS, "a drill")


def test_poisoned_logs_have_the_requests_and_other_answers(tmp_path: Path):
    log = tmp_path / "log"
    write_log(log, [replace(row(i), response_ids=[*range(i, i + 40)]) for i in range(12)])
    before = select(str(log), WINDOW, ORIGIN).training
    for kind in POISONS:
        found = select(str(poison(log, tmp_path / kind, kind)), WINDOW, ORIGIN)
        assert found.read == 12
        if kind == "garbage":
            assert found.refused == {"a loop": 12}
        else:
            assert [list(r.prompt_ids) for r in found.training] == [list(r.prompt_ids) for r in before]
            assert all(
                list(a.response_ids) != list(b.response_ids) for a, b in zip(found.training, before, strict=True)
            )
    assert repeated_share(before[0].response_ids, 8) == 0


def test_a_bad_version_has_the_good_ones_evaluation_and_other_weights(tmp_path: Path, toy_target_dir: Path):
    registry = Registry(str(tmp_path / "registry"))
    drafter = save_toy_drafter(tmp_path / "drafter", toy_target_dir)
    good = registry.publish(drafter, name="good", evaluation={"tau": 2.5})
    bad = registry.version(publish_bad(registry, good.name, tmp_path / "bad"))
    assert (bad.evaluation, bad.parent) == ({"tau": 2.5}, "good")
    assert bad.files["model.safetensors"] != good.files["model.safetensors"]
    load_module(Path(bad.uri), toy_target_dir)  # nothing of it is refused


def test_what_traffic_shifts_to_is_shipped():
    assert {"mbpp", "russian"} <= set(SHIPPED)
    for name in SHIPPED:
        assert shipped(name).read_text("utf-8").count("\n") >= 190
