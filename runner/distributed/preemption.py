"""Preemption: SIGTERM or Ctrl-C on any host becomes one agreed stop on all of them. So do SIGHUP, SIGUSR1, SIGUSR2.

The main thread counts ticks: every host calls `poll` at the same places, so tick t is the same place everywhere.

1. A signal on any host wakes a listener thread through a pipe, also while the main thread is inside a long compile.
2. The listener tells every host through the job's key-value store (a single process skips to 5).
3. On each host a second thread learns of it, takes the lock that `poll` needs, and publishes this host's tick. It is
   this thread that answers, because the main thread may be waiting for a device that waits for a slower host.
4. When all hosts have answered, all know the same largest tick.
5. `poll` returns True from the tick after it on. Hosts that are behind go on until they reach it.

Before the first tick nothing exists that is not committed or derived from the spec. If the largest tick is 0 every
host therefore ends at once, with the exit code of a preemption: a compile of half an hour is not waited for.
A second SIGTERM or Ctrl-C on the same host ends that process at once; the last commit stays intact. The others may come
twice without that: a terminal that closes sends SIGHUP twice, systemd sends one after SIGTERM. SIGQUIT asks for
nothing: it prints the stacks of all threads, and the job goes on.

The preemption of a Google Cloud VM, announced some time before SIGTERM comes, if it comes at all.

The VM's metadata server has `preempted` for spot VMs and `maintenanceEvent` for TPU hosts that are about to be
maintained. It holds its answer back until something changes.
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
from typing import Protocol

from runner.console import LOGGER, warn
from runner.distributed.clock import Clock
from runner.errors import EXIT_PREEMPTED, EXIT_RETRYABLE
from runner.process import INSISTENT_SIGNALS, STOP_SIGNALS, list_stop_signals

_STANDARD_ERROR = 2
_JOIN_SECONDS = 15
_VERDICT_SECONDS = 60  # in which the watchdog names the lost peer, and ends the process


class StopPeers(Protocol):
    """What a stop needs of the other processes of the job (`agreement.Hosts`). Each may raise `ConnectionError`."""

    def announce_stop(self) -> None:
        """Tell every host, this one too, that the job was asked to stop."""

    def await_stop(self) -> None:
        """Block until any host has announced a stop."""

    def exchange_ticks(self, tick: int) -> list[int]:
        """Publish this host's tick and return every host's."""

    def leave(self, code: int) -> None:
        """Say that this process ends in order, with `code`, so that its end does not look like a crash."""


def end_process(code: int, message: str | None = None) -> None:
    """End this process at once, past every handler that could wait for a peer. Output is flushed. Any thread."""
    if message is not None:
        warn(message)
    for handler in LOGGER.handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class StopNotice:
    """Whether the job was asked to stop, and at which tick it does. One a process, made by the command.

    `on_idle_exit`, set by the job, is called from a thread of this class before a process ends that has not begun.
    `clock` hears the exit code of a process that this class ends.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tick = 0
        self._stop_tick: int | None = None
        self._num_insistent = 0
        self._peers: StopPeers | None = None
        self._joined = threading.Event()
        self._joined.set()
        self.on_idle_exit: Callable[[], None] | None = None

    def install_signal_handlers(self) -> None:
        """Take over the signals that ask for a stop, and SIGQUIT. Main thread only, as early as possible."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in list_stop_signals():
            signal.signal(number, _leave_to_the_listener)
        faulthandler.register(signal.SIGQUIT, file=_STANDARD_ERROR)
        threading.Thread(target=self._await_signals, args=(reader, writer), name="signals", daemon=True).start()

    def expect_peers(self) -> None:
        """Until `join`, hold a stop back for a while, so that the peers can be told of it. Main thread only."""
        self._joined.clear()

    def join_peers(self, peers: StopPeers | None) -> None:
        """From now on agree on a stop with the other processes of the job; None = there are none. On every host."""
        self._peers = peers
        self._joined.set()
        if peers is not None:
            threading.Thread(target=self._await_peers, args=(peers,), name="stop", daemon=True).start()

    def poll(self) -> bool:
        """Count one tick; True once the job is to stop. Main thread, on every host at the same places.

        Waits only while the hosts agree on the tick of a stop.
        """
        with self._lock:
            self._tick += 1
            return self._stop_tick is not None and self._tick >= self._stop_tick

    def _await_signals(self, reader: socket.socket, writer: socket.socket) -> None:
        """`writer` is held here alone: Python knows only its number."""
        while numbers := reader.recv(16):
            for number in numbers:
                if number in STOP_SIGNALS:
                    self._on_signal(signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_insistent += number in INSISTENT_SIGNALS
        if self._num_insistent > 1:
            self._end(EXIT_PREEMPTED, f"{number.name} again: leaving at once; the last commit is intact")
        self.request_stop(number.name)

    def request_stop(self, reason: str) -> None:
        """Ask the job to stop, as a first signal does. Any host, any thread; asking again changes nothing."""
        warn(f"{reason}: stopping at the next step")
        threading.Thread(target=self._ask_to_stop, name="ask to stop", daemon=True).start()

    def _ask_to_stop(self) -> None:
        self._joined.wait(_JOIN_SECONDS)
        peers = self._peers
        if peers is None:
            with self._lock:
                self._decide([self._tick])
            return
        try:
            peers.announce_stop()
        except ConnectionError as error:
            time.sleep(_VERDICT_SECONDS)
            self._end(EXIT_RETRYABLE, f"peer lost: {error}")

    def _await_peers(self, peers: StopPeers) -> None:
        try:
            peers.await_stop()
            with self._lock:
                ticks = peers.exchange_ticks(self._tick)
                if max(ticks) == 0:
                    peers.leave(EXIT_PREEMPTED)
                self._decide(ticks)
        except ConnectionError as error:
            time.sleep(_VERDICT_SECONDS)
            self._end(EXIT_RETRYABLE, f"peer lost: {error}")

    def _decide(self, ticks: list[int]) -> None:
        if self._stop_tick is not None:
            return
        if max(ticks) > 0:
            self._stop_tick = max(ticks) + 1
            return
        if self.on_idle_exit is not None:
            self.on_idle_exit()
        self._end(EXIT_PREEMPTED, "stopped before the first step: nothing to save")

    def _end(self, code: int, message: str) -> None:
        if self._clock is not None:
            self._clock.end(code)
        end_process(code, message)


def _leave_to_the_listener(number: int, frame: FrameType | None) -> None:
    """The wakeup pipe has the signal already; a Python handler must exist for it to be written."""


_PRODUCT = Path("/sys/class/dmi/id/product_name")
_HOLD_SECONDS = 300
_RETRY_SECONDS = 10.0


def watch_gcp_preemption(ask_to_stop: Callable[[str], None]) -> None:
    """Call `ask_to_stop` with the reason once this VM is to be preempted. Called on every host; returns at once.

    It is called at most once, from a thread of its own. On other machines nothing happens.
    """
    server = _metadata_server()
    if server is not None:
        threading.Thread(target=_watch, args=(server, ask_to_stop), name="gcp-preemption", daemon=True).start()


def _metadata_server() -> str | None:
    """Its address; None if this machine is none of Google Cloud."""
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        if os.environ.get(name):
            return os.environ[name]
    is_google = _PRODUCT.exists() and "Google" in _PRODUCT.read_text(errors="replace")
    return "metadata.google.internal" if is_google else None


def _watch(server: str, ask_to_stop: Callable[[str], None]) -> None:
    etag = "0"
    while True:
        query = f"recursive=true&wait_for_change=true&timeout_sec={_HOLD_SECONDS}&last_etag={etag}"
        request = urllib.request.Request(
            f"http://{server}/computeMetadata/v1/instance/?{query}", headers={"Metadata-Flavor": "Google"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_HOLD_SECONDS + 30) as answer:
                etag = answer.headers.get("ETag", "0")
                reason = parse_preemption_reason(json.load(answer))
        except (OSError, ValueError):  # metadata that cannot be read are no reason to end a job
            time.sleep(_RETRY_SECONDS)
            continue
        if reason is not None:
            ask_to_stop(reason)
            return


def parse_preemption_reason(instance: object) -> str | None:
    """Why the VM that these metadata describe is to be preempted; None if it is not."""
    if not isinstance(instance, dict):
        return None
    if str(instance.get("preempted", "")).upper() == "TRUE":
        return "this machine is being preempted"
    event = str(instance.get("maintenanceEvent", "NONE")).upper()
    return f"this machine is about to be maintained ({event})" if event.startswith("TERMINATE") else None
