"""Step time of a run while clients look at its dashboard, over that while none does: in turns, within one run.

Each client does as the page does in a browser: it asks for its data every two seconds, half of them for the table of
all runs, half for the page of this one, and takes a 304 where nothing has changed.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from runner.metrics.file import read_rows
from runner.metrics.rows import Row
from runner.process import find_free_port
from runner.storage import LocalStore
from tests.support.job_process import ROOT

POLL_SECONDS = 2.0
ANSWER_SECONDS = 120.0  # for a hang
CHANGES = {
    "config.train.total_steps": 1_000_000,
    "config.eval.every_steps": 100_000,
    "checkpoint.every_steps": 500,
    "logging.every_steps": 2,
}


@dataclass
class Crowd:
    """Clients of one server, until `stop` is set."""

    port: int
    paths: list[str]
    stop: threading.Event = field(default_factory=threading.Event)
    statuses: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def look(self, number: int) -> None:
        """What one client does."""
        connection, tag = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS), ""
        while not self.stop.wait(POLL_SECONDS * (0.5 + number % 10 / 10)):
            try:
                headers = {"Accept-Encoding": "gzip"} | ({"If-None-Match": tag} if tag else {})
                connection.request("GET", self.paths[number % len(self.paths)], headers=headers)
                answer = connection.getresponse()
                answer.read()
                tag = answer.headers.get("ETag") or ""
                self.statuses.append(answer.status)
            except (OSError, http.client.HTTPException) as error:
                self.problems.append(repr(error))
                connection.close()


@contextlib.contextmanager
def looking(port: int, paths: list[str], num_clients: int) -> Iterator[Crowd]:
    """While it is open, so many clients look."""
    crowd = Crowd(port, paths)
    threads = [threading.Thread(target=crowd.look, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield crowd
    finally:
        crowd.stop.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command, which is ended at the end."""
    process = subprocess.Popen([sys.executable, "-m", "runner", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def rows_in(directory: Path) -> list[Row]:
    """All rows so far."""
    return read_rows(LocalStore(directory))


def data_at(port: int, path: str) -> object:
    """What the server answers, once it is there."""
    while True:
        with contextlib.suppress(ConnectionError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        time.sleep(0.1)


def step_seconds(rows: list[Row], began: float, ended: float) -> list[float]:
    """Of the steps between two moments."""
    inside = [row for row in rows if began <= row["perf/time"] <= ended]
    return [
        (after["perf/time"] - before["perf/time"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(inside)
    ]


def measure(root: Path, num_clients: int, seconds: float, rounds: int) -> tuple[list[float], list[Crowd]]:
    """Median step time with clients over that without, for each round of twice `seconds`; and all the clients."""
    directory, port = root / "run", find_free_port()
    words = [word for key, value in CHANGES.items() for word in ("--set", f"{key}={value}")]
    ratios, crowds = [], []
    with (
        running("specs/gpt_nano.yaml", "--set", f"directory={directory}", *words) as job,
        running("dashboard", str(root), "--port", str(port)),
    ):
        while len(rows_in(directory)) < 20:
            assert job.poll() is None, "the job has ended"
            time.sleep(0.2)
        table = data_at(port, "/data")
        assert isinstance(table, dict)
        paths = ["/data", f"/data/{table['table'][0]['id']}"]
        for _ in range(rounds):
            moments = [time.time()]
            with looking(port, paths, num_clients) as crowd:
                time.sleep(seconds)
                moments.append(time.time())
            crowds.append(crowd)
            moments.append(time.time())
            time.sleep(seconds)
            moments.append(time.time())
            rows = rows_in(directory)
            crowded, alone = (statistics.median(step_seconds(rows, *moments[index : index + 2])) for index in (0, 2))
            ratios.append(crowded / alone)
        assert job.poll() is None, "the job has ended"
    return ratios, crowds


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        ratios, crowds = measure(Path(root), parsed.clients, parsed.seconds, parsed.rounds)
    statuses = [status for crowd in crowds for status in crowd.statuses]
    failed = sum(status not in (200, 304) for status in statuses) + sum(len(crowd.problems) for crowd in crowds)
    print(f"{parsed.clients} clients: {len(statuses)} requests, {failed} failed")
    print(f"step time with them over without: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    print(f"median: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
