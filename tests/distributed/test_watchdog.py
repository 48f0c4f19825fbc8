"""The watchdog: a directory that hangs, and errors that a lost peer may have caused."""

import subprocess
import sys

import jax
import pytest

from runner.distributed import watchdog as watchdog_module
from runner.distributed.agreement import Hosts, Liveness
from runner.distributed.clock import Clock
from runner.distributed.key_value import KeyValueStore
from runner.distributed.watchdog import Watchdog
from runner.errors import FailedError, PeerLostError
from runner.spec import Deadlines
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


# An error on one of two processes, and whether the failed collective of a lost peer may be its cause.
@pytest.mark.parametrize(
    ("error", "is_suspect"),
    [
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed"), True),
        (ValueError("Gloo AllReduce failed"), True),
        (PeerLostError("process 1 has died"), True),
        (ZeroDivisionError("a bug"), False),
        (FailedError("known"), None),
    ],
    ids=repr,
)
def test_an_error_leaves_the_job_after_a_lost_peer_would_have_been_named(
    error: Exception, is_suspect: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the end of a peer is not recorded as a failure of this process."""
    waits: list[float] = []
    hosts = Hosts(0, 2, KeyValueStore(None), Liveness(KeyValueStore(None), 0, 2, {}), 60.0)
    watchdog = Watchdog(hosts, Deadlines(), Clock(), *[lambda *_: None] * 3)
    monkeypatch.setattr(watchdog_module.time, "sleep", waits.append)
    with pytest.raises(type(error)), watchdog.explain_errors():
        raise error
    assert len(waits) == (is_suspect is not None)
    assert all(seconds > (5 if is_suspect else 0.1) for seconds in waits)
    # The end of the watchdog itself does not wait again.
    watchdog.__exit__(type(error), error, None)
    assert len(waits) == (is_suspect is not None)
