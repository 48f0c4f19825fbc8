"""What a plan tells on standard error while it works, so that nobody looks at a silent terminal for minutes."""

import contextlib
import threading
import time
from collections.abc import Iterator

from runner.terminal import warn

_EVERY_SECONDS = 10.0


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Say that `what` begins, and from time to time how long it has taken. A compiler lets other threads run."""
    began, is_over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not is_over.wait(_EVERY_SECONDS):
            warn(f"{what}: {time.monotonic() - began:.0f} s")

    warn(f"{what} ...")
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
