"""Copies of checkpoints between all kinds of storage, and runs that start from them."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import job_process
from tests.support.cloud_job import CloudJob, make_unique_name
from tests.support.job_process import SMALL_GPT_OPTIONS, Job, make_killed_run, make_uninterrupted_run
from tests.support.object_stores import BACKENDS, Backend, start_backend

SPEC = "specs/gpt_nano.yaml"
OPTIONS = (
    *SMALL_GPT_OPTIONS,
    "config.train.total_steps=12",
    "config.schedule.warmup_steps=2",
    "checkpoint.every_steps=4",
    "logging.every_steps=4",
    "config.eval.every_steps=12",
)


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[str, Backend]]:
    """Start the servers of all clouds."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(start_backend(name)) for name in BACKENDS}


def get_environment(backends: dict[str, Backend]) -> dict[str, str]:
    """Return the environment variables that give a process access to all servers."""
    return {key: value for backend in backends.values() for key, value in backend.environment.items()}


def run_checkpoints_command(backends: dict[str, Backend], *arguments: str) -> tuple[int, str]:
    """Run `python -m runner checkpoints ...` and return its exit code and output."""
    code, output = job_process.run_runner(
        job_process.environment(1) | get_environment(backends), "checkpoints", *arguments
    )
    assert "Traceback" not in output, output
    return code, output


@pytest.mark.soak
def test_a_run_resumes_bit_identically_from_a_step_copied_through_all_clouds(
    backends: dict[str, Backend], tmp_path: Path
) -> None:
    origin = make_killed_run(4, SPEC, OPTIONS).copy_to(tmp_path / "origin")
    step = origin.newest()
    stations = [str(origin.directory), *(backends[name].url(make_unique_name("copy")) for name in BACKENDS)]
    stations += [str(tmp_path / "home")]
    for source, target in itertools.pairwise(stations):
        code, output = run_checkpoints_command(backends, "copy", f"{source}/checkpoints/{step}", target)
        assert code == 0, output
        code, output = run_checkpoints_command(backends, target, "--verify")
        assert (code, output.count(" good ")) == (0, 1), output
    home = Job(SPEC, tmp_path / "home", OPTIONS)
    again = home.finish()
    assert [event["step"] for event in again.events("restore")] == [step]
    assert home.result() == make_uninterrupted_run(SPEC, OPTIONS).result()


@pytest.mark.soak
def test_a_run_resumes_from_a_step_copied_to_its_bucket(backends: dict[str, Backend]) -> None:
    origin = make_killed_run(4, SPEC, OPTIONS)
    job = CloudJob(backends["gs"], make_unique_name("moved"), SPEC, OPTIONS)
    code, output = run_checkpoints_command(backends, "copy", str(origin.directory), job.directory)
    assert code == 0, output
    again = job.finish()
    assert [event["step"] for event in again.events("restore")] == [origin.newest()]
    assert job.result() == make_uninterrupted_run(SPEC, OPTIONS).result()


@pytest.mark.parametrize(
    ("source", "target", "place"),
    [
        pytest.param("gs", "s3", "/checkpoints/12", marks=pytest.mark.soak),
        pytest.param("s3", "az", "", marks=pytest.mark.soak),
        pytest.param("az", "gs", "", marks=pytest.mark.soak),
    ],
)
def test_a_run_starts_from_weights_in_another_cloud(
    backends: dict[str, Backend], source: str, target: str, place: str
) -> None:
    origin = make_uninterrupted_run(SPEC, OPTIONS)
    url = backends[source].url(make_unique_name("origin"))
    code, output = run_checkpoints_command(backends, "copy", str(origin.directory), url)
    assert code == 0, output
    options = (*OPTIONS, "config.train.total_steps=4")
    taken = f"checkpoint.init_from={origin.directory}"
    expected = make_uninterrupted_run(SPEC, (*options, taken)).result()
    assert expected != make_uninterrupted_run(SPEC, options).result(), "the weights were not loaded"
    taken = f"checkpoint.init_from={url}{place}"
    job = CloudJob(
        backends[target], make_unique_name("fine"), SPEC, (*options, taken), variables=dict(get_environment(backends))
    )
    job.finish()
    assert job.result() == expected


@pytest.mark.soak
def test_a_damaged_step_is_not_copied_and_an_existing_one_not_replaced(
    backends: dict[str, Backend], tmp_path: Path
) -> None:
    origin = make_killed_run(4, SPEC, OPTIONS).copy_to(tmp_path / "origin")
    target = backends["s3"].url(make_unique_name("refused"))
    path = origin.largest_file(origin.newest())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    code, output = run_checkpoints_command(backends, "copy", str(origin.directory), target)
    assert (code, path.name in output, len(output.splitlines())) == (2, True, 1), output
    code, output = run_checkpoints_command(backends, target, "--verify")
    assert (code, " good " in output) == (0, False), output
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert run_checkpoints_command(backends, "copy", str(origin.directory), target)[0] == 0
    code, output = run_checkpoints_command(backends, "copy", str(origin.directory), target)
    assert (code, "is there already" in output, len(output.splitlines())) == (2, True, 1), output
    assert run_checkpoints_command(backends, target, "--verify")[0] == 0
