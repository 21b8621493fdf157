"""After every test of this folder: engines without work have all their slots back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from serving.engine.engine import Engine


def _whole(engine: Engine) -> bool:
    return engine.has_work or engine.free_slots == engine.num_slots


@pytest.fixture(autouse=True)
def _slots_return(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Engine] = []
    init = Engine.__init__

    def noted(self: Engine, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", noted)
    yield
    deadline = time.monotonic() + 30.0  # an engine's own thread may be in the middle of a release
    while not all(map(_whole, made)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for engine in made:
        assert _whole(engine), f"{engine.num_slots - engine.free_slots} slots are lost"
