"""How much an engine has to do: its sequences in, figures for gauges, for queues and for autoscaling out."""

from __future__ import annotations

import time
from dataclasses import dataclass

from serving.engine.scheduler import Scheduler
from serving.engine.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Load:
    """Between two rounds."""

    running: int  # requests that hold a slot
    waiting: int  # requests that wait for one
    tokens_in_flight: int  # still to do for all of them: prompt tokens to feed and max_new_tokens to emit
    oldest_wait_s: float  # of the request that has waited longest; 0 if none waits
    slot_use: float  # share of the slots that are held, 0 to 1
    token_use: float  # share of all slots' positions that hold a running request's keys and values, 0 to 1


def load_of(scheduler: Scheduler, max_len: int) -> Load:
    """The load of a scheduler whose slots take `max_len` tokens."""
    running, waiting = list(scheduler.running.values()), list(scheduler.waiting)
    slots = len(running) + scheduler.free_slots
    now = time.perf_counter()
    return Load(
        running=len(running),
        waiting=len(waiting),
        tokens_in_flight=sum(_tokens_to_do(s) for s in running) + sum(_tokens_to_do(s) for s in waiting),
        oldest_wait_s=max((now - s.arrived_at for s in waiting), default=0.0),
        slot_use=len(running) / slots,
        token_use=sum(s.cached for s in running) / (slots * max_len),
    )


def _tokens_to_do(s: Sequence) -> int:
    prompt = max(0, s.prompt_len - s.cached)
    return prompt + s.sampling.max_new_tokens - (len(s.tokens) - s.prompt_len)
