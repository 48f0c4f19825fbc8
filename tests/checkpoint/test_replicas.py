"""Copies of parts of the fast tier on other hosts: where they are placed, how they are sent, and what is refused."""

import contextlib
import functools
import io
import json
import os
import re
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from runner.checkpoint.fast_tier import FastTier, ProcessPlace, Replicas, choose_holders, open_fast_tier
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.restore import find_limits
from runner.distributed.agreement import Hosts
from runner.storage import LocalStore
from tests.support.coordinator import MemoryCoordinator


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


FILES = {"part.json": b"{}", "pieces/params.a.0.0": bytes(range(256)) * 9000, "pieces/empty.0": b"", "rows": b"1\n2\n"}


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
            FastTier(tmp_path / str(process)),
            hosts[process],
            [owner for owner, own in enumerate(holders) if process in own],
            "token",
        )
        for process in range(num_processes)
    ]
    for replicas in found:
        replicas.connect([("127.0.0.1", each.port) for each in found], holders, places)
    try:
        yield found
    finally:
        for replicas in found:
            replicas.close()


def write_state(tmp_path: Path, process: int, step: int, fingerprint: str = "f", attempt: int = 1) -> None:
    """Write a part of a state by the fast tier itself."""
    manifest = Manifest(step=step, name=str(step), attempt=attempt, fingerprint=fingerprint)
    FastTier(tmp_path / str(process)).write(manifest, {"a": [([0], np.full(8, process))]}, {"rows": b"1"})


def wait_for_copy(tmp_path: Path, step: int, owner: int = 0, holder: int = 1) -> Path:
    """Return the copy of a part, once its holder has it."""
    path = tmp_path / str(holder) / "copies" / str(owner) / str(step)
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path


