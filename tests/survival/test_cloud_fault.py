"""A bucket that throttles, cuts, dawdles, goes away or refuses: the same bits, or an honest exit code.

Never is a checkpoint committed that does not verify. Every scenario makes sure that the faults it asked for did happen.
"""

import resource
import time
from collections.abc import Iterator

import pytest

from tests.support.cloud_job import (
    CloudAttempt,
    CloudJob,
    assert_same_outcome,
    assert_verified,
    check_output_lines,
    make_backend_params,
    make_unique_name,
    run_scenario,
)
from tests.support.job_process import make_uninterrupted_counter_run
from tests.support.object_stores import BACKENDS, Backend, Faults, start_backend

COUNTER_SPEC, NANO_SPEC = "specs/counter.yaml", "specs/gpt_nano.yaml"
SHORT = ("config.total_steps=40", "config.step_seconds=0.1", "config.width=100000", "checkpoint.every_steps=10")
FEW = ("config.total_steps=4", "config.width=1000", "checkpoint.every_steps=2")
LONG = ("config.total_steps=400", "config.step_seconds=0.07", "config.width=1000", "checkpoint.every_steps=5")
SHORT_OUTAGE_SECONDS, THROTTLED_SECONDS = 20.0, 60.0
FILE_LIMIT_BYTES = 200_000  # less than a piece of SHORT, more than any other file
MAX_UNSAVED = "checkpoint.max_unsaved_minutes=0.05"


@pytest.fixture(scope="module", autouse=True)
def _what_all_are_compared_with() -> None:
    make_uninterrupted_counter_run(SHORT)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with start_backend(request.param) as backend:
        yield backend


def wait_for_commits(job: CloudJob, attempt: CloudAttempt, steps: int = 1) -> None:
    """Wait until so many checkpoints are committed, and the run goes on."""
    attempt.wait_for_server(lambda: len(job.committed()) >= steps, f"{steps} commits")


# Faults that pass.


def train_with_many_errors(backend: Backend) -> None:
    backend.proxy.faults = Faults(error_rate=0.3, error_statuses=(503, 429))
    fired = backend.proxy.fired
    job = CloudJob(backend, make_unique_name("errors"), COUNTER_SPEC, SHORT)
    attempt = job.start()
    attempt.wait_for_server(lambda: fired["error"] >= 5 and job.committed(), "errors, and a commit")
    attempt.kill()
    num_before = fired["error"]
    again = job.finish()
    assert again.events("restore")
    assert fired["error"] >= num_before + 5
    assert_same_outcome(job, make_uninterrupted_counter_run(SHORT))


@pytest.mark.soak
@pytest.mark.parametrize("name", make_backend_params("az"))
def test_errors_of_a_third_of_requests_change_no_bit(name: str) -> None:
    run_scenario(name, train_with_many_errors)


def train_with_cut_connections(backend: Backend) -> None:
    job = CloudJob(backend, make_unique_name("cuts"), COUNTER_SPEC, SHORT)
    fired = backend.proxy.fired
    backend.proxy.faults = Faults(matching=is_write, cut_upload_rate=0.2, cut_rate=0.3)
    attempt = job.start()
    attempt.wait_until(lambda: fired["cut_upload"] > 0 and fired["cut"] > 0 and job.newest() > 0, "cuts, and a commit")
    attempt.kill()
    num_cut_writes = fired["cut"]
    backend.proxy.faults = Faults(matching=is_read, cut_rate=0.4)
    job.finish()
    assert fired["cut"] > num_cut_writes
    assert_same_outcome(job, make_uninterrupted_counter_run(SHORT))


def is_write(method: str, path: str) -> bool:
    return method in ("PUT", "POST", "DELETE")


def is_read(method: str, path: str) -> bool:
    return method == "GET"


@pytest.mark.soak
@pytest.mark.parametrize("name", BACKENDS)
def test_cut_connections_change_no_bit(name: str) -> None:
    run_scenario(name, train_with_cut_connections)


def train_with_two_seconds_of_latency(backend: Backend) -> None:
    backend.proxy.faults = Faults(latency_seconds=2.0)
    job = CloudJob(backend, make_unique_name("latency"), COUNTER_SPEC, FEW)
    job.finish()
    assert backend.proxy.fired["latency"] > 10
    backend.proxy.faults = Faults()
    assert_same_outcome(job, make_uninterrupted_counter_run(FEW))


