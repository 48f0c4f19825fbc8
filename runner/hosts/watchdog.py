"""Notices that a job does not go on: a process that is gone, one that stands still, one that is late.

Driven by the training thread's own progress: it says what it is at (`during`) and which step it has come to
(`arrive`). The thread here only looks and tells; it never speaks for a training thread that hangs.

1. Each second every process publishes a row through the job's key-value store: what its training thread is at, since
   when, and whether that is overdue. It reads the verdict, if there is one.
2. Process 0 reads all rows. One that stays the same for LOST_SECONDS is that of a process that is frozen or cut off. A
   process that has died is known at once, by its lifeline (`rendezvous`).
3. If a process is lost or overdue, process 0 writes the verdict: a line that names the late ones and what they did.
4. On a verdict every process puts the stacks of its threads where `on_verdict` says, and ends with 76. A process that
   cannot reach process 0 any more judges for itself.
"""

import collections
import faulthandler
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from runner.errors import EXIT_RETRYABLE, PeerLostError, RunnerError, first_line
from runner.hosts.join import Hosts
from runner.hosts.preemption import end_process
from runner.hosts.progress import Progress
from runner.hosts.straggler import Rounds, Straggling
from runner.spec import Deadlines
from runner.terminal import warn

LOST_SECONDS = 30.0
SUSPECTED_LOST_SECONDS = 5.0  # once a collective has failed somewhere
UNREACHABLE_SECONDS = 5.0
_POLL_SECONDS = 1.0
_ARRIVAL_POLL_SECONDS = 0.02
_LAST_WORDS_SECONDS = 5.0
_HEARD_SECONDS = 3.0
_VERDICT_SECONDS = 30.0
_TELL_BEATS = 60

Row = dict[str, Any]


