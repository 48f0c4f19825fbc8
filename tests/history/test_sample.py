"""Sample of rows, from files of any size and shape, with bounded work."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.history import reader as sampling
from runner.history.reader import ROWS_MAX, read_history, read_sample
from runner.metrics import rows as metrics_line
from runner.metrics.file import SealedPart, encode_parts, read_rows
from runner.storage import LocalStore, encode_line
from tests.support.memory_bucket import memory_bucket

NUM_BLOCKS_BYTES = sampling._NUM_BLOCKS * sampling._BLOCK_BYTES + sampling._TAILS_BYTES[0]


def row(step: int) -> bytes:
    return encode_line({"step": step, "train/loss": 1.0 / step, "train/tokens": step * 1024, "perf/mfu": 0.25})


@pytest.fixture
def num_parsed(monkeypatch) -> list[int]:
    """How many lines have been parsed so far."""
    count, decode = [0], metrics_line.decode_object

    def counting(text):
        count[0] += 1
        return decode(text)

    monkeypatch.setattr(metrics_line, "decode_object", counting)
    return count


def steps_of(sample) -> list[int]:
    return [each["step"] for each in sample]


@pytest.mark.parametrize("num_rows", [0, 1, 2, 63, 64, 65, 600, 20_000])
def test_a_sample_is_spread_over_the_file_and_has_the_newest_rows(num_rows, num_parsed, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(row(step) for step in range(1, num_rows + 1)))
    found = steps_of(read_sample(LocalStore(tmp_path)))
    assert found == sorted(set(found))
    assert len(found) <= 2 * ROWS_MAX
    assert found[-20:] == list(range(1, num_rows + 1))[-20:]
    assert num_parsed[0] <= 3 * NUM_BLOCKS_BYTES / len(row(1))
    if num_rows:
        gaps = [after - before for before, after in zip([0, *found], found, strict=False)]
        assert max(gaps) <= max(num_rows // 50, 2)


def test_the_work_is_independent_of_the_file_size(num_parsed, tmp_path):
    counts = []
    for num_rows in (20_000, 60_000):
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(row, range(1, num_rows + 1))))
        num_parsed[0] = 0
        read_sample(LocalStore(tmp_path))
        counts.append(num_parsed[0])
    assert counts[1] < 1.2 * counts[0]


@pytest.mark.parametrize(
    "tail",
    [b'{"step": 9', b"\xff\xfe\n", b"x" * 10_000_000, b"[1]\n", b'{"step": 3, "train/loss": 1}\n', b"\0" * 100_000],
    ids=["half a line", "no text", "10 MB", "a list", "an older step", "zeros"],
)
def test_lines_that_are_no_rows_are_skipped(tail, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(row, range(1, 9))) + tail)
    assert steps_of(read_sample(LocalStore(tmp_path))) == list(range(1, 9))


def test_in_a_bucket_parts_are_sampled_and_the_last_is_read():
    store, parts = memory_bucket(), []
    for number in range(100):
        steps = range(number * 10 + 1, number * 10 + 11)
        named = parts if len(parts) >= 64 else []
        part = SealedPart(f"metrics/000001.{number:08}.jsonl", steps[-1])
        store.write(part.name, encode_parts(named) + b"".join(map(row, steps)))
        parts = [part] if named else [*parts, part]
    store.write("metrics.jsonl", encode_parts(parts) + row(1001))
    found = steps_of(read_sample(store))
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
def test_invalid_part_names_are_reported_in_a_line(named):
    """By `status` as what is not read, by a start as what a person must move away."""
    store = memory_bucket()
    if named == "circle":
        named = [["metrics/a.jsonl", 1]]
        store.write("metrics/a.jsonl", encode_line({"parts": named}) + row(1))
    store.write("metrics.jsonl", encode_line({"parts": named}) + row(2))
    with pytest.raises(ValueError, match=r"parts .*(none|circle)"):
        read_sample(store)
    with pytest.raises(ValueError, match=r"parts .*(none|circle)"):
        read_rows(store)


def test_a_missing_part_leaves_the_newest_rows():
    store = memory_bucket()
    store.write("metrics.jsonl", encode_parts([SealedPart("metrics/a.jsonl", 1)]) + row(2))
    assert steps_of(read_sample(store)) == [2]


# A kernel's `ru_maxrss` counts what the process was before it became this program: the tests of a worker.
STATUS = """
import pathlib, runpy, sys
sys.argv[0] = "runner"
try:
    runpy.run_module("runner", run_name="__main__")
finally:
    peak = next(line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(peak.split()[1], file=sys.stderr)
"""


@pytest.mark.soak
def test_a_million_rows_and_500_attempts_fit_into_300_mb(tmp_path: Path) -> None:
    """Run it with `-s` to see the seconds: `status` in a process of its own."""
    write_large_run(tmp_path, num_rows=1_000_000, num_attempts=500)
    began = time.monotonic()
    command = [sys.executable, "-c", STATUS, "status", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, check=True)
    seconds = time.monotonic() - began
    peak_mb = int(done.stderr.splitlines()[-1]) / 1024
    size_mb = (tmp_path / "metrics.jsonl").stat().st_size / 1e6
    print(f"\nstatus of {size_mb:.0f} MB of rows: {seconds:.2f} s, {peak_mb:.0f} MiB at most")
    assert json.loads(done.stdout)["step"] == 1_000_000
    assert peak_mb < 300


def write_large_run(directory: Path, num_rows: int, num_attempts: int) -> None:
    """Rows, and a ledger with four saves an attempt; each attempt is killed in the middle of an interval."""
    with (directory / "metrics.jsonl").open("wb") as file:
        file.writelines(map(row, range(1, num_rows + 1)))
    own = num_rows // num_attempts
    with (directory / "events.jsonl").open("wb") as file:
        for number in range(1, num_attempts + 1):
            base, moment = (number - 1) * own, 1e9 + number * 10_000.0
            events = [("start", None, {"began": moment, "total_steps": num_rows}), ("restore", base, {"seconds": 1.0})]
            for save in range(1, 5):
                step = base + save * own // 4
                events += [("save", step, {"blocked_seconds": 0.1}), ("commit", step, {"bytes": 1 << 30})]
                events += [("evaluate", step, {"figures": {"val/loss": 1.0 / step}}), ("progress", step, {})]
            for place, (event, step, details) in enumerate(events):
                common = {"time": moment + place, "attempt": number, "process": 0, "event": event, "step": step}
                file.write(encode_line(common | details))


def test_a_run_of_many_attempts_is_read_in_bounded_work(num_parsed, tmp_path):
    write_large_run(tmp_path, num_rows=20_000, num_attempts=500)
    history = read_history(LocalStore(tmp_path))
    assert len(history.attempts) == 500
    assert history.step == 20_000
    assert num_parsed[0] <= 3 * NUM_BLOCKS_BYTES / len(row(1))
