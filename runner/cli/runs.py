"""Access to a run for read-only commands, which claim no attempt."""

import contextlib
import os
import sys
from collections.abc import Iterator

from runner.errors import InvalidError, RetryableError, RunnerError
from runner.run.layout import read_owner
from runner.spec import load_document, validate_spec
from runner.storage import Store, open_store


def find_directory(where: str) -> str:
    """Return the directory that a spec names, or `where` itself, which is a directory or URL then."""
    if not where.endswith((".yaml", ".yml")):
        return where
    return str(validate_spec(load_document(where)).directory)


def open_run_store(where: str) -> Store:
    """Open the directory of a run by its spec, path or URL. Raises `InvalidError` if it holds no run."""
    store = open_store(find_directory(where))
    if read_owner(store) is None:
        raise InvalidError(f"{store.url} holds no run: it has no job.json; give a run's directory, or its spec")
    return store


@contextlib.contextmanager
def convert_read_errors(*normal_ends: type[BaseException]) -> Iterator[None]:
    """Convert an `OSError` of a read-only command into a `RetryableError`.

    Args:
        normal_ends: exceptions that end the command without an error, such as a closed pipe behind its output.
    """
    try:
        yield
    except normal_ends:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes standard output when it exits
    except RunnerError:
        raise
    except OSError as error:
        raise RetryableError(str(error)) from error
