"""Jobs on data sets of arrays, as real processes: kills, stops, other topologies, and data sets that fail."""

import signal
from pathlib import Path

import pytest
import yaml

from tests.support.arrays import CHANGES
from tests.support.job_process import Job, has_state, make_uninterrupted_run
from tests.support.tiny_jobs import make_gpt_document

EXAMPLES = {
    "vit_nano": "config.model.layers=1",
    "mae_nano": "config.model.layers=1",
    "clip_nano": "config.model.group=4",
}
OPTIONS = (
    "config.train={total_steps: 60, global_batch_examples: 16, micro_batch_examples: 4}",
    "config.schedule.warmup_steps=4",
    "config.eval={every_steps: 20, batches: 2}",
    "checkpoint.every_steps=4",
    "logging.every_steps=5",
)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.soak) for name in EXAMPLES])
def example(request: pytest.FixtureRequest) -> tuple[str, tuple[str, ...]]:
    """Return the spec of an example, and options that make it small."""
    return f"specs/{request.param}.yaml", (*OPTIONS, EXAMPLES[request.param])


def test_kills_and_stops_change_no_bit_and_no_row(example: tuple[str, tuple[str, ...]], tmp_path: Path) -> None:
    spec, options = example
    job = Job(spec, tmp_path / "run", options)
    attempt = job.start()
    attempt.wait_until(lambda: job.newest() >= 4, "step 4")
    attempt.kill()
    stopped = job.start()
    stopped.wait_until(lambda: job.newest() >= 12, "step 12")
    stopped.process.send_signal(signal.SIGTERM)
    stopped.expect(75)
    job.finish()
    assert job.outcome() == make_uninterrupted_run(spec, options).outcome()


@pytest.mark.soak
def test_two_processes_and_another_split_give_the_bits_of_one(
    example: tuple[str, tuple[str, ...]], tmp_path: Path
) -> None:
    spec, options = example
    options = (*options, "config.train.same_bits_devices=4")
    job = Job(spec, tmp_path / "run", options)
    for devices, processes, step in ((1, 2, 4), (1, 1, 8), (4, 1, 16)):
        place = Job(spec, job.directory, options, devices)
        attempt = place.launch(processes) if processes > 1 else place.start()
        attempt.wait_until(lambda step=step: job.newest() >= step, f"step {step}")
        attempt.kill_tree()
    Job(spec, job.directory, options, devices=2).finish()
    assert job.outcome() == make_uninterrupted_run(spec, options, devices=2, num_processes=2).outcome()


def make_job(directory: Path, source: str, module: str = "tests.support.arrays", **options: object) -> Job:
    """Return a job on images of tests, whose data set fails in some way."""
    data = {"source": f"{module}:{source}", "options": options, "validation_fraction": 0.1}
    document = make_gpt_document(directory / "run", **CHANGES | {"config.data": data, "config.train.total_steps": 40})
    path = directory / "spec.yaml"
    path.write_text(yaml.safe_dump(document))
    return Job(str(path), directory / "run", ("checkpoint.every_steps=2",))


def test_a_bad_example_ends_the_job_with_2_and_its_index(tmp_path: Path) -> None:
    job = make_job(tmp_path, "Bad", kind="shape")
    attempt = job.start()
    attempt.expect(2)
    assert "tests.support.arrays:Bad: example 6: image is float32 of shape (3, 4, 1)" in attempt.output
    assert "Traceback" not in attempt.output


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["generator", "stop", "interrupt", "exit", "cancelled"])
@pytest.mark.parametrize("place", ["example 6: __getitem__", "example 6: items of a mapping", "fingerprint"])
def test_an_exception_that_is_no_error_ends_the_job_with_2(kind: str, place: str, tmp_path: Path) -> None:
    module = "tests.data.test_array_examples"
    attempt = make_job(tmp_path, "Rude", module, kind=kind, place=place).start()
    attempt.expect(2)
    assert f"data.source={module}:Rude: {place.removesuffix(' of a mapping')} raised " in attempt.output
    assert "Traceback" not in attempt.output


@pytest.mark.soak
def test_changed_data_are_refused_on_resume(tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    job = make_job(tmp_path, "Changing", changed=str(changed), at=204)
    attempt = job.start()
    attempt.wait_until(lambda: job.newest() >= 2, "step 2")
    attempt.kill()
    changed.touch()
    refused = job.start()
    refused.expect(2)
    assert "config.data" in refused.output
    changed.unlink()
    job.finish()


@pytest.mark.soak
@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_example_that_hangs_is_named_and_the_job_ends_with_76(tmp_path: Path, num_processes: int) -> None:
    until = tmp_path / "until"
    job = make_job(tmp_path, "Stubborn", until=str(until), at=100).with_options("deadlines.phase_seconds=20")
    attempts = [job.start()] if num_processes == 1 else job.start_processes(2)
    for attempt in attempts:
        attempt.expect(76)
    assert any("example 100 of tests.support.arrays:Stubborn has been read for" in each.output for each in attempts)
    until.touch()
    finished = [job.start()] if num_processes == 1 else job.start_processes(2)
    for attempt in finished:
        attempt.expect(0)
    assert has_state(finished[0])


@pytest.mark.soak
def test_a_server_that_does_not_answer_ends_the_job_with_76(tmp_path: Path) -> None:
    job = make_job(tmp_path, "Stubborn", until=str(tmp_path / "until"), at=100, is_unreachable=True)
    attempt = job.start()
    attempt.expect(76)
    assert "example 100: __getitem__ raised ConnectionResetError" in attempt.output
