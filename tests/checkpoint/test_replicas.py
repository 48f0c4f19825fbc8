"""Copies of parts of the fast tier on other hosts: where they are placed, how they are sent, and what is refused."""

import contextlib
import io
import json
import os
import re
import shutil
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from runner.checkpoint.fast_tier import FastTier, make_fast_tier
from runner.checkpoint.fingerprint import compute_leaf_digests
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.parts import FastPart, PartDirectory, make_fetch
from runner.checkpoint.replicas import ProcessPlace, Replicas, choose_holders
from runner.checkpoint.restore import find_limits, restore_newest
from runner.distributed.agreement import Hosts
from runner.storage import LocalStore, compute_crc32c
from tests.support.coordinator import MemoryCoordinator
from tests.support.damage import JSON_DAMAGES, flip_bit, list_damages


def make_places(hosts, slices=None, blocks=None):
    """Return places from a letter for each process: its host, its slice, and the blocks of its part."""
    slices, blocks = slices or [None] * len(hosts), blocks or range(len(hosts))
    return [ProcessPlace(*each) for each in zip(slices, hosts, map(str, blocks), strict=True)]


PLACEMENTS = {
    "processes of one host": (make_places("aaa"), 1, [[1], [2], [0]]),
    "two copies on one host": (make_places("aaa"), 2, [[1, 2], [2, 0], [0, 1]]),
    "hosts of unequal size": (make_places("aabbc"), 1, [[2], [3], [4], [4], [0]]),
    "two copies on three hosts": (make_places("aabbc"), 2, [[2, 4], [3, 4], [4, 0], [4, 1], [0, 2]]),
    "slices": (make_places("abcd", "0011"), 1, [[2], [3], [0], [1]]),
    "more copies than other slices": (make_places("abcd", "0011"), 2, [[1, 2], [2, 3], [3, 0], [0, 1]]),
    "no copies": (make_places("abc"), 0, [[], [], []]),
    "data-parallel replicas": (make_places("abc", blocks="xxx"), 1, [[1], [], []]),
    "data-parallel replicas on one host": (make_places("aaa", blocks="xxx"), 1, [[1], [], []]),
    "too few data-parallel replicas": (make_places("abcd", blocks="xyxy"), 2, [[1, 2], [2, 3], [3, 0], [0, 1]]),
    "enough data-parallel replicas": (make_places("abcd", blocks="xyxy"), 1, [[1], [], [], []]),
    "data-parallel replicas of the same host": (make_places("aabb", blocks="xxyy"), 1, [[2], [3], [0], [1]]),
    "data-parallel replicas of the same slice": (make_places("abcd", "0011", "xxyy"), 1, [[2], [3], [0], [1]]),
}


