"""Directories written by released versions: this version resumes, verifies and opens them.

For each format of `manifest.json`, `tests/data/format_<n>` holds a counter on disk and in a bucket, a small GPT, and
one that two processes have trained. A new format adds a directory with runs of the version that has introduced it;
existing directories are never rewritten.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax
import pytest
from pydantic import Field

from experiments.counter import Counter, CounterConfig
from experiments.gpt import PretrainGPT
from runner import RestoreableJob, open_checkpoint
from runner.checkpoint.inspect import VerifyDepth, format_report
from runner.checkpoint.manifest import FORMAT, parse_manifest, read_newest_manifest, seal
from runner.errors import InvalidError, NewerFormatError
from runner.parallel.mesh import AXES
from runner.spec import JobConfig, load_document, validate_spec
from runner.storage import LocalStore, Store, compute_crc32c, read_json, read_log
from tests.support.damage import write_newer_format
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket
from tests.support.tiny_jobs import ROOT, make_counter

DATA = Path(__file__).parent / "data"
FORMATS = sorted(int(path.name.removeprefix("format_")) for path in DATA.glob("format_*"))
FIXED_OVERRIDES = (
    "config.model.vocabulary_size=auto",
    "topology.mesh.data=auto",
    "config.train.micro_batch_examples=auto",
)
JOBS: dict[str, tuple[type[RestoreableJob], tuple[str, ...]]] = {
    "counter": (Counter, ()),
    "bucket": (Counter, ()),
    "gpt": (PretrainGPT, (*FIXED_OVERRIDES, "config.train.total_steps=4")),
    # Two processes with two devices each, which have a quarter of each array.
    "pod": (PretrainGPT, (*FIXED_OVERRIDES, "config.train.total_steps=4", "topology.mesh.fsdp=2")),
}


def test_every_format_has_directories() -> None:
    assert list(range(1, FORMAT + 1)) == FORMATS


def copy_run(number: int, name: str, directory: Path) -> Path:
    return Path(shutil.copytree(DATA / f"format_{number}" / name, directory))


def make_bucket(directory: Path) -> Store:
    """Return a bucket with the objects of the run's bucket."""
    driver = MemoryDriver()
    bucket = make_memory_bucket(driver)
    for path in directory.rglob("*"):
        if path.is_file():
            bucket.write(path.relative_to(directory).as_posix(), path.read_bytes())
    return bucket


def load_job(directory: Path, job_class: type[RestoreableJob], *overrides: str) -> Any:
    document = load_document(directory / "spec.yaml", [f"directory={directory}", *overrides])
    return job_class(validate_spec(document), document)


