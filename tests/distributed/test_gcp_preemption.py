"""Preemption notice of a Google Cloud VM, which acts like an early SIGTERM."""

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from runner.distributed.preemption import parse_preemption_reason
from tests.support.job_process import Job, make_uninterrupted_run

SPEC = "specs/counter.yaml"


@pytest.mark.parametrize(
    ("instance", "is_preempted"),
    [
        ({}, False),
        ([], False),
        ({"preempted": "FALSE", "maintenanceEvent": "NONE"}, False),
        ({"preempted": "TRUE"}, True),
        ({"maintenanceEvent": "TERMINATE_ON_HOST_MAINTENANCE"}, True),
        ({"maintenanceEvent": "MIGRATE_ON_HOST_MAINTENANCE"}, False),
    ],
)
def test_terminating_maintenance_is_a_preemption(instance, is_preempted):
    assert (parse_preemption_reason(instance) is not None) == is_preempted


@pytest.fixture
def machine(monkeypatch):
    """Start a metadata server, and return it with the event that preempts its machine."""
    is_preempted = threading.Event()
    requests = []

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.path, self.headers.get("Metadata-Flavor")))
            if "last_etag=0" not in self.path:  # wait_for_change request
                is_preempted.wait(600)
            answer = {"preempted": "TRUE" if is_preempted.is_set() else "FALSE", "maintenanceEvent": "NONE"}
            self.send_response(200)
            self.send_header("ETag", "abc" if is_preempted.is_set() else "first")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_address[1]}")
    yield is_preempted, requests
    server.shutdown()


@pytest.mark.soak
def test_a_preempted_machine_saves_and_ends_with_75_despite_a_later_sigterm(machine, tmp_path):
    is_preempted, requests = machine
    job = Job(SPEC, tmp_path / "run", ("config.step_seconds=0.02", "checkpoint.every_steps=1000", "config.width=64"))
    attempt = job.start()
    attempt.wait_until(lambda: job.events("progress"), "the first steps")
    is_preempted.set()
    attempt.wait_until(lambda: "being preempted: stopping at the next step" in attempt.output, "the stop")
    if attempt.process.poll() is None:
        attempt.process.send_signal(signal.SIGTERM)
    attempt.expect(75)
    (saved,) = job.committed()
    assert saved > 0
    assert requests[0][1] == "Google"
    is_preempted.clear()
    job.with_options("config.step_seconds=0").finish()
    assert job.result() == make_uninterrupted_run(SPEC, ("config.width=64",)).result()
