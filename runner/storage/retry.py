"""Try again what is transient, with backoff and jitter, until a deadline; nothing else. Knows no store."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from runner.errors import StorageError

Result = TypeVar("Result")

FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 10.0


class TransientError(OSError):
    """What may go away by itself: a throttled, overloaded or unreachable store, a connection that broke."""


class DeadlineError(StorageError, TimeoutError):
    """What was transient did not go away in time."""


class DeniedError(StorageError, PermissionError):
    """The store refuses: no permission, or credentials that have expired."""


def retry(act: Callable[[int], Result], what: str, deadline_seconds: float) -> Result:
    """Call `act(number of earlier tries)` until it does not raise `TransientError`.

    Waits between tries a random time up to twice the last bound (full jitter). Raises `DeadlineError` when the next try
    could not begin within `deadline_seconds`.
    """
    started, bound_seconds, tries = time.monotonic(), FIRST_WAIT_SECONDS, 0
    while True:
        try:
            return act(tries)
        except TransientError as error:
            tries += 1
            wait_seconds = random.uniform(0, bound_seconds)
            if time.monotonic() + wait_seconds - started > deadline_seconds:
                raise DeadlineError(
                    f"{what}: not within {deadline_seconds:.0f} s and {tries} tries; the last: {error}"
                ) from error
            time.sleep(wait_seconds)
            bound_seconds = min(2 * bound_seconds, LONGEST_WAIT_SECONDS)
