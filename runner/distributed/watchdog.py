"""Notices that a job does not go on: a process has crashed, one stands still, one is late.

The training thread reports its phase and its last completed step (`progress`). The watchdog's thread only reads them
and passes them on: it never speaks for a training thread that hangs.

1. Each second every process publishes a beat through the job's key-value store: the phase and step of its training
   thread, since when, and whether that is overdue. It reads the verdict, if there is one.
2. Process 0 reads all beats. If one stays the same for LOST_SECONDS, its process is frozen or cut off. A process that
   has crashed is known at once, by its peer socket (`liveness`).
3. If a process is lost or overdue, process 0 writes the verdict: a line that names it and the phase it was in. Where
   a process waits for its data, that the others' step takes long is no verdict.
4. On a verdict every process calls `on_verdict`, which keeps the stacks of its threads, and ends with 76. A process
   that cannot reach process 0 any more judges for itself.
5. What has failed on one host alone (a hook, an evaluator) is told in the same way, before any deadline: every process
   prints it. Where the job ends by it, the verdict is 1, and comes soon.
"""

import faulthandler
import math
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import jax

from runner.console import warn
from runner.distributed import key_value
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Clock, Progress
from runner.distributed.heartbeat import (
    HealthVerdict,
    Heartbeat,
    StragglerDetector,
    StragglerReport,
    find_failure,
    find_unresponsive,
    format_diagnosis,
    has_data_wait,
    has_overdue,
)
from runner.distributed.preemption import end_process
from runner.errors import EXIT_FAILED, EXIT_RETRYABLE, PeerLostError, RunnerError, format_error
from runner.spec import Deadlines

LOST_SECONDS = 30.0
SUSPECTED_LOST_SECONDS = 5.0  # once a collective has failed somewhere
UNREACHABLE_SECONDS = 5.0  # of the coordinator
_POLL_SECONDS = 1.0
_ARRIVAL_POLL_SECONDS = 0.02
_LAST_WORDS_SECONDS = 5.0  # for `on_verdict`
_HEARD_SECONDS = 3.0  # in which every process reads the verdict
_VERDICT_SECONDS = 30.0  # in which a failed collective is found to be a lost peer
_MAX_REPORT_BEATS = 60  # between two reports of progress; the first ones come sooner


