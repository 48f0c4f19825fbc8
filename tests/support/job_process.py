"""Runner processes for tests: start a command, watch its run directory from outside, kill or signal it in a phase.

The product has no hooks for this. A phase is a predicate of the files in the run directory. To kill a process in a
phase, it is stopped with SIGSTOP as soon as the predicate holds, the predicate is checked again while the process
cannot change anything, and only then it is killed; so a kill that counts for a phase did happen in it. Every wait has a
deadline and fails with the output of the process.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from runner.process import make_placements
from tests.support import forked_python
from tests.support.simulated_devices import environment

ROOT = Path(__file__).resolve().parents[2]
# Only a hang takes this long: the deadlines must hold on the slowest machine.
DEADLINE_SECONDS = 600.0
WHOLE_RUN_DEADLINE_SECONDS = 1800.0
POLL_SECONDS = 0.001
_IN_OPEN = 0x20

# Options of a cheap gpt_nano. Tests with the same number of steps share its compiled programs within a session.
SMALL_GPT_OPTIONS = (
    "config.train.global_batch_examples=8",
    "config.data.sequence_length=32",
    "config.eval.batches=2",
)

Row = dict[str, Any]
_running_attempts: set["Attempt"] = set()


@atexit.register
def _kill_running_attempts() -> None:
    for attempt in list(_running_attempts):
        attempt.kill_tree()


def disable_compiler_optimizer(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment without LLVM's optimiser, for tests that compile a program but hardly run it."""
    return variables | {"XLA_FLAGS": f"{variables['XLA_FLAGS']} --xla_backend_optimization_level=0"}


