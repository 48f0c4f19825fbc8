"""Fast tiers of several runs on the disk of one host, and a fast tier that cannot be used any more."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.counter import Counter
from runner.attempts.layout import Owner, write_owner
from runner.checkpoint import fast_tier
from runner.checkpoint.fast_tier import remove_ended_runs, write_run_file
from runner.checkpoint.parts import PartDirectory
from runner.cli.app import run_command
from runner.errors import InvalidError, StorageError
from runner.storage import LocalStore, read_log
from tests.support.memory_bucket import make_memory_bucket
from tests.support.tiny_jobs import make_counter, stop_after


def make_job(base: Path, total_steps: int = 20, local: str = "fast") -> Counter:
    fast = {"checkpoint.local_directory": str(base / local), "checkpoint.local_every_steps": 2}
    return make_counter(base / "runs/run", **fast, **{"config.total_steps": total_steps})


def list_parts(base: Path) -> list[int]:
    return sorted(int(path.parent.name) for path in (base / "fast").rglob("part.json"))


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    # The parts that are there already are counted as free.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=-(2**30)))


def make_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(PartDirectory, "find_space_problem", refuse)


def break_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def fail(path: Path, **options: bool) -> os.stat_result:
        if "fast" in path.parts:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, **options)

    make_read_only(monkeypatch)
    monkeypatch.setattr(Path, "stat", fail)


DISKS = {"full": fill_disk, "read-only": make_read_only, "broken": break_disk}


@pytest.mark.parametrize("disk", DISKS)
def test_a_run_continues_without_a_fast_tier_that_cannot_be_used(disk, tmp_path, monkeypatch, capsys):
    stop_after(make_job(tmp_path), 12)
    shutil.rmtree(tmp_path / "runs/run/checkpoints/12")
    assert list_parts(tmp_path) == [10, 12]
    DISKS[disk](monkeypatch)
    make_job(tmp_path)()
    warning = capsys.readouterr().err
    assert "checkpoint.local_directory: " in warning
    assert "this attempt continues without the fast tier" in warning
    store = LocalStore(tmp_path / "runs/run")
    events = [row for row in read_log(store, "events") if row["attempt"] == 2]
    (restore,) = (row for row in events if row["event"] == "restore")
    assert (restore["step"], restore["tier"]) == (10, "durable")
    (off,) = (row for row in events if row["event"] == "fast_tier_off")
    assert str(tmp_path / "fast") in off["reason"] or "cannot be written" in off["reason"]
    assert not [row for row in events if row.get("tier") == "fast"]
    monkeypatch.undo()
    run_command(["status", str(store.url)])
    assert "continues without the fast tier" in capsys.readouterr().out
    make_job(tmp_path, total_steps=22)()
    assert make_job(tmp_path, total_steps=22).done


@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("has_parts", [False, True])
def test_a_run_that_has_no_checkpoint_is_refused_without_its_fast_tier(disk, has_parts, tmp_path, monkeypatch):
    if has_parts:
        stop_after(make_job(tmp_path), 4)
        shutil.rmtree(tmp_path / "runs/run/checkpoints")
    DISKS[disk](monkeypatch)
    with pytest.raises(InvalidError, match=r"checkpoint\.local_directory"):
        make_job(tmp_path)()


def test_a_run_that_was_stopped_writes_no_more(tmp_path, monkeypatch):
    delete_old = PartDirectory.delete_old

    def delete_late(parts: PartDirectory) -> None:
        time.sleep(0.3)
        delete_old(parts)

    monkeypatch.setattr(PartDirectory, "delete_old", delete_late)
    stop_after(make_job(tmp_path), 6)
    assert list_parts(tmp_path) == [4, 6]


def test_a_run_that_is_done_leaves_no_parts(tmp_path):
    job = make_job(tmp_path)
    stop_after(job, 12)
    assert list_parts(tmp_path) == [10, 12]
    make_job(tmp_path)()
    assert list((tmp_path / "fast").iterdir()) == []
    # A larger total continues from the durable checkpoint.
    make_job(tmp_path, total_steps=30)()
    assert make_job(tmp_path, total_steps=30).done


# Changes after a run was stopped with its parts in the fast tier.


def keep(base: Path) -> None:
    pass


def delete(base: Path) -> None:
    shutil.rmtree(base / "runs/run")


def delete_with_all_others(base: Path) -> None:
    shutil.rmtree(base / "runs")


def replace_by_another(base: Path) -> None:
    delete(base)
    stop_after(make_job(base, local="elsewhere"), 3)


def rename(base: Path) -> None:
    (base / "runs/run").rename(base / "runs/renamed")


def rename_parent(base: Path) -> None:
    (base / "runs").rename(base / "moved")


def replace_after_rename(base: Path) -> None:
    rename(base)
    stop_after(make_job(base, local="elsewhere"), 3)


def unmount(base: Path) -> None:
    """Show the empty directory in which the disk with all runs was mounted."""
    (base / "runs").rename(base.parent / f"{base.name}.disk")
    (base / "runs").mkdir()


def unmount_automatically(base: Path) -> None:
    """Take away the mount point too, which is on another disk than the run."""
    unmount(base)
    (base / "runs").rmdir()
    edit_record(base, ancestors={str(base / "runs"): 2})


def empty(base: Path) -> None:
    delete(base)
    (base / "runs/run").mkdir()


def damage_owner(base: Path) -> None:
    (base / "runs/run/job.json").write_text("{")


def finish(base: Path) -> None:
    write_result(base, 12)


def finish_and_extend(base: Path) -> None:
    """The run had ended at step 10, and was extended since."""
    write_result(base, 10)


def delete_beside_a_living_process(base: Path) -> None:
    delete(base)
    edit_record(base, process=os.getpid(), created=fast_tier.read_creation_ticks(os.getpid()))


def delete_while_another_container_may_live(base: Path) -> None:
    delete(base)
    edit_record(base, machine="another")


def delete_long_after_another_container(base: Path) -> None:
    delete_while_another_container_may_live(base)
    for path in (base / "fast").glob("*/0/*"):
        os.utime(path, (1e9, 1e9))


def remove_record(base: Path) -> None:
    delete(base)
    for path in (base / "fast").rglob("run.json"):
        path.unlink()


def damage_record(base: Path) -> None:
    delete(base)
    edit_record(base, ancestors=1)


def edit_record(base: Path, **changes: object) -> None:
    for path in (base / "fast").rglob("run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_result(base: Path, step: int) -> None:
    (base / "runs/run/result.json").write_text(json.dumps({"step": step, "fingerprint": "f"}))


# Change, and True if the parts are deleted.
CHANGES: list[tuple[Callable[[Path], None], bool]] = [
    (keep, False),
    (delete, True),
    (delete_with_all_others, True),
    (replace_by_another, True),
    (rename, False),
    (rename_parent, False),
    (replace_after_rename, False),
    (unmount, False),
    (unmount_automatically, False),
    (empty, False),
    (damage_owner, False),
    (finish, True),
    (finish_and_extend, False),
    (delete_beside_a_living_process, False),
    (delete_while_another_container_may_live, False),
    (delete_long_after_another_container, True),
    (remove_record, False),
    (damage_record, False),
]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that was stopped at step 12, whose process has ended."""
    base = tmp_path_factory.mktemp("stopped")
    stop_after(make_job(base), 12)
    edit_record(base, created=-1)
    return base


