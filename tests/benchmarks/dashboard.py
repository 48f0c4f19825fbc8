"""Step time of a run while clients poll its dashboard, relative to none, in alternating windows of one run.

Each client polls like the page in a browser: every two seconds, half of the clients for the table of all runs and half
for the page of this run, with an ETag so that unchanged data is answered by 304.
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
ANSWER_SECONDS = 120.0  # only a hang takes this long
CHANGES = {
    "config.train.total_steps": 1_000_000,
    "config.eval.every_steps": 100_000,
    "checkpoint.every_steps": 500,
    "logging.every_steps": 2,
}


@dataclass
class Clients:
    """Statistics of polling clients of one server, which run until `stop` is set."""

    port: int
    paths: list[str]
    stop: threading.Event = field(default_factory=threading.Event)
    statuses: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def poll(self, number: int) -> None:
        """Poll as client `number` until `stop` is set."""
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
def start_clients(port: int, paths: list[str], num_clients: int) -> Iterator[Clients]:
    """Poll with `num_clients` clients inside the context."""
    clients = Clients(port, paths)
    threads = [threading.Thread(target=clients.poll, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        clients.stop.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def start_runner(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a runner command that is killed when the context ends."""
    process = subprocess.Popen([sys.executable, "-m", "runner", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def read_all_rows(directory: Path) -> list[Row]:
    """Return all rows of metrics.jsonl so far."""
    return read_rows(LocalStore(directory))


def fetch_data(port: int, path: str) -> object:
    """Return the JSON that the server responds with, once it listens."""
    while True:
        with contextlib.suppress(ConnectionError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        time.sleep(0.1)


def list_step_seconds(rows: list[Row], began: float, ended: float) -> list[float]:
    """Return the seconds of each step between two times."""
    inside = [row for row in rows if began <= row["perf/time"] <= ended]
    return [
        (after["perf/time"] - before["perf/time"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(inside)
    ]


def measure(root: Path, num_clients: int, seconds: float, rounds: int) -> tuple[list[float], list[Clients]]:
    """Return the ratio of median step times with and without clients for each round, and the clients."""
    directory, port = root / "run", find_free_port()
    words = [word for key, value in CHANGES.items() for word in ("--set", f"{key}={value}")]
    ratios, all_clients = [], []
    with (
        start_runner("specs/gpt_nano.yaml", "--set", f"directory={directory}", *words) as job,
        start_runner("dashboard", str(root), "--port", str(port)),
    ):
        while len(read_all_rows(directory)) < 20:
            assert job.poll() is None, "the job has ended"
            time.sleep(0.2)
        table = fetch_data(port, "/data")
        assert isinstance(table, dict)
        paths = ["/data", f"/data/{table['table'][0]['id']}"]
        for _ in range(rounds):
            moments = [time.time()]
            with start_clients(port, paths, num_clients) as clients:
                time.sleep(seconds)
                moments.append(time.time())
            all_clients.append(clients)
            moments.append(time.time())
            time.sleep(seconds)
            moments.append(time.time())
            rows = read_all_rows(directory)
            loaded, alone = (
                statistics.median(list_step_seconds(rows, *moments[index : index + 2])) for index in (0, 2)
            )
            ratios.append(loaded / alone)
        assert job.poll() is None, "the job has ended"
    return ratios, all_clients


def main() -> None:
    """Print the ratios of step times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        ratios, all_clients = measure(Path(root), parsed.clients, parsed.seconds, parsed.rounds)
    statuses = [status for clients in all_clients for status in clients.statuses]
    failed = sum(status not in (200, 304) for status in statuses) + sum(
        len(clients.problems) for clients in all_clients
    )
    print(f"{parsed.clients} clients: {len(statuses)} requests, {failed} failed")
    print(f"step time with them over without: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    print(f"median: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
