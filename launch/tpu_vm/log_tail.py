"""A log on another machine, shown on this terminal: over connections that break, each line once and in order."""

import subprocess
import threading
from collections.abc import Callable, Sequence

from launch.tpu_vm.gcloud import kill
from runner.terminal import say


class LogTail:
    """Shows a log until the job has ended.

    `connect` makes the command that prints the log from a numbered line on (None: the last few lines) until the job
    ends; `begins_at` reads the number of the next line off the line that the command prints first of all.
    """

    def __init__(
        self,
        connect: Callable[[int | None], Sequence[str]],
        begins_at: Callable[[str], int | None],
        first_line: int | None,
        pause_seconds: float,
    ):
        self._connect = connect
        self._begins_at = begins_at
        self._next_line = first_line
        self._pause_seconds = pause_seconds
        self._process: subprocess.Popen[str] | None = None
        self._has_ended = threading.Event()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, deadline_seconds: float) -> None:
        """The job has ended: show what is left of the log, and stop."""
        self._has_ended.set()
        self._thread.join(deadline_seconds)
        self.abandon()

    def abandon(self) -> None:
        """Stop at once."""
        self._is_abandoned = True
        self._has_ended.set()
        if self._process is not None:
            kill(self._process)

    def _run(self) -> None:
        while not self._is_abandoned:
            is_last = self._has_ended.is_set()
            self._show()
            if is_last:
                return
            self._has_ended.wait(self._pause_seconds)

    def _show(self) -> None:
        """One connection. A line that the connection's end has cut short is left to the next one."""
        self._process = subprocess.Popen(
            self._connect(self._next_line),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        has_begun = False
        for line in self._process.stdout:
            if not has_begun:
                begin = self._begins_at(line.rstrip())
                has_begun = begin is not None
                self._next_line = begin if has_begun else self._next_line
            elif line.endswith("\n") and not self._is_abandoned:
                say(line.rstrip())
                self._next_line = (self._next_line or 1) + 1
        self._process.wait()