@pytest.mark.parametrize(("change", "is_deleted"), CHANGES, ids=lambda value: getattr(value, "__name__", None))
def test_parts_are_deleted_only_of_runs_that_cannot_resume(change, is_deleted, stopped, tmp_path):
    # At the same place, which the parts name.
    shutil.copytree(stopped, tmp_path / "copy")
    try:
        change(stopped)
        assert list_parts(stopped) == [10, 12]
        remove_ended_runs(stopped / "fast", "0" * 12)
        assert list_parts(stopped) == ([] if is_deleted else [10, 12])
    finally:
        for name in ("runs", "fast", "moved", "elsewhere"):
            shutil.rmtree(stopped / name, ignore_errors=True)
        shutil.rmtree(stopped.parent / f"{stopped.name}.disk", ignore_errors=True)
        for name in ("runs", "fast"):
            shutil.copytree(tmp_path / "copy" / name, stopped / name)
        edit_record(stopped, ancestors={str(each): each.stat().st_ino for each in (stopped / "runs/run").parents})


def test_a_start_makes_room_of_runs_that_were_deleted(tmp_path):
    stop_after(make_job(tmp_path), 12)
    delete(tmp_path)
    edit_record(tmp_path, created=-1)
    (former,) = (tmp_path / "fast").iterdir()
    stop_after(make_job(tmp_path), 4)
    (own,) = (tmp_path / "fast").iterdir()
    assert own != former
    assert list_parts(tmp_path) == [2, 4]


class UnreachableStore:
    """Store of a bucket that does not answer."""

    root = None
    url = "s3://bucket/run"

    def read(self, name):
        raise StorageError("the bucket does not answer")


def put_owner(store, run_id):
    write_owner(store, Owner(run_id, "count", 0.0, {}))


# Content of the bucket, and True if the parts are deleted.
BUCKETS = {
    "empty": (lambda store, run_id: None, True),
    "its run": (put_owner, False),
    "another run": (lambda store, run_id: put_owner(store, "f" * 12), True),
    "other files": (lambda store, run_id: store.write("metrics.jsonl", b""), False),
    "unreachable": (None, False),
}


@pytest.mark.parametrize(("fill", "is_deleted"), BUCKETS.values(), ids=BUCKETS)
def test_parts_of_a_run_in_a_bucket_are_deleted_with_the_bucket_alone(fill, is_deleted, tmp_path, monkeypatch):
    store, run_id = UnreachableStore() if fill is None else make_memory_bucket(), "a" * 12
    directory = tmp_path / run_id / "0"
    (directory / "12").mkdir(parents=True)
    write_run_file(directory, store, run_id)
    for path in tmp_path.rglob("run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"created": -1}))
    if fill is not None:
        fill(store, run_id)
    monkeypatch.setattr(fast_tier, "make_store", lambda url: store)
    remove_ended_runs(tmp_path, "0" * 12)
    assert directory.exists() != is_deleted
