"""Items of a source that may stop for ever, taken by somebody who does not wait for ever.

Ray Data starts lost actors again without end, so its iterators have no deadline of their own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

_LOOK_S = 0.5  # how soon the thread notices that nobody takes items any more

Item = TypeVar("Item")


class NothingCameError(RuntimeError):
    """No item came in time; the next one may be asked for again."""


class Arrivals(Generic[Item]):
    """An iterator over `read()`, which a thread of its own walks through, at most `ahead` items before (0: any number).

    An item that takes longer than `timeout_s` seconds raises NothingCameError; the source's own errors come in order.
    """

    def __init__(self, read: Callable[[], Iterable[Item]], *, timeout_s: float, ahead: int = 0):
        self._read, self._timeout_s = read, timeout_s
        self._queue: queue.Queue[tuple[Item] | Exception | None] = queue.Queue(ahead)
        self._over = threading.Event()
        threading.Thread(target=self._run, name="arrivals", daemon=True).start()

    def __enter__(self) -> Arrivals[Item]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()  # the thread ends with the item that it waits for

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        try:
            arrived = self._queue.get(timeout=self._timeout_s)
        except queue.Empty:
            raise NothingCameError(f"nothing came for {self._timeout_s:g} s") from None
        if arrived is None:
            raise StopIteration
        if isinstance(arrived, Exception):
            raise arrived
        return arrived[0]

    def _run(self) -> None:
        try:
            for item in self._read():
                self._put((item,))
                if self._over.is_set():
                    return
            self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, arrived: tuple[Item] | Exception | None) -> None:
        while not self._over.is_set():
            try:
                return self._queue.put(arrived, timeout=_LOOK_S)
            except queue.Full:
                continue
