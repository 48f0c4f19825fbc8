"""A host on which the write of a save fails: process 0 learns of it at once, and the next save is not affected."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from runner.checkpoint import arrays
from runner.checkpoint.arrays import READ_BACK_SHARE, WRITE_ERRORS, ArrayWriter, WriteResult, find_read_back_problems
from runner.checkpoint.blocks import Blocks
from runner.distributed.agreement import Hosts
from runner.storage import LocalStore
from tests.support.coordinator import MemoryCoordinator, run_on_all_hosts
from tests.support.memory_bucket import make_memory_bucket

DEADLINE_SECONDS = 60.0  # of a save; a message that is missing is waited for this long
FAILING = "fails"  # name of a leaf that the copy or the write of a host refuses


def fail_if_named(function: Any) -> Any:
    def call(*arguments: Any) -> Any:
        if any(FAILING in argument for argument in arguments if isinstance(argument, dict)):
            raise OSError(errno.ENOSPC, "there is no space")
        return function(*arguments)

    return call


class OneRowWriter(ArrayWriter):
    """Writer of one simulated process, which has one element of each leaf."""

    def write_part(self, target: str, blocks: Blocks, deadline: float) -> dict[str, Any]:
        row = self._hosts.process_id
        own = {name: [([row], block[row : row + 1])] for name, ((_, block),) in blocks.items()}
        return super().write_part(target, own, deadline)


def write(writer: ArrayWriter, step: int, fails: bool, error: Exception | None = None) -> Exception | WriteResult:
    """Write one save; return its result, or the error with which it ends on this host."""
    leaves = {"leaf": jnp.arange(3.0)} | ({FAILING: jnp.arange(3.0)} if fails else {})
    finish = writer.start(f"checkpoints/{step}/arrays.1", leaves, error)
    try:
        return finish(DEADLINE_SECONDS)
    except WRITE_ERRORS as caught:
        return caught


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("place", ["before", "copy_to_host", "write_packs"])
def test_every_host_reports_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, failing: int
) -> None:
    if place != "before":
        monkeypatch.setattr(arrays, place, fail_if_named(getattr(arrays, place)))
    store = LocalStore(tmp_path / "run")

    def save_twice(hosts: Hosts) -> list[Exception | WriteResult]:
        writer = OneRowWriter(store, hosts, tmp_path / f"staging.{hosts.process_id}")
        is_failing = hosts.process_id == failing
        error = OSError(errno.ENOSPC, "there is no space") if is_failing and place == "before" else None
        return [write(writer, 1, is_failing and error is None, error), write(writer, 2, False)]

    ends = run_on_all_hosts(MemoryCoordinator(3).hosts(), save_twice)
    assert all("there is no space" in str(first) for first, _ in ends), ends
    assert all(isinstance(second, WriteResult) for _, second in ends)
    assert len(ends[0][1].files) == 6


# What has been written is read back before it is committed.


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def hide(path: Path) -> None:
    """Let a file be on another disk, as if the hosts did not share the directory."""
    path.rename(path.with_name("elsewhere"))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "empty": lambda path: path.write_bytes(b"") and None,
    "halved": halve,
    "flipped": flip,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0") and None,
    "hidden": hide,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["0.json", "0.0.bin", "1.json", "1.0.bin", "2.json", "2.0.bin"])
def test_a_file_that_cannot_be_read_back_fails_the_save(tmp_path: Path, name: str, damage: str) -> None:
    """The damage is done when all parts are durable; the save after it is good."""
    store = LocalStore(tmp_path / "run")
    written = threading.Barrier(3, action=lambda: DAMAGES[damage](tmp_path / "run/checkpoints/1/arrays.1" / name))

    class Writer(OneRowWriter):
        def read_back(self, number: int, *arguments: Any) -> WriteResult:
            if number == 1:
                written.wait()
            return super().read_back(number, *arguments)

    def save_twice(hosts: Hosts) -> list[Exception | WriteResult]:
        writer = Writer(store, hosts, tmp_path / f"staging.{hosts.process_id}")
        return [write(writer, 1, False), write(writer, 2, False)]

    ends = run_on_all_hosts(MemoryCoordinator(3).hosts(), save_twice)
    first, second = ends[0]
    assert isinstance(first, Exception)
    assert f"arrays.1/{name}" in str(first) or name.replace(".0.bin", ".json") in str(first)
    assert "all hosts must share `directory`" in str(first) or "json" in name
    assert isinstance(second, WriteResult)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_elements_that_no_process_has_written_fail_the_save(tmp_path: Path, missing: int) -> None:
    store = LocalStore(tmp_path / "run")

    class Writer(OneRowWriter):
        def write_part(self, target: str, blocks: Blocks, deadline: float) -> dict[str, Any]:
            is_missing = self._hosts.process_id == missing
            return (
                ArrayWriter.write_part(self, target, {}, deadline)
                if is_missing
                else super().write_part(target, blocks, deadline)
            )

    def save(hosts: Hosts) -> Exception | WriteResult:
        return write(Writer(store, hosts, tmp_path / f"staging.{hosts.process_id}"), 1, False)

    ends = run_on_all_hosts(MemoryCoordinator(3).hosts(), save)
    assert all("2 of the 3 elements of leaf" in str(end) for end in ends)


def test_messages_of_saves_do_not_accumulate(tmp_path: Path) -> None:
    store, coordinator = LocalStore(tmp_path / "run"), MemoryCoordinator(3)

    def save_often(hosts: Hosts) -> None:
        writer = OneRowWriter(store, hosts, tmp_path / f"staging.{hosts.process_id}")
        for step in range(1, 20):
            hosts.barrier()
            assert isinstance(write(writer, step, False), WriteResult)

    run_on_all_hosts(coordinator.hosts(), save_often)
    assert len([key for key in coordinator.list_keys() if "save" in key]) <= 3


def test_a_share_of_the_files_in_a_bucket_is_read_in_full(tmp_path: Path) -> None:
    """The service reports the digest of a file that has rotted since; after a while each file is read."""
    bucket = make_memory_bucket()
    writer = ArrayWriter(bucket, Hosts.single_process(), tmp_path / "staging")
    state = {"leaf": jnp.arange(3.0)}
    results = [writer.start(f"checkpoints/{step}/arrays.1", state)(DEADLINE_SECONDS) for step in range(1, 9)]
    assert [result.read_back for result in results] == [False] * 8
    assert writer.start("checkpoints/9/arrays.1", state)(DEADLINE_SECONDS, lambda reader: None).read_back
    found: dict[str, list[int]] = {}
    read = bucket.read
    for number in range(READ_BACK_SHARE):
        names: list[str] = []
        bucket.read = lambda name, names=names: names.append(name) or read(name)  # type: ignore[method-assign]
        assert not list(find_read_back_problems(bucket, "checkpoints/1", "arrays.1/0.json", number, False))
        for name in names:
            found.setdefault(name.rpartition("/")[2], []).append(number)
    assert len(found["0.0.bin"]) == 1


@pytest.mark.parametrize("process", [0, 1, 2])
def test_a_failed_save_deletes_only_its_own_files(tmp_path: Path, process: int) -> None:
    """Names of later attempts and of other processes begin with the same digits."""
    others = [f"arrays.{attempt}/{name}" for attempt in (10, 11, 19, 100) for name in ("0.0.bin", "0.json", "1.json")]
    others += [f"arrays.1/{other}{ending}" for other in (10, 11, 20, 21) for ending in (".0.bin", ".1.bin", ".json")]
    others += [f"arrays.1/{other}.json" for other in {0, 1, 2} - {process}] + ["manifest.json"]
    own = [f"arrays.1/{process}{ending}" for ending in (".0.bin", ".1.bin", ".10.bin", ".json")]
    store = LocalStore(tmp_path / "run")
    for name in (*others, *own):
        store.write(f"checkpoints/7/{name}", b"bits")
    writer = ArrayWriter(store, MemoryCoordinator(3).hosts()[process], tmp_path / "staging")
    writer.discard("checkpoints/7/arrays.1")
    assert sorted(store.list_sizes("checkpoints/7")) == sorted(others)


def test_the_end_of_a_failed_attempt_deletes_no_files_of_a_later_one(tmp_path: Path) -> None:
    """A suspended attempt 1 goes on after attempts 10 to 19 have committed the step that it failed to save."""
    store = LocalStore(tmp_path / "run")
    names = [f"checkpoints/7/arrays.{attempt}/0.0.bin" for attempt in range(10, 20)]
    for name in ("checkpoints/7/arrays.1/1.0.bin", *names):
        store.write(name, b"bits")
    writer = ArrayWriter(store, Hosts.single_process(), tmp_path / "staging")
    writer.discard("checkpoints/7/arrays.1")
    writer.close()
    assert sorted(store.list_sizes("")) == names
