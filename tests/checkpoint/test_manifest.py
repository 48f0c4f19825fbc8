"""Manifests: commit, verification, retirement of unfinished steps, and deletion."""

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
from tests.support.missing_calls import take_calls_away


@pytest.fixture(params=["disk", "disk without calls", "bucket"])
def store(request, tmp_path, monkeypatch):
    if request.param == "disk without calls":
        take_calls_away(monkeypatch)
    return make_memory_bucket() if request.param == "bucket" else LocalStore(tmp_path / "run")


@pytest.fixture(params=["with all calls", "without calls"])
def local_store(request, tmp_path, monkeypatch):
    if request.param == "without calls":
        take_calls_away(monkeypatch)
    return LocalStore(tmp_path / "run")


def write_manifest(store, name, **more):
    step = name if isinstance(name, int) else 0
    store.write(f"checkpoints/{name}/{MANIFEST}", Manifest(name=str(name), step=step, **more).encode())


def test_a_manifest_round_trips(store):
    leaves = {"w": {"shape": [2], "dtype": "int8", "digest": "0"}}
    manifest = Manifest(name="7", step=7, leaves=leaves, time=1.5, shards={}, metric=0.0)
    store.write(f"checkpoints/7/{MANIFEST}", manifest.encode())
    assert read_manifest(store, "checkpoints/7") == manifest


def test_the_record_has_the_documented_keys():
    explained = {key.name for key in MANIFEST_KEYS if "." not in key.name}
    assert {each.name for each in dataclasses.fields(Manifest)} == explained - {"format", "digest", TOMBSTONE}


def test_every_change_of_a_manifest_is_detected(store):
    write_manifest(store, 7, time=123.5)
    content = json.loads(store.read(f"checkpoints/7/{MANIFEST}"))
    for changed in (content | {"step": 8}, content | {"more": 1}, content | {"digest": "0"}, content | {"format": 0}):
        store.write(f"checkpoints/7/{MANIFEST}", json.dumps(changed).encode())
        with pytest.raises(ValueError, match="does not match its own digest"):
            read_manifest(store, "checkpoints/7")


def test_a_directory_without_a_manifest_is_not_committed(store):
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


def test_files_and_empty_directories_named_like_a_step_are_ignored(local_store):
    write_manifest(local_store, 99)
    (local_store.root / "checkpoints" / "2000").mkdir()
    assert list(read_committed(local_store)) == [99]
    (local_store.root / "checkpoints" / "3000").touch()
    assert list(read_committed(local_store)) == [99]
    assert read_newest_manifest(local_store).step == 99


def test_an_empty_store_has_no_committed_steps(store):
    assert read_committed(store) == {}
    assert list_steps(store) == []
    assert read_newest_manifest(store) is None


def test_the_newest_readable_manifest_is_found(store):
    assert read_newest_manifest(store) is None
    for step in (1, 2, 3):
        write_manifest(store, step)
    store.write(f"checkpoints/3/{MANIFEST}", b"{")
    assert read_newest_manifest(store).step == 2
    assert list(read_committed(store)) == [1, 2]


def test_files_are_verified_by_size_and_checksum_and_divided_among_hosts(store):
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


def test_differing_leaves_are_listed():
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


# Commit and retirement: one attempt wins each step.

STEP = "checkpoints/5"


def upload_arrays(store, attempt):
    store.write(f"{STEP}/arrays.{attempt}/x", b"x" * attempt)


def try_commit(store, attempt):
    manifest = Manifest(name="5", step=5, attempt=attempt, arrays=f"arrays.{attempt}")
    commit(store, STEP, manifest, attempt)


def save(store, attempt):
    upload_arrays(store, attempt)
    try_commit(store, attempt)


def find_committer(store):
    """Return the attempt whose checkpoint of the step is committed, or None."""
    found = read_committed(store).get(5)
    return None if found is None else found.attempt


class KilledError(BaseException):
    """Simulated end of the process."""


def test_a_committed_step_cannot_be_committed_again(store):
    save(store, 1)
    for attempt in (1, 2):
        upload_arrays(store, attempt)
        with pytest.raises(FileExistsError):
            try_commit(store, attempt)
    assert find_committer(store) == 1


def test_an_older_attempt_cannot_commit_a_retired_step(store):
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    assert set(store.list_sizes("checkpoints")) <= {f"5/{MANIFEST}"}
    with pytest.raises((FileExistsError, FileNotFoundError)):
        try_commit(store, 1)
    assert find_committer(store) is None
    with pytest.raises(NotCommittedError):
        read_manifest(store, STEP)


