"""Several rollout sets are one: in the order given, held out from all parts, and never two that do not agree."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.cores import usable_cores
from pipelines.rollout_schema import RolloutMetadata
from pipelines.rollout_store import RolloutStore, shard_name
from pipelines.train_config import TrainError
from pipelines.training_data import open_sets, read_sequences, split
from tests.pipelines.test_rollout_store import METADATA, rollout


def save_set(folder: Path, numbers: range, metadata: RolloutMetadata = METADATA, response: int = 3) -> str:
    store = RolloutStore(str(folder))
    store.begin({})
    rows = [rollout(number, response=response) for number in numbers]
    store.finish({}, metadata, [store.write_shard(shard_name(0, 1), rows, metadata)], [])
    return str(folder)


def test_sets_are_read_in_the_order_given_and_every_part_is_held_out_from(tmp_path: Path):
    one, two = save_set(tmp_path / "one", range(8)), save_set(tmp_path / "two", range(50, 54))
    sequences = read_sequences(open_sets([two, one]))
    assert [int(s.ids[-1]) - 100 for s in sequences] == [50, 51, 52, 53, *range(8)]
    training, held_out = split(sequences, 0.25)
    assert [int(s.ids[-1]) - 100 for s in held_out] == [53, 3, 7]
    assert len(training) == 9


def test_responses_too_short_to_draft_in_are_left_out(tmp_path: Path):
    short = save_set(tmp_path / "short", range(3), response=2)
    assert read_sequences(open_sets([short])) == []


def test_a_set_that_is_given_twice_is_refused(tmp_path: Path):
    one = save_set(tmp_path / "one", range(4))
    same = save_set(tmp_path / "same", range(4))
    with pytest.raises(TrainError, match="given twice; give every set once"):
        open_sets([one, same])


@pytest.mark.parametrize(
    "change",
    [
        {"target_layer_ids": (0, 2)},
        {"target_fingerprint": "e" * 32},
        {"tokenizer_hash": "e" * 32},
        {"chat_template_hash": "e" * 32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_sets_that_do_not_agree_are_refused_with_both_values(change: dict[str, object], tmp_path: Path):
    one = save_set(tmp_path / "one", range(4))
    other = save_set(tmp_path / "other", range(4, 8), replace(METADATA, **change))
    name, value = next(iter(change.items()))
    with pytest.raises(TrainError, match=f"differ in {name}") as caught:
        open_sets([one, other])
    assert str(value) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_cores_are_those_that_the_process_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert usable_cores() == len(before)
