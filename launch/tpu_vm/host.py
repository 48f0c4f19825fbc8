"""What is run on the hosts of a TPU VM: the programs beside this file, which know neither gcloud nor each other.

In the directory `~/NAME` of each host:

| file | content |
|---|---|
| `code/`, `venv/`, `installed` | the commit, the environment that runs it, and which commit that is |
| `log` | all that setting up and the job have printed; `log.previous`: that of the job before |
| `lock` | locked by the job as long as any of its processes lives |
| `pid` | the job's process group |
| `submitted` | when the machines were asked for, in Unix seconds; empty if they were kept from a job before |
| `exit_code` | how it ended, written once it has |

`attend` is the one step that brings a host from anything to a running job, and may be repeated at any moment: it starts
the job where it is not running and has not ended. The job outlives the connection that started it, and a host that was
rebooted is started again by the next look at it.

A log on another machine, shown on this terminal: over connections that break, each line once and in order.
"""

import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch.options import Value, fill, read_program
from launch.tpu_vm.gcloud import kill
from runner.console import say

CREATE_TIME = "createTime"  # stands for the number where commands are only printed; to a job it says nothing
SHOWN_AT_FIRST_LINES = 20
_ANSWER = re.compile(r"^tpu-vm: worker (\d+) (empty|started|running|stopped|ended (\d+))(?: of ([0-9a-f]+))?$", re.M)
_LOG = re.compile(r"^tpu-vm: log from (\d+)$")


@dataclass(frozen=True)
class HostStatus:
    """What one host says of the job: empty (nothing shipped yet), started, running, ended or stopped."""

    state: str
    code: int | None = None
    commit: str = ""


@dataclass(frozen=True)
class HostPrograms:
    """The programs of one job.

    Attributes:
        name: of its directory: letters, digits and hyphens.
        commit: what is run, as shipped in `archive` (a file in the home directory) with this `sha256`.
        extras: of the project's package.
        arguments: of `python -m launch.worker`.
        environment: file in the home directory with NAME=value lines for the job, if any.
    """

    name: str
    commit: str
    archive: str
    sha256: str
    extras: Sequence[str]
    arguments: Sequence[str]
    environment: str | None = None

    def attend(self, submitted: int | str | None) -> str:
        """Start the job unless it runs or has ended; say which. One that was asked to stop (75) is started again.

        `submitted`: when the machines were asked for, in Unix seconds; None if that is not known.
        """
        return self._enter_and(
            "attend.sh",
            commit=self.commit,
            archive=self.archive,
            sha256=self.sha256,
            submitted=submitted,
            job=[self.job()],
        )

    def job(self) -> str:
        """Set up and run the job, and write down how it ended. Runs detached, in the job's directory."""
        return fill(
            read_program(__package__, "job.sh"),
            commit=self.commit,
            archive=self.archive,
            extras=",".join(self.extras),
            environment=self.environment,
            arguments=self.arguments,
        )

    def tail(self, first_line: int | None) -> str:
        """Print the log from a line on (None: the last few) until the job ends."""
        last_lines = SHOWN_AT_FIRST_LINES if first_line is None else None
        program = read_program(__package__, "tail.sh")
        return fill(program, name=self.name, first_line=first_line, last_lines=last_lines)

    def stop(self) -> str:
        """End the job if it runs, at once if it must be, and forget how it ended: the next look starts it anew."""
        return self._enter_and("stop.sh")

    def _enter_and(self, name: str, **values: Value) -> str:
        enter = fill(read_program(__package__, "enter.sh"), name=self.name)
        return f"{enter}\n{fill(read_program(__package__, name), **values)}"


def answers(output: str) -> dict[int, HostStatus]:
    """By worker, what `attend` or `stop` has printed on all workers of a slice, among gcloud's own lines."""
    return {
        int(worker): HostStatus(words.split()[0], int(code) if code else None, commit)
        for worker, words, code, commit in _ANSWER.findall(output)
    }


def log_begins_at(line: str) -> int | None:
    """The number of the next line of the log, if that is what this line of `tail` says."""
    match = _LOG.match(line)
    return None if match is None else int(match[1])


def lines_of_log(output: str) -> list[str]:
    """The lines of the log in what `tail` has printed."""
    lines = output.splitlines()
    begins = [number for number, line in enumerate(lines, start=1) if log_begins_at(line) is not None]
    return lines[begins[0] :] if begins else []


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
