"""Real jobs for tests: start the command, watch its directory from outside, strike there, read what it left.

Nothing in the product helps. A phase is a question about the files of a directory; to strike in a phase the process is
frozen with SIGSTOP as soon as the answer is yes, asked once more while it stands still, and only then killed. So a kill
that is counted for a phase did land in it. Every wait has a deadline and fails with the output of the process.
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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from runner.process import bind_to_parent, make_placements
from tests.support.simulated_devices import environment

ROOT = Path(__file__).resolve().parents[2]
# For hangs alone: no machine may be too slow for them.
DEADLINE_SECONDS = 600.0
WHOLE_RUN_DEADLINE_SECONDS = 1800.0
POLL_SECONDS = 0.001
_IN_OPEN = 0x20

# A gpt_nano that costs little. Who takes the same number of steps shares its compiled programs, in a session.
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
    """The same without LLVM's optimiser: for who compiles to look at the program, and hardly runs it."""
    return variables | {"XLA_FLAGS": f"{variables['XLA_FLAGS']} --xla_backend_optimization_level=0"}


def read_lines(path: Path, offset_bytes: int = 0) -> list[Row]:
    """The whole JSON lines of a file from an offset on."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(offset_bytes)
        return parse_lines(file.read())


def parse_lines(content: bytes) -> list[Row]:
    """The whole JSON lines."""
    rows = []
    for line in content.split(b"\n"):
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def drop_speed_metrics(rows: list[Row]) -> list[Row]:
    """Rows of metrics without the keys that no two runs share."""
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def run_runner(
    variables: dict[str, str],
    *arguments: str,
    deadline_seconds: float = DEADLINE_SECONDS,
    has_progress: bool = False,
) -> tuple[int, str]:
    """Exit code and output of `python -m runner ARGUMENTS`, which must end in time.

    Of a command that tells its progress on standard error, only standard output, and a traceback if there is one.
    """
    result = subprocess.run(
        bind_to_parent([sys.executable, "-m", "runner", *arguments]),
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if has_progress else subprocess.STDOUT,
        text=True,
        timeout=deadline_seconds,
    )
    return result.returncode, result.stdout + (result.stderr if "Traceback" in (result.stderr or "") else "")


@dataclass(frozen=True)
class Job:
    """A spec in a directory, and what stands in that directory."""

    spec: str
    directory: Path
    options: tuple[str, ...] = ()
    devices: int = 1
    cache: Path | None = field(default=None)

    def with_options(self, *options: str) -> "Job":
        """The same directory, other `--set` options on top."""
        return replace(self, options=(*self.options, *options))

    @property
    def arguments(self) -> list[str]:
        """SPEC and its `--set` options."""
        sets = (f"directory={self.directory}", *self.options)
        return [self.spec, *(word for option in sets for word in ("--set", option))]

    def start(self) -> "Attempt":
        """`python -m runner`, as one process."""
        return Attempt(self, ["runner", *self.arguments], self.devices)

    def start_paused(self, place: str, until: Path | None = None) -> "Attempt":
        """`python -m runner`, which waits in a place that `tests.support.paused_runner` knows, until a file appears."""
        variables = {"HELD_IN": place} | ({"HELD_UNTIL": str(until)} if until else {})
        return Attempt(self, ["tests.support.paused_runner", *self.arguments], self.devices, **variables)

    def start_processes(self, num_processes: int) -> list["Attempt"]:
        """The same command on every host of a job, each with its place; `devices` is per process."""
        return link_peers(
            [
                Attempt(self, ["runner", *self.arguments, *placement], self.devices)
                for placement in make_placements(num_processes)
            ]
        )

    def launch(self, num_processes: int, max_restarts: int = 0, grace_seconds: int = 60) -> "Attempt":
        """`python -m launch local`; `devices` is per process."""
        layout = ["--processes", str(num_processes), "--devices-per-process", str(self.devices)]
        layout += ["--max-restarts", str(max_restarts), "--grace-seconds", str(grace_seconds)]
        return Attempt(self, ["launch", "local", *self.arguments, *layout], devices=1)

    def finish(self) -> "Attempt":
        """Run to the end, which must be good."""
        attempt = self.start()
        attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
        return attempt

    # What the directory says.

    def events(self, *names: str) -> list[Row]:
        """The ledger, or its events of these names."""
        rows = read_lines(self.directory / "events.jsonl")
        return [row for row in rows if not names or row["event"] in names]

    def rows(self) -> list[Row]:
        """The metrics without those of speed, which no two runs share."""
        return drop_speed_metrics(read_lines(self.directory / "metrics.jsonl"))

    def result(self) -> Row:
        """`result.json`."""
        return dict(json.loads((self.directory / "result.json").read_bytes()))

    def outcome(self) -> tuple[Row, list[Row]]:
        """All that must be the same whatever happened on the way: the result with its fingerprint, and every row."""
        return self.result(), self.rows()

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.directory / "checkpoints"

    def _steps(self, committed: bool) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            names = [name for name in os.listdir(self.checkpoints) if name.isdecimal()]
            good = [name for name in names if (self.checkpoints / name / "manifest.json").exists() == committed]
            return sorted(map(int, good))
        return []

    def committed(self) -> list[int]:
        """Steps whose checkpoint has a manifest, ascending."""
        return self._steps(committed=True)

    def uncommitted(self) -> list[int]:
        """Steps that have a directory without a manifest, ascending."""
        return self._steps(committed=False)

    def newest(self) -> int:
        """The newest committed step, 0 if there is none."""
        return max(self.committed(), default=0)

    def largest_file(self, step: int) -> Path:
        """The largest file of a checkpoint, which holds arrays. A living attempt may rename files meanwhile."""
        sizes_bytes: dict[Path, int] = {}
        for path in (self.checkpoints / str(step)).rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    sizes_bytes[path] = path.stat().st_size
        return max(sizes_bytes, key=sizes_bytes.__getitem__)

    def num_attempts(self) -> int:
        """Attempts that have claimed the directory."""
        attempts = self.directory / "attempts"
        return sum(name.isdecimal() for name in os.listdir(attempts)) if attempts.exists() else 0

    def copy_to(self, directory: Path) -> "Job":
        """The same job in a copy of its directory."""
        shutil.copytree(self.directory, directory)
        return replace(self, directory=directory)


class Attempt:
    """One started command."""

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
        self.process = subprocess.Popen(
            bind_to_parent(self._command(arguments)),
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        _running_attempts.add(self)

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", *arguments]

    @property
    def output(self) -> str:
        """All that the process has printed so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def events(self, *names: str) -> list[Row]:
        """What this attempt has put into the ledger so far."""
        rows = read_lines(self.job.directory / "events.jsonl", self._offset_bytes)
        return [row for row in rows if row["attempt"] >= self.number and (not names or row["event"] in names)]

    def has_opened_checkpoint(self) -> bool:
        """Whether the arrays of the checkpoint that was newest at the start have been opened since."""
        return self._opened is not None and self._opened.seen()

    # Waiting.

    def wait_until(self, happens: Callable[[], Any], what: str) -> None:
        """Wait until `happens()`; fails if the process ends before, or the deadline passes."""
        if not self.wait_until_or_exit(happens, what):
            raise AssertionError(self.report(f"ended with {self.process.returncode} before {what}"))

    def wait_until_or_exit(self, happens: Callable[[], Any], what: str) -> bool:
        """Wait until `happens()`; False if the process ends before it."""
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
        """The exit status; fails if the process does not end in time."""
        try:
            code = self.process.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            self.kill_tree()
            raise AssertionError(self.report(f"did not end within {deadline_seconds:.0f} s")) from None
        self._forget()
        return code

    def expect(self, code: int, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        """Wait for the end and compare its exit status."""
        got = self.wait(deadline_seconds)
        assert got == code, self.report(f"ended with {got}, not {code}")

    def report(self, what: str) -> str:
        """`what`, and all that is known about the process and about those of the same job: one may be the cause."""
        ledger = "\n".join(json.dumps(row) for row in self.job.events()[-12:])
        peers = "".join(f"\n--- output of a peer ({peer.process.poll()})\n{peer.output}" for peer in self.peers)
        return f"attempt {self.number} {what}\n--- output\n{self.output}{peers}\n--- end of the ledger\n{ledger}"

    # Striking.

    def freeze_during(self, phase: "Phase", delay_seconds: float = 0.0) -> bool:
        """Stop the process inside `phase`, `delay_seconds` after its beginning; False if the phase was missed for good.

        A phase that comes again is tried again, without the delay.
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
        """Whether `phase` cannot come any more: what lies before the first step comes once an attempt."""
        return phase in (start_up, compiling, restoring) and has_state(self)

    def freeze(self) -> None:
        """SIGSTOP, and wait until the process stands still."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.process.poll() is None and stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, self.report("does not stop on SIGSTOP")
            time.sleep(POLL_SECONDS / 10)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill_during(self, phase: "Phase", delay_seconds: float = 0.0) -> bool:
        """kill -9 inside `phase`; False if the process was killed elsewhere because it was past it, or had ended."""
        hit = self.freeze_during(phase, delay_seconds)
        self.kill()
        return hit

    def signal_during(self, phase: "Phase", number: int, delay_seconds: float = 0.0) -> None:
        """Send a signal inside `phase`, which the process must reach."""
        assert self.freeze_during(phase, delay_seconds), self.report(f"ended without {phase.__name__}")
        self.process.send_signal(number)
        self.thaw()

    def kill(self) -> None:
        """kill -9, and wait."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def limit_file_size(self, num_bytes: int) -> None:
        """From now on larger writes of the process fail, as they do on a full disk."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (num_bytes, hard))

    def children(self) -> list[int]:
        """Process ids of the children, in the order in which they were started. Threads may end meanwhile."""
        found: list[int] = []
        tasks = Path(f"/proc/{self.process.pid}/task")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(tasks):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    found += map(int, (tasks / task / "children").read_text().split())
        return sorted(found)

    def kill_tree(self) -> None:
        """kill -9 to the process and its children."""
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
    """The processes of one job, each of which knows the others."""
    for attempt in attempts:
        attempt.peers = [peer for peer in attempts if peer is not attempt]
    return attempts


class FileOpenWatch:
    """Whether anybody has opened a file since this was made (inotify)."""

    def __init__(self, path: Path):
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        watch = libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_OPEN)
        assert min(self._descriptor, watch) >= 0, f"inotify on {path}: errno {ctypes.get_errno()}"
        self._seen = False

    def seen(self) -> bool:
        """Ask."""
        if not self._seen:
            with contextlib.suppress(BlockingIOError):
                self._seen = bool(os.read(self._descriptor, 4096))
        return self._seen

    def close(self) -> None:
        """Stop watching."""
        os.close(self._descriptor)