class Watchdog:
    """Watches one process, and on process 0 all of them. Made on every host; watches between `with` and its end.

    The three functions are called from the watchdog's thread, and must not wait for another host:

    - `on_verdict` with the verdict's line and code, on every host before it ends: keep what helps to understand.
    - `on_straggler` on process 0.
    - `on_progress` with the last completed step on process 0, from time to time if it is another than before.
    """

    def __init__(
        self,
        hosts: Hosts,
        deadlines: Deadlines,
        clock: Clock,
        on_verdict: Callable[[str, int], None],
        on_straggler: Callable[[StragglerReport], None],
        on_progress: Callable[[int], None],
    ):
        self.progress = Progress(clock)
        self._hosts, self._deadlines = hosts, deadlines
        self._on_verdict, self._on_straggler, self._on_progress = on_verdict, on_straggler, on_progress
        self._reported_step, self._next_report_beat = 0, 1
        self._is_over = threading.Event()
        self._suspects_peer = False  # a collective has failed here
        self._heard = ""  # the last word on the way
        self._num_beats = 0
        self._seen: dict[int, tuple[int, float]] = {}  # process -> (number of its last beat, when it came)
        self._reached_seconds = self._looked_seconds = time.monotonic()
        self._data_seconds = -math.inf  # when a process was last seen to wait for its data
        self._rounds = StragglerDetector(hosts, self.progress)

    def __enter__(self) -> Progress:
        self._hosts.liveness.set_abort_callback(self._judge_alone)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self.progress

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._hosts.num_processes > 1 and error is not None:
            self._await_verdict(error)
        self._is_over.set()
        self.progress.has_arrived.set()
        self._hosts.liveness.set_abort_callback(None)

    def _await_verdict(self, error: BaseException) -> None:
        """Wait: if the error comes from a peer's death, the watchdog's thread ends this process and names the peer.

        JAX raises a failed collective as one of several types.
        """
        is_suspect = isinstance(error, (jax.errors.JaxRuntimeError, PeerLostError)) or "Gloo" in str(error)
        if is_suspect or not isinstance(error, RunnerError):
            warn(f"{format_error(error)}; waiting for word of a lost peer")
            self._suspects_peer = is_suspect
            time.sleep(_VERDICT_SECONDS if is_suspect else 3 * _POLL_SECONDS)

    def _watch(self) -> None:
        next_seconds = time.monotonic()
        while not self._is_over.is_set():
            left_seconds = max(next_seconds - time.monotonic(), 0.0)
            self.progress.has_arrived.wait(min(left_seconds, _ARRIVAL_POLL_SECONDS if self._rounds.is_open else 60.0))
            self.progress.has_arrived.clear()
            is_time = time.monotonic() >= next_seconds
            if is_time:
                next_seconds = time.monotonic() + _POLL_SECONDS
            try:
                self._look(is_time)
            except PeerLostError:
                if time.monotonic() - self._reached_seconds > UNREACHABLE_SECONDS and not self._is_over.is_set():
                    self._judge_alone()

    def _look(self, is_time: bool) -> None:
        if is_time and not self._is_over.is_set():
            self._forgive_a_pause()
            beat = self._beat()
            self._report_progress(beat.step)
            if self._hosts.num_processes > 1:
                self._exchange(beat)
                self._rounds.begin_or_join()
            elif beat.is_overdue:
                self._end(format_diagnosis({0: beat}, {}), EXIT_RETRYABLE)
        if self._hosts.num_processes > 1:
            straggling = self._rounds.advance()
            if straggling is not None:
                self._on_straggler(straggling)

    def _forgive_a_pause(self) -> None:
        """After this very process was stopped for a while, count neither its phase nor the others' beats as late."""
        now, before = time.monotonic(), self._looked_seconds
        self._looked_seconds = now
        if now - before > UNREACHABLE_SECONDS:
            self._seen.clear()
            self.progress.since_seconds = now

    def _report_progress(self, step: int) -> None:
        if self._hosts.is_main and self._num_beats >= self._next_report_beat and step != self._reported_step:
            self._reported_step = step
            self._next_report_beat = self._num_beats + min(self._num_beats, _MAX_REPORT_BEATS)
            self._on_progress(step)

    def _beat(self) -> Heartbeat:
        progress = self.progress
        self._num_beats += 1
        failure, seconds = progress.failure, time.monotonic() - progress.since_seconds
        return Heartbeat(
            number=self._num_beats,
            host=socket.gethostname(),
            phase=progress.phase.name,
            step=progress.step,
            seconds=round(seconds, 1),
            is_overdue=seconds > progress.deadline_seconds(self._deadlines),
            suspects_peer=self._suspects_peer,
            failure="" if failure is None else failure.line,
            is_end=failure is not None and failure.is_end,
        )

    def _exchange(self, beat: Heartbeat) -> None:
        """Publish the beat, and hear the verdict, if there is one. Process 0 gives it."""
        hosts, store = self._hosts, self._hosts.store
        store.set(key_value.process_key(key_value.HEARTBEATS, hosts.process_id), asdict(beat))
        told = store.try_get(key_value.VERDICT)
        verdict = None if told is None else HealthVerdict(*told)
        crashed = hosts.liveness.find_crashed()
        self._reached_seconds = time.monotonic()
        is_open = verdict is None or verdict.code is None
        if is_open and 0 in crashed:
            self._judge_alone()
        if is_open and hosts.is_main:
            beats = {
                process: Heartbeat(**fields) for process, fields in store.list_values(key_value.HEARTBEATS).items()
            }
            found = self._verdict(beats, crashed)
            if found is not None and found != verdict:
                store.set(key_value.VERDICT, found)
                verdict = found
        if verdict is not None:
            self._hear(verdict)

    def _hear(self, verdict: HealthVerdict) -> None:
        if verdict.code is not None:
            self._end(verdict.line, verdict.code)
        elif verdict.line != self._heard:
            self._heard = verdict.line
            warn(verdict.line)

    def _verdict(self, beats: dict[int, Heartbeat], crashed: list[int]) -> HealthVerdict | None:
        """What is wrong, by all beats; None if nothing is. Main host only."""
        now = time.monotonic()
        for process in range(self._hosts.num_processes):
            number = beats[process].number if process in beats else 0
            if process not in self._seen or self._seen[process][0] != number:
                self._seen[process] = (number, now)
        is_suspected = any(beat.suspects_peer for beat in beats.values())
        limit_seconds = SUSPECTED_LOST_SECONDS if is_suspected else LOST_SECONDS
        quiet_seconds = {process: now - since_seconds for process, (_, since_seconds) in self._seen.items()}
        silent = find_unresponsive(quiet_seconds, limit_seconds, self._hosts.liveness.read_departures(), crashed)
        if has_data_wait(beats.values()):
            self._data_seconds = now
        step_deadline_seconds = self.progress.step_deadline_seconds(self._deadlines)
        if silent or has_overdue(beats.values(), now - self._data_seconds, step_deadline_seconds):
            return HealthVerdict(format_diagnosis(beats, silent), EXIT_RETRYABLE)
        return find_failure(beats)

    def _judge_alone(self) -> None:
        """Process 0 cannot be reached: end by what is known here."""
        silent_seconds = time.monotonic() - self._reached_seconds
        how = (
            "has died"
            if 0 in self._hosts.liveness.find_disconnected()
            else f"does not answer for {silent_seconds:.0f} s"
        )
        silent = {} if self._hosts.is_main else {0: how}
        self._end(format_diagnosis({self._hosts.process_id: self._beat()}, silent), EXIT_RETRYABLE)

    def _end(self, verdict: str, code: int) -> None:
        words = threading.Thread(target=self._on_verdict, args=(verdict, code), daemon=True)
        words.start()
        words.join(_LAST_WORDS_SECONDS)  # the directory may be what hangs
        if self._hosts.is_main and self._hosts.num_processes > 1:
            time.sleep(_HEARD_SECONDS)  # the store ends with process 0, and the verdict with it
        end_process(code, verdict if code == EXIT_FAILED else f"{verdict}; run the same command again")


def format_thread_stacks() -> str:
    """The Python stacks of this process, as text."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
