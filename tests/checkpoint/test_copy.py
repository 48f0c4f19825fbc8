"""Checkpoints that move: copied between any two kinds of storage, and taken as a beginning from any of them."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import harness
from tests.support.cloud import CloudJob, free_name
from tests.support.harness import LITTLE, Job, killed_after, undisturbed
from tests.support.servers import BACKENDS, Backend, start_backend

SPEC = "specs/gpt_nano.yaml"
OPTIONS = (
    *LITTLE,
    "config.train.total_steps=12",
    "config.schedule.warmup_steps=2",
    "checkpoint.every_steps=4",
    "logging.every_steps=4",
    "config.eval.every_steps=12",
)


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[str, Backend]]:
    """All of the servers, at the same time."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(start_backend(name)) for name in BACKENDS}


def everywhere(backends: dict[str, Backend]) -> dict[str, str]:
    """The variables by which a process finds all servers."""
    return {key: value for backend in backends.values() for key, value in backend.environment.items()}


def command(backends: dict[str, Backend], *arguments: str) -> tuple[int, str]:
    """Exit code and output of `python -m runner checkpoints ...`."""
    code, output = harness.command(harness.environment(1) | everywhere(backends), "checkpoints", *arguments)
    assert "Traceback" not in output, output
    return code, output


@pytest.mark.soak
def test_a_step_goes_from_cloud_to_cloud_and_home_and_the_run_goes_on_from_it_to_the_same_bits(
    backends: dict[str, Backend], tmp_path: Path
) -> None:
    origin = killed_after(4, SPEC, OPTIONS).copy_to(tmp_path / "origin")
    step = origin.newest()
    stations = [str(origin.directory), *(backends[name].url(free_name("copy")) for name in BACKENDS)]
    stations += [str(tmp_path / "home")]
    for source, target in itertools.pairwise(stations):
        code, output = command(backends, "copy", f"{source}/checkpoints/{step}", target)
        assert code == 0, output
        code, output = command(backends, target, "--verify")
        assert (code, output.count(" good ")) == (0, 1), output
    home = Job(SPEC, tmp_path / "home", OPTIONS)
    again = home.finish()
    assert [event["step"] for event in again.events("restore")] == [step]
    assert home.result() == undisturbed(SPEC, OPTIONS).result()


@pytest.mark.soak
def test_a_run_in_a_bucket_goes_on_from_a_step_that_was_copied_there(backends: dict[str, Backend]) -> None:
    origin = killed_after(4, SPEC, OPTIONS)
    job = CloudJob(backends["gs"], free_name("moved"), SPEC, OPTIONS)
    code, output = command(backends, "copy", str(origin.directory), job.directory)
    assert code == 0, output
    again = job.finish()
    assert [event["step"] for event in again.events("restore")] == [origin.newest()]
    assert job.result() == undisturbed(SPEC, OPTIONS).result()


@pytest.mark.parametrize(
    ("source", "target", "place"),
    [
        pytest.param("gs", "s3", "/checkpoints/12", marks=pytest.mark.soak),
        pytest.param("s3", "az", "", marks=pytest.mark.soak),
        pytest.param("az", "gs", "", marks=pytest.mark.soak),
    ],
)
def test_weights_of_a_run_in_one_cloud_begin_a_run_in_another(
    backends: dict[str, Backend], source: str, target: str, place: str
) -> None:
    origin = undisturbed(SPEC, OPTIONS)
    url = backends[source].url(free_name("origin"))
    code, output = command(backends, "copy", str(origin.directory), url)
    assert code == 0, output
    options = (*OPTIONS, "config.train.total_steps=4")
    taken = f"checkpoint.init_from={origin.directory}"
    expected = undisturbed(SPEC, (*options, taken)).result()
    assert expected != undisturbed(SPEC, options).result(), "the weights were not taken"
    taken = f"checkpoint.init_from={url}{place}"
    job = CloudJob(backends[target], free_name("fine"), SPEC, (*options, taken), variables=dict(everywhere(backends)))
    job.finish()
    assert job.result() == expected


@pytest.mark.soak
def test_a_damaged_step_is_not_copied_and_one_that_is_there_is_not_replaced(
    backends: dict[str, Backend], tmp_path: Path
) -> None:
    origin = killed_after(4, SPEC, OPTIONS).copy_to(tmp_path / "origin")
    target = backends["s3"].url(free_name("refused"))
    path = origin.largest_file(origin.newest())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    code, output = command(backends, "copy", str(origin.directory), target)
    assert (code, path.name in output, len(output.splitlines())) == (2, True, 1), output
    code, output = command(backends, target, "--verify")
    assert (code, " good " in output) == (0, False), output
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert command(backends, "copy", str(origin.directory), target)[0] == 0
    code, output = command(backends, "copy", str(origin.directory), target)
    assert (code, "is there already" in output, len(output.splitlines())) == (2, True, 1), output
    assert command(backends, target, "--verify")[0] == 0
