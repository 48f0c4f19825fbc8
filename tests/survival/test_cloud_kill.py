"""kill -9 anywhere with the run's directory in a bucket: the bits and rows of an undisturbed run on a disk."""

import random
import signal
import threading
import time

import pytest

from tests.support.cloud_job import (
    DELETED_BATCH,
    CloudAttempt,
    CloudJob,
    RequestFilter,
    RequestGate,
    assert_same_outcome,
    assert_verified,
    check_output_lines,
    make_backend_params,
    make_unique_name,
    run_scenario,
)
from tests.support.job_process import make_uninterrupted_counter_run, make_uninterrupted_run
from tests.support.object_stores import BACKENDS, Backend, start_backend

COUNTER_SPEC, NANO_SPEC = "specs/counter.yaml", "specs/gpt_nano.yaml"
# 10 MB of state: more than one request an array on gs:// and s3://.
COUNTER = ("config.total_steps=160", "config.step_seconds=0.03", "config.width=2500000", "checkpoint.every_steps=5")
SHORT = ("config.total_steps=40", "config.step_seconds=0.1", "config.width=100000", "checkpoint.every_steps=5")
DAILY_COUNTER = (*SHORT, "config.total_steps=100")
NANO = (
    "config.train.total_steps=32",
    "checkpoint.every_steps=4",
    "logging.every_steps=2",
    "config.eval.every_steps=10",
    "config.eval.batches=2",
)
# Every process has a part of every large leaf.
TWO_PROCESS_NANO = (*NANO, "config.train.total_steps=24", "topology.mesh={data: 1, fsdp: auto, tensor: 1}")
NUM_PROCESSES = 2

WRITE = "PUT|POST"
PIECE = r"checkpoints/\d+/arrays\..*"
MANIFEST = r"checkpoints/\d+/manifest\.json"
STATE = (WRITE, "spec.yaml")  # written right after the state is there
COMMIT = (WRITE, MANIFEST)

Strike = tuple[str, str] | None
# Where to strike: method and name of a request that is in flight; None is at random in the start-up.
COUNTER_STRIKES: dict[str, Strike] = {
    "start-up": None,
    "claim": (WRITE, r"attempts/\d+"),
    "state": STATE,
    "upload": (WRITE, PIECE),
    "restore": ("GET", PIECE),
    "look before the commit": ("GET", MANIFEST),
    "commit": COMMIT,
    "retention, manifest": ("DELETE", MANIFEST),
    "retention, files": ("POST", DELETED_BATCH),
    "ledger": (WRITE, r"events/.*"),
    "result": (WRITE, "result.json"),
}
DAILY_STRIKES = ("upload", "restore", "commit", "retention, files", "result")
NANO_STRIKES: dict[str, Strike] = {
    "metrics": (WRITE, "metrics.jsonl"),
    "commit": COMMIT,
    "restore": ("GET", PIECE),
}
# In which request a process is stopped for long: spec, options, and the request as above.
ZOMBIES: dict[str, tuple[str, tuple[str, ...], tuple[str, str]]] = {
    "a piece is on its way": (COUNTER_SPEC, SHORT, (WRITE, PIECE)),
    "it looks before the commit": (COUNTER_SPEC, SHORT, ("GET", MANIFEST)),
    "the manifest is on its way": (COUNTER_SPEC, SHORT, COMMIT),
    "the rows are on their way": (NANO_SPEC, NANO, (WRITE, "metrics.jsonl")),
}


def kill_in_flight(job: CloudJob, what: str, place: tuple[str, str], rng: random.Random) -> None:
    """kill -9 while a request is on its way. It arrives after the death, at once or some time into the next attempt."""
    gate = RequestGate(job.backend, job.match_requests(*place))
    attempt = job.start()
    attempt.wait_until(lambda: gate.has_caught, what)
    attempt.kill()
    assert attempt.process.returncode == -9, attempt.report(f"ended before it was killed in {what}")
    threading.Timer(rng.choice([0.0, rng.uniform(0.5, 2.0)]), gate.open).start()


def kill_after(attempt: CloudAttempt, seconds: float) -> None:
    """Kill -9 the attempt so many seconds from now, in whatever phase that is."""
    time.sleep(seconds)
    attempt.kill()
    assert attempt.process.returncode == -9, attempt.report("ended before it was killed")


def kill_while_stepping(job: CloudJob, seconds: float) -> None:
    """Kill -9 the job so many seconds after it has a state."""
    attempt = job.start()
    attempt.wait_until(lambda: attempt.has_requested(job.match_requests(*STATE)), "a state")
    kill_after(attempt, seconds)


def kill_after_a_commit(job: CloudJob) -> None:
    """Kill -9 the job as soon as it has committed a step."""
    attempt = job.start()
    attempt.wait_for_server(job.committed, "a commit")
    attempt.kill()


def storm(job: CloudJob, strikes: dict[str, Strike], seed: int) -> int:
    """Kill the job while it steps and once in each of these places, in random order; how often in all."""
    rng = random.Random(seed)
    kill_while_stepping(job, rng.uniform(0.05, 0.5))
    last = [name for name in strikes if name == "result"]
    names = rng.sample([name for name in strikes if name not in last], len(strikes) - len(last))
    kills = 1
    while names or last:
        name = (names or last).pop(0)
        place = strikes[name]
        if name == "restore" and not job.committed():
            kill_after_a_commit(job)
        if place is None:
            kill_after(job.start(), rng.uniform(0.0, 1.2))
        else:
            kill_in_flight(job, name, place, rng)
        kills += 1
    return kills


