"""History of a run with many rows and attempts, in bounded work and memory."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.history.reader import read_history
from runner.storage import LocalStore, encode_line
from tests.support.metric_rows import NUM_PARSED_MAX, count_parsed
from tests.support.metric_rows import make_row as row

# `ru_maxrss` includes the memory of the process before exec, which is that of a test worker.
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
    """Run `status` in its own process; `-s` shows the seconds."""
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
    """Write rows, and a ledger with four saves per attempt; each attempt is killed halfway between two saves."""
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


def test_a_run_of_many_attempts_is_read_in_bounded_work(monkeypatch, tmp_path):
    num_parsed = count_parsed(monkeypatch)
    write_large_run(tmp_path, num_rows=20_000, num_attempts=500)
    history = read_history(LocalStore(tmp_path))
    assert len(history.attempts) == 500
    assert history.step == 20_000
    assert num_parsed[0] <= NUM_PARSED_MAX
