"""The target of drafters that go to other servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.toy_formats import save_deep_target


@pytest.fixture(scope="session")
def deep_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers. Read-only."""
    return save_deep_target(tmp_path_factory.mktemp("targets") / "deep")
