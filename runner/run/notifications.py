"""Whoever wants to hear of a run is told what happened to it: by a command, or by a POST to a URL. Main host only.

Each call is made on a thread of its own and has a deadline; one that fails costs a warning. Nothing waits for it but
the end of the process, for some seconds. A command that is still running then is left to itself.
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
HOUR_SECONDS = 3600.0
# Of the events in the ledger, those that are told, and the word for them.
NOTIFIED_EVENTS = {"done": "done", "failed": "failed", "fallback": "fallback", "stuck": "stalled"}


class Notifier:
    """The calls of one attempt. `run` is what every payload says: name, directory, attempt."""

    def __init__(self, notify: NotifyConfig | None, run: JsonObject):
        self._notify, self._run = notify, run
        self._calls: list[threading.Thread] = []
        self._url = None if notify is None else _url(notify)

    def on_event(self, event: str, step: int | None, details: JsonObject) -> None:
        """An event has gone into the ledger. What is to be tried again is no failure. Any thread."""
        if event in NOTIFIED_EVENTS and details.get("code") != EXIT_RETRYABLE:
            self.notify(NOTIFIED_EVENTS[event], step, details.get("reason"))

    def report_frequent_preemption(self, read_ledger: Callable[[], Sequence[JsonObject]]) -> None:
        """At the start of an attempt: tell if the attempt before was preempted, as the first too many in an hour.

        The ledger may be long, and in a bucket: it is read on a thread, and only where somebody wants to hear of it.
        """
        if self._notify is not None:
            self._begin(self._look_back, read_ledger)

    def _look_back(self, read_ledger: Callable[[], Sequence[JsonObject]]) -> None:
        assert self._notify is not None, "nobody is called"
        limit, attempt = self._notify.preemptions_per_hour, self._run["attempt"]
        try:
            events = [event for event in read_ledger() if event.get("event") == "preempt"]
        except OSError as error:
            warn(f"notify: the preemptions of the last hour cannot be counted: {format_error(error)}")
            return
        times = sorted(event["time"] for event in events if isinstance(event.get("time"), float))
        if len(times) > limit and any(event.get("attempt") == attempt - 1 for event in events):
            now, before = (sum(end - HOUR_SECONDS < time <= end for time in times) for end in (times[-1], times[-2]))
            if now > limit >= before:
                self.notify("preempted", None, f"{now} times within an hour")

    def notify(self, event: str, step: int | None, reason: str | None) -> None:
        """Begin to call whoever the spec names."""
        if self._notify is None:
            return
        payload = {**self._run, "event": event, "step": step, "reason": reason}
        payload |= {"host": socket.gethostname(), "time": time.time()}
        self._begin(self._call, json.dumps(payload).encode())

    def _begin(self, work: Callable[[Any], None], argument: Any) -> None:
        call = threading.Thread(target=work, args=(argument,), name="notify", daemon=True)
        self._calls.append(call)
        call.start()

    def drain(self, seconds: float) -> None:
        """Before the end of the process: give the calls some seconds. Never raises."""
        deadline_seconds = time.monotonic() + seconds
        for call in self._calls:  # which may grow meanwhile
            call.join(max(0.0, deadline_seconds - time.monotonic()))

    def _call(self, content: bytes) -> None:
        assert self._notify is not None, "nobody is called"
        if self._notify.command is not None:
            try:
                _run(self._notify.command, content)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                warn(f"notify: the command failed: {format_error(error)}")
        if self._url is not None:
            try:
                _post(self._url, content)
            except (OSError, ValueError) as error:  # what is wrong with a URL may quote it
                warn(f"notify: the webhook failed: {format_error(error).replace(self._url, '***')}")


def _url(notify: NotifyConfig) -> str | None:
    """The URL, which is a secret: who knows it can post there."""
    url = notify.webhook
    if url is not None and url.startswith("$"):
        name, url = url[1:], os.environ.get(url[1:])
        if url is None:
            warn(f"notify: there is no {name} in the environment; nothing will be posted")
    if url is not None:
        hide_secret(url)
    return url


def _run(command: Sequence[str], content: bytes) -> None:
    """Raises `subprocess.SubprocessError` if it ends with another code than 0, or not in time; then it is killed."""
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


def _post(url: str, content: bytes) -> None:
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS):
        return