@pytest.mark.soak
@pytest.mark.parametrize("name", BACKENDS)
def test_two_seconds_of_latency_change_no_bit(name: str) -> None:
    run_scenario(name, train_with_two_seconds_of_latency)


def train_through_a_short_outage(backend: Backend) -> None:
    job = CloudJob(backend, make_unique_name("outage"), COUNTER_SPEC, LONG)
    attempt = job.start()
    wait_for_commits(job, attempt, 2)
    backend.proxy.faults = Faults(outage=True)
    began = time.time()
    time.sleep(SHORT_OUTAGE_SECONDS)
    assert attempt.process.poll() is None, attempt.report("did not outlive the outage")
    ended = time.time()
    backend.proxy.faults = Faults()
    attempt.expect(0)
    assert backend.proxy.fired["outage"] > 0
    left_out = [event["step"] for event in job.events("save_left_out") if began < event["time"] < ended]
    assert len(left_out) > 2, "training has stood still in the outage"
    assert any(event["step"] > max(left_out) for event in job.events("commit"))
    assert not job.events("save_failed")
    assert_same_outcome(job, make_uninterrupted_counter_run(LONG))


def train_through_a_minute_of_throttling(backend: Backend) -> None:
    job = CloudJob(backend, make_unique_name("throttled"), COUNTER_SPEC, LONG)
    attempt = job.start()
    wait_for_commits(job, attempt, 2)
    backend.proxy.faults = Faults(error_rate=1.0, error_statuses=(429,))
    time.sleep(THROTTLED_SECONDS / 2)
    attempt.kill()
    attempt = job.start()  # which finds a bucket that answers nothing else
    time.sleep(THROTTLED_SECONDS / 2)
    assert attempt.process.poll() is None, attempt.report("did not outlive the throttling")
    backend.proxy.faults = Faults()
    attempt.expect(0)
    assert backend.proxy.fired["error"] > 5
    assert not job.events("save_failed")
    assert_same_outcome(job, make_uninterrupted_counter_run(LONG))


@pytest.mark.soak
@pytest.mark.parametrize("name", BACKENDS)
def test_a_minute_of_throttling_changes_no_bit(name: str) -> None:
    run_scenario(name, train_through_a_minute_of_throttling)


@pytest.mark.soak
@pytest.mark.parametrize("name", BACKENDS)
def test_training_continues_through_a_short_outage(name: str) -> None:
    run_scenario(name, train_through_a_short_outage)


# Faults that do not pass in time.


def train_through_a_long_outage(backend: Backend) -> None:
    job = CloudJob(backend, make_unique_name("long-outage"), COUNTER_SPEC, SHORT)
    attempt = job.with_options(MAX_UNSAVED, "config.step_seconds=0.2").start()
    wait_for_commits(job, attempt)
    backend.proxy.faults = Faults(outage=True)
    attempt.expect(76)
    assert any("nothing could be saved for" in line for line in check_output_lines(attempt))
    assert backend.proxy.fired["outage"] > 0
    finish_after_recovery(job)


@pytest.mark.soak
@pytest.mark.parametrize("name", make_backend_params("gs"))
def test_an_outage_beyond_max_unsaved_minutes_ends_with_76(name: str) -> None:
    run_scenario(name, train_through_a_long_outage)


def finish_after_recovery(job: CloudJob) -> None:
    """The server is back: what was committed is whole, and the run goes on from it to the same bits."""
    job.backend.proxy.faults = Faults()
    assert_verified(job)
    last_commit = job.newest()
    assert 0 < last_commit < 40
    assert not job.exists("result.json")
    again = job.finish()
    assert [event["step"] for event in again.events("restore")] == [last_commit]
    assert_same_outcome(job, make_uninterrupted_counter_run(SHORT))


