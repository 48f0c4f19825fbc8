"""Lines for a person. A closed terminal or a broken pipe never stops a run."""

import contextlib
import sys


def say(line: str) -> None:
    """Print a line on standard output, if anyone still reads it."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def warn(line: str) -> None:
    """Print a line on standard error, if anyone still reads it."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
