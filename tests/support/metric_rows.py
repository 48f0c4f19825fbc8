"""Rows of metrics.jsonl, and a counter of the rows that a reader parses."""

import pytest

from runner.metrics import file, rows
from runner.storage import encode_line


def make_row(step: int) -> bytes:
    return encode_line({"step": step, "train/loss": 1.0 / step, "train/tokens": step * 1024, "perf/mfu": 0.25})


# Upper bound, with a margin, of the rows of `make_row` that one sample of a file parses.
NUM_PARSED_MAX = (
    3 * (file._SAMPLE_NUM_BLOCKS * file._SAMPLE_BLOCK_BYTES + file._SAMPLE_TAILS_BYTES[0]) / len(make_row(1))
)


def count_parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list whose only element is the number of lines parsed so far."""
    count, parse = [0], rows.parse_line

    def parse_and_count(text):
        count[0] += 1
        return parse(text)

    monkeypatch.setattr(rows, "parse_line", parse_and_count)
    return count
