"""Who only looks at a run in a bucket of each service, by the commands: what they say is true, beside it and after."""

import csv
import io
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cloud_job import CloudJob, make_unique_name
from tests.support.job_process import ROOT, Row, run_runner
from tests.support.object_stores import BACKENDS, Backend, start_backend

pytestmark = pytest.mark.soak
OPTIONS = (
    "config.train.total_steps=40",
    "checkpoint.every_steps=5",
    "logging.every_steps=1",
    "logging.tensorboard=true",
    "config.eval.every_steps=10",
    "config.eval.batches=2",
)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with start_backend(request.param) as started:
        yield started


def command_output(job: CloudJob, *words: str) -> str:
    """What a command that must end with 0 prints."""
    code, output = run_runner(job.environment, words[0], job.directory, *words[1:])
    assert code == 0, output
    return output


def status(job: CloudJob) -> Row:
    found: Row = json.loads(command_output(job, "status", "--json"))
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_seconds"], abs=1e-3)
    return found


@contextmanager
def dashboard(job: CloudJob) -> Iterator[str]:
    """The server's address."""
    words = [sys.executable, "-m", "runner", "dashboard", job.directory, "--port", "0"]
    process = subprocess.Popen(words, cwd=ROOT, env=job.environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().rpartition(" ")[2].strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def fetch(address: str) -> Row:
    with urllib.request.urlopen(address, timeout=60) as response:
        found: Row = json.load(response)
        return found


def test_status_and_dashboard_are_right_during_and_after_a_run(backend: Backend, tmp_path: Path) -> None:
    job = CloudJob(backend, make_unique_name("look"), "specs/gpt_nano.yaml", OPTIONS, cache=tmp_path)
    first = job.start_paused("step 12")
    first.wait_for_server(lambda: job.newest() >= 5 and job.rows()[-1]["step"] == 12, "a commit and the place")
    alive = status(job)
    assert (alive["state"], len(alive["attempts"])) == ("running", 1)
    assert alive["step"] >= 10
    first.kill()
    assert status(job)["state"] == "killed", "its process is asked for"
    newest = job.newest()
    job.finish()

    found = status(job)
    assert [attempt["state"] for attempt in found["attempts"]] == ["killed", "done"]
    assert found["attempts"][1]["resumed_step"] >= newest
    assert found["lost_steps"] == found["attempts"][0]["reached_step"] - found["attempts"][1]["resumed_step"]
    assert (found["state"], found["step"], found["total_steps"]) == ("done", 40, 40)
    assert found["seconds"]["unattributed"] <= 0.02 * found["wall_seconds"] + 2.0, "in a bucket two seconds are lost"
    assert {row["step"] for row in found["trend"]} == set(range(1, 41))
    assert found["checkpoints"][-1]["step"] == 40

    rows = [json.loads(line) for line in command_output(job, "metrics").splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41))
    table = list(csv.DictReader(io.StringIO(command_output(job, "metrics", "--csv"))))
    assert [float(line["train/loss"]) for line in table] == [row["train/loss"] for row in rows]
    page = tmp_path / "report.html"
    command_output(job, "report", "-o", str(page))
    assert "gpt_nano" in page.read_text()

    with dashboard(job) as address:
        (line,) = fetch(f"{address}data")["table"]
        assert line["state"].startswith("done")
        assert fetch(f"{address}data/{line['id']}")["title"]
    num_objects = len(job.files())
    assert status(job)["state"] == "done"
    assert len(job.files()) == num_objects, "looking writes nothing"
