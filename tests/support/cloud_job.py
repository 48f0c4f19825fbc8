"""Runner processes whose run directory is in a bucket: the counterpart of `job_process.Job`.

The job reaches the bucket through the proxy of its `Backend`, which injects faults; the test reads the bucket directly
from the server. To kill a process at an exact point, a `RequestGate` holds its first matching request: the request has
then neither succeeded nor failed, for as long as the test needs, even after the process has died.
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

POLL_SECONDS = 0.02  # between two reads of a server
WRITES = ("PUT", "POST")
DELETED_BATCH = "many objects"  # instead of the name of an object, see `CloudJob.match_requests`


@dataclass(frozen=True)
class CloudJob:
    """A spec with a prefix of a bucket as its run directory, and readers of that prefix.

    Buckets live for the whole session, so every test needs its own `name`.
    """

    backend: Backend
    name: str
    spec: str
    options: tuple[str, ...] = ()
    devices: int = 1
    cache: Path | None = None
    variables: dict[str, str | None] = field(default_factory=dict)

    def with_options(self, *options: str) -> "CloudJob":
        """Return a job on the same directory with more `--set` options."""
        return replace(self, options=(*self.options, *options))

    @property
    def directory(self) -> str:
        """URL of the run directory."""
        return self.backend.url(self.name)

    @property
    def arguments(self) -> list[str]:
        """SPEC and its `--set` options, as command-line arguments."""
        sets = (f"directory={self.directory}", *self.options)
        return [self.spec, *(word for option in sets for word in ("--set", option))]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the job's processes; a variable that is None is removed."""
        variables: dict[str, str | None] = dict(job_process.environment(self.devices, self.cache))
        merged = variables | self.backend.environment | self.variables
        return {key: value for key, value in merged.items() if value is not None}

    def start(self, *more_arguments: str) -> "CloudAttempt":
        """Start `python -m runner` as a single-process job."""
        return CloudAttempt(self, ["runner", *self.arguments, *more_arguments])

    def start_paused(self, place: str) -> "CloudAttempt":
        """Start a runner that pauses at a place known to `tests.support.paused_runner` until it is killed."""
        paused = replace(self, variables={**self.variables, "PAUSE_AT": place})
        return CloudAttempt(paused, ["tests.support.paused_runner", *self.arguments])

    def start_processes(self, num_processes: int) -> list["CloudAttempt"]:
        """Start all processes of a multi-host job; `devices` is per process."""
        return link_peers([self.start(*placement) for placement in make_placements(num_processes)])

    def finish(self) -> "CloudAttempt":
        """Run the job to its end and check its exit status."""
        attempt = self.start()
        attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
        return attempt

    def verify(self) -> tuple[int, str]:
        """Return the exit code and output of `checkpoints --verify`."""
        return job_process.run_runner(self.environment, "checkpoints", self.directory, "--verify")

    # Reads of the server, past the proxy.

    def files(self, prefix: str = "") -> dict[str, int]:
        """Return the size of every object below the directory by its name relative to the directory."""
        found = self.backend.names(f"{self.name}/{prefix}")
        return {name.removeprefix(f"{self.name}/"): size for name, size in found.items()}

    def read(self, name: str) -> bytes:
        """Return the content of an object of the directory."""
        return self.backend.read(f"{self.name}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object of the directory."""
        self.backend.write(f"{self.name}/{name}", content)

    def delete(self, name: str) -> None:
        """Delete an object of the directory."""
        self.backend.delete(f"{self.name}/{name}")

    def exists(self, name: str) -> bool:
        """Return True if the directory contains the object."""
        return name in self.files(name)

    def events(self, *names: str) -> list[Row]:
        """Return the events of all attempts ordered by time, optionally only those of the given names."""
        rows = [row for part in self.files("events/") for row in parse_lines(self.read(part))]
        return [row for row in sorted(rows, key=lambda row: row["time"]) if not names or row["event"] in names]

    def rows(self) -> list[Row]:
        """Return the rows of metrics.jsonl without the speed metrics, which differ between runs."""
        if not self.exists("metrics.jsonl"):
            return []
        return drop_speed_metrics(parse_lines(self.read("metrics.jsonl")))

    def result(self) -> Row:
        """Return the content of result.json."""
        return dict(json.loads(self.read("result.json")))

    def outcome(self) -> tuple[Row, list[Row]]:
        """Return the result with its fingerprint, and all rows: they must not depend on interruptions."""
        return self.result(), self.rows()

    def manifests(self) -> dict[int, Row]:
        """Return the manifest of each step, including void manifests."""
        names = [name for name in self.files("checkpoints/") if re.fullmatch(r"checkpoints/\d+/manifest\.json", name)]
        found = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # retention may have deleted it since the listing
                found[int(name.split("/")[1])] = dict(json.loads(self.read(name)))
        return dict(sorted(found.items()))

    def committed(self) -> list[int]:
        """Return the steps with a valid manifest, ascending."""
        return [step for step, manifest in self.manifests().items() if "void" not in manifest]

    def newest(self) -> int:
        """Return the newest committed step, or 0."""
        return max(self.committed(), default=0)

    def num_attempts(self) -> int:
        """Return the number of attempts that have claimed the directory."""
        return sum(name.rpartition("/")[2].isdecimal() for name in self.files("attempts/"))

    def read_progress_objects(self) -> dict[str, bytes]:
        """Return the objects that record the progress of the run: manifests, metrics and result."""
        names = [name for name in self.files() if name.endswith(("manifest.json", "metrics.jsonl", "result.json"))]
        return {name: self.read(name) for name in names}

    def match_requests(self, method_pattern: str, pattern: str) -> "RequestFilter":
        """Return a filter for the job's requests, by regular expressions of the method and of the object name.

        `DELETED_BATCH` stands for the requests that delete many objects, of any job: their paths name none.
        """
        own = rf"/{BUCKET}/{re.escape(self.name)}/(?:{pattern})"
        whole = re.compile(rf"/{BUCKET}|/batch/storage/v1" if pattern == DELETED_BATCH else own)

        def is_one(method: str, path: str) -> bool:
            return re.fullmatch(method_pattern, method) is not None and whole.fullmatch(path) is not None

        return is_one


class CloudAttempt(Attempt):
    """A process started on a `CloudJob`."""

    def __init__(self, job: CloudJob, arguments: Sequence[str]):
        self.cloud = job
        self.job: Any = job
        self.number = job.num_attempts() + 1
        self.newest_at_start = job.newest()
        self._opened = None
        self._first_request = len(job.backend.proxy.requests)
        self._start(arguments, job.environment)

    def events(self, *names: str) -> list[Row]:
        """Return the events that this attempt has recorded so far."""
        return [row for row in self.cloud.events(*names) if row["attempt"] >= self.number]

    def has_requested(self, kind: "RequestFilter", times: int = 1) -> bool:
        """Return True if the proxy has seen `times` matching requests, from any process, since this attempt started."""
        requests = self.cloud.backend.proxy.requests[self._first_request :]
        return sum(kind(*request) for request in requests) >= times

    def wait_for_server(self, happens: Callable[[], Any], what: str) -> None:
        """Like `wait_until`, for a condition that reads the server: polled less often."""

        def poll() -> bool:
            if happens():
                return True
            time.sleep(POLL_SECONDS)
            return False

        self.wait_until(poll, what)


RequestFilter = Callable[[str, str], bool]


class RequestGate:
    """Context that holds the first matching request in the proxy until it is opened; later requests pass.

    The proxy has then read only the beginning of the request's body. If the process dies meanwhile, a large body is
    incomplete and nothing is written, while a small body is written once the gate opens. The gate replaces the faults
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
        """True once a request has reached the gate."""
        return bool(self.path)

    def open(self) -> None:
        """Forward the held request and hold no others."""
        self._opened.set()

    def _hold(self, method: str, path: str) -> bool:
        if not self._opened.is_set() and self._kind(method, path):
            with self._lock:
                is_first, self.path = not self.path, self.path or path
            if is_first:
                self._opened.wait(WHOLE_RUN_DEADLINE_SECONDS)
        return False


def assert_verified(job: CloudJob) -> None:
    """Check with `checkpoints --verify` that every committed checkpoint is complete."""
    code, output = job.verify()
    assert code == 0, output
    assert "DAMAGED" not in output, output


def assert_same_outcome(job: CloudJob, whole: Job) -> None:
    """Check that the result and rows equal those of an uninterrupted local run, and that all checkpoints verify."""
    result, rows = job.outcome()
    whole_result, whole_rows = whole.outcome()
    assert result == whole_result, f"ended with {result}, uninterrupted with {whole_result}"
    assert rows == whole_rows, f"different rows: {[row for row in rows if row not in whole_rows] or len(rows)}"
    assert_verified(job)
    last_step = job.result()["step"]
    assert job.newest() == last_step
    assert job.manifests()[last_step]["fingerprint"] == job.result()["fingerprint"]


def check_output_lines(attempt: CloudAttempt) -> list[str]:
    """Check that the output of an attempt has no traceback, and return its lines."""
    assert "Traceback" not in attempt.output, attempt.report("printed a traceback")
    return [line for line in attempt.output.splitlines() if line.strip()]


def make_unique_name(stem: str) -> str:
    """Return a name that no other test uses."""
    return f"{stem}-{os.urandom(4).hex()}"


Scenario = Callable[[Backend], None]


def make_backend_params(daily: str | None) -> list[Any]:
    """Return every backend as a parameter; all but `daily` are marked as soak tests."""
    return [name if name == daily else pytest.param(name, marks=pytest.mark.soak) for name in BACKENDS]


def run_scenario(name: str, scenario: Scenario) -> None:
    """Run a scenario on a new backend."""
    with start_backend(name) as backend:
        scenario(backend)
