"""Small files are published whole or not at all."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runner import storage
from runner.errors import InvalidError


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_publish_replaces_a_file_and_leaves_nothing_beside_it(tmp_path):
    for content in (b"first", b"second"):
        storage.publish(tmp_path / "deep" / "x.json", content)
        assert (tmp_path / "deep" / "x.json").read_bytes() == content
    assert names(tmp_path / "deep") == ["x.json"]


def test_a_reader_sees_the_old_content_or_the_new_and_never_a_part(tmp_path):
    path, contents = tmp_path / "x", {b"a" * 200_000, b"b" * 100_000}
    storage.publish(path, b"a" * 200_000)
    seen, stop = set(), threading.Event()

    def read():
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        for content in contents:
            storage.publish(path, content)
    stop.set()
    reader.join()
    assert seen <= contents


def test_publish_new_never_overwrites(tmp_path):
    storage.publish_new(tmp_path / "manifest.json", b"first")
    with pytest.raises(FileExistsError):
        storage.publish_new(tmp_path / "manifest.json", b"second")
    assert (tmp_path / "manifest.json").read_bytes() == b"first"
    assert names(tmp_path) == ["manifest.json"]


def test_only_one_of_many_racing_writers_creates_a_file(tmp_path):
    winners, barrier = [], threading.Barrier(8)

    def race(number):
        barrier.wait()
        try:
            storage.publish_new(tmp_path / "1", str(number).encode())
        except FileExistsError:
            return
        winners.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "1").read_bytes() == str(*winners).encode()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"text"', b"\xff"])
def test_a_file_that_is_not_a_json_object_is_a_value_error(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is the contract, json words the rest
        storage.read_json(tmp_path / "x.json")


def test_json_comes_back_as_it_was_published(tmp_path):
    value = {"loss": 0.1 + 0.2, "shape": [2, 3], "none": None, "text": "é"}
    storage.publish(tmp_path / "x.json", storage.encode_json(value))
    assert storage.read_json(tmp_path / "x.json") == value


def test_torn_lines_are_left_out_and_take_no_other_line_with_them(tmp_path):
    path = tmp_path / "events.jsonl"
    storage.append_line(path, {"n": 1})
    with path.open("ab") as file:
        file.write(b'{"n": 2, "torn": ')
    storage.append_line(path, {"n": 3})
    storage.append_line(path, {"n": 4})
    assert [row["n"] for row in storage.read_lines(path)] == [1, 3, 4]


def test_a_file_that_is_not_there_has_no_lines(tmp_path):
    assert storage.read_lines(tmp_path / "none.jsonl") == []


def test_lines_of_several_processes_never_mix(tmp_path):
    path = tmp_path / "events.jsonl"
    program = (
        "import sys; from pathlib import Path; from runner.storage import append_line\n"
        "for n in range(200): append_line(Path(sys.argv[1]), {'process': sys.argv[2], 'n': n, 'pad': 'x' * 300})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), str(process)]) for process in range(3)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    rows = storage.read_lines(path)
    assert len([line for line in path.read_bytes().split(b"\n") if line]) == len(rows) == 600
    for process in "012":
        assert [row["n"] for row in rows if row["process"] == process] == list(range(200))


def test_crc32c_is_the_castagnoli_one(tmp_path):
    (tmp_path / "x").write_bytes(b"123456789")
    assert storage.crc32c(tmp_path / "x") == "e3069283"


def test_list_files_finds_every_file_by_relative_name(tmp_path):
    for name in ("b", "a/c", "a/b/d"):
        storage.publish(tmp_path / name, b"")
    assert list(storage.list_files(tmp_path)) == ["a/b/d", "a/c", "b"]
    assert storage.list_files(tmp_path / "none") == {}


def test_remove_tree_deletes_what_a_dying_writer_still_adds(tmp_path):
    directory = tmp_path / "900"
    storage.publish(directory / "arrays" / "x", b"")
    stop = threading.Event()

    def keep_writing():
        for number in range(20):
            if stop.is_set():
                return
            try:
                storage.publish(directory / "arrays" / str(number), b"x" * 1000)
            except OSError:
                continue

    writer = threading.Thread(target=keep_writing)
    writer.start()
    storage.remove_tree(directory)
    writer.join()
    storage.remove_tree(directory)
    storage.remove_tree(directory)
    assert not directory.exists()


def test_a_directory_must_be_local_and_no_file(tmp_path):
    assert storage.open_directory("runs/x") == Path.cwd() / "runs" / "x"
    assert storage.open_directory("~/x") == Path.home() / "x"
    with pytest.raises(InvalidError, match="gs:// is not supported yet"):
        storage.open_directory("gs://bucket/x")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidError, match="is a file, needs a directory"):
        storage.open_directory(str(tmp_path / "file"))