def read_values(fast_tier: FastTier, step: int) -> list[int]:
    """Return the values of the array in a part that `write_state` has written."""
    leaf = jax.ShapeDtypeStruct((8,), np.int64, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    arrays, _ = fast_tier.read(step, {"a": leaf})
    return [int(value) for value in arrays["a"]]


def find_missing(found: list[Replicas], last_steps: dict[int, int] | None = None, first_step: int = 0) -> dict:
    """Call `find_missing` on all processes at once."""
    with ThreadPoolExecutor(len(found)) as pool:
        (result, *others) = pool.map(
            lambda each: each.find_missing(lambda *_: True, last_steps or {}, first_step), found
        )
    assert all(each == result for each in others)
    return result


def test_a_part_is_copied_and_comes_back(tmp_path):
    with open_processes(tmp_path) as (first, second):
        for process, replicas in enumerate((first, second)):
            write_part(tmp_path / str(process), 7)
            replicas.send(7)
        assert read_part(wait_for_copy(tmp_path, 7).parent, 7) == FILES
        # The host of process 0 comes back empty.
        wait_for_copy(tmp_path, 7, 1, 0)
        (tmp_path / "0" / "7").rename(tmp_path / "lost")
        assert {name: first.fetch(7, [(1, 0)], name) for name in FILES} == FILES
        with pytest.raises(
            OSError, match=r"rows cannot be .* replica: process 1: .*No such file.*; process 0: .*No such"
        ):
            first.fetch(9, [(1, 0), (0, 0)], "rows")
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
                found[process]._fast_tier.write(Manifest(step=step, name=str(step)), {}, {})
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
    "nothing": ([], {}),
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
        assert find_missing(found) == expected
        tiers = [replicas._fast_tier for replicas in found]
        if expected or not lost:
            assert [tier.list_parts(lambda *_: True, {}) for tier in tiers] == [{7: "f"}] * 3
            # Each has its own part, wherever it was read from.
            assert [read_values(tier, 7) for tier in tiers] == [[process] * 8 for process in range(3)]
        tiers[0].delete_after(7)
        assert tiers[0].list_parts(lambda *_: True, {}) == ({} if 0 in lost else {7: "f"})


def test_hosts_that_have_changed_their_places_use_their_own_copies(tmp_path):
    with open_processes(tmp_path, 3) as found:
        for process in range(3):
            write_state(tmp_path, process, 7)
            # Each host has become the process of which it had copies.
            (tmp_path / str(process) / "copies" / str(process)).mkdir(parents=True)
            (tmp_path / str(process) / "7").rename(tmp_path / str(process) / "copies" / str(process) / "7")
        assert find_missing(found) == {7: [0, 1, 2]}
        assert [read_values(replicas._fast_tier, 7)[0] for replicas in found] == [0, 1, 2]


def test_data_parallel_replicas_need_no_copies(tmp_path):
    with open_processes(tmp_path, 3, blocks="xxx") as found:
        write_state(tmp_path, 0, 7)
        write_state(tmp_path, 1, 9)
        assert find_missing(found) == {7: [1, 2]}, "process 0 alone has the attachments"
        assert [read_values(replicas._fast_tier, 7)[0] for replicas in found] == [0, 0, 0]


def test_parts_of_one_step_with_other_bits_are_not_combined(tmp_path):
    with open_processes(tmp_path) as found:
        write_state(tmp_path, 0, 7, "f")
        write_state(tmp_path, 1, 7, "g")
        write_state(tmp_path, 0, 5, "f")
        (tmp_path / "0" / "copies").mkdir()
        write_state(tmp_path, 1, 5, "f")
        shutil.move(tmp_path / "1" / "5", tmp_path / "0" / "copies" / "1" / "5")
        assert find_missing(found) == {5: [1]}


def test_parts_behind_which_a_later_attempt_has_gone_back_do_not_count(tmp_path):
    with open_processes(tmp_path) as found:
        for step, attempt in ((100, 1), (60, 2)):
            write_state(tmp_path, 1, step, attempt=attempt)
            write_state(tmp_path, 0, step, attempt=attempt)
            shutil.move(tmp_path / "0" / str(step), tmp_path / "1" / "copies" / "0" / str(step))
        assert find_missing(found, {1: 50}) == {60: [0]}
        assert find_missing(found, {1: 50, 2: 50}) == {}


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
    lines = [json.dumps({"attempt": attempt, "event": event, "step": step}) for attempt, event, step in events]
    (tmp_path / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for step in (70, 80):
        store.write(f"checkpoints/{step}/manifest.json", Manifest(name=str(step), step=step).encode())
    store.write("checkpoints/90/arrays.1/x", b"1")  # of a save that was interrupted
    limits, newest = find_limits(store, [70, 80, 90])
    assert (dict(limits), newest) == ({0: 0, 1: 50, 2: 70}, 80)


DAMAGES = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "too large": lambda path: os.truncate(path, 2**28 + 1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("file", ["part.json", "pieces/a.0.0", "rows"])
def test_a_damaged_copy_is_not_restored(file, damage, tmp_path):
    with open_processes(tmp_path) as found:
        for process in (0, 1):
            write_state(tmp_path, process, 7)
        copy = tmp_path / "1" / "copies" / "0" / "7"
        copy.parent.mkdir(parents=True)
        (tmp_path / "0" / "7").rename(copy)
        assert find_missing(found) == {7: [0]}
        fast_tier = found[0]._fast_tier
        assert read_values(fast_tier, 7) == [0] * 8
        damage(copy / file)
        if file == "part.json":
            assert fast_tier.list_parts(lambda *_: True, {}) == {}
        assert find_missing(found) == ({} if file == "part.json" else {7: [0]})
        read = fast_tier.read_attachments if file == "rows" else functools.partial(read_values, fast_tier)
        with pytest.raises((ValueError, OSError)):
            read(7)


PUT = {"token": "token", "kind": "put", "owner": 0, "step": 3, "generation": 0}
GET = {"token": "token", "kind": "get", "owner": 1, "step": 3, "file": "a"}
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
        "an end in the middle": (PUT | {"files": {"a": 5}}, "was closed in the middle of a"),
    }
    | {
        f"{kind} file {name!r}": (request, "cannot contain a file")
        for name in ("../a", "..", ".", "/a", "pieces/../a", "pieces/..", "a/b/c", "a\x00", "", "pieces/")
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
    "an end in the middle": (b'{"size": 3}\nab', "closed in the middle of rows"),
}


@pytest.mark.parametrize(("answer", "reason"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_after_a_bad_answer_the_next_holder_is_asked(answer, reason, tmp_path, monkeypatch):
    with open_processes(tmp_path) as (first, _second):
        write_part(tmp_path / "1" / "copies" / "0", 7)
        request = first.request

        @contextlib.contextmanager
        def give_bad_answer(process, record):
            if process == 1:
                with request(process, record) as stream:
                    yield stream
            else:
                yield io.BytesIO(answer)

        monkeypatch.setattr(first, "request", give_bad_answer)
        assert first.fetch(7, [(0, 0), (1, 0)], "rows") == FILES["rows"]
        with pytest.raises(OSError, match=f"process 0: .*{re.escape(reason)}"):
            first.fetch(7, [(0, 0)], "rows")


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
    open_fast_tier(tmp_path / "0", Hosts.single_process(num_missing=1), {}, num_replicas=1)
    copies = tmp_path / "0" / "copies"
    assert read_part(copies / "2", 6) == read_part(copies / "0", 5) == FILES
    assert read_part(copies / "1", 6) == {"part.json": b"kept"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "3"]
    # Without replicas copies would only take space.
    open_fast_tier(tmp_path / "0", Hosts.single_process(), {})
    assert not copies.exists()
