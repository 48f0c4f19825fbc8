"""Samples of rows from files of any size, with bounded work."""

import pytest

from runner.metrics.file import _SAMPLE_ROWS_MAX, _encode_parts, _SealedPart, read_rows, read_sample
from runner.storage import LocalStore, encode_line
from tests.support.memory_bucket import make_memory_bucket
from tests.support.metric_rows import NUM_PARSED_MAX, count_parsed
from tests.support.metric_rows import make_row as row


@pytest.fixture
def parsed_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_parsed(monkeypatch)


def get_steps(sample) -> list[int]:
    return [each["step"] for each in sample]


@pytest.mark.parametrize("num_rows", [0, 1, 2, 63, 64, 65, 600, 20_000])
def test_a_sample_covers_the_file_and_has_the_newest_rows(num_rows, parsed_counts, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(row(step) for step in range(1, num_rows + 1)))
    found = get_steps(read_sample(LocalStore(tmp_path)))
    assert found == sorted(set(found))
    assert len(found) <= 2 * _SAMPLE_ROWS_MAX
    assert found[-20:] == list(range(1, num_rows + 1))[-20:]
    assert parsed_counts[0] <= NUM_PARSED_MAX
    if num_rows:
        gaps = [after - before for before, after in zip([0, *found], found, strict=False)]
        assert max(gaps) <= max(num_rows // 50, 2)


def test_the_work_is_independent_of_the_file_size(parsed_counts, tmp_path):
    counts = []
    for num_rows in (20_000, 60_000):
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(row, range(1, num_rows + 1))))
        parsed_counts[0] = 0
        read_sample(LocalStore(tmp_path))
        counts.append(parsed_counts[0])
    assert counts[1] < 1.2 * counts[0]


@pytest.mark.parametrize(
    "tail",
    [b'{"step": 9', b"\xff\xfe\n", b"x" * 10_000_000, b"[1]\n", b'{"step": 3, "train/loss": 1}\n', b"\0" * 100_000],
    ids=["half a line", "no text", "10 MB", "a list", "an older step", "zeros"],
)
def test_lines_that_are_no_rows_are_skipped(tail, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(row, range(1, 9))) + tail)
    assert get_steps(read_sample(LocalStore(tmp_path))) == list(range(1, 9))


def test_parts_in_a_bucket_are_sampled_and_the_last_is_read():
    store, parts = make_memory_bucket(), []
    for number in range(100):
        steps = range(number * 10 + 1, number * 10 + 11)
        named = parts if len(parts) >= 64 else []
        part = _SealedPart(f"metrics/000001.{number:08}.jsonl", steps[-1])
        store.write(part.name, _encode_parts(named) + b"".join(map(row, steps)))
        parts = [part] if named else [*parts, part]
    store.write("metrics.jsonl", _encode_parts(parts) + row(1001))
    found = get_steps(read_sample(store))
    assert found[-11:] == list(range(991, 1002))
    assert 100 <= len(found) <= 300
    assert found[0] == 1


@pytest.mark.parametrize(
    "named",
    [
        3,
        [3],
        [["metrics/a.jsonl"]],
        [["metrics/a.jsonl", "1"]],
        [["../a.jsonl", 1]],
        [["metrics/../../a", 1]],
        "circle",
    ],
    ids=str,
)
def test_invalid_part_names_are_reported_in_one_line(named):
    """`status` reports them as unreadable, and the start of a job as files that the user must move away."""
    store = make_memory_bucket()
    if named == "circle":
        named = [["metrics/a.jsonl", 1]]
        store.write("metrics/a.jsonl", encode_line({"parts": named}) + row(1))
    store.write("metrics.jsonl", encode_line({"parts": named}) + row(2))
    with pytest.raises(ValueError, match=r"parts .*(none|circle)"):
        read_sample(store)
    with pytest.raises(ValueError, match=r"parts .*(none|circle)"):
        read_rows(store)


def test_a_missing_part_leaves_the_newest_rows():
    store = make_memory_bucket()
    store.write("metrics.jsonl", _encode_parts([_SealedPart("metrics/a.jsonl", 1)]) + row(2))
    assert get_steps(read_sample(store)) == [2]
