"""`metrics.jsonl` as CSV: a column a key, in the order in which they first come; an empty field where a row has none.

Numbers are written at full precision. What bounds the memory: the rows as encoded lines.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from runner.terminal import one_line
from runner.train.metrics.line import Line


def csv_lines(lines: Sequence[Line]) -> Iterator[str]:
    """The header and a line a row, each with its newline; nothing if there are no rows."""
    columns = list(dict.fromkeys(key for line in lines for key in line.row))
    if columns:
        yield _csv_line(map(one_line, columns))
    for line in lines:
        row = line.row
        yield _csv_line(row.get(column) for column in columns)


def _cell(value: Any) -> Any:
    """A list or a histogram as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _csv_line(values: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(map(_cell, values))
    return text.getvalue()
