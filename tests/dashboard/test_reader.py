"""Feeds of rows: they give the rows of `metrics.jsonl` after any writes and rewinds, on a disk and in a bucket."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.dashboard.reader import RowBatch, open_feed
from runner.metrics import file as bucket
from runner.metrics.file import open_metrics_file, read_rows
from runner.run.fence import Fence
from runner.storage import BackgroundWriter, LocalStore, encode_line
from tests.support.memory_bucket import memory_bucket

KINDS = ("disk", "bucket")
LINE = encode_line({"step": 1, "train/loss": 0.5})


class Unhurried(BackgroundWriter):
    """Writer that sends only on `sync`."""

    def mark(self, name, send):
        pass


def heard(known: list, fed: RowBatch) -> tuple[list, list]:
    """Return the final rows, and all rows, for a reader that knows `known` and receives `fed`."""
    standing = ([] if fed.is_restarted else known) + list(fed.rows)
    return standing, standing + fed.newest


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.one_of(st.integers(1, 12), st.floats(0, 1), st.just("replace")), min_size=1, max_size=12),
)
def test_whoever_listens_knows_the_surviving_rows_after_any_appends_and_rewinds(kind, actions):
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "PART_BYTES", 150)
        patch.setattr(bucket, "PARTS_MAX", 3)
        store = LocalStore(Path(directory)) if kind == "disk" else memory_bucket()
        feed, standing, step, attempt = open_feed(store), [], 0, 0
        for action in [0.0, *actions]:
            if isinstance(action, float):  # a new attempt resumes at this share of what there is
                fence = Fence(store)
                attempt = fence.claim()
                step = int(step * action)
                file = open_metrics_file(store, Unhurried(), fence)
                file.rewind(step)
            elif action == "replace" and step:
                file.replace_last({"step": step, "train/loss": -1.0, "perf/attempt": attempt})
            elif action != "replace":
                for _ in range(action):
                    step += 1
                    file.append({"step": step, "train/loss": 1.0, "perf/attempt": attempt})
            file.sync()
            standing, known = heard(standing, feed.read())
            assert known == read_rows(store)
        file.close()


@pytest.mark.parametrize(
    ("content", "steps"),
    [
        (b"", []),
        (LINE[:-1], []),
        (LINE[:-4], []),
        (LINE + b'{"step": 2, "train/lo', [1]),
        (b"\xff\xfe\n[1]\nnull\n\n" + LINE + b"\0\0\n", [1]),
        (b'{"parts": 3}\n' + LINE, [1]),
        (b'"' + b"x" * (3 << 20) + b'"\n' + LINE, [1]),
        (LINE + b"x" * (3 << 20), [1]),
    ],
    ids=["empty", "no newline", "torn", "half a line", "no text", "another object", "long line", "long and torn"],
)
def test_what_is_no_row_is_passed_over_and_half_a_line_waits_for_the_rest(tmp_path, content, steps):
    feed = open_feed(LocalStore(tmp_path))
    assert heard([], feed.read()) == ([], [])
    (tmp_path / "metrics.jsonl").write_bytes(content)
    standing, known = heard([], feed.read())
    assert [row["step"] for row in known] == steps
    (tmp_path / "metrics.jsonl").write_bytes(content + b"\n" + encode_line({"step": 7, "train/loss": 1.0}))
    assert [row["step"] for row in heard(standing, feed.read())[1]][-1] == 7


def test_a_line_is_read_once_however_often_one_looks(tmp_path):
    path, feed, lines = tmp_path / "metrics.jsonl", open_feed(LocalStore(tmp_path)), 0
    for step in range(1, 20):
        with path.open("ab") as file:
            file.write(encode_line({"step": step, "train/loss": 1.0}))
        fed = feed.read()
        lines += len(list(fed.rows))
        assert fed.is_restarted == (step == 1)
    assert lines == 19