@pytest.mark.parametrize(("places", "count", "holders"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_copies_are_placed_in_other_failure_domains(places, count, holders):
    assert choose_holders(places, count) == holders


FILES = {"part.json": b"{}", "arrays/blocks.0.bin": bytes(range(256)) * 9000, "arrays/empty": b"", "rows": b"1\n2\n"}


PART_FILES = ("part.json", "arrays/blocks.0.bin", "arrays/blocks.json", "rows")  # of a part by `write_state`


def write_part(directory: Path, step: int, files: dict[str, bytes] = FILES) -> None:
    for name, content in files.items():
        path = directory / str(step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_part(directory: Path, step: int) -> dict[str, bytes]:
    top = directory / str(step)
    return {path.relative_to(top).as_posix(): path.read_bytes() for path in top.rglob("*") if path.is_file()}


@contextlib.contextmanager
def open_processes(tmp_path: Path, num_processes: int = 2, blocks=None):
    """Give the replicas of processes on different hosts, each of which sends its parts to the next one."""
    coordinator = MemoryCoordinator(num_processes)
    hosts = coordinator.hosts()
    places = make_places("abcdef"[:num_processes], blocks=blocks)
    holders = choose_holders(places, 1)
    found = [
        Replicas(
            PartDirectory(tmp_path / str(process)),
            hosts[process],
            [owner for owner, own in enumerate(holders) if process in own],
            "token",
        )
        for process in range(num_processes)
    ]
    with ThreadPoolExecutor(num_processes) as pool:
        list(pool.map(lambda each, own, place: each.connect("127.0.0.1", own, place), found, holders, places))
    try:
        yield found
    finally:
        for replicas in found:
            replicas.close()


ABSTRACT = {"a": jax.ShapeDtypeStruct((8,), np.int32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))}


def write_state(
    tmp_path: Path, process: int, step: int, fingerprint: str = "f", attempt: int = 1, is_corrupt: bool = False
) -> None:
    """Write a part of a state by the fast tier itself; if it `is_corrupt`, from memory that was wrong by then."""
    block = np.full(8, 10 * step + process, np.int32)
    digest = compute_leaf_digests({"a": jax.device_put(block, ABSTRACT["a"].sharding)})["a"]
    block = block + is_corrupt
    leaves = {"a": {"shape": [8], "dtype": "int32", "digest": digest}}
    manifest = Manifest(step=step, name=str(step), attempt=attempt, fingerprint=fingerprint, leaves=leaves)
    PartDirectory(tmp_path / str(process)).write(manifest, {"a": [([0], block)]}, {"rows": b"1"})


def wait_for_copy(tmp_path: Path, step: int, owner: int = 0, holder: int = 1) -> Path:
    """Return the copy of a part, once its holder has it."""
    path = tmp_path / str(holder) / "copies" / str(owner) / str(step)
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path


def list_parts(
    found: list[Replicas], last_steps: dict[int, int] | None = None, first_step: int = 0
) -> list[dict[int, FastPart]]:
    """Call `list_parts` on all processes at once."""
    with ThreadPoolExecutor(len(found)) as pool:
        return list(pool.map(lambda each: each.list_parts(lambda *_: True, last_steps or {}, first_step), found))


def find_complete(parts: list[dict[int, FastPart]]) -> dict[int, list[int]]:
    """Return the processes that lack their own part, by step of which all have a part."""
    steps = set.intersection(*({(step, part.manifest.fingerprint) for step, part in own.items()} for own in parts))
    return {step: [process for process, own in enumerate(parts) if own[step].is_fetched] for step, _ in steps}


def read_values(parts: list[dict[int, FastPart]], step: int) -> list[int]:
    """Return the first value of the array in each process's part, which `write_state` has written."""
    return [int(own[step].read(ABSTRACT)["a"][0]) for own in parts]


def restore(tmp_path: Path, found: list[Replicas], with_replicas: bool = True) -> tuple[list, list[dict]]:
    """Return what `restore_newest` returns on each process, and the events that process 0 writes."""
    events: list[dict] = []

    def append(event, step, **details):
        events.append({"event": event, "step": step} | details)

    def restore_one(replicas: Replicas):
        attempt = SimpleNamespace(
            store=LocalStore(tmp_path / "run"),
            hosts=replicas._hosts,
            number=2,
            fence=SimpleNamespace(check=lambda: None),
            events=SimpleNamespace(append=append),
        )
        fast_tier = FastTier(replicas._parts, replicas._hosts, replicas if with_replicas else None)
        return restore_newest(attempt, fast_tier, ABSTRACT, lambda *_: True)

    with ThreadPoolExecutor(len(found)) as pool:
        return list(pool.map(restore_one, found)), events


def test_a_part_is_copied_and_comes_back(tmp_path):
    with open_processes(tmp_path) as (first, second):
        for process, replicas in enumerate((first, second)):
            write_part(tmp_path / str(process), 7)
            replicas.send(7)
        assert read_part(wait_for_copy(tmp_path, 7).parent, 7) == FILES
        # The host of process 0 comes back empty.
        wait_for_copy(tmp_path, 7, 1, 0)
        (tmp_path / "0" / "7").rename(tmp_path / "lost")
        assert {name: first.fetch(7, 1, 0, name, 0, None) for name in FILES} == FILES
        assert first.fetch(7, 1, 0, "arrays/blocks.0.bin", 3, 9) == bytes(range(3, 9))
        with pytest.raises(ValueError, match="No such file"):
            first.fetch(9, 1, 0, "rows", 0, None)
    assert not list(tmp_path.glob("**/*.tmp"))


def test_a_slow_network_has_copies_of_the_same_steps_everywhere(tmp_path, monkeypatch):
    request, sent_steps, written_steps = Replicas.request, set(), [0]

    def send_slowly(replicas, process, record):
        """Send a part after two more steps have been written."""
        sent_steps.add(record["step"])
        while written_steps[-1] < min(record["step"] + 2, 29):
            time.sleep(0.01)
        return request(replicas, process, record)

    monkeypatch.setattr(Replicas, "request", send_slowly)
    with open_processes(tmp_path, 3) as found:
        for step in range(1, 30):
            for process in (2, 0, 1):
                found[process]._parts.write(Manifest(step=step, name=str(step)), {}, {})
                found[process].send(step)
                time.sleep(0.02)
            written_steps.append(step)
        for process in range(3):
            wait_for_copy(tmp_path, 29, process, (process + 1) % 3)
        copies = [tmp_path / str((process + 1) % 3) / "copies" / str(process) for process in range(3)]
        # An older one may be about to be deleted.
        sent = [sorted(int(path.name) for path in each.iterdir() if path.name.isdecimal())[-2:] for each in copies]
        assert sent[0] == sent[1] == sent[2]
        assert len(sent_steps) < 20
        # What was sent is there to be restored, although newer parts have come since.
        assert all((tmp_path / str(process) / str(sent[0][0])).exists() for process in range(3))


def test_copies_beyond_a_step_and_those_of_other_processes_are_deleted(tmp_path):
    with open_processes(tmp_path) as (_, second):
        for step in (3, 4):
            write_part(tmp_path / "1" / "copies" / "0", step)
        write_part(tmp_path / "1" / "copies" / "5", 4)
        second.delete_after(3)
        assert [path.name for path in (tmp_path / "1" / "copies" / "0").iterdir()] == ["3"]
        assert not (tmp_path / "1" / "copies" / "5").exists()


def test_a_copy_of_a_step_that_was_given_up_is_refused(tmp_path):
    with open_processes(tmp_path) as (first, second):
        files = {"a": 1}
        put = {"kind": "put", "owner": 0, "step": 3, "files": files, "generation": 0}
        with first.request(1, put) as stream:
            # The step is given up, and its copies are deleted, while the part arrives.
            second.begin_generation()
            second.delete_after(2)
            stream.write(b"x")
            stream.flush()
            assert "given up" in json.loads(stream.readline())["error"]
    assert not list((tmp_path / "1").glob("copies/0/*"))


def test_a_holder_that_is_gone_is_named_at_the_second_failure(tmp_path, capsys):
    with open_processes(tmp_path) as (first, second):
        second.close()
        for step in (1, 2, 3, 4):
            first.send_to_holder(1, step, 0)
            assert ("has no replica on process 1" in capsys.readouterr().err) == (step == 2)


LOST = {
    "nothing": ([], {7: []}),
    "one process": ([1], {7: [1]}),
    "process 0": ([0], {7: [0]}),
    "a process and its holder": ([1, 2], {}),
}


@pytest.mark.parametrize(("lost", "expected"), LOST.values(), ids=LOST)
def test_a_step_is_completed_if_each_process_can_get_its_part(lost, expected, tmp_path):
    with open_processes(tmp_path, 3) as found:
        for process in range(3):
            write_state(tmp_path, process, 7)
            found[process].send(7)
        for process in range(3):
            wait_for_copy(tmp_path, 7, process, (process + 1) % 3)
        for process in lost:
            shutil.rmtree(tmp_path / str(process))
        parts = list_parts(found)
        assert find_complete(parts) == expected
        if expected:
            # Each has its own part, wherever it was read from.
            assert read_values(parts, 7) == [70, 71, 72]


def test_hosts_that_have_changed_their_places_use_their_own_copies(tmp_path):
    with open_processes(tmp_path, 3) as found:
        for process in range(3):
            write_state(tmp_path, process, 7)
            # Each host has become the process of which it had copies.
            (tmp_path / str(process) / "copies" / str(process)).mkdir(parents=True)
            (tmp_path / str(process) / "7").rename(tmp_path / str(process) / "copies" / str(process) / "7")
        parts = list_parts(found)
        assert find_complete(parts) == {7: [0, 1, 2]}
        assert read_values(parts, 7) == [70, 71, 72]


def test_data_parallel_replicas_need_no_copies(tmp_path):
    with open_processes(tmp_path, 3, blocks="xxx") as found:
        write_state(tmp_path, 0, 7)
        write_state(tmp_path, 1, 9)
        parts = list_parts(found)
        assert find_complete(parts) == {7: [1, 2]}, "process 0 alone has the attachments"
        assert read_values(parts, 7) == [70, 70, 70]


def test_data_parallel_replicas_replace_a_damaged_piece_of_process_0(tmp_path):
    with open_processes(tmp_path, 2, blocks="xx") as found:
        write_state(tmp_path, 0, 7)
        shutil.copytree(tmp_path / "0" / "7", tmp_path / "1" / "7")
        flip_bit(tmp_path / "0" / "7" / "arrays" / "blocks.0.bin")
        parts = list_parts(found)
        assert find_complete(parts) == {7: []}
        assert read_values(parts, 7) == [70, 70]
        assert [own[7].is_fetched for own in parts] == [True, False]


def test_parts_of_one_step_with_other_bits_are_not_combined(tmp_path):
    with open_processes(tmp_path) as found:
        write_state(tmp_path, 0, 7, "f")
        write_state(tmp_path, 1, 7, "g")
        write_state(tmp_path, 0, 5, "f")
        (tmp_path / "0" / "copies").mkdir()
        write_state(tmp_path, 1, 5, "f")
        shutil.move(tmp_path / "1" / "5", tmp_path / "0" / "copies" / "1" / "5")
        assert find_complete(list_parts(found)) == {5: [1]}


def test_parts_behind_which_a_later_attempt_has_gone_back_do_not_count(tmp_path):
    with open_processes(tmp_path) as found:
        for step, attempt in ((100, 1), (60, 2)):
            write_state(tmp_path, 1, step, attempt=attempt)
            write_state(tmp_path, 0, step, attempt=attempt)
            shutil.move(tmp_path / "0" / str(step), tmp_path / "1" / "copies" / "0" / str(step))
        assert find_complete(list_parts(found, {1: 50})) == {60: [0]}
        assert find_complete(list_parts(found, {1: 50, 2: 50})) == {}


def write_ledger(directory: Path, events: list[tuple[int, str, int]]) -> None:
    """Write `events.jsonl` from (attempt, event, step) of each event."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"attempt": attempt, "event": event, "step": step}) for attempt, event, step in events]
    (directory / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("with_replicas", [True, False], ids=["replicas", "own_parts"])
def test_a_restore_ignores_parts_behind_which_a_later_attempt_has_gone_back(with_replicas, tmp_path):
    write_ledger(tmp_path / "run", [(1, "init", 0), (2, "restore", 50)])
    with open_processes(tmp_path) as found:
        for process in (0, 1):
            for step, attempt in ((60, 2), (100, 1)):
                write_state(tmp_path, process, step, attempt=attempt)
        restored, _ = restore(tmp_path, found, with_replicas)
    assert [each.manifest.step for each in restored] == [60, 60]


def test_the_last_steps_of_attempts_follow_from_the_ledger(tmp_path):
    store = LocalStore(tmp_path)
    events = [
        (1, "init", 0),
        (1, "save", 100),
        (2, "restore", 90),
        (2, "load", 50),
        (3, "restore", 70),
        (3, "commit", 80),
    ]
    write_ledger(tmp_path, events)
    for step in (70, 80):
        store.write(f"checkpoints/{step}/manifest.json", Manifest(name=str(step), step=step).encode())
    store.write("checkpoints/90/arrays.1/x", b"1")  # of a save that was interrupted
    limits, newest = find_limits(store, [70, 80, 90])
    assert (dict(limits), newest) == ({0: 0, 1: 50, 2: 70}, 80)


def change_leaf_digest(path: Path) -> None:
    """Change the digest of a leaf, with which only this process would compare the restored bits."""
    content, count = re.subn(r'"digest": "\w{16}"', '"digest": "0123456789abcdef"', path.read_text())
    assert count == 1
    path.write_text(content)


FILE_DAMAGES = list_damages(Path(__file__)) | {
    "flip bit": flip_bit,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
}
DAMAGES = {
    (place, name): damage
    for place, damages in {
        "part.json": FILE_DAMAGES | JSON_DAMAGES | {"other leaf digest": change_leaf_digest},
        "arrays/blocks.0.bin": FILE_DAMAGES,
        "arrays/blocks.json": FILE_DAMAGES | JSON_DAMAGES,
        "rows": FILE_DAMAGES,
        "arrays": list_damages(Path(__file__).parent),
        "": list_damages(Path(__file__).parent),
    }.items()
    for name, damage in damages.items()
    # Neither is damage: of files with a table, nothing behind the recorded bytes is read.
    if name != "move behind link" and (place not in ("arrays/blocks.0.bin", "rows") or name != "longer")
}
# Every place daily, and every kind of damage at one place at least.
DAILY = {
    *((place, "delete") for place in (*PART_FILES, "arrays", "")),
    *((place, "flip bit") for place in PART_FILES),
    ("part.json", "other leaf digest"),
    ("part.json", "torn"),
    ("arrays/blocks.0.bin", "replace by link loop"),
    ("rows", "change file type"),
}
# By the parts and copies of step 7 that are damaged: the restored step, and the processes that read from a replica.
DAMAGED_PARTS = {
    ("0/7",): (7, [0]),
    ("1/7",): (7, [1]),
    ("0/7", "1/7"): (7, [0, 1]),
    ("1/copies/0/7",): (7, []),
    ("0/7", "1/copies/0/7"): (5, []),
}


def write_states_with_copies(tmp_path: Path) -> None:
    """Write the parts of two processes at steps 5 and 7, and a copy of each on the other process."""
    for process in (0, 1):
        for step in (5, 7):
            write_state(tmp_path, process, step)
            copy = tmp_path / str(1 - process) / "copies" / str(process) / str(step)
            shutil.copytree(tmp_path / str(process) / str(step), copy)


@pytest.mark.daily(5)
@pytest.mark.parametrize(
    ("place", "name"),
    [pytest.param(*case, marks=[] if case in DAILY else [pytest.mark.soak]) for case in DAMAGES],
)
def test_a_damaged_file_is_read_from_a_replica_if_it_is_intact_there(place, name, tmp_path, capsys):
    for number, (parts, (step, fetched)) in enumerate(DAMAGED_PARTS.items()):
        base = tmp_path / str(number)
        with open_processes(base) as found:
            write_states_with_copies(base)
            for part in parts:
                DAMAGES[place, name](base / part / place)
            restored, events = restore(base, found)
        assert [each.manifest.step for each in restored] == [step] * 2
        assert [list(each.fetched) for each in restored] == [fetched] * 2
        assert [int(each.state["a"][0]) for each in restored] == [10 * step, 10 * step + 1]
        assert [each.attachments for each in restored] == [{"rows": b"1"}] * 2
        # A part without its `part.json` is lost, and one that is lost is not reported.
        is_listed = place not in ("part.json", "")
        assert [event["rejected"] for event in events] == [7] * (step == 5 and is_listed)
        warnings = re.findall(r"process (\d): [12] files of step 7 .* were damaged", capsys.readouterr().err)
        assert sorted(map(int, warnings)) == fetched * is_listed


# By the processes whose part of step 7 was corrupt when it was written, of two that have the same blocks: the restored
# step, and the processes that read it from the other one.
CORRUPT_PARTS = {(0,): (7, [0]), (1,): (7, [1]), (0, 1): (5, [])}


@pytest.mark.parametrize("corrupt", CORRUPT_PARTS)
def test_a_part_of_corrupt_memory_is_read_from_a_process_with_the_same_blocks(corrupt, tmp_path, capsys):
    with open_processes(tmp_path, 2, blocks="xx") as found:
        for process in (0, 1):
            for step in (5, 7):
                # All parts hold the blocks of process 0.
                write_state(tmp_path / "made", 0, step, is_corrupt=step == 7 and process in corrupt)
                shutil.move(tmp_path / "made" / "0" / str(step), tmp_path / str(process) / str(step))
        restored, events = restore(tmp_path, found)
    step, fetched = CORRUPT_PARTS[corrupt]
    assert [each.manifest.step for each in restored] == [step] * 2
    assert [int(each.state["a"][0]) for each in restored] == [10 * step] * 2
    assert list(restored[0].fetched) == fetched
    assert [event["rejected"] for event in events] == [7] * (step == 5)
    assert "the bits of a are not those that were saved" in capsys.readouterr().err


def test_any_flipped_bit_of_a_part_is_found(tmp_path):
    write_state(tmp_path, 0, 7)
    path = tmp_path / "0" / "7" / "part.json"
    content = path.read_bytes()
    intact = FastPart(7, [(None, make_fetch(LocalStore(path.parent)))])
    num_found = 0
    for place in range(len(content)):
        damaged = bytes([*content[:place], content[place] ^ 1, *content[place + 1 :]])
        try:
            part = FastPart(7, [(None, lambda *_, damaged=damaged: damaged)])
        except ValueError:
            num_found += 1
        else:
            assert part.manifest == intact.manifest
    assert num_found > 0.9 * len(content)


def test_a_part_of_an_earlier_version_is_read(tmp_path):
    write_state(tmp_path, 0, 7)
    path = tmp_path / "0" / "7" / "part.json"
    record = json.loads(path.read_bytes())
    content = (path.parent / "arrays" / "blocks.0.bin").read_bytes()
    shutil.rmtree(path.parent / "arrays")
    pieces = {"pieces/a.0.0": content[:12], "pieces/a.0.1": content[12:]}
    (path.parent / "pieces").mkdir()
    for name, piece in pieces.items():
        (path.parent / name).write_bytes(piece)
    record["shards"] = {"a": [{"start": [0], "shape": [8], "pieces": list(pieces)}]}
    record["files"] = {name: [len(piece), compute_crc32c(piece)] for name, piece in pieces.items()}
    record["format"] = 1
    del record["digest"], record["indexes"]
    path.write_text(json.dumps(record))
    part = PartDirectory(tmp_path / "0").list_parts(lambda *_: True, {})[7]
    assert read_values([{7: part}], 7) == [70]
    assert part.read_attachments() == {"rows": b"1"}


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_a_restore_reads_each_file_once(lost, tmp_path, monkeypatch):
    files, fetch = Counter(), Replicas.fetch
    read = {name: getattr(LocalStore, name) for name in ("read", "read_range")}

    def count_read(method):
        def count(store, name, *arguments):
            files[f"{store.root.relative_to(tmp_path)}/{name}"] += 1
            return read[method](store, name, *arguments)

        return count

    def count_fetch(replicas, step, holder, owner, name, *arguments):
        files[f"{holder}/copies/{owner}/{step}/{name} over the network"] += 1
        return fetch(replicas, step, holder, owner, name, *arguments)

    with open_processes(tmp_path) as found:
        write_states_with_copies(tmp_path)
        for step in (5, 7):
            shutil.rmtree(tmp_path / str(lost) / str(step), ignore_errors=True)
        for method in read:
            monkeypatch.setattr(LocalStore, method, count_read(method))
        monkeypatch.setattr(Replicas, "fetch", count_fetch)
        restored, _ = restore(tmp_path, found)
    assert [each.manifest.step for each in restored] == [7, 7]
    assert set(files.values()) == {1}
    for process in (0, 1):
        own = f"{1 - lost}/copies/{lost}/7/{{}} over the network" if process == lost else f"{process}/7/{{}}"
        assert all(files[own.format(name)] for name in PART_FILES)


PUT = {"token": "token", "kind": "put", "owner": 0, "step": 3, "generation": 0}
GET = {"token": "token", "kind": "get", "owner": 1, "step": 3, "file": "a", "begin": 0, "end": None}
BAD_REQUESTS = (
    {
        "nothing": (b"", "the token is not"),
        "no token": (b"\xff\xfe\n", "the token is not"),
        "no request": (b"token\n", "the connection was closed"),
        "no JSON": (b"token\n\xff\xfe\n", "codec can't decode"),
        "a number": (b"token\n5\n", "the connection was closed"),
        "a deep request": (b"token\n" + b"[" * 100_000 + b"\n", "recursion"),
        "files that are no table": (PUT | {"files": [1]}, "attribute"),
        "another token": (GET | {"token": "tokem"}, "the token is not"),
        "an owner without copies here": (PUT | {"owner": 1, "files": {}}, "holds no copies for process 1"),
        "a step that is no number": (PUT | {"step": "../3", "files": {}}, "invalid literal"),
        "no files": (PUT, "files"),
        "a step that is not there": (GET, "No such file"),
        "a file that is not named": ({key: GET[key] for key in GET if key != "file"}, "file"),
        "a huge part": (PUT | {"files": {"a": 10**18}}, "has no room"),
        "a negative size": (PUT | {"files": {"a": -1}}, "has no room"),
        "an end in the middle": (PUT | {"files": {"a": 5}}, "bytes are missing at the end"),
    }
    | {
        f"{kind} file {name!r}": (request, "cannot contain a file")
        for name in ("../a", "..", ".", "/a", "arrays/../a", "arrays/..", "a/b/c", "a\x00", "", "arrays/")
        for kind, request in (("put", PUT | {"files": {name: 0}}), ("get", GET | {"file": name}))
    }
    | {f"get file {name!r}": (GET | {"file": name}, "cannot contain a file") for name in (None, 1, ["a"], {})}
)


BAD_ANSWERS = {
    "nothing": (b"", "the connection was closed"),
    "no JSON": (b"x\n", "Expecting value"),
    "no size": (b"{}\n", "size"),
    "a size that is no number": (b'{"size": []}\n', "int()"),
    "a negative size": (b'{"size": -1}\n', "cannot have -1 bytes"),
    "a huge size": (b'{"size": 1000000000000}\n', "cannot have 1,000,000,000,000 bytes"),
    "an end in the middle": (b'{"size": 3}\nab', "closed in the middle of"),
}


@pytest.mark.daily(3)
@pytest.mark.parametrize(("answer", "reason"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_after_a_bad_answer_the_next_holder_is_asked(answer, reason, tmp_path, monkeypatch):
    with open_processes(tmp_path, 3) as found:
        write_state(tmp_path, 1, 7)
        for holder in (0, 2):
            shutil.copytree(tmp_path / "1" / "7", tmp_path / str(holder) / "copies" / "1" / "7")
        shutil.rmtree(tmp_path / "1" / "7")
        for process in (0, 2):
            write_state(tmp_path, process, 7)
        request = Replicas.request

        @contextlib.contextmanager
        def give_bad_answer(replicas, process, record):
            if process in bad:
                yield io.BytesIO(answer)
            else:
                with request(replicas, process, record) as stream:
                    yield stream

        monkeypatch.setattr(Replicas, "request", give_bad_answer)
        bad = {2}
        parts = list_parts(found)
        assert read_values(parts, 7) == [70, 71, 72]
        assert re.match(f"process 2: .*{re.escape(reason)}", parts[1][7].problems[0])
        bad = {0, 2}
        with pytest.raises(ValueError, match=f"process 2: .*{re.escape(reason)}.*; process 0: "):
            parts[1][7].read(ABSTRACT)


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2), (0, 4), (5, None), (10**30, 10**31), ("x", 2), (0, [])])
def test_a_range_outside_of_a_file_is_refused(begin, end, tmp_path):
    write_part(tmp_path / "1" / "copies" / "0", 7, {"rows": b"123"})
    with open_processes(tmp_path) as (first, _), pytest.raises(ValueError, match=r"has 3 bytes, not|invalid|int\(\)"):
        first.fetch(7, 1, 0, "rows", begin, end)


@pytest.mark.daily(12)
@pytest.mark.parametrize(("request_", "reason"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_refused_and_leaves_nothing(request_, reason, tmp_path):
    with open_processes(tmp_path) as (_, second):
        line = request_
        if not isinstance(request_, bytes):
            record = dict(request_)
            line = str(record.pop("token")).encode() + b"\n" + json.dumps(record).encode() + b"\n"
        with socket.create_connection(("127.0.0.1", second.port), 10) as connection:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            answer = json.loads(connection.makefile("rb").read())
        assert reason in answer["error"]
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.suffix == ".tmp"] == []


def test_a_host_offers_the_parts_that_it_had_under_another_number(tmp_path):
    former = tmp_path / "2"
    write_part(former, 6)
    write_part(former / "copies" / "1", 6)
    write_part(former / "copies" / "0", 5)
    (former / "host").write_text(socket.gethostname())
    write_part(tmp_path / "0" / "copies" / "1", 6, {"part.json": b"kept"})
    write_part(tmp_path / "3", 6)
    (tmp_path / "3" / "host").write_text("another host on the same disk")
    make_fast_tier(tmp_path / "0", Hosts.single_process(num_missing=1), {}, num_replicas=1)
    copies = tmp_path / "0" / "copies"
    assert read_part(copies / "2", 6) == read_part(copies / "0", 5) == FILES
    assert read_part(copies / "1", 6) == {"part.json": b"kept"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "3"]
    # Without replicas copies would only take space.
    make_fast_tier(tmp_path / "0", Hosts.single_process(), {})
    assert not copies.exists()


def test_a_pipe_in_the_place_of_the_file_with_the_host_keeps_no_start_waiting(tmp_path):
    for process in ("0", "1"):
        (tmp_path / process).mkdir()
        os.mkfifo(tmp_path / process / "host")
    arguments = (tmp_path / "0", Hosts.single_process(), {})
    thread = threading.Thread(target=make_fast_tier, args=arguments, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert (tmp_path / "0" / "host").read_text() == socket.gethostname()
    assert (tmp_path / "1" / "host").exists()
