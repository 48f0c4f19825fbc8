"""Copies of parts of the fast tier on other hosts: where they are placed, how they are sent, and what is refused."""

import contextlib
import json
import socket
import time
from pathlib import Path

import pytest

from runner.checkpoint.fast_tier import FastTier, ProcessPlace, Replicas, choose_holders, open_fast_tier
from runner.distributed.agreement import Hosts


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
def open_pair(tmp_path: Path):
    """Give the replicas of two processes, each of which holds copies for the other."""
    pair = [
        Replicas(FastTier(tmp_path / str(process)), process, [1 - process], "token", "127.0.0.1")
        for process in range(2)
    ]
    for process, replicas in enumerate(pair):
        replicas.connect([each.address for each in pair], [1 - process], make_places("ab"))
    try:
        yield pair
    finally:
        for replicas in pair:
            replicas.close()


def wait_for_copy(tmp_path: Path, step: int) -> Path:
    """Return the copy of the part of process 0, once process 1 has it."""
    path = tmp_path / "1" / "copies" / "0" / str(step)
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path


def test_a_part_is_copied_and_comes_back(tmp_path):
    with open_pair(tmp_path) as (first, second):
        write_part(tmp_path / "0", 7)
        first.send(7)
        assert read_part(wait_for_copy(tmp_path, 7).parent, 7) == FILES
        # The host of process 0 comes back empty.
        (tmp_path / "0" / "7").rename(tmp_path / "lost")
        assert first.fetch(7, [(1, 0)]) is None
        assert read_part(tmp_path / "0", 7) == FILES
        assert "there is no such part" in first.fetch(9, [(1, 0)])
        assert "there is no such part" in second.fetch(7, [(0, 1)]), "process 0 holds no copy of process 1"
    assert not list(tmp_path.glob("**/*.tmp"))


def test_only_the_newest_copies_are_kept_and_those_beyond_a_step_are_deleted(tmp_path):
    with open_pair(tmp_path) as (first, second):
        for step in range(1, 5):
            write_part(tmp_path / "0", step)
            first.send(step)
            copy = wait_for_copy(tmp_path, step)
            first.stop_sending()
        assert sorted(path.name for path in copy.parent.iterdir()) == ["3", "4"]
        write_part(tmp_path / "1" / "copies" / "5", 4)  # of a process for which this one is no holder any more
        second.delete_after(3)
        assert [path.name for path in copy.parent.iterdir()] == ["3"]
        assert not (tmp_path / "1" / "copies" / "5").exists()


def test_a_holder_that_is_gone_is_named_once_and_tried_again(tmp_path, capsys):
    with open_pair(tmp_path) as (first, second):
        second.close()
        for step in (1, 2):
            write_part(tmp_path / "0", step)
            first.send(step)
            time.sleep(0.1)
            first.stop_sending()
    lines = capsys.readouterr().err.splitlines()
    assert ["step 1 has no replica on process 1" in line for line in lines] == [True], lines


PUT = {"token": "token", "kind": "put", "owner": 0, "step": 3}
GET = {"token": "token", "kind": "get", "owner": 1, "step": 3}
BAD_REQUESTS = {
    "nothing": (b"", "the connection was closed"),
    "no JSON": (b"\xff\xfe\n", "codec can't decode"),
    "a number": (b"5\n", "the connection was closed"),
    "no token": (PUT | {"token": None, "files": {}}, "the token is not"),
    "another token": (GET | {"token": "tokem"}, "the token is not"),
    "an owner without copies here": (PUT | {"owner": 1, "files": {}}, "holds no copies for process 1"),
    "a step that is no number": (PUT | {"step": "../3", "files": {}}, "invalid literal"),
    "no files": (PUT, "files"),
    "a step that is not there": (GET, "there is no such part"),
    "a huge part": (PUT | {"files": {"a": 10**18}}, "has no room"),
    "a negative size": (PUT | {"files": {"a": -1}}, "has no room"),
    "an end in the middle": (PUT | {"files": {"a": 5}}, "was closed in the middle of a"),
} | {
    f"file {name}": (PUT | {"files": {name: 0}}, "cannot contain a file")
    for name in ("../a", "..", ".", "/a", "pieces/../a", "pieces/..", "a/b/c", "a\x00", "", "pieces/")
}


@pytest.mark.parametrize(("request_", "reason"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_refused_and_leaves_nothing(request_, reason, tmp_path):
    with open_pair(tmp_path) as (_, second):
        line = request_ if isinstance(request_, bytes) else json.dumps(request_).encode() + b"\n"
        with socket.create_connection(second.address, 10) as connection:
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
