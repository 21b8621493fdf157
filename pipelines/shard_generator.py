"""The actor of `draftloop generate`: one shard's prompts in, one Parquet shard and its record out.

Each actor holds a decode engine and pushes the prompts of a shard through its slots. A shard starts on an idle engine,
so that its bytes depend on nothing but its own rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.remote_checkpoint import local_checkpoint
from pipelines.dialogue import Dialogue
from pipelines.prompt_rows import BadRowError
from pipelines.prompts import PromptRow
from pipelines.rollout_schema import Rollout, RolloutMetadata
from pipelines.rollout_store import RolloutStore, ShardRecord

if TYPE_CHECKING:
    from pipelines.generate_config import GenerateConfig
    from serving.engine.engine import Engine

REPORT_EVERY_S = 1.0  # how often an actor tells the progress board where it stands


@dataclass(frozen=True, kw_only=True)
class ShardContext:
    """What every actor of a run needs to know, beside its shards. Its paths are absolute: actors run elsewhere."""

    config: GenerateConfig
    metadata: RolloutMetadata
    target: str  # absolute path of the driver's copy
    drafter: str | None  # absolute path or URI
    output: str  # absolute URI
    max_len: int  # tokens of the longest row, prompt and response, or of the target's context


def shard_item(name: str, rows: list[PromptRow]) -> dict[str, str]:
    """One shard's work as a row of a Ray dataset: text, so that any Arrow block can hold it."""
    return {"name": name, "rows": json.dumps([row.as_json() for row in rows])}


class ShardGenerator:
    """Callable for `Dataset.map_batches`. A shard that fails returns its error: it must not take others with it."""

    def __init__(self, context: ShardContext, board: Any):
        self.context, self.board = context, board
        self.store = RolloutStore(context.output, features_dtype=context.config.features_dtype)
        self._engine: Engine | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        results = [self._guarded(str(n), str(r)) for n, r in zip(batch["name"], batch["rows"], strict=True)]
        return {"result": [json.dumps(result) for result in results]}

    def _guarded(self, name: str, rows: str) -> dict[str, Any]:
        try:
            record = self.store.record(name)  # written before this actor was restarted
            if record is None:
                record = self._generate(name, json.loads(rows))
            return {"name": name, "record": asdict(record)}
        except Exception as error:
            self._engine = None  # its slots may hold half a shard
            reason = (str(error).strip().splitlines() or [""])[0]
            return {"name": name, "error": f"{type(error).__name__}: {reason}"}

    def _generate(self, name: str, items: list[dict[str, Any]]) -> ShardRecord:
        """Make a shard of what its item holds."""
        engine = self.engine()
        layers = self.context.metadata.target_layer_ids
        done: dict[int, Rollout] = {}
        rejected: dict[int, dict[str, Any]] = {}
        for place, dialogue in self._dialogues(engine, name, [PromptRow.from_json(item) for item in items]):
            features = pick_layers(dialogue.features_TF, tuple(engine.target_layer_ids), layers)
            rollout = dialogue.rollout(features)
            if bad := _unusable(rollout):
                row = dialogue.row
                rejected[place] = {"file": row.file, "line": row.row_number, "kind": bad.kind, "reason": str(bad)}
            else:
                done[place] = rollout
        ordered = [done[place] for place in sorted(done)]
        return self.store.write_shard(name, ordered, self.context.metadata, [rejected[p] for p in sorted(rejected)])

    def _dialogues(self, engine: Engine, name: str, rows: list[PromptRow]) -> Iterator[tuple[int, Dialogue]]:
        """Run the rows through the engine's slots, a row's next turn as soon as its last is over; tell the board.

        Yields (place in the shard, finished dialogue).
        """
        config = self.context.config
        dialogues = [Dialogue(row, config, engine.max_len) for row in rows]

        def ask(place: int) -> None:
            dialogue = dialogues[place]
            engine.add(dialogue.ids, dialogue.sampling(), request_id=str(place), keep_features=config.with_features)

        for place in range(len(rows)):
            ask(place)
        finished = tokens = 0
        reported = time.monotonic()
        while engine.has_work:
            for progress in engine.step():
                tokens += len(progress.token_ids)
                if progress.completion:
                    place = int(progress.request_id)
                    if dialogues[place].take(progress.completion):
                        ask(place)
                        continue
                    finished += 1
                    yield place, dialogues[place]
            if time.monotonic() - reported > REPORT_EVERY_S or not engine.has_work:
                reported = time.monotonic()
                self.board.note.remote(name, finished, tokens)

    def engine(self) -> Engine:
        """The engine, built with the first shard: an error there is a shard's error, with its reason."""
        if self._engine is None:
            from drafters.target import target_on_this_node
            from serving.engine.build import build_engine
            from serving.engine.engine_config import EngineConfig

            context, config = self.context, self.context.config
            layers = context.metadata.target_layer_ids
            path = target_on_this_node(config.target, context.target, layers, context.metadata.target_fingerprint)
            self._engine = build_engine(
                path,
                dtype=config.dtype,
                backend=config.backend,
                device="cuda" if config.gpus_per_actor else "cpu",
                num_slots=config.batch,
                max_len=context.max_len,
                drafter_path=local_checkpoint(context.drafter) if context.drafter else None,
                target_layer_ids=layers or None,
                num_threads=config.threads,
                # with the torch backend bytes would depend on the shards before: rounding does, on what a pass feeds
                config=EngineConfig(reuse_prefixes=False),
            )
        return self._engine


def pick_layers(features_TF: Tensor | None, have: tuple[int, ...], want: tuple[int, ...]) -> Tensor | None:
    """The features of the wanted layers, where a drafter makes the engine tap more of them."""
    if features_TF is None or have == want:
        return features_TF
    places = [have.index(layer) for layer in want]
    return features_TF.unflatten(1, (len(have), -1))[:, places].flatten(1)


def _unusable(rollout: Rollout) -> BadRowError | None:
    """Why a finished row is left out, or None."""
    if rollout.finish_reason not in ("stop", "length"):
        return BadRowError("generation failed", f"generation ended with {rollout.finish_reason}")
    if rollout.features_TF is not None and not bool(torch.isfinite(rollout.features_TF).all()):
        return BadRowError("hidden states not finite", "the target's hidden states are not finite")
    return None
