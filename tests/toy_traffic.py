"""A traffic log of a toy target: greedy answers to prompts, as service would have logged them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from drafters.acceptance import Acceptance
from drafters.atomic_files import AtomicFolder
from drafters.target import load_target
from serving.chat_options import ChatTemplate
from serving.engine.build import build_engine
from serving.engine.sampling import Sampling
from serving.traffic_schema import TrafficMetadata, TrafficRow, traffic_table
from serving.traffic_shards import shard_name


def log_traffic(uri: str, target_dir: Path, prompts: Sequence[str], since: datetime, tokens: int = 24) -> None:
    """A request a second from `since` on, in one shard."""
    target = load_target(str(target_dir))
    engine = build_engine(target.path, backend="torch", num_slots=4, max_len=128)
    sampling = Sampling(max_new_tokens=tokens)
    answers = engine.generate([target.tokenizer.encode(prompt) for prompt in prompts], sampling)
    rows = [
        TrafficRow(
            request_id=f"t{i}",
            arrived_at=since.timestamp() + i,
            prompt_ids=answer.prompt_ids,
            response_ids=answer.token_ids,
            finish_reason=answer.finish_reason or "length",
            sampling=sampling,
            drafter_version=None,
            drafter_changed=False,
            placement="none",
            acceptance=Acceptance(),
        )
        for i, answer in enumerate(answers)
    ]
    table = traffic_table(rows, TrafficMetadata.of(str(target_dir), target, ChatTemplate(target)))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    name = shard_name(rows[0].arrived_us, rows[-1].arrived_us, "toy", 1)
    AtomicFolder(uri).write(name, sink.getvalue().to_pybytes())
