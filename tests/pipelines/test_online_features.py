"""Features that do not come end a run with a word; it goes on from its last state."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines import online_features
from pipelines.online_features import FeatureActors


def test_a_target_that_gives_no_features_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    never = threading.Event()
    dataset: Any = SimpleNamespace()
    dataset.map_batches = lambda *args, **kwargs: dataset
    dataset.iter_batches = lambda **kwargs: iter(lambda: never.wait(30), True)
    monkeypatch.setattr(online_features.ray.data, "from_items", lambda *args, **kwargs: dataset)
    monkeypatch.setattr(online_features, "STALL_S", 0.05)
    source: Any = SimpleNamespace(actors=FeatureActors())
    with pytest.raises(RuntimeError, match=r"the target gave no features: nothing came for 0\.05 s; see the Ray logs"):
        list(online_features._stream([{}], source))
    never.set()