def read_lines(path: Path, offset_bytes: int = 0) -> list[Row]:
    """Return the complete JSON lines of a file from an offset on."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(offset_bytes)
        return parse_lines(file.read())


def parse_lines(content: bytes) -> list[Row]:
    """Parse the complete JSON lines of `content`; an unfinished last line is skipped."""
    rows = []
    for line in content.split(b"\n"):
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def drop_speed_metrics(rows: list[Row]) -> list[Row]:
    """Return rows without the speed metrics, which differ between runs."""
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def run_runner(
    variables: dict[str, str],
    *arguments: str,
    deadline_seconds: float = DEADLINE_SECONDS,
    has_progress: bool = False,
) -> tuple[int, str]:
    """Run `python -m runner ARGUMENTS` and return its exit code and output.

    With `has_progress`, standard error holds progress lines and is returned only if it contains a traceback.
    """
    done = forked_python.run(["runner", *arguments], variables, deadline_seconds, merge_streams=not has_progress)
    return done.returncode, done.stdout + (done.stderr if "Traceback" in done.stderr else "")


def drop_plugin_messages(stderr: str) -> str:
    """Return what a program wrote to standard error, without the messages of JAX's plugin that there is no GPU.

    The commands of the runner silence it, which a program that imports JAX by itself does not.
    """
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if "absl::InitializeLog" not in line and "cudart_stub" not in line)


@dataclass(frozen=True)
class Job:
    """A spec with its run directory: starts processes and reads the files they leave."""

    spec: str
    directory: Path
    options: tuple[str, ...] = ()
    devices: int = 1
    cache: Path | None = field(default=None)

    def with_options(self, *options: str) -> "Job":
        """Return a job on the same directory with more `--set` options."""
        return replace(self, options=(*self.options, *options))

    @property
    def arguments(self) -> list[str]:
        """SPEC and its `--set` options, as command-line arguments."""
        sets = (f"directory={self.directory}", *self.options)
        return [self.spec, *(word for option in sets for word in ("--set", option))]

    def start(self) -> "Attempt":
        """Start `python -m runner` as a single-process job."""
        return Attempt(self, ["runner", *self.arguments], self.devices)

    def start_paused(self, place: str, until: Path | None = None) -> "Attempt":
        """Start a runner that pauses at a place known to `paused_runner` until the file `until` exists."""
        variables = {"PAUSE_AT": place} | ({"PAUSE_UNTIL": str(until)} if until else {})
        return Attempt(self, ["tests.support.paused_runner", *self.arguments], self.devices, **variables)

    def start_processes(
        self, num_processes: int, variables: Mapping[int, Mapping[str, str]] | None = None
    ) -> list["Attempt"]:
        """Start all processes of a multi-host job; `devices` is per process, `variables` are of single ones."""
        own = variables or {}
        return link_peers(
            [
                Attempt(self, ["runner", *self.arguments, *placement], self.devices, **own.get(process, {}))
                for process, placement in enumerate(make_placements(num_processes))
            ]
        )

    def launch(
        self, num_processes: int, max_restarts: int = 0, grace_seconds: int = 60, standby_seconds: int = 0
    ) -> "Attempt":
        """Start `python -m launch local`; `devices` is per process."""
        layout = ["--processes", str(num_processes), "--devices-per-process", str(self.devices)]
        layout += ["--max-restarts", str(max_restarts), "--grace-seconds", str(grace_seconds)]
        layout += ["--standby-seconds", str(standby_seconds)]
        return Attempt(self, ["launch", "local", *self.arguments, *layout], devices=1)

    def finish(self) -> "Attempt":
        """Run the job to its end and check its exit status."""
        attempt = self.start()
        attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
        return attempt

    # Reads of the run directory.

    def events(self, *names: str) -> list[Row]:
        """Return the events of the ledger, optionally only those of the given names."""
        rows = read_lines(self.directory / "events.jsonl")
        return [row for row in rows if not names or row["event"] in names]

    def rows(self) -> list[Row]:
        """Return the rows of metrics.jsonl without the speed metrics, which differ between runs."""
        return drop_speed_metrics(read_lines(self.directory / "metrics.jsonl"))

    def result(self) -> Row:
        """Return the content of result.json."""
        return dict(json.loads((self.directory / "result.json").read_bytes()))

    def outcome(self) -> tuple[Row, list[Row]]:
        """Return the result with its fingerprint, and all rows: they must not depend on interruptions."""
        return self.result(), self.rows()

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.directory / "checkpoints"

    def _steps(self, committed: bool) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            names = [name for name in os.listdir(self.checkpoints) if name.isdecimal()]
            good = [name for name in names if (self.checkpoints / name / "manifest.json").exists() == committed]
            return sorted(map(int, good))
        return []

    def committed(self) -> list[int]:
        """Return the steps whose checkpoint has a manifest, ascending."""
        return self._steps(committed=True)

    def uncommitted(self) -> list[int]:
        """Return the steps that have a directory but no manifest, ascending."""
        return self._steps(committed=False)

    def newest(self) -> int:
        """Return the newest committed step, or 0."""
        return max(self.committed(), default=0)

    def largest_file(self, step: int) -> Path:
        """Return the largest file of a checkpoint, which holds arrays; a running attempt may rename files meanwhile."""
        sizes_bytes: dict[Path, int] = {}
        for path in (self.checkpoints / str(step)).rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    sizes_bytes[path] = path.stat().st_size
        return max(sizes_bytes, key=sizes_bytes.__getitem__)

    def num_attempts(self) -> int:
        """Return the number of attempts that have claimed the directory."""
        attempts = self.directory / "attempts"
        return sum(name.isdecimal() for name in os.listdir(attempts)) if attempts.exists() else 0

    def copy_to(self, directory: Path) -> "Job":
        shutil.copytree(self.directory, directory)
        return replace(self, directory=directory)


class Attempt:
    """A started process of a job: waits for conditions, sends signals, and reports its output on failure."""

    _wrapper: Sequence[str] = ()  # the words of the command before the interpreter

    def __init__(self, job: Job, arguments: Sequence[str], devices: int, **variables: str):
        self.job = job
        self.number = job.num_attempts() + 1
        self.newest_at_start = job.newest()
        events = job.directory / "events.jsonl"
        self._offset_bytes = events.stat().st_size if events.exists() else 0
        self._opened: FileOpenWatch | None = None
        if self.newest_at_start:
            self._opened = FileOpenWatch(job.largest_file(self.newest_at_start))
        self._start(arguments, environment(devices, job.cache) | variables)

    def _start(self, arguments: Sequence[str], variables: dict[str, str]) -> None:
        self.peers: Sequence[Attempt] = ()  # the other processes of the same job
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = forked_python.start(arguments, variables, self._log, self._log, self._wrapper)
        _running_attempts.add(self)

    @property
    def output(self) -> str:
        """Output of the process so far."""
        return forked_python.read_output(self._log)

    def events(self, *names: str) -> list[Row]:
        """Return the events that this attempt has recorded so far, optionally only those of the given names."""
        rows = read_lines(self.job.directory / "events.jsonl", self._offset_bytes)
        return [row for row in rows if row["attempt"] >= self.number and (not names or row["event"] in names)]

    def has_opened_checkpoint(self) -> bool:
        """Return True once the arrays of the checkpoint that was newest at the start have been opened."""
        return self._opened is not None and self._opened.was_opened()

    # Waits.

    def wait_until(self, happens: Callable[[], Any], what: str) -> None:
        """Wait until `happens()`; fail if the process ends first or the deadline passes."""
        if not self.wait_until_or_exit(happens, what):
            raise AssertionError(self.report(f"ended with {self.process.returncode} before {what}"))

    def wait_until_or_exit(self, happens: Callable[[], Any], what: str) -> bool:
        """Wait until `happens()` and return True, or return False if the process ends first."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not happens():
            if self.process.poll() is not None:
                return bool(happens())
            if time.monotonic() > deadline:
                self.kill_tree()
                raise AssertionError(self.report(f"not within {DEADLINE_SECONDS:.0f} s: {what}"))
            time.sleep(POLL_SECONDS)
        return True

    def wait(self, deadline_seconds: float = DEADLINE_SECONDS) -> int:
        """Return the exit status; fail if the process does not end in time."""
        try:
            code = self.process.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            self.kill_tree()
            raise AssertionError(self.report(f"did not end within {deadline_seconds:.0f} s")) from None
        self._forget()
        return code

    def expect(self, code: int, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        """Wait for the process to end and check its exit status."""
        got = self.wait(deadline_seconds)
        assert got == code, self.report(f"ended with {got}, not {code}")

    def report(self, what: str) -> str:
        """Return `what` with the output of the process and of its peers, any of which may be the cause."""
        ledger = "\n".join(json.dumps(row) for row in self.job.events()[-12:])
        peers = "".join(f"\n--- output of a peer ({peer.process.poll()})\n{peer.output}" for peer in self.peers)
        return f"attempt {self.number} {what}\n--- output\n{self.output}{peers}\n--- end of the ledger\n{ledger}"

    # Signals and kills.

    def freeze_during(self, phase: "Phase", delay_seconds: float = 0.0) -> bool:
        """Stop the process `delay_seconds` after `phase` begins; return False if the phase is over and cannot recur.

        If the phase is missed but can recur, its next occurrence is awaited, without the delay.
        """
        pause = delay_seconds
        while self.wait_until_or_exit(lambda: phase(self) or self._is_past(phase), phase.__name__):
            time.sleep(pause)
            self.freeze()
            if phase(self) and self.process.poll() is None:
                return True
            self.thaw()
            if self._is_past(phase):
                return False
            pause = 0.0
        return False

    def _is_past(self, phase: "Phase") -> bool:
        """Return True if `phase` cannot recur: the phases before the first step occur once per attempt."""
        return phase in (start_up, compiling, restoring) and has_state(self)

    def freeze(self) -> None:
        """Send SIGSTOP and wait until the process is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.process.poll() is None and stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, self.report("does not stop on SIGSTOP")
            time.sleep(POLL_SECONDS / 10)

    def thaw(self) -> None:
        """Send SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill_during(self, phase: "Phase", delay_seconds: float = 0.0) -> bool:
        """Kill -9 during `phase`; return False if the process was past the phase or had ended."""
        hit = self.freeze_during(phase, delay_seconds)
        self.kill()
        return hit

    def signal_during(self, phase: "Phase", number: int, delay_seconds: float = 0.0) -> None:
        """Send a signal during `phase`, which the process must reach."""
        assert self.freeze_during(phase, delay_seconds), self.report(f"ended without {phase.__name__}")
        self.process.send_signal(number)
        self.thaw()

    def kill(self) -> None:
        """Kill -9 and wait."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def limit_file_size(self, num_bytes: int) -> None:
        """Make writes of the process beyond `num_bytes` per file fail from now on, as on a full disk."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (num_bytes, hard))

    def children(self) -> list[int]:
        """Return the child process ids in the order of their start; threads may end meanwhile."""
        found: list[int] = []
        tasks = Path(f"/proc/{self.process.pid}/task")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(tasks):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    found += map(int, (tasks / task / "children").read_text().split())
        return sorted(found)

    def kill_tree(self) -> None:
        """Kill -9 the process and its children."""
        for pid in (*self.children(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._forget()

    def _forget(self) -> None:
        _running_attempts.discard(self)
        if self._opened is not None:
            self._opened.close()
            self._opened = None


AttemptType = TypeVar("AttemptType", bound=Attempt)


def link_peers(attempts: list[AttemptType]) -> list[AttemptType]:
    """Tell each process of a job about the others, for its failure reports."""
    for attempt in attempts:
        attempt.peers = [peer for peer in attempts if peer is not attempt]
    return attempts


class FileOpenWatch:
    """An inotify watch that tells whether a file has been opened since the watch was made."""

    def __init__(self, path: Path):
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        watch = libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_OPEN)
        assert min(self._descriptor, watch) >= 0, f"inotify on {path}: errno {ctypes.get_errno()}"
        self._was_opened = False

    def was_opened(self) -> bool:
        """Return True if the file has been opened."""
        if not self._was_opened:
            with contextlib.suppress(BlockingIOError):
                self._was_opened = bool(os.read(self._descriptor, 4096))
        return self._was_opened

    def close(self) -> None:
        """Remove the watch."""
        os.close(self._descriptor)


def kill_all_when(attempts: Sequence[Attempt], happens: Callable[[], Any], what: str) -> None:
    """Kill -9 all processes of a job while `happens()` is true, which is checked again once all are stopped."""
    while True:
        attempts[0].wait_until(happens, what)
        for attempt in attempts:
            attempt.freeze()
        if happens():
            break
        for attempt in attempts:
            attempt.thaw()
    for attempt in attempts:
        attempt.kill()


# Phases: predicates of an attempt, decided by the files of the run directory.

Phase = Callable[[Attempt], bool]


def start_up(attempt: Attempt) -> bool:
    """Return True before the attempt records its start."""
    return not attempt.events("start")


def compiling(attempt: Attempt) -> bool:
    """Return True between the start event and the first read of a checkpoint or the initial state."""
    return bool(attempt.events("start")) and not attempt.has_opened_checkpoint() and not has_state(attempt)


def restoring(attempt: Attempt) -> bool:
    """Return True while the arrays of the newest checkpoint are read."""
    return attempt.has_opened_checkpoint() and bool(attempt.events("start")) and not has_state(attempt)


def has_state(attempt: Attempt) -> bool:
    """Return True once the state is initialised, restored or forked, so that steps follow."""
    return bool(attempt.events("init", "restore", "fork"))


def saving(attempt: Attempt) -> bool:
    """Return True while a new step is being written and is not committed."""
    return max(attempt.job.uncommitted(), default=0) > attempt.job.newest() and has_state(attempt)


def just_committed(attempt: Attempt) -> bool:
    """Return True once this attempt has committed a step."""
    return attempt.job.newest() > attempt.newest_at_start


def retaining(attempt: Attempt) -> bool:
    """Return True while an old step has lost its manifest but not yet its files."""
    newest = attempt.job.newest()
    return any(step < newest for step in attempt.job.uncommitted())


def last_committed(last_step: int) -> Phase:
    """Return the phase between the commit of `last_step` and result.json."""

    def before_done(attempt: Attempt) -> bool:
        return last_step in attempt.job.committed() and not (attempt.job.directory / "result.json").exists()

    return before_done


# Reference runs and prepared directories, made once per session by the first pytest worker that needs them.


@functools.cache
def _get_scratch_directory() -> Path:
    if session := os.environ.get("RUNNER_TESTS_SESSION"):
        return Path(session)
    path = Path(tempfile.mkdtemp(prefix="runner-harness-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _make_once(kind: str, job: Job, make: Callable[[Job], None]) -> Job:
    """Return `job` on a directory that `make` fills once per session, in this worker or another."""
    key = (kind, job.spec, job.options, job.devices)
    directory = _get_scratch_directory() / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    made = replace(job, directory=directory / "run")
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "whole").exists():
            shutil.rmtree(made.directory, ignore_errors=True)
            make(made)
            (directory / "whole").touch()
    return made


@functools.cache
def make_uninterrupted_run(spec: str, options: tuple[str, ...] = (), devices: int = 1, num_processes: int = 1) -> Job:
    """Run a job to its end without interruption, once per session; tests only read its directory."""

    def make(job: Job) -> None:
        attempt = job.start() if num_processes == 1 else job.launch(num_processes)
        attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)

    return _make_once(f"{num_processes} processes", Job(spec, Path(), options, devices), make)


def make_uninterrupted_counter_run(options: tuple[str, ...]) -> Job:
    """Run a counter without interruption, and without its pauses and saves, which do not change the result."""
    settings = dict(option.split("=", 1) for option in options)  # the last value of a key wins, as for `--set`
    kept = tuple(f"{key}={settings[key]}" for key in ("config.total_steps", "config.width") if key in settings)
    return make_uninterrupted_run(
        "specs/counter.yaml", (*kept, "config.step_seconds=0", "checkpoint.every_steps=1000000")
    )


@functools.cache
def make_killed_run(step: int, spec: str, options: tuple[str, ...] = ()) -> Job:
    """Run a job and kill it after the commit of `step`, once per session; tests work on copies of its directory."""

    def make(job: Job) -> None:
        attempt = job.start_paused(f"step {step + 2}")
        attempt.wait_until(lambda: job.newest() >= step, f"the commit of step {step}")
        attempt.kill()
        assert job.newest() == step, attempt.report(f"does not stand at step {step}")

    return _make_once(f"killed after {step}", Job(spec, Path(), options), make)


def list_fast_tier_parts(fast: Path, process: int) -> dict[int, Path]:
    """Return the directories of a process's checkpoint parts in a fast tier, by step."""
    return {int(path.name): path for path in fast.glob(f"*/{process}/*") if path.name.isdecimal()}


def list_common_steps(fast: Path, num_processes: int) -> list[int]:
    """Return the steps for which every process has a part in the fast tier, ascending."""
    return sorted(set.intersection(*(set(list_fast_tier_parts(fast, process)) for process in range(num_processes))))


def list_copied_steps(fast: Path, owner: int, holder: int | str = "*") -> set[int]:
    """Return the steps for which a process, by default any, holds a copy of the part of `owner`."""
    return {int(path.name) for path in fast.glob(f"*/{holder}/copies/{owner}/*[0-9]")}


def hash_tree(directory: Path) -> dict[str, str]:
    """Return the digest of every file below `directory` by relative name; directories have an empty digest."""
    paths = sorted(directory.rglob("*"))
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in paths
    }


def has_signal_handler(pid: int, number: int) -> bool:
    """Return True if the process has a handler for the signal."""
    for line in _status(pid):
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _status(pid: int) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        yield from Path(f"/proc/{pid}/status").read_text().splitlines()
