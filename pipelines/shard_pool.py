"""The driver's side of `draftloop generate`: missing shards in, their records out, with progress on the way.

Ray Data gives each actor of a pool one shard at a time. Shards that fail are tried once more, then reported by name.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray

from pipelines.arrivals import Arrivals, NothingCameError
from pipelines.cores import usable_cores
from pipelines.generate_config import GenerateConfig, GenerateError
from pipelines.progress_board import ProgressBoard
from pipelines.ray_session import lacking_resource, start_ray
from pipelines.rollout_store import RolloutStore, ShardRecord
from pipelines.shard_generator import ShardContext, ShardGenerator

MAX_ATTEMPTS = 2  # of a shard that fails
POLL_S = 1.0  # how often the driver looks at the progress board
VISIBLE_S = 60.0  # a file on a network file system may be seen so much later on another node


@dataclass(frozen=True, kw_only=True)
class GenerateProgress:
    """Where a run stands. `message` is set for what is worth a line of its own."""

    message: str | None = None
    rows_done: int = 0
    rows_total: int = 0
    response_tokens: int = 0  # made in this run
    tokens_per_s: float = 0.0
    eta_s: float | None = None  # None: not known yet


OnProgress = Callable[[GenerateProgress], None]


class Meter:
    """Turns finished shards and what the board says of others into progress.

    Speed counts from the first report on, so without the engines' start.
    """

    def __init__(self, say: OnProgress, rows_total: int, rows_before: int):
        self.say, self.rows_total, self.rows_before = say, rows_total, rows_before
        self.finished: dict[str, tuple[int, int]] = {}  # by shard: rows, response tokens
        self.at_work: dict[str, tuple[int, int]] = {}  # the same, as the board said last
        self.heard = time.monotonic()  # when an actor gave a sign of life last
        self.moved = self.heard  # when the figures changed last
        self.last = (0, 0)  # rows and response tokens of this run
        self.first: tuple[float, int, int] | None = None  # time, rows, tokens of the first report

    def take(self, result: dict[str, Any]) -> None:
        """Count what arrived, be it an error: the board may be lost while the work goes on."""
        self.heard = time.monotonic()
        if record := result.get("record"):
            rows = record["rows"] + len(record["rejected"])
            self.finished[result["name"]] = (rows, record["response_tokens"])

    def show(self) -> None:
        shards = (self.at_work | self.finished).values()
        rows, tokens = sum(rows for rows, _ in shards), sum(tokens for _, tokens in shards)
        if (rows, tokens) != self.last:
            self.heard = self.moved = time.monotonic()
            self.last = (rows, tokens)
            self.first = self.first or (self.moved, rows, tokens)
        self.say(
            GenerateProgress(
                rows_done=self.rows_before + rows,
                rows_total=self.rows_total,
                response_tokens=tokens,
                tokens_per_s=self.tokens_per_s,
                eta_s=self._eta_s(),
            )
        )

    @property
    def tokens_per_s(self) -> float:
        """Response tokens a second between the first change and the last."""
        if self.first is None or self.moved <= self.first[0]:
            return 0.0
        return (self.last[1] - self.first[2]) / (self.moved - self.first[0])

    def _eta_s(self) -> float | None:
        if self.first is None or self.last[0] <= self.first[1]:
            return None
        left = self.rows_total - self.rows_before - self.last[0]
        return left * (time.monotonic() - self.first[0]) / (self.last[0] - self.first[1])

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self.heard


def make_shards(
    context: ShardContext,
    items: dict[str, dict[str, str]],
    meter: Meter,
    actor: type[ShardGenerator] | None = None,
) -> list[ShardRecord]:
    """Make the shards of `items` (by name) with actors of a kind; None: they generate.

    Raises GenerateError naming those that failed twice.
    """
    if not items:
        return []
    config = context.config
    start_ray(num_cpus=max(4, usable_cores(), int(config.num_actors[1] * config.cpus) + 1))
    check_resources(config)
    board = ProgressBoard.remote()  # type: ignore[attr-defined]
    store = RolloutStore(context.output)
    records: dict[str, ShardRecord] = {}
    errors: dict[str, str] = {}
    for _ in range(MAX_ATTEMPTS):
        left = [item for name, item in items.items() if name not in records]
        if not left:
            break
        errors = {item["name"]: "no result" for item in left}
        for result in _results(context, left, board, meter, actor):
            name = result["name"]
            if "error" in result:
                errors[name] = result["error"]
            else:
                records[name] = ShardRecord(**result["record"])
                check_visible(store, records[name])
                errors.pop(name, None)
    if errors:
        name, reason = next(iter(errors.items()))
        raise GenerateError(
            f"{len(errors)} of {len(items)} shards failed, first {name} ({reason}); the others are kept, "
            "run the same command again once the cause is mended"
        )
    return list(records.values())


def check_resources(config: GenerateConfig) -> None:
    """Raise GenerateError if the least pool can never start: Ray would wait for ever."""
    actors, each = config.num_actors[0], {"CPU": config.cpus, "GPU": config.gpus_per_actor, **dict(config.resources)}
    need = {name: actors * amount for name, amount in each.items()}
    need["CPU"] += 1  # a pool that takes every CPU leaves none for reading
    if lacking := lacking_resource(need):
        name, have = lacking
        option = f"{name.lower()}s_per_actor" if name in ("CPU", "GPU") else f"resource {name}"
        raise GenerateError(
            f"{actors} actors with {option} {each[name]:g} need {need[name]:g} {name}s, "
            f"Ray has {have:g}; lower num_actors or {option}"
        )


def check_visible(store: RolloutStore, record: ShardRecord) -> None:
    """Raise GenerateError if the driver does not find what an actor wrote: their nodes have a disk each."""
    if store.folder.local is None:
        return  # an object store is one and the same for all nodes
    deadline = time.monotonic() + VISIBLE_S
    while store.folder.size(record.name) != record.bytes:
        if time.monotonic() > deadline:
            raise GenerateError(
                f"shard {record.name} is not in {store.uri}: it was written on another node; "
                "give a shared folder or an s3:// address as output"
            )
        time.sleep(POLL_S)


def _results(
    context: ShardContext,
    items: list[dict[str, str]],
    board: Any,
    meter: Meter,
    actor: type[ShardGenerator] | None = None,
) -> Iterator[dict[str, Any]]:
    """Results in the order in which shards finish. Raises GenerateError when nothing moves for too long."""
    dataset = _dataset(context, items, board, actor or ShardGenerator)
    rows = Arrivals(dataset.iter_rows, timeout_s=POLL_S)
    while True:
        try:
            result = json.loads(next(rows)["result"])
        except NothingCameError:
            _look(board, meter)
            if meter.idle_s > context.config.stall_timeout_s:
                raise GenerateError(
                    f"no actor reported progress for {meter.idle_s:.0f} s; see the Ray logs, or raise stall_timeout_s"
                ) from None
            continue
        except StopIteration:
            return _look(board, meter)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[-1]
            raise GenerateError(
                f"Ray could not run the shards ({reason}); finished shards are kept, run again"
            ) from error
        meter.take(result)
        yield result
        board.forget.remote(result["name"])
        _look(board, meter)


def _look(board: Any, meter: Meter) -> None:
    """Show where the run stands."""
    with contextlib.suppress(ray.exceptions.RayError):  # the board is lost or slow; the work is not
        meter.at_work = ray.get(board.at_work.remote(), timeout=10)
    meter.show()


def _dataset(context: ShardContext, items: list[dict[str, str]], board: Any, actor: type[ShardGenerator]) -> Any:
    """One block per shard, so that a task is a shard."""
    import ray.data

    config = context.config
    least, most = config.num_actors
    dataset = ray.data.from_items(list(items), override_num_blocks=len(items)).map_batches(
        actor,
        fn_constructor_args=(context, board),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            min_size=least,
            max_size=max(least, min(most, len(items))),  # an actor more than there are shards would find no work
            max_tasks_in_flight_per_actor=1,  # a queue before one actor would leave another idle at the end
        ),
        num_cpus=config.cpus,
        num_gpus=config.gpus_per_actor or None,
        resources=dict(config.resources) or None,
    )
    # Ray would grow the pool only for tasks queued before its actors, which there are none of here.
    dataset.context.autoscaling_config.actor_pool_util_upscaling_threshold = 1.0
    return dataset
