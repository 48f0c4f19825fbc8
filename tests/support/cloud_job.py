"""Real jobs whose directory is in a bucket: the counterpart of `harness.Job`.

The job sees the bucket through the proxy of its `Backend`, with whatever faults that has; what it left is read from the
server itself. To strike at one moment a `RequestGate` holds the first request of a kind: what the process asked
for has then neither happened nor failed, for as long as the test likes, also beyond the death of the process.
"""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from runner.process import make_placements
from tests.support import job_process
from tests.support.job_process import (
    WHOLE_RUN_DEADLINE_SECONDS,
    Attempt,
    Job,
    Row,
    drop_speed_metrics,
    link_peers,
    parse_lines,
)
from tests.support.object_stores import BACKENDS, BUCKET, Backend, Faults, start_backend

POLL_SECONDS = 0.02  # between two looks at a server
WRITES = ("PUT", "POST")


@dataclass(frozen=True)
class CloudJob:
    """A spec whose directory is a prefix of a bucket, and what stands there. No two tests may share a name."""

    backend: Backend
    name: str
    spec: str
    options: tuple[str, ...] = ()
    devices: int = 1
    cache: Path | None = None
    variables: dict[str, str | None] = field(default_factory=dict)

    def with_options(self, *options: str) -> "CloudJob":
        """The same directory, other `--set` options on top."""
        return replace(self, options=(*self.options, *options))

    @property
    def directory(self) -> str:
        """The URL."""
        return self.backend.url(self.name)

    @property
    def arguments(self) -> list[str]:
        """SPEC and its `--set` options."""
        sets = (f"directory={self.directory}", *self.options)
        return [self.spec, *(word for option in sets for word in ("--set", option))]

    @property
    def environment(self) -> dict[str, str]:
        """What the job's processes run under; a variable that is None is left out."""
        variables: dict[str, str | None] = dict(job_process.environment(self.devices, self.cache))
        merged = variables | self.backend.environment | self.variables
        return {key: value for key, value in merged.items() if value is not None}

    def start(self, *more_arguments: str) -> "CloudAttempt":
        """`python -m runner`, as one process."""
        return CloudAttempt(self, ["runner", *self.arguments, *more_arguments])

    def start_paused(self, place: str) -> "CloudAttempt":
        """`python -m runner`, which waits in a place that `tests.support.paused_runner` knows, until it is killed."""
        held = replace(self, variables={**self.variables, "HELD_IN": place})
        return CloudAttempt(held, ["tests.support.paused_runner", *self.arguments])

    def start_processes(self, num_processes: int) -> list["CloudAttempt"]:
        """The same command on every host of a job, each with its place; `devices` is per process."""
        return link_peers([self.start(*placement) for placement in make_placements(num_processes)])

    def finish(self) -> "CloudAttempt":
        """Run to the end, which must be good."""
        attempt = self.start()
        attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
        return attempt

    def verify(self) -> tuple[int, str]:
        """Exit code and output of `checkpoints --verify`, which must end in time."""
        return job_process.run_runner(self.environment, "checkpoints", self.directory, "--verify")

    # What the server says.

    def files(self, prefix: str = "") -> dict[str, int]:
        """Every object below the directory and its size, by names relative to the directory."""
        found = self.backend.names(f"{self.name}/{prefix}")
        return {name.removeprefix(f"{self.name}/"): size for name, size in found.items()}

    def read(self, name: str) -> bytes:
        """The content of one object of the directory."""
        return self.backend.read(f"{self.name}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Put an object there."""
        self.backend.write(f"{self.name}/{name}", content)

    def delete(self, name: str) -> None:
        """Take an object away."""
        self.backend.delete(f"{self.name}/{name}")

    def exists(self, name: str) -> bool:
        """Whether an object is there."""
        return name in self.files(name)

    def events(self, *names: str) -> list[Row]:
        """The ledger of all attempts in the order of time, or its events of these names."""
        rows = [row for part in self.files("events/") for row in parse_lines(self.read(part))]
        return [row for row in sorted(rows, key=lambda row: row["time"]) if not names or row["event"] in names]

    def rows(self) -> list[Row]:
        """The metrics without those of speed, which no two runs share."""
        if not self.exists("metrics.jsonl"):
            return []
        return drop_speed_metrics(parse_lines(self.read("metrics.jsonl")))

    def result(self) -> Row:
        """`result.json`."""
        return dict(json.loads(self.read("result.json")))

    def outcome(self) -> tuple[Row, list[Row]]:
        """All that must be the same whatever happened on the way: the result with its fingerprint, and every row."""
        return self.result(), self.rows()

    def manifests(self) -> dict[int, Row]:
        """What stands in the manifests of the steps, void ones too."""
        names = [name for name in self.files("checkpoints/") if re.fullmatch(r"checkpoints/\d+/manifest\.json", name)]
        found = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # retention may be at work
                found[int(name.split("/")[1])] = dict(json.loads(self.read(name)))
        return dict(sorted(found.items()))

    def committed(self) -> list[int]:
        """Steps that have a manifest which is not void, ascending."""
        return [step for step, manifest in self.manifests().items() if "void" not in manifest]

    def newest(self) -> int:
        """The newest committed step, 0 if there is none."""
        return max(self.committed(), default=0)

    def num_attempts(self) -> int:
        """Attempts that have claimed the directory."""
        return sum(name.rpartition("/")[2].isdecimal() for name in self.files("attempts/"))

    def read_progress_objects(self) -> dict[str, bytes]:
        """The objects that say where the run stands, byte by byte."""
        names = [name for name in self.files() if name.endswith(("manifest.json", "metrics.jsonl", "result.json"))]
        return {name: self.read(name) for name in names}

    # Requests of the job as the proxy sees them.

    def match_requests(self, method_pattern: str, pattern: str) -> "RequestFilter":
        """Requests of these methods about names of the directory that match a pattern, both regular expressions."""
        whole = re.compile(f"/{BUCKET}/{re.escape(self.name)}/(?:{pattern})")

        def is_one(method: str, path: str) -> bool:
            return re.fullmatch(method_pattern, method) is not None and whole.fullmatch(path) is not None

        return is_one


class CloudAttempt(Attempt):
    """One started command on a `CloudJob`; waits, signals and reports like any `Attempt`."""

    def __init__(self, job: CloudJob, arguments: Sequence[str]):
        self.cloud = job
        self.job: Any = job
        self.number = job.num_attempts() + 1
        self.newest_at_start = job.newest()
        self._opened = None
        self._first_request = len(job.backend.proxy.requests)
        self._start(arguments, job.environment)

    def events(self, *names: str) -> list[Row]:
        """What this attempt has put into the ledger so far."""
        return [row for row in self.cloud.events(*names) if row["attempt"] >= self.number]

    def has_requested(self, kind: "RequestFilter", times: int = 1) -> bool:
        """Whether such requests have come since the attempt was started, from whatever process."""
        requests = self.cloud.backend.proxy.requests[self._first_request :]
        return sum(kind(*request) for request in requests) >= times

    def wait_for_server(self, happens: Callable[[], Any], what: str) -> None:
        """Like `until`, for a question that asks the server: with a pause after each."""

        def look() -> bool:
            if happens():
                return True
            time.sleep(POLL_SECONDS)
            return False

        self.wait_until(look, what)


RequestFilter = Callable[[str, str], bool]


class RequestGate:
    """Holds the first request of a kind in the proxy; those that follow pass, as does the held one once it is opened.

    The proxy has read only the beginning of the request's body then, so a process that dies in the middle of a large
    body has written nothing, while a small body is written once the gate opens, whoever lives. Takes over the faults
    of the proxy. Leaving the context opens it.
    """

    def __init__(self, backend: Backend, kind: RequestFilter):
        self._kind = kind
        self._lock = threading.Lock()
        self._opened = threading.Event()
        self.path = ""
        backend.proxy.faults = Faults(matching=self._hold)

    def __enter__(self) -> "RequestGate":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.open()

    @property
    def has_caught(self) -> bool:
        """Whether a request is being held, or was."""
        return bool(self.path)

    def open(self) -> None:
        """Let the held request go on, and hold none any more."""
        self._opened.set()

    def _hold(self, method: str, path: str) -> bool:
        if not self._opened.is_set() and self._kind(method, path):
            with self._lock:
                is_first, self.path = not self.path, self.path or path
            if is_first:
                self._opened.wait(WHOLE_RUN_DEADLINE_SECONDS)
        return False


def assert_verified(job: CloudJob) -> None:
    """Every committed checkpoint of the bucket is whole, by the command's own word."""
    code, output = job.verify()
    assert code == 0, output
    assert "DAMAGED" not in output, output


def assert_same_outcome(job: CloudJob, whole: Job) -> None:
    """The run has ended in the bits and rows of an undisturbed local one, and all it has committed is whole."""
    result, rows = job.outcome()
    whole_result, whole_rows = whole.outcome()
    assert result == whole_result, f"ended with {result}, undisturbed with {whole_result}"
    assert rows == whole_rows, f"other rows: {[row for row in rows if row not in whole_rows] or len(rows)}"
    assert_verified(job)
    last_step = job.result()["step"]
    assert job.newest() == last_step
    assert job.manifests()[last_step]["fingerprint"] == job.result()["fingerprint"]


def check_output_lines(attempt: CloudAttempt) -> list[str]:
    """The lines of an attempt's output, none of which is a traceback."""
    assert "Traceback" not in attempt.output, attempt.report("printed a traceback")
    return [line for line in attempt.output.splitlines() if line.strip()]


def make_unique_name(stem: str) -> str:
    """A directory of a test's own."""
    return f"{stem}-{os.urandom(4).hex()}"


Scenario = Callable[[Backend], None]


def make_backend_params(daily: str | None) -> list[Any]:
    """Every backend as a parameter; those but `daily` belong to the soak."""
    return [name if name == daily else pytest.param(name, marks=pytest.mark.soak) for name in BACKENDS]


def run_scenario(name: str, scenario: Scenario) -> None:
    """Play a scenario on a backend of its own."""
    with start_backend(name) as backend:
        scenario(backend)
