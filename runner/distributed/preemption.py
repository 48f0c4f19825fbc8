"""Preemption: a signal to any process becomes one agreed stop of all processes.

SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR1 and SIGUSR2 request a stop. Every process runs the same program and calls
`StopNotice.poll` at the same points of it, once after each step. The count of these calls is the *tick*, so tick t is
the same point on every process. From the signal to exit code 75:

1. The signal wakes a listener thread through a pipe, even while the main thread is inside a long compile.
2. The listener announces the stop to every process through the job's key-value store. A single-process job continues
   with step 5.
3. On each process a second thread receives the announcement, takes the lock that `poll` needs, and publishes the tick
   of this process. The main thread cannot do that, because it may wait for a device that waits for a slower process.
4. When all processes have answered, all of them know the same largest tick.
5. `poll` returns True at the tick after the largest one. Processes that are behind train until they reach it.
6. The job (`runner.job`) saves that step, waits for the commit, and raises `PreemptedError`, whose exit code is 75.

Before the first tick there is nothing to save. If the largest tick is 0, every process therefore ends at once with exit
code 75, without waiting for a compile that may take half an hour.

A second SIGTERM or SIGINT ends that process at once; the last commit stays intact. The other signals may arrive any
number of times, because a terminal that closes sends SIGHUP twice, and systemd sends it after SIGTERM. SIGQUIT does not
stop the job; it prints the stacks of all threads.

`watch_gcp_preemption` follows the metadata server of a Google Cloud VM, which announces a preemption some time before
SIGTERM, if SIGTERM is sent at all.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

from runner.console import LOGGER, warn
from runner.distributed.clock import Clock
from runner.errors import EXIT_PREEMPTED, EXIT_RETRYABLE
from runner.process import INSISTENT_SIGNALS, STOP_SIGNALS, list_stop_signals

_STDERR = 2  # the file descriptor, because `sys.stderr` may be replaced and `faulthandler` needs a real file
_RENDEZVOUS_WAIT_SECONDS = 15
_WATCHDOG_WAIT_SECONDS = 60  # time for the watchdog to name the lost peer and end the process
_CLEAN_UP_SECONDS = 5.0  # time for a command that runs no job to remove what it has not finished


class StopPeers(Protocol):
    """Operations of `agreement.Hosts` that an agreed stop needs. Each may raise `ConnectionError`."""

    def announce_stop(self) -> None:
        """Tell every process, including this one, that a stop was requested."""

    def await_stop(self) -> None:
        """Block until any process has announced a stop."""

    def agree_on_tick(self, tick: int) -> int:
        """Return the highest of the ticks of all processes, each of which calls this once."""

    def leave(self, code: int) -> None:
        """Announce that this process is about to exit with `code`, so that its exit does not count as a crash."""


def end_process(code: int, message: str | None = None) -> NoReturn:
    """Flush the output and exit at once, without `atexit` handlers, which could wait for a peer. Any thread."""
    if message is not None:
        warn(message)
    for handler in LOGGER.handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        # A program that calls a job itself may have closed a stream, or have been started without one.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


class StopNotice:
    """Stop request of this process, and the tick at which it takes effect. One per process, made by the command."""

    def __init__(self, clock: Clock | None = None) -> None:
        """Create the notice; `clock` receives the exit code if this class ends the process."""
        self._clock = clock
        self._lock = threading.Lock()
        self._tick = 0
        self._idle_tick = 0  # at which the job began: before its first poll there is nothing to save
        self._stop_tick: int | None = None
        self._num_insistent_signals = 0
        self._handles_signals = False
        self._peers: StopPeers | None = None
        # Cleared only while a multi-process job waits for its rendezvous, see `expect_peers`.
        self._joined = threading.Event()
        self._joined.set()
        # Of the job; called on a thread of this class before the process exits at tick 0.
        self.on_idle_exit: Callable[[], None] | None = None

    def install_signal_handlers(self) -> None:
        """Handle the stop signals and SIGQUIT from now on. Main thread only, as early as possible."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in list_stop_signals():
            signal.signal(number, lambda number, frame: None)  # A handler makes Python fill the pipe.
        faulthandler.register(signal.SIGQUIT, file=_STDERR)
        threading.Thread(target=self._read_signals, args=(reader, writer), name="signals", daemon=True).start()
        self._handles_signals = True

    def interrupt_command(self) -> None:
        """Let a stop signal raise `KeyboardInterrupt` in the main thread from now on: the command runs no job.

        The exception lets the command remove incomplete output. If that takes too long, as during a long compile, or if
        another signal comes, the process ends at once. Main thread only; has no effect without signal handlers.
        """
        if not self._handles_signals:
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        received: list[int] = []

        def interrupt(number: int, frame: FrameType | None) -> None:
            received.append(number)
            if len(received) == 1:
                raise KeyboardInterrupt(f"{signal.Signals(number).name}: stopped before the end; run the command again")

        # `writer` is an argument to keep it alive, as in `_read_signals`.
        def limit_clean_up(reader: socket.socket, writer: socket.socket) -> None:
            number = reader.recv(1)[0]
            deadline_seconds = time.monotonic() + _CLEAN_UP_SECONDS
            with contextlib.suppress(TimeoutError, BlockingIOError):
                while True:
                    reader.settimeout(max(0.0, deadline_seconds - time.monotonic()))
                    if reader.recv(1)[0] in INSISTENT_SIGNALS:
                        break
            name = signal.Signals(number).name
            self._end(EXIT_PREEMPTED, f"{name}: stopped at once, without cleaning up; run the command again")

        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in list_stop_signals():
            signal.signal(number, interrupt)
        threading.Thread(target=limit_clean_up, args=(reader, writer), name="interrupt", daemon=True).start()

    def expect_peers(self) -> None:
        """Delay a stop until `join_peers`, for a limited time, so that peers can learn of it. Main thread only."""
        self._joined.clear()

    def join_peers(self, peers: StopPeers | None) -> None:
        """Agree on stops with `peers` from now on; None for a single-process job. Called on every process."""
        self._peers = peers
        self._joined.set()
        if peers is not None:
            threading.Thread(target=self._await_announcement, args=(peers,), name="stop", daemon=True).start()

    def poll(self) -> bool:
        """Count one tick, and return True once the job must stop.

        Called by the main thread of every process at the same places. Blocks only while the processes agree on the
        tick of a stop.
        """
        with self._lock:
            self._tick += 1
            return self._stop_tick is not None and self._tick >= self._stop_tick

    def begin_next_job(self) -> None:
        """Begin another job of the same processes. Called by the main thread of every process at the same place."""
        with self._lock:
            self._idle_tick = self._tick

    def stop_at_next_poll(self, reason: str) -> None:
        """Stop at the next poll. Called by the main thread of every process at the same place."""
        warn(f"{reason}: stopping")
        with self._lock:
            self._stop_tick = self._tick if self._stop_tick is None else min(self._stop_tick, self._tick)

    @property
    def has_begun(self) -> bool:
        """True once the job has polled: before its first step a stop ends the process, since nothing is to be saved."""
        return self._tick != self._idle_tick

    def request_stop(self, reason: str) -> None:
        """Request a stop, as the first signal does. Any process, any thread; repeated calls have no effect."""
        warn(f"{reason}: stopping at the next step")
        # On its own thread, so that the caller can go on to receive a second signal.
        threading.Thread(target=self._announce_stop, name="announce stop", daemon=True).start()

    def _read_signals(self, reader: socket.socket, writer: socket.socket) -> None:
        # `writer` is an argument to keep it alive: the wakeup pipe knows only its file descriptor.
        while numbers := reader.recv(16):
            for number in (each for each in numbers if each in STOP_SIGNALS):
                name = signal.Signals(number).name
                self._num_insistent_signals += number in INSISTENT_SIGNALS
                if self._num_insistent_signals > 1:
                    self._end(EXIT_PREEMPTED, f"{name} again: exiting without another save; the last commit is intact")
                self.request_stop(name)

    def _announce_stop(self) -> None:
        # If the rendezvous does not complete in time, this process exits alone: no step has begun, so its tick is 0.
        self._joined.wait(_RENDEZVOUS_WAIT_SECONDS)
        peers = self._peers
        if peers is None:
            with self._lock:
                self._set_stop_tick(self._encode_tick())
            return
        try:
            peers.announce_stop()
        except ConnectionError as error:
            self._end_after_lost_peer(error)

    def _await_announcement(self, peers: StopPeers) -> None:
        try:
            peers.await_stop()
            # `poll` must not count meanwhile: this process could pass the agreed tick.
            with self._lock:
                tick = peers.agree_on_tick(self._encode_tick())
                # All processes are about to exit; an exit without this announcement would be taken for a crash.
                if tick % 2:
                    peers.leave(EXIT_PREEMPTED)
                self._set_stop_tick(tick)
        except ConnectionError as error:
            self._end_after_lost_peer(error)

    def _encode_tick(self) -> int:
        """Return a number that grows with the tick, and is odd if the job has not counted one yet."""
        return 2 * self._tick + (self._tick == self._idle_tick)

    def _set_stop_tick(self, farthest: int) -> None:
        """Set the tick of the stop from the highest encoded one of all, or end the process if all are idle."""
        if self._stop_tick is not None:
            return
        # If any process has begun the job, it has begun for all.
        if farthest % 2 == 0:
            self._stop_tick = farthest // 2 + 1
            return
        if self.on_idle_exit is not None:
            self.on_idle_exit()
        self._end(EXIT_PREEMPTED, "stopped before the first step: nothing to save")

    def _end_after_lost_peer(self, error: ConnectionError) -> None:
        # The watchdog reports more than this error does, and normally ends the process during this wait.
        time.sleep(_WATCHDOG_WAIT_SECONDS)
        self._end(EXIT_RETRYABLE, f"peer lost: {error}")

    def _end(self, code: int, message: str) -> None:
        if self._clock is not None:
            self._clock.end(code)
        end_process(code, message)


