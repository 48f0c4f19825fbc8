"""Batches made ahead on a thread. A cache of a pure function of the step: it holds no position that must survive."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

DEPTH_BATCHES = 2  # the one that is needed next, and one more to ride out a slow read
CLOSE_SECONDS = 5.0

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Yields `make_batch(first_step)`, `make_batch(first_step + 1)`, ... without end, made at most two ahead.

    What `make_batch` raises is raised by the `next` that would have returned its batch, and by every later one. The
    thread is a daemon: a read that hangs cannot keep a dying process alive.
    """

    def __init__(self, make_batch: Callable[[int], T], *, first_step: int) -> None:
        self._make_batch = make_batch
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, args=(first_step,), name="prefetch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None or self._closed)
            if self._closed:
                raise StopIteration
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            assert self._error is not None
            raise self._error

    def close(self) -> None:
        """End the thread and drop what it made. Waits for the batch in the making, but not for a read that hangs."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _work(self, step: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._ready) < DEPTH_BATCHES or self._closed)
                if self._closed:
                    return
            try:
                batch = self._make_batch(step)
            except BaseException as error:  # noqa: BLE001 - nothing is swallowed: the consumer raises it
                self._finish(error=error)
                return
            with self._changed:
                if self._closed:
                    return
                self._ready.append(batch)
                self._changed.notify_all()
            step += 1

    def _finish(self, *, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