def test_an_older_attempt_that_keeps_writing_cannot_commit_a_retired_step(store):
    """The older attempt writes its files again after they were deleted."""
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    save(store, 2)
    upload_arrays(store, 1)
    with pytest.raises(FileExistsError):
        try_commit(store, 1)
    assert find_committer(store) == 2


def test_retiring_leaves_a_committed_step(store):
    save(store, 1)
    before = {name: store.read(f"checkpoints/{name}") for name in store.list_sizes("checkpoints")}
    retire_uncommitted(store, 5, 2)
    assert {name: store.read(f"checkpoints/{name}") for name in store.list_sizes("checkpoints")} == before
    assert find_committer(store) == 1


def test_the_retiring_attempt_can_commit_the_step(store):
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    save(store, 2)
    assert find_committer(store) == 2
    assert set(store.list_sizes(STEP)) == {MANIFEST, "arrays.2/x"}


def test_successive_attempts_can_retire_a_step(store):
    """Attempt 2 retires the step and is killed during its save; attempt 3 retires and saves it."""
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    upload_arrays(store, 2)
    retire_uncommitted(store, 5, 3)
    for attempt in (1, 2):
        with pytest.raises((FileExistsError, FileNotFoundError)):
            try_commit(store, attempt)
    assert find_committer(store) is None
    save(store, 3)
    assert find_committer(store) == 3
    assert set(store.list_sizes(STEP)) == {MANIFEST, "arrays.3/x"}


def test_an_attempt_can_retire_a_step_again(store):
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    if list_steps(store):
        retire_uncommitted(store, 5, 2)
    save(store, 2)
    assert find_committer(store) == 2


def test_a_new_step_is_committed_directly(store):
    save(store, 3)
    assert find_committer(store) == 3


def test_a_damaged_manifest_is_neither_overwritten_nor_retired(store):
    upload_arrays(store, 1)
    store.write(f"{STEP}/{MANIFEST}", b'{"format": 1, "st')
    retire_uncommitted(store, 5, 2)
    upload_arrays(store, 2)
    with pytest.raises(FileExistsError):
        try_commit(store, 2)
    assert store.read(f"{STEP}/{MANIFEST}") == b'{"format": 1, "st'
    assert store.exists(f"{STEP}/arrays.1/x")


def test_a_tombstone_is_no_checkpoint_and_names_the_retiring_attempt():
    store = make_memory_bucket()
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    assert store.list_sizes(STEP).keys() == {MANIFEST}
    with pytest.raises(NotCommittedError, match="attempt 2 found it unfinished"):
        read_manifest(store, STEP)
    assert read_committed(store) == {}
    assert read_newest_manifest(store) is None
    assert list_steps(store) == [5]


def test_a_commit_before_the_tombstone_wins_in_a_bucket():
    driver = MemoryDriver()
    store = make_memory_bucket(driver)
    upload_arrays(store, 1)

    def overtake(verb, key):
        if verb == "put" and key.endswith(MANIFEST):
            driver.before = lambda verb, key: None
            try_commit(store, 1)

    driver.before = overtake
    retire_uncommitted(store, 5, 2)
    assert find_committer(store) == 1
    assert store.exists(f"{STEP}/arrays.1/x")


def test_a_tombstone_before_the_commit_wins_in_a_bucket():
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
    assert find_committer(store) is None
    save(store, 2)
    assert find_committer(store) == 2


def test_the_next_attempt_completes_a_killed_retirement_in_a_bucket(monkeypatch):
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
    assert find_committer(store) == 3


def kill_after_the_rename(store, patch, before=lambda: None):
    """Kill `retire_uncommitted` right after it renames the directory; `before` runs before the rename."""
    move_tree = store.move_tree

    def killed(source, target):
        before()
        move_tree(source, target)
        raise KilledError

    patch.setattr(store, "move_tree", killed)


def test_a_commit_right_before_the_rename_is_restored_on_disk(local_store, monkeypatch):
    upload_arrays(local_store, 1)
    move_tree = local_store.move_tree

    def overtaken(source, target):
        if source == STEP:
            try_commit(local_store, 1)
        move_tree(source, target)

    monkeypatch.setattr(local_store, "move_tree", overtaken)
    retire_uncommitted(local_store, 5, 2)
    assert find_committer(local_store) == 1
    assert local_store.list_names("checkpoints") == ["5"]
    assert local_store.read(f"{STEP}/arrays.1/x") == b"x"