# Google Cloud's notice of preemption.
_PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
_LONG_POLL_SECONDS = 300
_RETRY_SECONDS = 10.0


def watch_gcp_preemption(request_stop: Callable[[str], None]) -> None:
    """Call `request_stop` with a reason when Google Cloud announces that it will preempt or maintain this VM.

    Called on every process; returns at once. The callback is called at most once, from a separate thread. On other
    machines nothing happens. The metadata server reports `preempted` for spot VMs and `maintenanceEvent` for TPU hosts
    before maintenance, and delays its answer until something changes.
    """
    server = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_IP")
    if not server:
        if not _PRODUCT_NAME.exists() or "Google" not in _PRODUCT_NAME.read_text(errors="replace"):
            return
        server = "metadata.google.internal"
    threading.Thread(target=_poll_metadata, args=(server, request_stop), name="gcp-preemption", daemon=True).start()


def _poll_metadata(server: str, request_stop: Callable[[str], None]) -> None:
    etag = "0"
    while True:
        query = f"recursive=true&wait_for_change=true&timeout_sec={_LONG_POLL_SECONDS}&last_etag={etag}"
        request = urllib.request.Request(
            f"http://{server}/computeMetadata/v1/instance/?{query}", headers={"Metadata-Flavor": "Google"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_LONG_POLL_SECONDS + 30) as answer:
                etag = answer.headers.get("ETag", "0")
                reason = parse_preemption_reason(json.load(answer))
        except (OSError, ValueError):  # Unreadable metadata must not end a job.
            time.sleep(_RETRY_SECONDS)
            continue
        if reason is not None:
            request_stop(reason)
            return


def parse_preemption_reason(instance: object) -> str | None:
    """Return the reason for the coming stop of the VM with these metadata, or None if there is none."""
    if not isinstance(instance, dict):
        return None
    if str(instance.get("preempted", "")).upper() == "TRUE":
        return "this machine is being preempted"
    event = str(instance.get("maintenanceEvent", "NONE")).upper()
    return f"this machine is about to be maintained ({event})" if event.startswith("TERMINATE") else None
