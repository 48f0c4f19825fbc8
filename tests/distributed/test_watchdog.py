"""The watchdog: a directory that hangs, and errors that a lost peer may have caused."""

import contextlib
import functools
import json
import queue
import re
import subprocess
import sys
import threading

import jax
import pytest

from runner.distributed import watchdog as watchdog_module
from runner.distributed.agreement import Hosts, Liveness
from runner.distributed.clock import Clock
from runner.distributed.key_value import KeyValueStore
from runner.distributed.watchdog import Diagnosis, Periods, Watchdog
from runner.errors import (
    FailedError,
    FencedError,
    InvalidError,
    PeerLostError,
    RemovedError,
    RetryableError,
    RunnerError,
)
from runner.spec import Deadlines
from tests.support.coordinator import MemoryCoordinator
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


class FrozenCoordinator(MemoryCoordinator):
    """Coordinator whose process is stopped while `runs` is clear: its calls do not return."""

    def __init__(self) -> None:
        super().__init__(2)
        self.runs = threading.Event()
        self.runs.set()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        self.runs.wait()
        super().key_value_set(key, value, allow_overwrite)


def test_a_frozen_process_0_is_noticed_although_calls_to_it_do_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: queue.Queue[tuple[int, str]] = queue.Queue()
    for name, seconds in {"LOST_SECONDS": 1.0, "_POLL_SECONDS": 0.05}.items():
        monkeypatch.setattr(watchdog_module, name, seconds)
    monkeypatch.setattr(watchdog_module, "end_process", lambda code, line: ends.put((code, line)))
    coordinator = FrozenCoordinator()
    with Watchdog(coordinator.hosts()[1], Deadlines(), Clock(), *[lambda *_: None] * 3):
        coordinator.wait_until(lambda: "runner/beat/1" in coordinator.values)
        assert ends.empty()
        coordinator.runs.clear()
        code, line = ends.get(timeout=20)
        coordinator.runs.set()
    assert code == 76
    assert "process 0 has not responded for 1 s" in line


@pytest.mark.daily(1)
@pytest.mark.parametrize("stretch", [1, 4])
def test_of_many_processes_eight_record_a_diagnosis_and_all_end(stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LOST_SECONDS": 2.0, "_POLL_SECONDS": 0.05, "_DELIVERY_SECONDS": 0.5}.items():
        monkeypatch.setattr(watchdog_module, name, seconds)
    monkeypatch.setattr(watchdog_module, "_MAX_BEATS_PER_SECOND", 21 / stretch)
    ends: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(watchdog_module, "end_process", lambda code, line: ends.put(code))
    coordinator, records = MemoryCoordinator(21), dict[int, bool]()

    def record(process: int, diagnosis: Diagnosis, is_recorder: bool) -> None:
        assert "process 20 has not responded" in diagnosis.line
        assert (diagnosis.lost, diagnosis.late) == ([20], [])
        records[process] = is_recorder

    with contextlib.ExitStack() as watchdogs:
        for process, hosts in enumerate(coordinator.hosts()[:20]):
            on_diagnosis = functools.partial(record, process)
            watchdogs.enter_context(Watchdog(hosts, Deadlines(), Clock(), on_diagnosis, *[lambda *_: None] * 2))
        codes = [ends.get(timeout=20) for _ in range(20)]
    assert codes == [76] * 20
    assert records == {process: process < 8 for process in range(20)}


def test_a_frozen_process_is_noticed_within_the_time_of_the_page() -> None:
    page = (ROOT / ".github/docs/processes.md").read_text()
    (seconds,) = re.findall(r"frozen or disconnected \| within (\d+) s", page)
    for num_processes in range(1, 5000):
        periods = Periods.choose(num_processes)
        # The last heartbeat before, the last look before, and the look that is late enough.
        assert float(seconds) >= periods.lost_seconds + 3 * periods.poll_seconds
        assert periods.lost_seconds > periods.suspected_lost_seconds > 2 * periods.poll_seconds
        assert periods.lost_seconds > periods.unreachable_seconds > 2 * periods.poll_seconds
        assert periods.delivery_seconds > periods.poll_seconds
        assert periods.round_seconds > periods.lead_seconds > 2 * periods.poll_seconds


def test_the_exchange_of_a_large_job_is_less_frequent() -> None:
    small = Periods.choose(2)
    assert (small.poll_seconds, small.arrival_poll_seconds, small.straggling_seconds) == (1.0, 0.02, 0.1)
    assert Periods.choose(400) == small
    for num_processes in (401, 1024, 1025, 4096, 16384):
        periods = Periods.choose(num_processes)
        assert num_processes / periods.poll_seconds <= 1024
        assert num_processes / periods.arrival_poll_seconds <= 20_000
        assert periods.straggling_seconds >= 2 * periods.arrival_poll_seconds


# Error with which process 0 ends, exit code, and True if the other processes end with its message and its code.
FENCE_ENDS = [
    (FencedError("attempt 2 has taken over runs/m; attempt 1 stops"), 1, True),
    (RemovedError("runs/m: the claim of this attempt is missing"), 2, True),
    (InvalidError("runs/m: other"), 2, False),
]


@pytest.mark.parametrize(("error", "code", "is_shared"), FENCE_ENDS)
def test_the_other_processes_of_a_fenced_attempt_learn_it(
    error: RunnerError, code: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they blame the loss of process 0, and advise a start that fences the attempt that has taken over."""
    ends: queue.Queue[tuple[int, str]] = queue.Queue()
    monkeypatch.setattr(watchdog_module, "end_process", lambda code, line: ends.put((code, line)))
    monkeypatch.setattr(watchdog_module, "_POLL_SECONDS", 0.05)
    coordinator = MemoryCoordinator(2)
    first, second = (Watchdog(hosts, Deadlines(), Clock(), *[lambda *_: None] * 3) for hosts in coordinator.hosts())
    with second:
        with pytest.raises(type(error)), first:
            raise error
        if is_shared:
            assert ends.get(timeout=20) == (code, str(error))
        assert ("runner/diagnosis" in coordinator.values) == is_shared


def test_the_end_of_an_elastic_group_that_is_fenced_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = MemoryCoordinator(2)
    watchdog = Watchdog(coordinator.hosts()[0], Deadlines(), Clock(), *[lambda *_: None] * 3)
    with pytest.raises(RetryableError), watchdog:
        raise RetryableError("its hosts go on without this one") from FencedError("attempt 2 has taken over")
    assert json.loads(coordinator.values["runner/diagnosis"]) == ["its hosts go on without this one", 76, True]
