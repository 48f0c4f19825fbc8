"""Damaged checkpoints and a full disk: the job falls back, says so, and still ends with the bits of a whole one."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.checkpoint.manifest import seal
from runner.storage import compute_crc32c
from tests.support.job_process import (
    SMALL_GPT_OPTIONS,
    Attempt,
    Job,
    has_state,
    hash_tree,
    make_killed_run,
    make_uninterrupted_counter_run,
    make_uninterrupted_run,
)

COUNTER_SPEC, NANO_SPEC = "specs/counter.yaml", "specs/gpt_nano.yaml"
NANO = (
    *SMALL_GPT_OPTIONS,
    "config.train.total_steps=30",
    "checkpoint.every_steps=5",
    "logging.every_steps=4",
    "config.eval.every_steps=10",
)
COUNTER = ("config.total_steps=60", "config.step_seconds=0.1", "config.width=1000000", "checkpoint.every_steps=5")
NO_DELAY = "config.step_seconds=0"
NEWEST, OLDER = 20, 15
# Between the largest file that is no array and the smallest write of the counter's array.
FILE_LIMIT_BYTES = 200_000


def flip_bit(path: Path, position: float) -> None:
    """Flip one bit of a file, at a share of its length."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * position)] ^= 0b100
    path.write_bytes(content)


def flip_bit_in_largest_file(job: Job) -> None:
    flip_bit(job.largest_file(NEWEST), 0.5)


def truncate_largest_file(job: Job) -> None:
    path = job.largest_file(NEWEST)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_largest_file(job: Job) -> None:
    job.largest_file(NEWEST).unlink()


def flip_bit_in_manifest(job: Job) -> None:
    flip_bit(job.checkpoints / str(NEWEST) / "manifest.json", 0.5)


def empty_manifest(job: Job) -> None:
    (job.checkpoints / str(NEWEST) / "manifest.json").write_bytes(b"")


def flip_bit_and_forge_file_digests(job: Job) -> None:
    """Leave only the digest of the bits themselves to notice."""
    damaged = job.largest_file(NEWEST)
    flip_bit(damaged, 0.9)
    directory = job.checkpoints / str(NEWEST)
    manifest = json.loads((directory / "manifest.json").read_bytes())
    del manifest["digest"]
    manifest["files"][damaged.relative_to(directory).as_posix()][1] = compute_crc32c(damaged.read_bytes())
    (directory / "manifest.json").write_bytes(seal(manifest))


def delete_manifest(job: Job) -> None:
    (job.checkpoints / str(NEWEST) / "manifest.json").unlink()


def make_empty_step(job: Job) -> None:
    (job.checkpoints / "1000").mkdir()


def make_empty_directory_after(job: Job) -> None:
    (job.checkpoints / str(NEWEST + 5) / "arrays.1").mkdir(parents=True)


def assert_ends_like_undisturbed(job: Job, attempt: Attempt) -> None:
    attempt.expect(0)
    whole = (
        make_uninterrupted_counter_run(COUNTER) if job.spec == COUNTER_SPEC else make_uninterrupted_run(NANO_SPEC, NANO)
    )
    assert job.outcome() == whole.outcome()
    assert job.committed()[-1] == whole.result()["step"]
    assert not job.uncommitted()


def counter_at_newest(directory: Path) -> Job:
    return make_killed_run(NEWEST, COUNTER_SPEC, COUNTER).copy_to(directory).with_options(NO_DELAY)


def nano_at_newest(directory: Path) -> Job:
    return make_killed_run(NEWEST, NANO_SPEC, NANO).copy_to(directory)


@pytest.fixture(params=[counter_at_newest, pytest.param(nano_at_newest, marks=pytest.mark.soak)])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    return request.param(tmp_path / "run")


@pytest.mark.soak
def test_fallback_of_a_trainer_logs_each_row_once(tmp_path: Path) -> None:
    job = nano_at_newest(tmp_path / "run")
    flip_bit_in_largest_file(job)
    attempt = job.start()
    assert_ends_like_undisturbed(job, attempt)
    assert [event["step"] for event in attempt.events("restore")] == [OLDER]