def test_a_killed_retirement_that_moved_a_manifest_is_undone_on_disk(local_store, monkeypatch):
    upload_arrays(local_store, 1)
    with monkeypatch.context() as patch:
        kill_after_the_rename(local_store, patch, before=lambda: try_commit(local_store, 1))
        with pytest.raises(KilledError):
            retire_uncommitted(local_store, 5, 2)
    assert find_committer(local_store) is None
    finish_retirements(local_store)
    assert find_committer(local_store) == 1
    assert local_store.list_names("checkpoints") == ["5"]
    assert local_store.read(f"{STEP}/arrays.1/x") == b"x"


def test_a_killed_retirement_without_a_manifest_is_completed_on_disk(local_store, monkeypatch):
    upload_arrays(local_store, 1)
    with monkeypatch.context() as patch:
        kill_after_the_rename(local_store, patch)
        with pytest.raises(KilledError):
            retire_uncommitted(local_store, 5, 2)
    with pytest.raises(FileNotFoundError):
        try_commit(local_store, 1)
    finish_retirements(local_store)
    assert local_store.list_names("checkpoints") == []
    save(local_store, 3)
    assert find_committer(local_store) == 3


def test_settling_ignores_steps_without_a_retirement(store):
    save(store, 1)
    store.write("checkpoints/6/arrays.1/x", b"")
    before = store.list_sizes("")
    finish_retirements(store)
    assert store.list_sizes("") == before


# Deletion of committed steps: first the manifest, then the files.


def delete(store, attempt):
    uncommit(store, STEP, attempt)
    assert find_committer(store) is None
    remove_files(store, STEP, attempt)


def test_a_withdrawn_step_is_no_checkpoint_while_its_files_remain(store):
    save(store, 1)
    uncommit(store, STEP, 1)
    assert find_committer(store) is None
    assert store.exists(f"{STEP}/arrays.1/x")
    remove_files(store, STEP, 1)
    assert store.list_names("checkpoints") == []


def test_a_zombie_cannot_commit_a_step_deleted_by_retention(store):
    """The zombie of attempt 1 is about to commit a step that attempt 2 has saved and deleted by retention."""
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    save(store, 2)
    delete(store, 2)
    assert set(store.list_sizes(STEP)) <= {MANIFEST}
    if store.root is None:
        upload_arrays(store, 1)
    with pytest.raises((FileExistsError, FileNotFoundError)):
        try_commit(store, 1)
    assert find_committer(store) is None


@pytest.mark.parametrize("deleted", ["manifest", "files"])
def test_a_zombie_cannot_commit_a_step_that_another_attempt_has_committed_and_deleted(store, deleted):
    """Attempt 1 commits while attempt 2 restores an older step; attempt 2 saves the step too, and 3 deletes it."""
    save(store, 1)
    upload_arrays(store, 2)
    uncommit(store, STEP, 3)
    if deleted == "files":
        remove_files(store, STEP, 3)
    with pytest.raises((FileExistsError, FileNotFoundError)):
        try_commit(store, 2)
    assert find_committer(store) is None


def test_a_tombstone_survives_a_second_deletion(store):
    """Attempts 2, which is superseded meanwhile, and 3 delete the same step; attempt 1 is about to commit it."""
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    save(store, 2)
    uncommit(store, STEP, 2)
    if store.root is None:
        uncommit(store, STEP, 3)
        upload_arrays(store, 1)
    with pytest.raises((FileExistsError, FileNotFoundError)):
        try_commit(store, 1)


def test_a_zombie_does_not_delete_the_arrays_of_a_newer_attempt(store):
    """A process of attempt 2 goes on with its deletion after attempt 3 has saved the step."""
    save(store, 3)
    remove_files(store, STEP, 2)
    assert find_committer(store) == 3
    assert store.read(f"{STEP}/arrays.3/x") == b"xxx"


def test_a_deleted_step_can_be_saved_again(store):
    upload_arrays(store, 1)
    retire_uncommitted(store, 5, 2)
    save(store, 2)
    delete(store, 2)
    if list_steps(store):
        retire_uncommitted(store, 5, 3)
    save(store, 3)
    assert find_committer(store) == 3
    delete(store, 3)
    assert set(store.list_sizes(STEP)) <= {MANIFEST}


def test_remove_files_keeps_the_manifest(store):
    save(store, 1)
    remove_files(store, STEP, 1)
    assert store.list_names(STEP) == [MANIFEST]
    assert find_committer(store) == 1
