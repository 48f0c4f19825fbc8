"""Rows as the lines of a file: which survive a restart, and what the fast tier keeps of them. Does no I/O.

A tail is the newest rows, those that may not be durable yet, as the fast tier keeps them beside a state: a line
`{"after": step of the row before them, "rows": how many}`, then the rows. Without that line, as an earlier version
wrote it, it holds all rows.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from runner.storage import encode_line
from runner.train.metrics.row import Row

_AFTER, _NUM_ROWS = "after", "rows"


class Line(NamedTuple):
    """One row, encoded, with its newline."""

    step: int
    text: bytes

    @classmethod
    def of(cls, row: Row) -> Self:
        """Encode a row."""
        return cls(row["step"], encode_line(row))

    @property
    def row(self) -> Row:
        """Decode it."""
        row: Row = json.loads(self.text)
        return row


class Tail(NamedTuple):
    """The newest rows, and the step of the row that they follow, None if they are the first."""

    after: int | None
    lines: Sequence[Line]

    def encode(self) -> bytes:
        """The content of the fast tier's file."""
        head = encode_line({_AFTER: self.after, _NUM_ROWS: len(self.lines)})
        return head + b"".join(line.text for line in self.lines)

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """The inverse of `encode`. Raises `ValueError` if it is torn."""
        head = decode(content.partition(b"\n")[0]) or {}
        lines = list(surviving(content.splitlines()))
        if content and head.get(_NUM_ROWS, len(lines) or None) != len(lines):
            raise ValueError("the rows that were kept beside it are not whole")
        return cls(head.get(_AFTER), lines)


def decode(text: bytes) -> Row | None:
    """The JSON object in one line, None if it is torn or something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _step_of(row: Row) -> int | None:
    """The step of a row, None for a JSON object that is none: damage may have left another.

    A row of step 0 is of an evaluation before the first step, and has no loss of a step.
    """
    step = row.get("step")
    is_row = isinstance(row.get("train/loss"), int | float) or (step == 0 and "train/tokens" in row)
    return step if type(step) is int and is_row else None


def surviving(texts: Iterable[bytes], step: int | None = None, beyond: int = -1) -> Iterator[Line]:
    """The rows among lines of text that are up to `step` (None: all) and beyond `beyond`, each step once, in order."""
    for text in texts:
        found = _step_of(decode(text) or {})
        if found is not None and found > beyond and (step is None or found <= step):
            beyond = found
            yield Line(found, text.strip() + b"\n")


def up_to(step: int, tail: Tail | None) -> int:
    """Up to which step the file's own rows are taken, where those of `tail` follow them; -1 for none."""
    if tail is None:
        return step
    return -1 if tail.after is None else min(step, tail.after)
