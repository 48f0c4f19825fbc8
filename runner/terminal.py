"""Lines for a person. A closed terminal or a broken pipe never stops a run."""

import contextlib
import sys


def say(line: str) -> None:
    """Print a line on standard output, if anyone still reads it."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def show(text: str) -> None:
    """Print a piece of a line on standard output, as UTF-8 whatever the locale. Raises `BrokenPipeError`."""
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
    sys.stdout.buffer.flush()


def warn(line: str) -> None:
    """Print a line on standard error, if anyone still reads it."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