def kill_all_when(attempts: Sequence[Attempt], happens: Callable[[], Any], what: str) -> None:
    """kill -9 to all processes of a job while `happens()` is true, which is asked again when all stand still."""
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


# Phases: each is a question about an attempt that its files answer.

Phase = Callable[[Attempt], bool]


def start_up(attempt: Attempt) -> bool:
    """The attempt has not begun."""
    return not attempt.events("start")


def compiling(attempt: Attempt) -> bool:
    """Begun, and no checkpoint opened and no state yet."""
    return bool(attempt.events("start")) and not attempt.has_opened_checkpoint() and not has_state(attempt)


def restoring(attempt: Attempt) -> bool:
    """The arrays of the newest checkpoint are being read."""
    return attempt.has_opened_checkpoint() and bool(attempt.events("start")) and not has_state(attempt)


def has_state(attempt: Attempt) -> bool:
    """There is a state, new or restored, so steps follow."""
    return bool(attempt.events("init", "restore"))


def saving(attempt: Attempt) -> bool:
    """Arrays of a new step are being written and nothing has committed them."""
    return max(attempt.job.uncommitted(), default=0) > attempt.job.newest() and has_state(attempt)


def just_committed(attempt: Attempt) -> bool:
    """This attempt has committed a step."""
    return attempt.job.newest() > attempt.newest_at_start


