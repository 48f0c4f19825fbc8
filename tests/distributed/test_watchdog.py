"""The watchdog of a process whose directory hangs."""

import subprocess
import sys

from tests.support.job_process import ROOT

PROGRAM = """
import time
from runner.distributed.agreement import Hosts
from runner.distributed.clock import SAVE, Clock
from runner.distributed.watchdog import Watchdog
from runner.spec import Deadlines

hang = lambda *_: time.sleep(3600)
deadlines = Deadlines(step_seconds=60, phase_seconds=1)
with Watchdog(Hosts.single_process(), deadlines, Clock(), hang, hang, hang) as progress:
    progress.report_step(7)
    time.sleep(2.5)
    with progress.report_phase(SAVE):
        time.sleep(60)
"""


def test_a_directory_that_hangs_stops_no_deadline() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 76, done.stderr
    assert "past the deadline" in done.stderr
