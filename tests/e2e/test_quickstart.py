"""The loop on the toy target: generate, train, evaluate, serve, asked by the real client; then again, reused."""

from __future__ import annotations

import io
import json
import socket

import pytest
from rich.console import Console

from cluster.quickstart import quickstart


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_quickstart_twice(ray_cluster, tmp_path, toy_target_dir):
    said = []
    with socket.socket() as taken:  # a port in use does not end the quickstart: it takes another
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for _ in range(2):
            out = io.StringIO()
            port = taken.getsockname()[1]
            quickstart(Console(file=out, width=120), str(toy_target_dir), tmp_path / "out", 8, 1.0, port)
            said.append(out.getvalue())
    for text in said:
        assert "tau" in text
        assert "equal to plain decoding" in text
        assert "draftloop serve" in text
    facts = json.loads((tmp_path / "out" / "drafter" / "evaluation.json").read_text())
    assert facts["equal"] == facts["prompts"] > 0
    assert ": reused" not in said[0]
    assert "0 made, 1 reused" in said[1]
    assert said[1].count(": reused") == 2  # the drafter and its evaluation
