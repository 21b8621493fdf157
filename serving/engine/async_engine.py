"""The engine behind an async stream: one daemon thread runs the rounds, any event loop submits and listens.

In: token ids and sampling. Out: the engine's `Progress`, as it happens. `serving/replica.py` makes one per replica.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from serving.engine.engine import Engine, RequestError
from serving.engine.sampling import Sampling
from serving.engine.sequence import Progress

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0  # an idle thread sleeps in the queue; it looks at nothing else, this only bounds the wait
_MAX_FAILED_ROUNDS = 3  # rounds in a row that raised, after which the engine is taken for broken

T = TypeVar("T")


class EngineError(RuntimeError):
    """The engine cannot serve a request that was fine; the message says why and what to do."""


class QueueFullError(EngineError):
    """More requests wait than the engine was told to queue; the request may be sent again later."""


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """What `Engine.add` takes."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling


@dataclass(eq=False)
class _Listener:
    """Where the progress of requests goes that somebody sent together: a queue of the event loop that asked."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[Progress | Exception] = field(default_factory=asyncio.Queue)

    def put(self, item: Progress | Exception) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)


@dataclass(frozen=True)
class _Command:
    """Something for the engine's thread to do between two rounds, or to call off if it never gets there."""

    run: Callable[[], None]
    call_off: Callable[[Exception], None]