@pytest.mark.soak
@pytest.mark.parametrize(
    "damage",
    [
        flip_bit_in_largest_file,
        pytest.param(truncate_largest_file, marks=pytest.mark.soak),
        pytest.param(remove_largest_file, marks=pytest.mark.soak),
        flip_bit_in_manifest,
        pytest.param(empty_manifest, marks=pytest.mark.soak),
        flip_bit_and_forge_file_digests,
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_checkpoint_is_quarantined(job: Job, damage: Callable[[Job], None]) -> None:
    damage(job)
    evidence = hash_tree(job.checkpoints / str(NEWEST))
    attempt = job.start()
    attempt.expect(0)
    assert [event["step"] for event in attempt.events("restore")] == [OLDER]
    assert [(event["step"], event["rejected"]) for event in attempt.events("fallback")] == [(OLDER, NEWEST)]
    (quarantine,) = attempt.events("quarantine")
    assert quarantine["step"] == NEWEST
    moved_to = Path(quarantine["moved_to"])
    assert moved_to.parent == job.directory / "quarantine"
    assert hash_tree(moved_to) == evidence
    assert f"checkpoint {NEWEST}" in attempt.output
    assert_ends_like_undisturbed(job, attempt)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("damage", "rejected", "restored"),
    [
        (delete_manifest, NEWEST, OLDER),
        pytest.param(make_empty_step, 1000, NEWEST, marks=pytest.mark.soak),
        pytest.param(make_empty_directory_after, NEWEST + 5, NEWEST, marks=pytest.mark.soak),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_directory_without_a_manifest_is_no_checkpoint(
    job: Job, damage: Callable[[Job], None], rejected: int, restored: int
) -> None:
    damage(job)
    attempt = job.start()
    attempt.expect(0)
    assert [event["step"] for event in attempt.events("restore")] == [restored]
    assert [(event["step"], event["rejected"]) for event in attempt.events("fallback")] == [(restored, rejected)]
    assert_ends_like_undisturbed(job, attempt)


@pytest.mark.soak
def test_restore_skips_several_damaged_checkpoints(job: Job) -> None:
    for step in (OLDER, NEWEST):
        flip_bit(job.largest_file(step), 0.3)
    attempt = job.start()
    attempt.expect(0)
    assert [event["rejected"] for event in attempt.events("fallback")] == [NEWEST, OLDER]
    assert [event["step"] for event in attempt.events("restore")] == [10]
    assert_ends_like_undisturbed(job, attempt)


@pytest.mark.soak
@pytest.mark.parametrize(
    "part", ["arrays", *(pytest.param(part, marks=pytest.mark.soak) for part in ("manifest.json", "everything"))]
)
def test_a_job_without_a_good_checkpoint_changes_no_file(job: Job, part: str) -> None:
    for step in job.committed():
        if part == "everything":
            shutil.rmtree(job.checkpoints / str(step))
        else:
            flip_bit(job.largest_file(step) if part == "arrays" else job.checkpoints / str(step) / part, 0.5)
    before = hash_tree(job.checkpoints)
    rows = job.rows()
    for _ in range(2):
        attempt = job.start()
        attempt.expect(2)
        assert "Traceback" not in attempt.output
        assert attempt.output.count("none can be restored") == 1
        assert hash_tree(job.checkpoints) == before
        assert not (job.directory / "quarantine").exists()
        assert job.rows() == rows
        assert not attempt.events("init", "restore", "fallback", "quarantine")


@pytest.mark.soak
def test_training_continues_after_a_save_on_a_full_disk(tmp_path: Path) -> None:
    job = Job(COUNTER_SPEC, tmp_path / "run", COUNTER)
    attempt = job.start()
    attempt.wait_until(lambda: job.newest() >= 10, "the commit of step 10")
    attempt.limit_file_size(FILE_LIMIT_BYTES)
    attempt.wait_until(lambda: len(attempt.events("save_failed")) >= 2, "two failed saves")
    failed = [event["step"] for event in attempt.events("save_failed")]
    last_good = job.newest()
    assert failed == [last_good + 5, last_good + 10]
    attempt.limit_file_size(resource.RLIM_INFINITY)
    attempt.wait_until(lambda: job.newest() > failed[-1], "the next save")
    attempt.expect(0)
    assert attempt.output.count("SAVE FAILED") == len(attempt.events("save_failed"))
    assert f"SAVE FAILED at step {failed[0]}" in attempt.output
    assert "Traceback" not in attempt.output, "the libraries have told it again"
    assert job.outcome() == make_uninterrupted_counter_run(COUNTER).outcome()
    for step in job.uncommitted():
        assert not any(path.is_file() for path in (job.checkpoints / str(step)).rglob("*")), "space was not freed"


@pytest.mark.soak
def test_a_kill_after_failed_saves_restores_the_last_commit(tmp_path: Path) -> None:
    job = Job(COUNTER_SPEC, tmp_path / "run", COUNTER)
    attempt = job.start()
    attempt.wait_until(lambda: job.newest() >= 5, "the commit of step 5")
    attempt.limit_file_size(FILE_LIMIT_BYTES)
    attempt.wait_until(lambda: attempt.events("save_failed"), "a failed save")
    attempt.kill()
    last_good = job.newest()
    again = job.with_options(NO_DELAY).finish()
    assert [event["step"] for event in again.events("restore")] == [last_good]
    assert job.outcome() == make_uninterrupted_counter_run(COUNTER).outcome()


@pytest.mark.soak
def test_a_failed_final_save_ends_with_76(tmp_path: Path) -> None:
    job = Job(COUNTER_SPEC, tmp_path / "run", COUNTER)
    attempt = job.start()
    attempt.wait_until(lambda: has_state(attempt) and job.newest() >= 5, "the commit of step 5")
    attempt.limit_file_size(FILE_LIMIT_BYTES)
    attempt.expect(76)
    assert "the state of step 60 could not be saved" in attempt.output
    assert "Traceback" not in attempt.output, attempt.output
    assert not (job.directory / "result.json").exists()
    last_good = job.newest()
    assert 5 <= last_good < 60
    again = job.with_options(NO_DELAY).finish()
    assert [event["step"] for event in again.events("restore")] == [last_good]
    assert job.outcome() == make_uninterrupted_counter_run(COUNTER).outcome()
