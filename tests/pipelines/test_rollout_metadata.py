"""What rollouts say about how their chats became prompts: in every file where it was told, by default where not."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.rollout_schema import Rollout, RolloutMetadata
from pipelines.rollout_store import RolloutStore, open_rollouts, shard_name
from serving.chat_options import ChatOptions

ROLLOUT = Rollout(
    id="a", category="", prompt_ids=[1], response_ids=[2, 3], finish_reason="stop", temperature=0.0, top_p=1.0,
    top_k=0, seed=0, max_new_tokens=2,
)  # fmt: skip


def save(folder: Path, **options) -> RolloutMetadata:
    metadata = RolloutMetadata(
        target="toy", target_fingerprint="f", tokenizer_hash="t", chat_template_hash="c", target_layer_ids=(),
        chat_options=ChatOptions(**options),
    )  # fmt: skip
    store = RolloutStore(str(folder))
    store.finish({}, metadata, [store.write_shard(shard_name(0, 1), [ROLLOUT], metadata)], [])
    return metadata


@pytest.mark.parametrize(
    "options", [{"system": "sei kurz, größer geht's"}, {"template": "{{ messages }}\n"}, {"thinking": "off"}]
)
def test_options_are_in_the_manifest_and_in_every_file(tmp_path: Path, options: dict):
    metadata = save(tmp_path, **options)
    assert open_rollouts(str(tmp_path)).metadata == metadata
    expected = {"template": None, "system": None, "thinking": "default"} | options
    assert json.loads((tmp_path / "manifest.json").read_text())["chat_options"] == expected
    texts = pq.read_schema(tmp_path / shard_name(0, 1)).metadata
    assert json.loads(texts[b"draftloop.chat_options"]) == expected


def test_sets_that_were_told_nothing_are_those_that_know_no_options(tmp_path: Path):
    save(tmp_path)
    assert "chat_options" not in json.loads((tmp_path / "manifest.json").read_text())
    assert b"draftloop.chat_options" not in pq.read_schema(tmp_path / shard_name(0, 1)).metadata
    assert open_rollouts(str(tmp_path)).metadata.chat_options == ChatOptions()