class AsyncEngine:
    """Streams from a single-threaded `Engine`. Methods may be called from any thread; the engine itself must not."""

    def __init__(self, engine: Engine, *, max_waiting: int = 64, stall_timeout_s: float = 600.0):
        self._engine = engine
        self.max_in_flight = engine.num_slots + max_waiting  # more requests than that can never be taken together
        self._stall_timeout_s = (
            stall_timeout_s  # longest wait for a request's next token, its time in the queue included
        )
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._listeners: dict[str, _Listener] = {}  # of the thread
        self._failed_rounds = 0  # of the thread
        self._lock = threading.Lock()  # over the two below
        self._in_flight = 0
        self._refusal: str | None = None  # why nothing is taken any more
        self._ended = False  # the thread looks at no command any more
        self._close_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="draftloop-engine", daemon=True)
        self._thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        return self._refusal is None and self._thread.is_alive()

    @property
    def refusal(self) -> str | None:
        """Why requests are refused; None while they are taken."""
        return self._refusal

    @property
    def num_in_flight(self) -> int:
        """Requests that somebody listens to, waiting or running."""
        return self._in_flight

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str | None = None
    ) -> AsyncGenerator[Progress, None]:
        """Progress of one request, the last with its completion.

        Raises RequestError for a request that the engine cannot take, QueueFullError, and EngineError if the engine
        fails. Leaving the iteration early cancels the request.
        """
        request = EngineRequest(request_id=request_id or uuid.uuid4().hex, prompt_ids=prompt_ids, sampling=sampling)
        async with aclosing(self.stream_all([request])) as stream:
            async for progress in stream:
                yield progress

    async def stream_all(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[Progress, None]:
        """Progress of several requests as it comes, until each has its completion.

        They are taken together or refused together, and the first error ends them all: it raises what `stream` raises.
        Leaving the iteration early cancels those that still run.
        """
        listener = _Listener(asyncio.get_running_loop())
        self._submit(
            _Command(run=lambda: self._add_all(requests, listener), call_off=listener.put), slots=len(requests)
        )
        running = {request.request_id for request in requests}
        try:
            while running:
                item = await self._next(listener)
                if isinstance(item, RequestError):  # none was added: an id may be that of somebody else's request
                    self._leave(len(running))
                    running.clear()
                if isinstance(item, Exception):
                    raise item
                if item.completion is not None:
                    running.remove(item.request_id)
                    self._leave(1)
                yield item
        finally:
            self._leave(len(running))
            for request_id in running:
                self.cancel(request_id)

    def _leave(self, slots: int) -> None:
        with self._lock:
            self._in_flight -= slots

    async def _next(self, listener: _Listener) -> Progress | Exception:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                return await listener.items.get()
        except TimeoutError:
            raise EngineError(f"no token came for {self._stall_timeout_s:g} s; the request was dropped") from None

    def cancel(self, request_id: str) -> None:
        """End a request before the next round; its stream gets a completion. Unknown ids are ignored."""
        with suppress(EngineError):
            self._submit(_Command(run=lambda: self._engine.cancel(request_id), call_off=lambda error: None))

    def between_rounds(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function with the engine in its thread, between two rounds: swap a drafter, read counters."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._submit(_Command(run=run, call_off=future.set_exception))
        return future

    def close(self, deadline_s: float) -> bool:
        """Take nothing more, let running requests finish for `deadline_s`, fail the rest. True: the thread is gone."""
        with self._lock:
            self._refusal = self._refusal or "the engine is shutting down; send the request again later"
            self._close_at = time.monotonic() + deadline_s
            self._commands.put(_Command(run=lambda: None, call_off=lambda error: None))
        self._thread.join(timeout=deadline_s + 5.0)  # a round that has begun is not interrupted
        if self._thread.is_alive():
            log.warning("the engine's thread is still in a round %.0f s after it was told to stop", deadline_s + 5.0)
        return not self._thread.is_alive()

    def _submit(self, command: _Command, slots: int = 0) -> None:
        with self._lock:
            if self._refusal is not None and (slots or self._ended):
                raise EngineError(self._refusal)
            if slots and self._in_flight + slots > self.max_in_flight:
                raise QueueFullError(
                    f"{self._in_flight} requests are being served or wait and {slots} more do not fit; "
                    "send it again later"
                )
            self._in_flight += slots
            self._commands.put(command)

    # -- the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the engine is shut down"
        try:
            while not self._time_to_stop():
                self._do_commands(wait=not self._engine.has_work)
                if self._engine.has_work:
                    self._round()
        except BaseException as error:
            log.exception("the engine's thread ends")
            reason = f"the engine is broken ({_first_line(error)}); restart the replica"
        finally:
            self._end(reason)

    def _time_to_stop(self) -> bool:
        if self._close_at is None:
            return False
        done = not self._engine.has_work and self._commands.empty()
        return done or time.monotonic() >= self._close_at

    def _do_commands(self, wait: bool) -> None:
        with suppress(queue.Empty):
            if wait:
                self._commands.get(timeout=_IDLE_WAIT_S).run()
            while True:
                self._commands.get_nowait().run()

    def _round(self) -> None:
        try:
            progress = self._engine.step()
        except Exception as error:
            self._failed_rounds += 1
            log.exception("a round failed; %d requests are dropped", len(self._listeners))
            self._drop_all(f"the engine failed in a round ({_first_line(error)}); the request was dropped")
            if self._failed_rounds >= _MAX_FAILED_ROUNDS:
                raise
            return
        for item in progress:
            self._deliver(item)

    def _add_all(self, requests: Sequence[EngineRequest], listener: _Listener) -> None:
        added: list[str] = []
        try:
            for request in requests:
                self._engine.add(request.prompt_ids, request.sampling, request_id=request.request_id)
                added.append(request.request_id)
        except Exception as error:
            for request_id in added:
                self._engine.cancel(request_id)
            if not isinstance(error, RequestError):
                log.exception("a request could not be added")
                error = EngineError(f"the request could not be added ({_first_line(error)})")
            listener.put(error)
        else:
            self._listeners |= dict.fromkeys(added, listener)

    def _deliver(self, progress: Progress) -> None:
        listener = self._listeners.get(progress.request_id)
        if progress.completion is not None:
            self._listeners.pop(progress.request_id, None)
        if progress.token_ids:
            self._failed_rounds = 0
        if listener is not None:
            listener.put(progress)

    def _drop_all(self, message: str) -> None:
        for request_id, listener in list(self._listeners.items()):
            listener.put(EngineError(message))
            del self._listeners[request_id]
            self._engine.cancel(request_id)  # if this raises, the engine is broken and the thread ends

    def _end(self, reason: str) -> None:
        """Nobody is left waiting for a thread that is gone."""
        with self._lock:
            self._refusal, self._ended = reason, True
            commands, listeners = [], list(self._listeners.values())
            with suppress(queue.Empty):
                while True:
                    commands.append(self._commands.get_nowait())
        for listener in listeners:
            listener.put(EngineError(reason))
        for command in commands:
            command.call_off(EngineError(reason))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
