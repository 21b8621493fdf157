"""Several rollout sets are one: in the order given, held out from all parts, and never two that do not agree."""

import os
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from pipelines.cores import usable_cores
from pipelines.draft_vocabulary import TokenCounts
from pipelines.rollout_index import index_rollouts, read_chunk, read_rows
from pipelines.rollout_schema import RolloutMetadata
from pipelines.rollout_store import RolloutError, RolloutSet, RolloutStore, shard_name
from pipelines.step_order import Chunk
from pipelines.train_config import TrainError
from pipelines.training_data import fetch_from, open_sets
from tests.pipelines.test_rollout_store import METADATA, rollout

VOCAB = 200


def save_set(folder: Path, numbers: range, metadata: RolloutMetadata = METADATA, response: int = 3) -> str:
    store = RolloutStore(str(folder))
    store.begin({})
    rows = [rollout(number, response=response) for number in numbers]
    store.finish({}, metadata, [store.write_shard(shard_name(0, 1), rows, metadata)], [])
    return str(folder)


def rows_of(sets: list[RolloutSet], chunks: list[Chunk]) -> list[int]:
    """The number of every row's rollout, which its last token tells."""
    return [int(s.ids[-1]) - 100 for chunk in chunks for s in read_chunk(sets, chunk)]


def test_sets_are_read_in_the_order_given_and_every_part_is_held_out_from(tmp_path: Path):
    one, two = save_set(tmp_path / "one", range(8)), save_set(tmp_path / "two", range(50, 54))
    sets = open_sets([two, one])
    index = index_rollouts(sets, vocab_size=VOCAB, held_out=0.25, lanes=1)
    assert rows_of(sets, index.training) == [50, 51, 52, 0, 1, 2, 4, 5, 6]
    assert rows_of(sets, index.held_out) == [53, 3, 7]
    assert (index.rows, index.held_out_rows, index.response_tokens) == (9, 3, 27)
    assert index.held_out_counts.responses_V.nonzero().flatten().tolist() == [103, 107, 153]
    assert int(index.held_out_counts.prompts_V.sum()) == 12
    counts = TokenCounts.total(index.counts)
    assert counts.responses_V[[100, 103, 150]].tolist() == [3, 0, 3]
    assert counts.prompts_V[:5].tolist() == [9, 9, 9, 9, 0]


def test_a_rollout_keeps_its_features_and_facts(tmp_path: Path):
    sets = open_sets([save_set(tmp_path / "one", range(3))])
    found = read_chunk(sets, Chunk(0, (0, 2), (7, 7)))
    for sequence, number in zip(found, (0, 2), strict=True):
        expected = rollout(number)
        assert torch.equal(sequence.features, expected.features_TF)
        assert sequence.ids.tolist() == expected.prompt_ids + expected.response_ids
        assert (sequence.prompt_len, sequence.category, sequence.greedy, sequence.turns) == (4, "math", False, ())


def test_responses_too_short_to_draft_in_are_left_out(tmp_path: Path):
    short, long = save_set(tmp_path / "short", range(3), response=2), save_set(tmp_path / "long", range(10, 12))
    sets = open_sets([short, long])
    index = index_rollouts(sets, vocab_size=VOCAB, held_out=0.05, lanes=1)
    assert (rows_of(sets, index.training), rows_of(sets, index.held_out)) == ([10], [11]), (
        "the last of a few is held out"
    )
    with pytest.raises(TrainError, match=r"0 usable rollouts are too few to train on \(of 3\)"):
        index_rollouts(open_sets([short]), vocab_size=VOCAB, held_out=0.05, lanes=1)


def test_a_conversation_is_several_turns(tmp_path: Path):
    """Two replies, and between them three tokens that the target did not write; then a row of turns too short."""
    spoken = [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    rows = [
        replace(rollout(1, response=9), loss_mask=spoken),
        replace(rollout(2, response=9), loss_mask=[0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1]),
        rollout(3),
    ]
    store = RolloutStore(str(tmp_path))
    store.begin({})
    store.finish({}, METADATA, [store.write_shard(shard_name(0, 1), rows, METADATA)], [])
    sets = open_sets([str(tmp_path)])
    index = index_rollouts(sets, vocab_size=VOCAB, held_out=0.5, lanes=1)
    (conversation,) = read_chunk(sets, index.training[0])
    assert conversation.spans == ((4, 7), (10, 13))
    assert conversation.response_tokens == index.response_tokens == 6
    assert rows_of(sets, index.held_out) == [3]
    counts = TokenCounts.total(index.counts)
    assert (int(counts.responses_V[101]), int(counts.prompts_V[101])) == (6, 3)


def test_rows_are_found_in_any_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipelines.rollout_store.ROW_GROUP_BYTES", 200)  # two rows or so
    (rollouts,) = open_sets([save_set(tmp_path, range(9))])
    assert pq.ParquetFile(tmp_path / shard_name(0, 1)).num_row_groups > 3
    assert [row.id for row in read_rows(rollouts, 0, (0, 3, 4, 8))] == ["row-0", "row-3", "row-4", "row-8"]
    assert list(read_rows(rollouts, 0, ())) == []


def test_chunks_come_in_the_order_asked_for_and_a_damaged_one_is_told(tmp_path: Path):
    uri = save_set(tmp_path, range(6))
    sets = open_sets([uri])
    chunks = [Chunk(0, (i,), (7,)) for i in range(6)]
    fetch = fetch_from(sets, chunks)
    found = [(c, int(rows[0].ids[-1]) - 100) for c, rows in fetch([4, 0, 5, 0, 2])]
    assert found == [(4, 4), (0, 0), (5, 5), (0, 0), (2, 2)]
    (tmp_path / shard_name(0, 1)).write_bytes(b"PAR1 no more")
    with pytest.raises(RolloutError, match=r"part-00000-of-00001\.parquet cannot be read .* run generate again"):
        list(fetch([1]))


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
