"""Tail of metrics: a reader knows the rows of `metrics.jsonl` after any writes and rewinds, on disk and in a bucket."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.attempts.fence import Fence
from runner.metrics import file as bucket
from runner.metrics.file import MetricsTail, MetricsTailUpdate, open_metrics_file, read_rows
from runner.storage import BackgroundWriter, LocalStore, encode_line
from tests.support.memory_bucket import make_memory_bucket

KINDS = ("disk", "bucket")
LINE = encode_line({"step": 1, "train/loss": 0.5})


class IdleWriter(BackgroundWriter):
    """A background writer that sends only on `sync`."""

    def mark(self, name, send):
        pass


def apply_update(known: list, update: MetricsTailUpdate) -> tuple[list, list]:
    """Return the final rows and all rows that a reader with the final rows `known` has after the update."""
    final = ([] if update.is_restart else known) + list(update.rows)
    return final, final + update.newest


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.one_of(st.integers(1, 12), st.floats(0, 1), st.just("replace")), min_size=1, max_size=12),
)
def test_a_tail_follows_any_appends_and_rewinds(kind, actions):
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "PART_BYTES", 150)
        patch.setattr(bucket, "_PARTS_MAX", 3)
        store = LocalStore(Path(directory)) if kind == "disk" else make_memory_bucket()
        tail, final, step, attempt = MetricsTail(store), [], 0, 0
        for action in [0.0, *actions]:
            if isinstance(action, float):  # a new attempt resumes at this fraction of the rows
                fence = Fence(store)
                attempt = fence.claim()
                step = int(step * action)
                file = open_metrics_file(store, IdleWriter(), fence)
                file.rewind(step)
            elif action == "replace" and step:
                file.replace_last({"step": step, "train/loss": -1.0, "perf/attempt": attempt})
            elif action != "replace":
                for _ in range(action):
                    step += 1
                    file.append({"step": step, "train/loss": 1.0, "perf/attempt": attempt})
            file.sync()
            final, known = apply_update(final, tail.read())
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
def test_invalid_lines_are_skipped_and_a_partial_line_is_completed_later(tmp_path, content, steps):
    tail = MetricsTail(LocalStore(tmp_path))
    assert apply_update([], tail.read()) == ([], [])
    (tmp_path / "metrics.jsonl").write_bytes(content)
    final, known = apply_update([], tail.read())
    assert [row["step"] for row in known] == steps
    (tmp_path / "metrics.jsonl").write_bytes(content + b"\n" + encode_line({"step": 7, "train/loss": 1.0}))
    assert [row["step"] for row in apply_update(final, tail.read())[1]][-1] == 7


def test_each_line_is_read_once(tmp_path):
    path, tail, lines = tmp_path / "metrics.jsonl", MetricsTail(LocalStore(tmp_path)), 0
    for step in range(1, 20):
        with path.open("ab") as file:
            file.write(encode_line({"step": step, "train/loss": 1.0}))
        update = tail.read()
        lines += len(list(update.rows))
        assert update.is_restart == (step == 1)
    assert lines == 19
