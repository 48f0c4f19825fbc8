"""What a generator yields, made ahead on a thread, such as batches. It holds no position that must survive."""

import contextlib
import threading
from collections import deque
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

DEPTH = 2  # the batch that is needed next, and one more to ride out a slow read
CLOSE_SECONDS = 5.0

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Yields the items of a generator, made at most `depth` ahead; it is closed where it has run, on the thread.

    What the generator raises is raised by the `next` that would have returned its item, and by every later one. The
    thread is a daemon: a read that hangs cannot keep a dying process alive.
    """

    def __init__(self, items: Generator[T], depth: int = DEPTH) -> None:
        self._items, self._depth = items, depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._is_over = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
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
            self._changed.wait_for(lambda: self._ready or self._is_over or self._closed)
            if self._ready and not self._closed:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None and not self._closed:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """End the thread and drop what it made. Waits for the item in the making, but not for a read that hangs."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            with contextlib.closing(self._items):
                for item in self._items:
                    if not self._put(item):
                        break
        except BaseException as raised:  # noqa: BLE001 - nothing is swallowed: the consumer raises it
            error = raised
        with self._changed:
            self._error, self._is_over = error, True
            self._changed.notify_all()

    def _put(self, item: T) -> bool:
        """Hand it over, and wait until the next may be made; False if none shall be."""
        with self._changed:
            if not self._closed:
                self._ready.append(item)
                self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
            return not self._closed
