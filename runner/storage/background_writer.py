"""Keeps growing files of a bucket up to date from one background thread, so that nobody waits for the network.

An object cannot be appended to. What grows is therefore written anew, whole, each time it has changed: the newest
content wins, and content that is overtaken is never sent. A failure is kept for `flush` to raise, said once, and tried
again.
"""

import contextlib
import threading
import time
from collections.abc import Callable

from runner.terminal import warn

PERIOD_SECONDS = 1.0


class BackgroundWriter:
    """Objects by name, each with a function that writes its newest content. Thread-safe."""

    def __init__(self) -> None:
        self._changed: dict[str, Callable[[], None]] = {}
        self._condition = threading.Condition()
        self._sending = threading.Lock()
        self._warned = False
        self._thread: threading.Thread | None = None

    def mark(self, name: str, send: Callable[[], None]) -> None:
        """Have `send` called soon: it writes what `name` should hold, and may raise `OSError`."""
        with self._condition:
            self._changed[name] = send
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="background writer", daemon=True)
                self._thread.start()
            self._condition.notify()

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._changed)
            try:
                self.flush()
                self._warned = False
            except OSError as error:
                if not self._warned:
                    warn(f"cannot be written, will be tried again: {error}")
                self._warned = True
            time.sleep(PERIOD_SECONDS)

    def drain(self, seconds: float) -> None:
        """Before the end of the process: give what has changed some seconds to arrive. Never raises."""

        def send() -> None:
            with contextlib.suppress(OSError):
                self.flush()

        thread = threading.Thread(target=send, name="drain", daemon=True)
        thread.start()
        thread.join(seconds)

    def flush(self) -> None:
        """Send what has changed, now, and wait. Raises the first `OSError`; what was not sent is tried again later."""
        with self._sending:
            with self._condition:
                changed, self._changed = self._changed, {}
            first: OSError | None = None
            for name, send in changed.items():
                try:
                    send()
                except OSError as error:
                    first = first or error
                    with self._condition:
                        self._changed.setdefault(name, send)
            if first is not None:
                raise first
