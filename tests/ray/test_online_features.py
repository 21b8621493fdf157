"""The pool of target actors behind online training grows while chunks wait, and gives them in order all the same."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines import online_features
from pipelines.online_features import NUMBER, FeatureActors, OnlineSource

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

CHUNKS = 8


class NotesItsProcess:
    """In place of the features: a chunk's number. The first chunk is held until another actor has begun, or 100 s."""

    def __init__(self, source: OnlineSource):
        self.seen = Path(source.rollouts[0])

    def __call__(self, batch: pa.Table) -> pa.Table:
        (self.seen / str(os.getpid())).touch()
        deadline = time.monotonic() + 100
        while 0 in batch[NUMBER].to_pylist() and len(list(self.seen.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        return batch.select([NUMBER])


def test_the_pool_grows_while_chunks_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(online_features, "FeatureStage", NotesItsProcess)
    actors = FeatureActors(least=1, most=2)
    source = OnlineSource(rollouts=[str(tmp_path)], target=None, actors=actors)  # type: ignore[arg-type]
    items = [{NUMBER: number} for number in range(CHUNKS)]
    numbers = [n for table in online_features._stream(items, source) for n in table[NUMBER].to_pylist()]
    assert numbers == list(range(CHUNKS))
    assert len(list(tmp_path.iterdir())) == 2
