"""What makes a directory a checkpoint, what is wrong with one, and who decides that it never becomes one."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from runner.checkpoint.leaves import validate_manifest_leaves
from runner.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_KEYS,
    TOMBSTONE,
    Manifest,
    NotCommittedError,
    commit,
    find_file_problems,
    finish_retirements,
    list_steps,
    read_committed,
    read_manifest,
    read_newest_manifest,
    remove_files,
    retire_uncommitted,
    uncommit,
)
from runner.errors import ResumeError
from runner.storage import LocalStore, compute_crc32c
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket


@pytest.fixture(params=["disk", "bucket"])
def store(request, tmp_path):
    return LocalStore(tmp_path / "run") if request.param == "disk" else make_memory_bucket()


@pytest.fixture
def disk(tmp_path):
    return LocalStore(tmp_path / "run")


def write_manifest(store, name, **more):
    step = name if isinstance(name, int) else 0
    store.write(f"checkpoints/{name}/{MANIFEST}", Manifest(name=str(name), step=step, **more).encode())


def test_a_manifest_comes_back_as_it_was_written(store):
    leaves = {"w": {"shape": [2], "dtype": "int8", "digest": "0"}}
    manifest = Manifest(name="7", step=7, leaves=leaves, time=1.5, shards={}, metric=0.0)
    store.write(f"checkpoints/7/{MANIFEST}", manifest.encode())
    assert read_manifest(store, "checkpoints/7") == manifest


def test_the_record_has_the_keys_that_are_explained():
    explained = {key.name for key in MANIFEST_KEYS if "." not in key.name}
    assert {each.name for each in dataclasses.fields(Manifest)} == explained - {"format", "digest", TOMBSTONE}


def test_any_change_of_a_manifest_is_seen(store):
    write_manifest(store, 7, time=123.5)
    content = json.loads(store.read(f"checkpoints/7/{MANIFEST}"))
    for changed in (content | {"step": 8}, content | {"more": 1}, content | {"digest": "0"}, content | {"format": 0}):
        store.write(f"checkpoints/7/{MANIFEST}", json.dumps(changed).encode())
        with pytest.raises(ValueError, match="does not match its own digest"):
            read_manifest(store, "checkpoints/7")


def test_without_a_manifest_it_was_never_committed(store):
    with pytest.raises(NotCommittedError, match="never committed"):
        read_manifest(store, "checkpoints/7")


def test_only_numbered_directories_with_a_manifest_are_committed_steps_in_order(store):
    for step in (1000, 900, 99):
        write_manifest(store, step)
    write_manifest(store, "best")
    store.write("checkpoints/2000/arrays.1/x", b"")
    assert list(read_committed(store)) == [99, 900, 1000]
    assert read_committed(store)[900] == Manifest(name="900", step=900)
    assert list_steps(store) == [99, 900, 1000, 2000]


def test_a_file_or_an_empty_directory_with_the_name_of_a_step_is_none(disk):
    write_manifest(disk, 99)
    (disk.root / "checkpoints" / "2000").mkdir()
    assert list(read_committed(disk)) == [99]
    (disk.root / "checkpoints" / "3000").touch()
    assert list(read_committed(disk)) == [99]
    assert read_newest_manifest(disk).step == 99


def test_where_nothing_was_ever_saved_nothing_is_committed(store):
    assert read_committed(store) == {}
    assert list_steps(store) == []
    assert read_newest_manifest(store) is None


def test_the_newest_manifest_is_the_newest_that_can_be_read(store):
    assert read_newest_manifest(store) is None
    for step in (1, 2, 3):
        write_manifest(store, step)
    store.write(f"checkpoints/3/{MANIFEST}", b"{")
    assert read_newest_manifest(store).step == 2
    assert list(read_committed(store)) == [1, 2]


def test_files_are_checked_by_size_and_sum_and_shared_out_over_hosts(store):
    files = {}
    for name in ("a", "b", "deep/c"):
        store.write(f"checkpoints/1/{name}", name.encode() * 10)
        files[name] = [10 * len(name), compute_crc32c(name.encode() * 10)]

    def problems(part=0, num_parts=1):
        return find_file_problems(store, "checkpoints/1", files, part, num_parts)

    assert problems() == []
    store.write("checkpoints/1/b", b"x" * 10)
    assert problems() == ["b does not match its CRC-32C"]
    assert [problems(part, 2) for part in range(2)] == [[], ["b does not match its CRC-32C"]]
    store.write("checkpoints/1/b", b"x")
    assert problems() == ["b has 1 bytes, the manifest says 10"]
    store.remove("checkpoints/1/b")
    assert problems() == ["b is missing"]
    store.write("checkpoints/1/deep/c", b"x" * 60)
    assert problems() == ["b is missing", "deep/c does not match its CRC-32C"]


def test_leaves_that_differ_are_named():
    abstract = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.int32)}
    saved = {"w": {"shape": [2, 3], "dtype": "float32"}, "b": {"shape": [], "dtype": "int32"}}
    validate_manifest_leaves(Manifest(name="5", leaves=saved), abstract)
    more = saved | {"old": {"shape": [1], "dtype": "bool"}, "b": {"shape": [4], "dtype": "int32"}}
    with pytest.raises(ResumeError) as caught:
        validate_manifest_leaves(Manifest(name="5", leaves=more), abstract)
    assert str(caught.value).splitlines() == [
        "checkpoint 5 does not fit this job",
        "  b: checkpoint has int32[4], the job int32[]",
        "  old: checkpoint has bool[1], the job nothing",
    ]
    validate_manifest_leaves(Manifest(name="5", leaves=saved | {"old": more["old"]}), abstract, may_hold_more=True)


# Commit and bury: of one step only one attempt decides.

STEP = "checkpoints/5"


def upload_arrays(store, attempt):
    store.write(f"{STEP}/arrays.{attempt}/x", b"x" * attempt)


def try_commit(store, attempt):
    manifest = Manifest(name="5", step=5, attempt=attempt, arrays=f"arrays.{attempt}")
    commit(store, STEP, manifest, attempt)


def save(store, attempt):
    upload_arrays(store, attempt)
    try_commit(store, attempt)


def committer(store):
    """The attempt whose checkpoint of the step counts, None if there is none."""
    found = read_committed(store).get(5)
    return None if found is None else found.attempt


class KilledError(BaseException):
    """The process ends here."""


def test_what_is_committed_can_be_committed_by_nobody_else(store):
    save(store, 1)
    for attempt in (1, 2):
        upload_arrays(store, attempt)
        with pytest.raises(FileExistsError):
            try_commit(store, attempt)
    assert committer(store) == 1


def test_what_was_retired_can_not_be_committed_by_the_older_attempt(store):
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    assert set(store.list_sizes("checkpoints")) <= {f"5/{MANIFEST}"}
    with pytest.raises((FileExistsError, FileNotFoundError)):
        try_commit(store, 1)
    assert committer(store) is None
    with pytest.raises(NotCommittedError):
        read_manifest(store, STEP)


def test_what_was_retired_can_not_be_committed_by_an_older_attempt_that_goes_on_writing(store):
    """Its files come back one by one after they were deleted."""
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    save(store, 2)
    upload_arrays(store, 1)
    with pytest.raises(FileExistsError):
        try_commit(store, 1)
    assert committer(store) == 2


def test_what_was_committed_is_left_by_retire(store):
    save(store, 1)
    before = {name: store.read(f"checkpoints/{name}") for name in store.list_sizes("checkpoints")}
    retire_uncommitted(store, 5, 2)
    assert {name: store.read(f"checkpoints/{name}") for name in store.list_sizes("checkpoints")} == before
    assert committer(store) == 1


def test_a_step_that_was_retired_is_committed_by_the_attempt_that_did_it(store):
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    save(store, 2)
    assert committer(store) == 2
    assert set(store.list_sizes(STEP)) == {MANIFEST, "arrays.2/x"}


def test_a_step_may_be_retired_by_one_attempt_after_the_other(store):
    """Attempt 2 retires and is killed in its save, attempt 3 retires and saves."""
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    upload_arrays(store, 2)
    retire_uncommitted(store, 5, 3)
    for attempt in (1, 2):
        with pytest.raises((FileExistsError, FileNotFoundError)):
            try_commit(store, attempt)
    assert committer(store) is None
    save(store, 3)
    assert committer(store) == 3
    assert set(store.list_sizes(STEP)) == {MANIFEST, "arrays.3/x"}


def test_retire_may_be_repeated_by_the_same_attempt(store):
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    if list_steps(store):
        retire_uncommitted(store, 5, 2)
    save(store, 2)
    assert committer(store) == 2


def test_a_step_that_never_began_is_committed_at_once(store):
    save(store, 3)
    assert committer(store) == 3


def test_a_manifest_that_is_damaged_is_neither_committed_over_nor_retired(store):
    upload_arrays(store, 1)
    store.write(f"{STEP}/{MANIFEST}", b'{"format": 1, "st')
    retire_uncommitted(store, 5, 2)
    upload_arrays(store, 2)
    with pytest.raises(FileExistsError):
        try_commit(store, 2)
    assert store.read(f"{STEP}/{MANIFEST}") == b'{"format": 1, "st'
    assert store.exists(f"{STEP}/arrays.1/x")


def test_a_void_step_is_no_checkpoint_and_says_who_found_it_unfinished():
    store = make_memory_bucket()
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    assert store.list_sizes(STEP).keys() == {MANIFEST}
    with pytest.raises(NotCommittedError, match="attempt 2 found it unfinished"):
        read_manifest(store, STEP)
    assert read_committed(store) == {}
    assert read_newest_manifest(store) is None
    assert list_steps(store) == [5]


def test_in_a_bucket_a_commit_between_the_look_and_the_void_wins():
    driver = MemoryDriver()
    store = make_memory_bucket(driver)
    upload_arrays(store, 1)

    def overtake(verb, key):
        if verb == "put" and key.endswith(MANIFEST):
            driver.before = lambda verb, key: None
            try_commit(store, 1)

    driver.before = overtake
    retire_uncommitted(store, 5, 2)
    assert committer(store) == 1
    assert store.exists(f"{STEP}/arrays.1/x")


def test_in_a_bucket_a_void_between_the_look_and_the_commit_wins():
    driver = MemoryDriver()
    store = make_memory_bucket(driver)
    upload_arrays(store, 1)

    def overtake(verb, key):
        if verb == "put" and key.endswith(MANIFEST):
            driver.before = lambda verb, key: None
            retire_uncommitted(store, 5, 2)

    driver.before = overtake
    with pytest.raises(FileExistsError):
        try_commit(store, 1)
    assert committer(store) is None
    save(store, 2)
    assert committer(store) == 2


def test_in_a_bucket_a_retire_that_was_killed_is_ended_by_the_next(monkeypatch):
    store = make_memory_bucket()
    upload_arrays(store, 1)

    def killed(prefix):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(store, "remove_tree", killed)
        with pytest.raises(KilledError):
            retire_uncommitted(store, 5, 2)
    with pytest.raises(FileExistsError):
        try_commit(store, 1)
    retire_uncommitted(store, 5, 3)
    assert store.list_sizes(STEP).keys() == {MANIFEST}
    save(store, 3)
    assert committer(store) == 3


def kill_after_the_rename(store, patch, before=lambda: None):
    """Kill `retire_uncommitted` right after it has renamed the directory, `before` which something may happen."""
    move_tree = store.move_tree

    def killed(source, target):
        before()
        move_tree(source, target)
        raise KilledError

    patch.setattr(store, "move_tree", killed)


def test_on_a_disk_a_commit_right_before_the_rename_is_renamed_back(disk, monkeypatch):
    upload_arrays(disk, 1)
    move_tree = disk.move_tree

    def overtaken(source, target):
        if source == STEP:
            try_commit(disk, 1)
        move_tree(source, target)

    monkeypatch.setattr(disk, "move_tree", overtaken)
    retire_uncommitted(disk, 5, 2)
    assert committer(disk) == 1
    assert disk.list_names("checkpoints") == ["5"]
    assert disk.read(f"{STEP}/arrays.1/x") == b"x"


def test_on_a_disk_a_retire_that_was_killed_with_the_manifest_in_its_hands_is_settled_back(disk, monkeypatch):
    upload_arrays(disk, 1)
    with monkeypatch.context() as patch:
        kill_after_the_rename(disk, patch, before=lambda: try_commit(disk, 1))
        with pytest.raises(KilledError):
            retire_uncommitted(disk, 5, 2)
    assert committer(disk) is None
    finish_retirements(disk)
    assert committer(disk) == 1
    assert disk.list_names("checkpoints") == ["5"]
    assert disk.read(f"{STEP}/arrays.1/x") == b"x"


def test_on_a_disk_a_retire_that_was_killed_without_a_manifest_is_ended(disk, monkeypatch):
    upload_arrays(disk, 1)
    with monkeypatch.context() as patch:
        kill_after_the_rename(disk, patch)
        with pytest.raises(KilledError):
            retire_uncommitted(disk, 5, 2)
    with pytest.raises(FileNotFoundError):
        try_commit(disk, 1)
    finish_retirements(disk)
    assert disk.list_names("checkpoints") == []
    save(disk, 3)
    assert committer(disk) == 3


def test_settle_leaves_what_no_retire_has_begun(store):
    save(store, 1)
    store.write("checkpoints/6/arrays.1/x", b"")
    before = store.list_sizes("")
    finish_retirements(store)
    assert store.list_sizes("") == before


# What was committed is deleted: first the manifest, then the files.


def delete(store, attempt):
    uncommit(store, STEP, attempt)
    assert committer(store) is None
    remove_files(store, STEP)


def test_what_was_withdrawn_is_no_checkpoint_before_its_files_are_deleted(store):
    save(store, 1)
    uncommit(store, STEP, 1)
    assert committer(store) is None
    assert store.exists(f"{STEP}/arrays.1/x")
    remove_files(store, STEP)
    assert store.list_names("checkpoints") == []


def test_what_was_retired_before_it_was_committed_can_not_be_committed_again_after_it_was_deleted(store):
    """The zombie of attempt 1 is still about to commit the step that attempt 2 has saved and retained away."""
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    save(store, 2)
    delete(store, 2)
    assert set(store.list_sizes(STEP)) <= {MANIFEST}
    if store.root is None:
        upload_arrays(store, 1)
    with pytest.raises((FileExistsError, FileNotFoundError)):
        try_commit(store, 1)
    assert committer(store) is None


def test_a_step_that_was_deleted_may_be_saved_again(store):
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    save(store, 2)
    delete(store, 2)
    if list_steps(store):
        retire_uncommitted(store, 5, 3)
    save(store, 3)
    assert committer(store) == 3
    delete(store, 3)
    assert set(store.list_sizes(STEP)) <= {MANIFEST}


def test_remove_files_leaves_the_manifest(store):
    save(store, 1)
    remove_files(store, STEP)
    assert store.list_names(STEP) == [MANIFEST]
    assert committer(store) == 1
