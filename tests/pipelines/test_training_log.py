"""Metrics and plot of a run: every point, in files that other programs read."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipelines.curve_point import CurvePoint
from pipelines.training_log import METRICS, PLOT, TENSORBOARD, LiveLog, scalars_of, write_log

POINTS = [
    CurvePoint(
        step=step,
        total_steps=30,
        seconds=2.0 * step,
        loss=5.0 - step / 10,
        accuracy_by_position=[0.1 + step / 100, 0.05],
        tokens=100 * step,
        learning_rate=1e-3,
        gradient_norm=0.5,
    )
    for step in (5, 10, 15)
]
MEASURED = replace(
    POINTS[-1],
    expected_tau=1.5,
    acceptance_by_position=[0.4, 0.1],
    tau_by_category={"math": 1.7, "": 1.2},
    skipped_steps=1,
)


def test_a_point_as_scalars():
    assert scalars_of(MEASURED) == {
        "train/loss": 3.5,
        "train/learning_rate": 1e-3,
        "train/gradient_norm": 0.5,
        "train/tokens": 1500,
        "train/tokens_per_s": 50,
        "train/waited_seconds": 0,
        "train/skipped_steps": 1,
        "train/skipped_sequences": 0,
        "held_out/expected_tau": 1.5,
        "accuracy/position_1": 0.25,
        "accuracy/position_2": 0.05,
        "acceptance/position_1": 0.4,
        "acceptance/position_2": 0.1,
        "expected_tau/math": 1.7,
        "expected_tau/none": 1.2,
    }
    assert "held_out/expected_tau" not in scalars_of(POINTS[0])
    skipped = scalars_of(replace(POINTS[0], loss=None, accuracy_by_position=[], gradient_norm=None))
    assert set(skipped) == {
        f"train/{n}"
        for n in ("learning_rate", "tokens", "tokens_per_s", "waited_seconds", "skipped_steps", "skipped_sequences")
    }


def test_the_log_has_every_point_and_a_plot(tmp_path: Path):
    skipped = replace(POINTS[0], step=7, loss=None, accuracy_by_position=[])
    write_log(tmp_path, [POINTS[0], skipped, POINTS[1], MEASURED])
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert lines == [json.loads(json.dumps(asdict(point))) for point in (POINTS[0], skipped, POINTS[1], MEASURED)]
    events = EventAccumulator(str(tmp_path / TENSORBOARD))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (5, 4.5),
        (10, 4.0),
        (15, 3.5),
    ]
    assert [(e.step, e.value) for e in events.Scalars("held_out/expected_tau")] == [(15, 1.5)]
    png = (tmp_path / PLOT).read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000


@pytest.mark.parametrize("points", [[], POINTS[:1]])
def test_a_run_without_much_to_show_is_plotted_all_the_same(points, tmp_path: Path):
    write_log(tmp_path, points)
    assert (tmp_path / PLOT).exists()


def test_a_log_is_gone_on_with(tmp_path: Path):
    for point in POINTS[:2]:
        log = LiveLog(tmp_path)
        log.add(point)
        log.close()
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [5, 10]