def retaining(attempt: Attempt) -> bool:
    """An old step has lost its manifest and not yet its files."""
    newest = attempt.job.newest()
    return any(step < newest for step in attempt.job.uncommitted())


def last_committed(last_step: int) -> Phase:
    """The phase in which step `last_step` is committed and the job not yet declared done."""

    def before_done(attempt: Attempt) -> bool:
        return last_step in attempt.job.committed() and not (attempt.job.directory / "result.json").exists()

    return before_done


# References and prepared directories, made once a session by whichever of its processes comes first.


@functools.cache
def _get_scratch_directory() -> Path:
    if session := os.environ.get("RUNNER_TESTS_SESSION"):
        return Path(session)
    path = Path(tempfile.mkdtemp(prefix="runner-harness-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _make_once(kind: str, job: Job, make: Callable[[Job], None]) -> Job:
    """`job` in a directory that `make` has filled, in this process of the session or in another."""
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
    """The job run to its end in one go, in a directory that tests only read."""

    def make(job: Job) -> None:
        attempt = job.start() if num_processes == 1 else job.launch(num_processes)
        attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)

    return _make_once(f"{num_processes} processes", Job(spec, Path(), options, devices), make)


def make_uninterrupted_counter_run(options: tuple[str, ...]) -> Job:
    """The undisturbed run of a counter on a disk: without its pauses and saves, which move no bit."""
    settings = dict(option.split("=", 1) for option in options)  # of two with one key the last one counts
    moving = tuple(f"{key}={settings[key]}" for key in ("config.total_steps", "config.width") if key in settings)
    return make_uninterrupted_run(
        "specs/counter.yaml", (*moving, "config.step_seconds=0", "checkpoint.every_steps=1000000")
    )


@functools.cache
def make_killed_run(step: int, spec: str, options: tuple[str, ...] = ()) -> Job:
    """The job killed when `step` was committed and the one after the next not made; tests work on copies of it."""

    def make(job: Job) -> None:
        attempt = job.start_paused(f"step {step + 2}")
        attempt.wait_until(lambda: job.newest() >= step, f"the commit of step {step}")
        attempt.kill()
        assert job.newest() == step, attempt.report(f"does not stand at step {step}")

    return _make_once(f"killed after {step}", Job(spec, Path(), options), make)


def list_fast_tier_parts(fast: Path, process: int) -> dict[int, Path]:
    """The steps of which a process has a part in a fast tier."""
    return {int(path.name): path for path in fast.glob(f"*/{process}/*") if path.name.isdecimal()}


def list_common_steps(fast: Path, num_processes: int) -> list[int]:
    """The steps of which every process has a part there, ascending."""
    return sorted(set.intersection(*(set(list_fast_tier_parts(fast, process)) for process in range(num_processes))))


def hash_tree(directory: Path) -> dict[str, str]:
    """Digest of every file below `directory`, and the directories, by relative name."""
    paths = sorted(directory.rglob("*"))
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in paths
    }


def has_signal_handler(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    for line in _status(pid):
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _status(pid: int) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        yield from Path(f"/proc/{pid}/status").read_text().splitlines()
