"""Directories that released versions have written are resumed, verified and opened by this one.

`tests/data/format_<n>` holds, for each format of `manifest.json`, a counter's on a disk and in a bucket, and a small
GPT's. The next format gets a directory of its own, written by the version before it; these are never written anew.
"""

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import jax
import pytest
from pydantic import Field

from experiments.counter import Counter, CounterConfig
from experiments.gpt import PretrainGPT
from runner import RestoreableJob, open_checkpoint
from runner.checkpoint.inspect import VerifyDepth, format_report
from runner.checkpoint.manifest import FORMAT, read_newest_manifest
from runner.errors import InvalidError, NewerFormatError
from runner.parallel.mesh import AXES
from runner.spec import JobConfig, load_document, validate_spec
from runner.storage import LocalStore, Store, read_json, read_log
from tests.support.damage import write_newer_format
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket
from tests.support.tiny_jobs import ROOT, make_counter

DATA = Path(__file__).parent / "data"
FORMATS = sorted(int(path.name.removeprefix("format_")) for path in DATA.glob("format_*"))
AS_WRITTEN = ("config.model.vocabulary_size=auto", "topology.mesh.data=auto", "config.train.micro_batch_examples=auto")
JOBS: dict[str, tuple[type[RestoreableJob], tuple[str, ...]]] = {
    "counter": (Counter, ()),
    "bucket": (Counter, ()),
    "gpt": (PretrainGPT, AS_WRITTEN),
}


def test_every_format_has_directories() -> None:
    assert list(range(1, FORMAT + 1)) == FORMATS


def copy_of(number: int, name: str, directory: Path) -> Path:
    return Path(shutil.copytree(DATA / f"format_{number}" / name, directory))


def in_memory(directory: Path) -> Store:
    """A bucket with the objects that were in the one that the run wrote to."""
    driver = MemoryDriver()
    bucket = make_memory_bucket(driver)
    for path in directory.rglob("*"):
        if path.is_file():
            bucket.write(path.relative_to(directory).as_posix(), path.read_bytes())
    return bucket


def load(directory: Path, job_class: type[RestoreableJob], *overrides: str) -> Any:
    document = load_document(directory / "spec.yaml", [f"directory={directory}", *overrides])
    return job_class(validate_spec(document), document)


def again(job: RestoreableJob) -> None:
    """Resume to the end: from the last checkpoint, with its bits."""
    manifest = read_newest_manifest(job.store)
    assert manifest is not None
    job()
    (restored,) = [row for row in read_log(job.store, "events") if row["event"] == "restore"]
    assert (restored["step"], restored["fingerprint"]) == (manifest.step, manifest.fingerprint)
    assert read_json(job.store, "result.json")["step"] == job.total_steps > manifest.step


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("number", FORMATS)
def test_a_run_of_a_released_version_goes_on(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where the GPT's text is
    directory = copy_of(number, name, tmp_path / "run")
    job_class, overrides = JOBS[name]
    job = load(directory, job_class, *overrides)
    if name == "bucket":
        job.store = in_memory(directory)
    lines, code = format_report(job.store, VerifyDepth.BITS)
    assert code == 0, lines
    assert "good" in lines[0]
    again(job)
    if job_class is Counter:
        make_counter(tmp_path / "whole", **{"config.total_steps": 6, "config.width": 8})()
        whole = read_json(LocalStore(tmp_path / "whole"), "result.json")
        assert read_json(job.store, "result.json") == whole


@pytest.mark.parametrize("number", FORMATS)
def test_it_goes_on_over_axes_that_it_did_not_know_and_without_them_its_mesh_is_what_it_was(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    directory = copy_of(number, "gpt", tmp_path / "run")
    assert load(directory, PretrainGPT).topology.mesh.model_dump() == dict.fromkeys(AXES, 1)
    later = "topology.mesh={data: 1, fsdp: 2, sequence: 2, expert: 2}"
    again(load(directory, PretrainGPT, *AS_WRITTEN, later))


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("number", FORMATS)
def test_its_weights_can_be_opened(number: int, name: str) -> None:
    directory = DATA / f"format_{number}" / name
    weights, spec = open_checkpoint(directory)
    manifest = read_newest_manifest(LocalStore(directory))
    assert manifest is not None
    is_whole = "count" in manifest.leaves
    saved = {name: leaf for name, leaf in manifest.leaves.items() if is_whole or name.startswith("params.")}
    paths, _ = jax.tree_util.tree_flatten_with_path(weights)
    found = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    assert {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in found.items()} == {
        name: [leaf["shape"], leaf["dtype"]] for name, leaf in saved.items()
    }
    assert spec.name in ("count", "tiny")


# A later version has other keys.


class LaterConfig(CounterConfig):
    """One key more, whose default is what was done before."""

    stride: int = Field(default=1, description="How far each step counts.")


class Later(Counter):
    Config = LaterConfig


class ShortConfig(JobConfig):
    """One key less."""

    total_steps: int
    step_seconds: float = 0.0

    width: ClassVar[int] = 8

    @property
    def free_keys(self) -> frozenset[str]:
        return frozenset({"step_seconds", "total_steps"})


class Short(Counter):
    Config = ShortConfig


def write_spec(directory: Path, drop: str) -> None:
    """As the user writes it for the later version."""
    path = directory / "spec.yaml"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if f"  {drop}:" not in line))


@pytest.mark.parametrize("number", FORMATS)
def test_a_key_that_a_later_version_adds_locks_nobody_out(number: int, tmp_path: Path) -> None:
    again(load(copy_of(number, "counter", tmp_path / "run"), Later))
    assert "stride: 1" in (tmp_path / "run/spec.yaml").read_text()


@pytest.mark.parametrize("number", FORMATS)
def test_a_key_that_a_later_version_adds_is_compared_with_its_default(number: int, tmp_path: Path) -> None:
    directory = copy_of(number, "counter", tmp_path / "run")
    for missing in ("nothing", "job.json"):  # each of the two that hold an identity refuses by itself
        (directory / missing).unlink(missing_ok=True)
        with pytest.raises(InvalidError, match=r"config\.stride.* has 1, the spec 2"):
            load(directory, Later, "config.stride=2")()


@pytest.mark.parametrize("number", FORMATS)
def test_a_run_that_depends_on_a_key_that_has_gone_is_refused_by_its_name(number: int, tmp_path: Path) -> None:
    directory = copy_of(number, "counter", tmp_path / "run")
    write_spec(directory, "width")
    with pytest.raises(InvalidError, match=r"config\.width: .* has 8, the spec nothing"):
        load(directory, Short)()


# A newer version has written it.


@pytest.mark.parametrize("place", ["checkpoints/4/manifest.json", "job.json", "result.json"])
def test_what_a_newer_runner_has_written_is_refused_and_not_touched(place: str, tmp_path: Path) -> None:
    directory = copy_of(1, "counter", tmp_path / "run")
    (directory / "result.json").write_text(json.dumps({"step": 4, "fingerprint": "0"}))
    write_newer_format(directory / place)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(InvalidError, match="written by a newer runner"):
        load(directory, Counter)()
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    if "manifest" in place:
        lines, code = format_report(LocalStore(directory), VerifyDepth.MANIFEST)
        assert code == 2
        assert "written by a newer runner, in format 2" in lines[1]
        with pytest.raises(NewerFormatError):
            open_checkpoint(directory)