class Watchdog:
    """Looks after one process, and on process 0 after all. Made on every host.

    Attributes:
        on_verdict: called with the verdict's line before the process ends: keep what helps to understand.
        on_straggler: called on process 0.
        on_progress: called on process 0 with the step, from time to time if it is another than before.
    """

    def __init__(
        self,
        hosts: Hosts,
        deadlines: Deadlines,
        on_verdict: Callable[[str], None],
        on_straggler: Callable[[Straggling], None],
        on_progress: Callable[[int], None],
    ):
        self.progress = Progress()
        self._hosts, self._deadlines = hosts, deadlines
        self._on_verdict, self._on_straggler, self._on_progress = on_verdict, on_straggler, on_progress
        self._told_step, self._tell_at_beat = 0, 1
        self._is_over = threading.Event()
        self._num_beats = 0
        self._seen: dict[int, tuple[int, float]] = {}  # process -> (last beat, when it was new)
        self._reached_seconds = self._looked_seconds = time.monotonic()
        self._rounds = Rounds(hosts, self.progress)

    def __enter__(self) -> Progress:
        self._hosts.on_peer_lost = self._judge_alone
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self.progress

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._hosts.num_processes > 1 and error is not None:
            self._await_verdict(error)
        self._is_over.set()
        self.progress.has_arrived.set()
        self._hosts.on_peer_lost = None

    def _await_verdict(self, error: BaseException) -> None:
        """The error may come from a peer's death: if so the watch ends this process, and names the peer.

        JAX raises a failed collective as one of several types.
        """
        is_suspect = isinstance(error, (jax.errors.JaxRuntimeError, PeerLostError)) or "Gloo" in str(error)
        if is_suspect or not isinstance(error, RunnerError):
            warn(f"{first_line(error)}; waiting for word of a lost peer")
            self._hosts.suspects_peer = is_suspect
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
            row = self._row()
            self._tell(row["step"])
            if self._hosts.num_processes > 1:
                self._exchange(row)
                self._rounds.hear()
            elif row["overdue"]:
                self._end(describe({0: row}, {}))
        if self._hosts.num_processes > 1:
            straggling = self._rounds.advance()
            if straggling is not None:
                self._on_straggler(straggling)

    def _forgive_a_pause(self) -> None:
        """What is late here because this very process was stopped for a while is not late."""
        now, before = time.monotonic(), self._looked_seconds
        self._looked_seconds = now
        if now - before > UNREACHABLE_SECONDS:
            self._seen.clear()
            self.progress.since_seconds = now

    def _tell(self, step: int) -> None:
        if self._hosts.is_main and self._num_beats >= self._tell_at_beat and step != self._told_step:
            self._told_step = step
            self._tell_at_beat = self._num_beats + min(self._num_beats, _TELL_BEATS)
            self._on_progress(step)

    def _row(self) -> Row:
        progress = self.progress
        self._num_beats += 1
        seconds = time.monotonic() - progress.since_seconds
        return {
            "host": socket.gethostname(),
            "doing": progress.doing,
            "step": progress.step,
            "seconds": round(seconds, 1),
            "overdue": seconds > progress.deadline_seconds(self._deadlines),
            "suspects": self._hosts.suspects_peer,
            "beat": self._num_beats,
        }

    def _exchange(self, row: Row) -> None:
        hosts = self._hosts
        hosts.publish(f"runner/row/{hosts.process_id}", row)
        verdict = hosts.peek("runner/verdict")
        dead = hosts.dead()
        self._reached_seconds = time.monotonic()
        if verdict is None and 0 in dead:
            self._judge_alone()
        if verdict is None and hosts.is_main:
            rows = {int(key): value for key, value in hosts.peek_all("runner/row").items()}
            verdict = self._verdict(rows, dead)
            if verdict is not None:
                hosts.publish("runner/verdict", verdict)
        if verdict is not None:
            self._end(verdict)

    def _verdict(self, rows: dict[int, Row], dead: list[int]) -> str | None:
        """What is wrong, by all rows. Main host only."""
        now = time.monotonic()
        for process in range(self._hosts.num_processes):
            beat = rows[process]["beat"] if process in rows else 0
            if process not in self._seen or self._seen[process][0] != beat:
                self._seen[process] = (beat, now)
        is_suspected = any(row["suspects"] for row in rows.values())
        limit_seconds = SUSPECTED_LOST_SECONDS if is_suspected else LOST_SECONDS
        silent = {
            process: f"does not answer for {now - since_seconds:.0f} s"
            for process, (_, since_seconds) in self._seen.items()
            if now - since_seconds > limit_seconds
        } | dict.fromkeys(dead, "has died")
        if silent or any(row["overdue"] for row in rows.values()):
            return describe(rows, silent)
        return None

    def _judge_alone(self) -> None:
        """Process 0 cannot be reached: end by what is known here."""
        silent_seconds = time.monotonic() - self._reached_seconds
        how = "has died" if 0 in self._hosts.gone() else f"does not answer for {silent_seconds:.0f} s"
        self._end(describe({self._hosts.process_id: self._row()}, {} if self._hosts.is_main else {0: how}))

    def _end(self, verdict: str) -> None:
        words = threading.Thread(target=self._on_verdict, args=(verdict,), daemon=True)
        words.start()
        words.join(_LAST_WORDS_SECONDS)  # the directory may be what hangs
        if self._hosts.is_main and self._hosts.num_processes > 1:
            time.sleep(_HEARD_SECONDS)  # with process 0 the verdict goes
        end_process(EXIT_RETRYABLE, f"{verdict}; run the same command again")


def stacks_of_all_threads() -> str:
    """The Python stacks of this process, as text."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def describe(rows: dict[int, Row], silent: dict[int, str]) -> str:
    """One line: who is silent, who is overdue with what, and what the others are at."""
    parts = []
    for process, how in sorted(silent.items()):
        row = rows.get(process)
        last = "" if row is None else f", last seen {_at(row)}"
        parts.append(f"{_name([process], row)} {how}{last}")
    groups: dict[tuple[bool, str], list[int]] = collections.defaultdict(list)
    for process, row in sorted(rows.items()):
        if process not in silent:
            groups[not row["overdue"], _at(row)].append(process)
    for (is_in_time, at), processes in sorted(groups.items()):
        row = rows[processes[0]]
        name, state = (_name(processes, row), "is") if len(processes) == 1 else (_name(processes, None), "are")
        late = "" if is_in_time else ", past the deadline"
        parts.append(f"{name} {state} {at} for {row['seconds']:.0f} s{late}")
    return "the job does not go on: " + "; ".join(parts)


def _name(processes: list[int], row: Row | None) -> str:
    host = f" ({row['host']})" if row is not None else ""
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}{host}"


def _at(row: Row) -> str:
    """What a training thread is at; the step in hand is the one after the last that is complete."""
    return f"in step {row['step'] + 1}" if row["doing"] == "step" else f"in {row['doing']} at step {row['step']}"
