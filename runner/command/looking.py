"""What commands share that only look at a run: which run, and what ends them."""

import contextlib
import os
import sys
from collections.abc import Iterator

from runner.attempt.owner import read_owner
from runner.command.arguments import directory_of
from runner.errors import InvalidError, RetryableError, RunnerError
from runner.storage import Store, open_store


def store_of(where: str) -> Store:
    """Where the run is that a spec or a directory names. Raises `InvalidError` if there is none."""
    store = open_store(directory_of(where))
    if read_owner(store) is None:
        raise InvalidError(f"{store.url} holds no run: there is no job.json; give a run's directory, or its spec")
    return store


@contextlib.contextmanager
def looking(*ends: type[BaseException]) -> Iterator[None]:
    """Around what a command does that only looks: what a store cannot do now is `RetryableError`.

    One of `ends` is the end of the command in order, such as nobody reading what it prints.
    """
    try:
        yield
    except ends:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what Python flushes at its end
    except RunnerError:
        raise
    except OSError as error:
        raise RetryableError(str(error)) from error
