"""Lines for a person. A closed terminal or a broken pipe never stops a run."""

import contextlib
import sys


def one_line(text: str) -> str:
    """`text` as one line that does nothing to a terminal: what is no plain character stands as its escape."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


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
