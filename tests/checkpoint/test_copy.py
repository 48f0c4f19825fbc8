"""Copies of checkpoints between all kinds of storage, and runs that start from them."""

import contextlib
import itertools
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.checkpoint.inspect import VerifyDepth, list_entries
from runner.cli.app import run_command
from runner.errors import InvalidError
from runner.storage import LocalStore
from tests.support import job_process
from tests.support.cloud_job import CloudJob, make_unique_name
from tests.support.job_process import (
    SMALL_GPT_OPTIONS,
    Job,
    hash_tree,
    make_killed_run,
    make_uninterrupted_run,
)
from tests.support.object_stores import BACKENDS, Backend, start_backend
from tests.support.tiny_jobs import make_counter

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


# Copies on a disk that are cut off.

NAME = "40"
# Runs a copy that gets a signal at a call of a method of the target's store, before or after its effect.
CUT_OFF = """
import os, sys
from runner.cli.app import run_command
from runner.storage import LocalStore
method, is_after, number, source, target = sys.argv[1:]
original = getattr(LocalStore, method)

def call(store, *arguments):
    if store.url == target and is_after == "":
        os.kill(os.getpid(), int(number))
    result = original(store, *arguments)
    if store.url == target:
        os.kill(os.getpid(), int(number))
    return result

setattr(LocalStore, method, call)
run_command(["checkpoints", "copy", source, target])
"""
# Method, whether the signal comes after its effect, the signal, and whether the copy is complete then.
CUTS = {
    "first file": ("write", True, signal.SIGKILL, False),
    "terminated": ("write", True, signal.SIGTERM, False),
    "before the manifest": ("write_if", False, signal.SIGKILL, False),
    "after the manifest": ("write_if", True, signal.SIGKILL, False),
    "after the rename": ("move_tree", True, signal.SIGKILL, True),
}
DAILY_CUTS = ("first file", "after the manifest")


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("copy") / "counted"
    make_counter(directory, **{"checkpoint.keep_last": 1})()
    return directory


def list_good(directory: Path) -> list[str]:
    """Return the names of the committed checkpoints, all of which are good."""
    entries = [entry for entry in list_entries(LocalStore(directory), VerifyDepth.BITS) if entry.is_committed]
    assert not any(entry.problems for entry in entries), entries
    return [entry.name for entry in entries]


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("method", "is_after", "number", "is_complete"),
    [pytest.param(*cut, marks=() if name in DAILY_CUTS else pytest.mark.soak, id=name) for name, cut in CUTS.items()],
)
def test_a_copy_that_is_cut_off_is_no_checkpoint_and_can_be_repeated(
    counted: Path, tmp_path: Path, method: str, is_after: bool, number: signal.Signals, is_complete: bool
) -> None:
    target = tmp_path / "target"
    arguments = [method, "after" if is_after else "", str(number.value), str(counted), str(target)]
    result = subprocess.run([sys.executable, "-c", CUT_OFF, *arguments], env=job_process.environment(1), timeout=120)
    assert result.returncode == -number
    assert (target / "checkpoints" / NAME).exists() == is_complete
    assert list_good(target) == [NAME] * is_complete
    if is_complete:
        with pytest.raises(InvalidError, match="is there already"):
            run_command(["checkpoints", "copy", str(counted), str(target)])
    else:
        assert run_command(["checkpoints", "copy", str(counted), str(target)]) == 0
    assert [path.name for path in (target / "checkpoints").iterdir()] == [NAME]
    assert hash_tree(target / "checkpoints" / NAME) == hash_tree(counted / "checkpoints" / NAME)


def test_a_copy_that_fails_leaves_nothing(counted: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(counted, tmp_path / "source"))
    next(path for path in (source / "checkpoints" / NAME).glob("arrays*/**/*") if path.is_file()).write_bytes(b"")
    with pytest.raises(InvalidError, match="is not what its manifest says"):
        run_command(["checkpoints", "copy", str(source), str(tmp_path / "target")])
    assert list(tmp_path.glob("target/checkpoints/*")) == []  # nor is there a directory, if no file was copied before


def test_a_copy_completes_a_directory_without_a_manifest(counted: Path, tmp_path: Path) -> None:
    left = tmp_path / "target" / "checkpoints" / NAME
    shutil.copytree(counted / "checkpoints" / NAME, left)
    (left / "manifest.json").unlink()
    assert run_command(["checkpoints", "copy", str(counted), str(tmp_path / "target")]) == 0
    assert list_good(tmp_path / "target") == [NAME]