def revoke_write_permission(backend: Backend) -> None:
    job = CloudJob(backend, make_unique_name("write-403"), COUNTER_SPEC, SHORT)
    attempt = job.start()
    wait_for_commits(job, attempt)
    backend.proxy.faults = Faults(forbidden_writes=True)
    attempt.expect(76)
    lines = check_output_lines(attempt)
    assert any(line.startswith("SAVE FAILED at step ") for line in lines), attempt.report("did not say it")
    assert any("the state of step 40 could not be saved" in line for line in lines), attempt.output
    assert backend.proxy.fired["forbidden_writes"] > 0
    finish_after_recovery(job)


@pytest.mark.parametrize("name", make_backend_params(None))
def test_a_lost_write_permission_ends_with_76(name: str) -> None:
    run_scenario(name, revoke_write_permission)


def fill_the_staging_disk(backend: Backend) -> None:
    job = CloudJob(backend, make_unique_name("full"), COUNTER_SPEC, SHORT)
    attempt = job.with_options("config.step_seconds=0.1").start()
    wait_for_commits(job, attempt)
    attempt.limit_file_size(FILE_LIMIT_BYTES)
    attempt.wait_until(lambda: "SAVE FAILED at step " in attempt.output, "a save that fails")
    attempt.limit_file_size(resource.RLIM_INFINITY)
    attempt.expect(0)
    check_output_lines(attempt)
    assert job.events("save_failed")
    assert_same_outcome(job, make_uninterrupted_counter_run(SHORT))


@pytest.mark.soak
@pytest.mark.parametrize("name", make_backend_params("az"))
def test_a_full_staging_disk_fails_one_save_only(name: str) -> None:
    run_scenario(name, fill_the_staging_disk)


# What can never work is refused at once.


def assert_refused(job: CloudJob, *words: str) -> None:
    """Exit 2 with one line that has these words, and nothing in the bucket."""
    attempt = job.start()
    attempt.expect(2)
    lines = check_output_lines(attempt)
    assert len(lines) == 1, attempt.output
    for word in words:
        assert word in lines[0], lines[0]
    assert not job.files()


@pytest.mark.soak
@pytest.mark.parametrize("backend", make_backend_params("gs"), indirect=True)
def test_a_bucket_without_access_is_refused_before_compilation(backend: Backend) -> None:
    backend.proxy.faults = Faults(forbidden=True)
    job = CloudJob(backend, make_unique_name("forbidden"), NANO_SPEC)
    assert_refused(job, "directory", job.directory, "no permission")
    assert backend.proxy.fired["forbidden"] > 0
    assert all("/.probe." in path for _, path in backend.proxy.requests), backend.proxy.requests


@pytest.mark.parametrize("backend", make_backend_params(None), indirect=True)
def test_a_read_only_bucket_is_refused_before_compilation(backend: Backend) -> None:
    backend.proxy.faults = Faults(forbidden_writes=True)
    job = CloudJob(backend, make_unique_name("read-only"), NANO_SPEC)
    assert_refused(job, "directory", job.directory, "no permission")
    assert backend.proxy.fired["forbidden_writes"] > 0


@pytest.mark.parametrize("backend", make_backend_params(None), indirect=True)
def test_a_missing_bucket_is_refused(backend: Backend) -> None:
    url = f"{backend.name}://no-such-bucket/run"
    assert_refused(CloudJob(backend, make_unique_name("none"), COUNTER_SPEC, (f"directory={url}",)), "directory", url)
    assert backend.proxy.requests


@pytest.mark.soak
@pytest.mark.parametrize(
    ("directory", "words"),
    [
        ("ftp://bkt/run", ["ftp://", "gs://", "s3://", "az://"]),
        ("s3://", ["names no bucket"]),
    ],
)
def test_an_invalid_directory_url_is_refused(directory: str, words: list[str]) -> None:
    with start_backend("s3") as backend:
        job = CloudJob(backend, make_unique_name("scheme"), COUNTER_SPEC, (f"directory={directory}",))
        assert_refused(job, "directory", *words)
        assert not backend.proxy.requests


@pytest.mark.soak
def test_azure_without_credentials_is_refused() -> None:
    with start_backend("az") as backend:
        variables = {"AZURE_STORAGE_CONNECTION_STRING": None}
        assert_refused(
            CloudJob(backend, make_unique_name("creds"), COUNTER_SPEC, variables=variables), "directory", "az://"
        )
        assert not backend.proxy.requests