def resume_and_check(job: RestoreableJob) -> None:
    """Resume the job to its end and check that it restored the last checkpoint bit-identically."""
    manifest = read_newest_manifest(job.store)
    assert manifest is not None
    job()
    (restored,) = [row for row in read_log(job.store, "events") if row["event"] == "restore"]
    assert (restored["step"], restored["fingerprint"]) == (manifest.step, manifest.fingerprint)
    assert read_json(job.store, "result.json")["step"] == job.total_steps > manifest.step


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.soak if name == "pod" else ()) for name in JOBS])
@pytest.mark.parametrize("number", FORMATS)
def test_a_run_of_a_released_version_resumes(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the GPT's text is relative to it
    directory = copy_run(number, name, tmp_path / "run")
    job_class, overrides = JOBS[name]
    job = load_job(directory, job_class, *overrides)
    if name == "bucket":
        job.store = make_bucket(directory)
    lines, code = format_report(job.store, VerifyDepth.BITS)
    assert code == 0, lines
    assert "good" in lines[0]
    resume_and_check(job)
    if job_class is Counter:
        make_counter(tmp_path / "whole", **{"config.total_steps": 6, "config.width": 8})()
        whole = read_json(LocalStore(tmp_path / "whole"), "result.json")
        assert read_json(job.store, "result.json") == whole


@pytest.mark.soak
@pytest.mark.parametrize("number", FORMATS)
def test_a_run_of_a_released_version_resumes_on_later_mesh_axes(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    directory = copy_run(number, "gpt", tmp_path / "run")
    assert load_job(directory, PretrainGPT).topology.mesh.model_dump() == dict.fromkeys(AXES, 1)
    later = "topology.mesh={data: 1, fsdp: 2, sequence: 2, expert: 2}"
    resume_and_check(load_job(directory, PretrainGPT, *JOBS["gpt"][1], later))


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("number", FORMATS)
def test_weights_of_a_released_version_can_be_opened(number: int, name: str) -> None:
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


# Files that fit their checksums and cannot be read: the next older checkpoint is restored, or the user is told.


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def scramble(content: bytes) -> bytes:
    return bytes(byte ^ 0x5A for byte in content)


UNREADABLE: dict[str, Callable[[bytes], bytes]] = {"empty": lambda _: b"", "half": cut, "scrambled": scramble}


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=() if name == "scrambled" else pytest.mark.soak) for name in UNREADABLE]
)
@pytest.mark.parametrize("number", FORMATS)
def test_files_that_fit_their_checksums_and_cannot_be_read_are_no_bug(
    number: int, damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each file of the arrays, one after another, as a writer with broken memory would have left it."""
    for file in sorted(DATA.glob(f"format_{number}/counter/checkpoints/4/arrays.*/**/*")):
        if file.is_dir():
            continue
        name = file.relative_to(DATA / f"format_{number}" / "counter").as_posix()
        directory = copy_run(number, "counter", tmp_path / name.replace("/", "_"))
        path = directory / "checkpoints/4/manifest.json"
        content = UNREADABLE[damage](file.read_bytes())
        (directory / name).write_bytes(content)
        record = parse_manifest(path.read_bytes())
        record["files"][name.removeprefix("checkpoints/4/")] = [len(content), compute_crc32c(content)]
        path.write_bytes(seal(record))
        store = LocalStore(directory)
        lines, code = format_report(store, VerifyDepth.BITS)
        # Some files beside the arrays are not needed to read them.
        if code == 0:
            open_checkpoint(directory)
            continue
        assert "DAMAGED" in lines[0], lines
        with pytest.raises(InvalidError, match="no good checkpoint"):
            open_checkpoint(directory)
        with pytest.raises(InvalidError, match="none can be restored"):
            load_job(directory, Counter)()
    assert "Traceback" not in capfd.readouterr().err


# Keys of later versions.


class LaterConfig(CounterConfig):
    """Config with an additional key, whose default is the previous behaviour."""

    stride: int = Field(default=1, description="How far each step counts.")


class LaterCounter(Counter):
    Config = LaterConfig


class ShortConfig(JobConfig):
    """Config without one of the keys."""

    total_steps: int
    step_seconds: float = 0.0

    width: ClassVar[int] = 8

    @property
    def free_keys(self) -> frozenset[str]:
        return frozenset({"step_seconds", "total_steps"})


class ShortCounter(Counter):
    Config = ShortConfig


def write_spec(directory: Path, drop: str) -> None:
    """Rewrite the spec the way a user would for the later version."""
    path = directory / "spec.yaml"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if f"  {drop}:" not in line))


@pytest.mark.parametrize("number", FORMATS)
def test_an_added_key_does_not_prevent_a_resume(number: int, tmp_path: Path) -> None:
    resume_and_check(load_job(copy_run(number, "counter", tmp_path / "run"), LaterCounter))
    assert "stride: 1" in (tmp_path / "run/spec.yaml").read_text()


@pytest.mark.parametrize("number", FORMATS)
def test_an_added_key_is_compared_with_its_default(number: int, tmp_path: Path) -> None:
    directory = copy_run(number, "counter", tmp_path / "run")
    for missing in ("nothing", "job.json"):  # both manifests with an identity are compared
        (directory / missing).unlink(missing_ok=True)
        with pytest.raises(InvalidError, match=r"config\.stride.* has 1, the spec 2"):
            load_job(directory, LaterCounter, "config.stride=2")()


@pytest.mark.parametrize("number", FORMATS)
def test_a_run_that_depends_on_a_removed_key_is_rejected_by_name(number: int, tmp_path: Path) -> None:
    directory = copy_run(number, "counter", tmp_path / "run")
    write_spec(directory, "width")
    with pytest.raises(InvalidError, match=r"config\.width: .* has 8, the spec nothing"):
        load_job(directory, ShortCounter)()


# Directories of a newer version.


@pytest.mark.parametrize("place", ["checkpoints/4/manifest.json", "job.json", "result.json"])
def test_files_of_a_newer_version_are_rejected_and_unchanged(place: str, tmp_path: Path) -> None:
    directory = copy_run(1, "counter", tmp_path / "run")
    (directory / "result.json").write_text(json.dumps({"step": 4, "fingerprint": "0"}))
    write_newer_format(directory / place)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(InvalidError, match="written by a newer runner"):
        load_job(directory, Counter)()
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    if "manifest" in place:
        lines, code = format_report(LocalStore(directory), VerifyDepth.MANIFEST)
        assert code == 2
        assert "written by a newer runner, in format 99" in lines[1]
        with pytest.raises(NewerFormatError):
            open_checkpoint(directory)
