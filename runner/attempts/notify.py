"""Notifications by command or webhook (`logging.notify`), of the events of the ledger that a person wants to know.

Process 0 runs the command, or sends a POST to the URL. Each notification is sent on its own thread with a deadline. A
failure only causes a warning. Training never waits for a notification; `drain` waits for a few seconds before the
process exits, and leaves a command that takes longer running.
"""

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from runner.console import hide_secret, warn
from runner.errors import EXIT_RETRYABLE, format_error
from runner.spec import NotifyConfig
from runner.storage import JsonObject

DEADLINE_SECONDS = 30.0
_HOUR_SECONDS = 3600.0
# Events of the ledger that cause a notification, and their names in it.
_NOTIFIED_EVENTS = {"done": "done", "failed": "failed", "fallback": "fallback", "stuck": "stalled"}


class Notifier:
    """Notifications of one attempt; none without recipients (`notify` of the spec).

    `run` has the keys of every payload: name, directory and attempt of the run.
    """

    def __init__(self, notify: NotifyConfig | None, run: JsonObject):
        self._notify, self._run = notify, run
        self._threads: list[threading.Thread] = []
        url = None if notify is None else notify.webhook
        if url is not None and url.startswith("$"):
            name, url = url[1:], os.environ.get(url[1:])
            if url is None:
                warn(f"notify: there is no {name} in the environment; nothing will be posted")
        if url is not None:
            hide_secret(url)  # Anyone who sees the URL in a log could post there.
        self._url = url

    def on_event(self, event: JsonObject) -> None:
        """Notify of an event of the ledger, unless the attempt will be retried. Any thread."""
        if event["event"] in _NOTIFIED_EVENTS and event.get("code") != EXIT_RETRYABLE:
            self.notify(_NOTIFIED_EVENTS[event["event"]], event["step"], event.get("reason"))

    def report_frequent_preemption(self, read_ledger: Callable[[], Sequence[JsonObject]]) -> None:
        """Notify if the previous attempt was preempted and thereby exceeded the limit of preemptions per hour.

        Called at the start of an attempt. The ledger may be long and in a bucket, so it is read on a thread, and only
        if there is a recipient.
        """
        if self._notify is not None:
            self._start_thread(self._count_preemptions, read_ledger)

    def _count_preemptions(self, read_ledger: Callable[[], Sequence[JsonObject]]) -> None:
        assert self._notify is not None, "there is a recipient"
        limit, attempt = self._notify.preemptions_per_hour, self._run["attempt"]
        try:
            events = [event for event in read_ledger() if event.get("event") == "preempt"]
        except OSError as error:
            warn(f"notify: the preemptions of the last hour cannot be counted: {format_error(error)}")
            return
        times = sorted(event["time"] for event in events if isinstance(event.get("time"), float))
        if len(times) > limit and any(event.get("attempt") == attempt - 1 for event in events):
            # Count the preemptions in the hour before the last one and before the one preceding it. Only the preemption
            # that crosses the limit is reported, not those after it.
            now, before = (sum(end - _HOUR_SECONDS < time <= end for time in times) for end in (times[-1], times[-2]))
            if now > limit >= before:
                self.notify("preempted", None, f"{now} times within an hour")

    def notify(self, event: str, step: int | None, reason: str | None) -> None:
        """Start a notification of each recipient, if there is one."""
        if self._notify is None:
            return
        payload = {**self._run, "event": event, "step": step, "reason": reason}
        payload |= {"host": socket.gethostname(), "time": time.time()}
        self._start_thread(self._send, json.dumps(payload).encode())

    def _start_thread(self, function: Callable[[Any], None], argument: Any) -> None:
        thread = threading.Thread(target=function, args=(argument,), name="notify", daemon=True)
        self._threads.append(thread)
        thread.start()

    def drain(self, seconds: float) -> None:
        """Wait up to `seconds` for pending notifications, before the process exits. Never raises."""
        deadline_seconds = time.monotonic() + seconds
        for thread in self._threads:  # The list may grow meanwhile.
            thread.join(max(0.0, deadline_seconds - time.monotonic()))

    def _send(self, content: bytes) -> None:
        assert self._notify is not None, "there is a recipient"
        if self._notify.command is not None:
            try:
                _run_command(self._notify.command, content)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                warn(f"notify: the command failed: {format_error(error)}")
        if self._url is not None:
            try:
                request = urllib.request.Request(self._url, content, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS):
                    pass
            except (OSError, ValueError) as error:  # An error about the URL may quote it.
                warn(f"notify: the webhook failed: {format_error(error).replace(self._url, '***')}")


def _run_command(command: Sequence[str], content: bytes) -> None:
    """Run a command with `content` on its standard input. Raises `SubprocessError` unless it ends with 0 in time."""
    # A new session, so that the command can be killed at the deadline together with its children.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.communicate(content, DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        raise
    if process.returncode != 0:
        raise subprocess.SubprocessError(f"it ended with {process.returncode}")
