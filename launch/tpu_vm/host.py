"""Programs that run on the hosts of a TPU VM, and what this machine reads from them: statuses and the log.

The programs are the `.sh` files beside this module. In the directory `~/NAME` of each host:

| file | content |
|---|---|
| `code/`, `venv/`, `installed` | the commit, the environment that runs it, and which commit that is |
| `log` | output of setup and job; `log.previous` is that of the job before |
| `lock` | locked by the job as long as any of its processes lives |
| `pid` | the job's process group |
| `submitted` | time of the request for the machines, in Unix seconds; empty if they were kept from an earlier job |
| `exit_code` | exit code of the job, written once it has ended |

`attend` is the single step that brings a host from any state to a running job, and may be repeated at any time: it
starts the job if it is not running and has not ended. The job outlives the connection that started it, and on a host
that was rebooted the next `attend` starts it again.
"""

import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch.options import Value, fill_program, read_program
from launch.tpu_vm.gcloud import kill_session
from runner.console import say

CREATE_TIME = "createTime"  # placeholder for the time in printed commands; the job ignores it
FIRST_LOG_LINES = 20  # shown of a job that was running before
_STATUS = re.compile(r"^tpu-vm: worker (\d+) (empty|started|running|stopped|ended (\d+))(?: of ([0-9a-f]+))?$", re.M)
_LOG_START = re.compile(r"^tpu-vm: log from (\d+)$")


@dataclass(frozen=True)
class HostStatus:
    """Status of the job on one host.

    Attributes:
        state: empty (no code yet), started, running, ended or stopped.
        code: exit code, if it has ended.
        commit: commit that it runs.
    """

    state: str
    code: int | None = None
    commit: str = ""


@dataclass(frozen=True)
class HostPrograms:
    """Shell programs of one job.

    Attributes:
        name: name of its directory, of letters, digits and hyphens.
        commit: commit to run.
        archive: name of the file with the commit, in the home directory.
        sha256: digest of the archive.
        extras: extras of the project's package to install.
        arguments: arguments of `python -m launch.worker`.
        environment: file in the home directory with NAME=value lines for the job, if any.
    """

    name: str
    commit: str
    archive: str
    sha256: str
    extras: Sequence[str]
    arguments: Sequence[str]
    environment: str | None = None

    def attend(self, submit_time: int | str | None) -> str:
        """Return a program that starts the job unless it runs or has ended, and prints the status.

        A job that was asked to stop (75) is started again.

        Args:
            submit_time: time of the request for the machines, in Unix seconds; None if it is not known.
        """
        return self._enter_and(
            "attend.sh",
            commit=self.commit,
            archive=self.archive,
            sha256=self.sha256,
            submitted=submit_time,
            job=[self.job()],
        )

    def job(self) -> str:
        """Return the program that sets up and runs the job, detached, and records how it ended."""
        return fill_program(
            read_program(__package__, "job.sh"),
            commit=self.commit,
            archive=self.archive,
            extras=",".join(self.extras),
            environment=self.environment,
            arguments=self.arguments,
        )

    def tail(self, first_line: int | None) -> str:
        """Return a program that prints the log from a line on (None: the last few lines) until the job ends."""
        last_lines = FIRST_LOG_LINES if first_line is None else None
        program = read_program(__package__, "tail.sh")
        return fill_program(program, name=self.name, first_line=first_line, last_lines=last_lines)

    def stop(self) -> str:
        """Return a program that ends the job if it runs, and deletes its exit code, so that `attend` starts it anew."""
        return self._enter_and("stop.sh")

    def _enter_and(self, name: str, **values: Value) -> str:
        enter = fill_program(read_program(__package__, "enter.sh"), name=self.name)
        return f"{enter}\n{fill_program(read_program(__package__, name), **values)}"


def parse_statuses(output: str) -> dict[int, HostStatus]:
    """Return the statuses by worker that `attend` or `stop` has printed on all workers of a slice.

    gcloud's own lines in the output are skipped.
    """
    return {
        int(worker): HostStatus(words.split()[0], int(code) if code else None, commit)
        for worker, words, code, commit in _STATUS.findall(output)
    }


def parse_log_start(line: str) -> int | None:
    """Return the number of the log's next line, if this line of `tail` says it."""
    match = _LOG_START.match(line)
    return None if match is None else int(match[1])


def parse_log_lines(output: str) -> list[str]:
    """Return the lines of the log in the output of `tail`."""
    lines = output.splitlines()
    starts = [number for number, line in enumerate(lines, start=1) if parse_log_start(line) is not None]
    return lines[starts[0] :] if starts else []


class LogTail:
    """A thread that shows a remote log on this terminal until the job has ended.

    Each line is shown once and in order, over connections that break.
    """

    def __init__(
        self,
        connect: Callable[[int | None], Sequence[str]],
        parse_start: Callable[[str], int | None],
        first_line: int | None,
        pause_seconds: float,
    ):
        """Start the thread.

        Args:
            connect: function that makes the command that prints the log from a numbered line on (None: the last few
                lines) until the job ends.
            parse_start: function that reads the number of the next line off the first line that the command prints.
            first_line: number of the first line to show, None for the last few.
            pause_seconds: time between two connections.
        """
        self._connect = connect
        self._parse_start = parse_start
        self._next_line = first_line
        self._pause_seconds = pause_seconds
        self._process: subprocess.Popen[str] | None = None
        self._has_ended = threading.Event()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, deadline_seconds: float) -> None:
        """Show the rest of the log of a job that has ended, and stop."""
        self._has_ended.set()
        self._thread.join(deadline_seconds)
        self.abandon()

    def abandon(self) -> None:
        """Stop at once."""
        self._is_abandoned = True
        self._has_ended.set()
        if self._process is not None:
            kill_session(self._process)

    def _run(self) -> None:
        while not self._is_abandoned:
            is_last = self._has_ended.is_set()
            self._show()
            if is_last:
                return
            self._has_ended.wait(self._pause_seconds)

    def _show(self) -> None:
        """Show the log over one connection; a line that its end has cut short is left to the next connection."""
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
        has_started = False
        for line in self._process.stdout:
            if not has_started:
                start = self._parse_start(line.rstrip())
                has_started = start is not None
                self._next_line = start if has_started else self._next_line
            elif line.endswith("\n") and not self._is_abandoned:
                say(line.rstrip())
                self._next_line = (self._next_line or 1) + 1
        self._process.wait()