def kill_a_counter(backend: Backend, options: tuple[str, ...], strikes: dict[str, Strike]) -> None:
    job = CloudJob(backend, make_unique_name("kill-counter"), COUNTER_SPEC, options)
    assert storm(job, strikes, seed=1) > len(strikes)
    job.with_options("config.step_seconds=0").finish()
    assert_same_outcome(job, make_uninterrupted_counter_run(options))
    # Retention keeps the newest three, and the newest of which every byte was read back.
    committed = job.committed()
    read_back = [step for step, manifest in job.manifests().items() if manifest.get("read_back")]
    assert committed == sorted({*committed[-3:], *read_back[-1:]})


@pytest.mark.soak
def test_kills_of_a_counter_in_a_bucket_change_no_bit() -> None:
    with start_backend("s3") as backend:
        kill_a_counter(backend, DAILY_COUNTER, {name: COUNTER_STRIKES[name] for name in DAILY_STRIKES})


@pytest.mark.soak
@pytest.mark.parametrize("name", BACKENDS)
def test_kills_in_every_kind_of_request_change_no_bit(name: str) -> None:
    with start_backend(name) as backend:
        kill_a_counter(backend, COUNTER, COUNTER_STRIKES)


def kill_gpt_nano(backend: Backend) -> None:
    job = CloudJob(backend, make_unique_name("kill-nano"), NANO_SPEC, NANO)
    storm(job, NANO_STRIKES, seed=2)
    job.finish()
    assert_same_outcome(job, make_uninterrupted_run(NANO_SPEC, NANO))
    assert [row["step"] for row in job.rows()] == list(range(2, 33, 2))


@pytest.mark.soak
@pytest.mark.parametrize("name", BACKENDS)
def test_kills_of_gpt_nano_in_a_bucket_change_no_bit(name: str) -> None:
    make_uninterrupted_run(NANO_SPEC, NANO)
    run_scenario(name, kill_gpt_nano)


def stop_with_sigterm(backend: Backend) -> None:
    job = CloudJob(backend, make_unique_name("sigterm"), COUNTER_SPEC, SHORT)
    attempt = job.start()
    attempt.wait_until(lambda: attempt.has_requested(job.match_requests(*COMMIT), 2), "two commits")
    attempt.process.send_signal(signal.SIGTERM)
    attempt.expect(75)
    check_output_lines(attempt)
    (preempt,) = job.events("preempt")
    assert preempt["saved"]
    assert 0 < preempt["step"] == job.newest() < 40
    assert_verified(job)
    again = job.finish()
    assert [event["step"] for event in again.events("restore")] == [preempt["step"]]
    assert_same_outcome(job, make_uninterrupted_counter_run(SHORT))


@pytest.mark.soak
@pytest.mark.parametrize("name", make_backend_params("gs"))
def test_sigterm_saves_the_running_step_to_the_bucket(name: str) -> None:
    make_uninterrupted_counter_run(SHORT)
    run_scenario(name, stop_with_sigterm)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gs"])
def test_a_kill_of_either_process_changes_no_bit(name: str) -> None:
    whole = make_uninterrupted_run(NANO_SPEC, TWO_PROCESS_NANO, 1, NUM_PROCESSES)
    with start_backend(name) as backend:
        job = CloudJob(backend, make_unique_name("two"), NANO_SPEC, TWO_PROCESS_NANO)
        for victim, place in ((0, (WRITE, r"checkpoints/\d+/arrays\.\d+/1\..*")), (1, COMMIT)):
            with RequestGate(backend, job.match_requests(*place)) as gate:
                attempts = job.start_processes(NUM_PROCESSES)
                attempts[0].wait_until(lambda gate=gate: gate.has_caught, str(place))  # type: ignore[misc]
                attempts[victim].kill()
            attempts[1 - victim].expect(76)
        for attempt in job.start_processes(NUM_PROCESSES):
            attempt.expect(0)
        assert_same_outcome(job, whole)


def stop_and_continue(job: CloudJob, kind: RequestFilter) -> None:
    """A process stopped in flight is overtaken by one that finishes, and then goes on."""
    zombie = job.start()
    zombie.wait_until(lambda: zombie.has_requested(job.match_requests(*COMMIT)), "a commit")
    with RequestGate(job.backend, kind) as gate:
        zombie.wait_until(lambda: gate.has_caught, "a request to be stopped in")
        zombie.freeze()
        assert not job.exists("result.json")
        job.finish()
        before = job.read_progress_objects()
        assert "result.json" in before
        assert sum(name.endswith("manifest.json") for name in before) >= 3
    zombie.thaw()
    zombie.expect(1)
    assert any(
        "has taken over" in line or "was written by another attempt" in line for line in check_output_lines(zombie)
    ), zombie.output
    assert job.read_progress_objects() == before, zombie.report("has changed what counts")


def resume_zombies(backend: Backend) -> None:
    failures = []
    for what, (spec, options, place) in ZOMBIES.items():
        job = CloudJob(backend, make_unique_name("zombie"), spec, options)
        try:
            stop_and_continue(job, job.match_requests(*place))
            assert_same_outcome(
                job,
                make_uninterrupted_run(spec, options) if spec == NANO_SPEC else make_uninterrupted_counter_run(options),
            )
        except AssertionError as error:
            error.add_note(f"stopped when {what}")
            failures.append(error)
    if failures:
        raise ExceptionGroup("zombies", failures)


@pytest.mark.soak
@pytest.mark.parametrize("name", BACKENDS)
def test_a_fenced_zombie_commits_nothing(name: str) -> None:
    make_uninterrupted_counter_run(SHORT)
    make_uninterrupted_run(NANO_SPEC, NANO)
    run_scenario(name, resume_zombies)
