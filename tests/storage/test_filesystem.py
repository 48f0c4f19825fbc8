"""File systems that lack calls: what is refused, what is done without, and that one of several writers succeeds."""

import errno
import io
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runner.attempts.environment import FileSystem, probe_file_system
from runner.data.readers import publish_once
from runner.storage import ABSENT, DiskError, LocalStore, WrongKindError, append_line, create_file, local, read_log
from runner.storage.local import take_turns
from runner.storage.store import fsync, retry_stale
from tests.support.missing_calls import ERRORS, make_variables, take_calls_away
from tests.support.tokenise_inputs import make_tokenise_job, write_text_files


@pytest.fixture(params=ERRORS, ids=errno.errorcode.get)
def code(request, monkeypatch):
    take_calls_away(monkeypatch, request.param)
    return request.param


def test_a_disk_of_this_machine_has_all_calls(tmp_path):
    assert probe_file_system(tmp_path / "new" / "run") == FileSystem(True, True, True)
    assert os.listdir(tmp_path / "new" / "run") == []


def test_missing_calls_are_found_whatever_their_error(code, tmp_path):
    found = probe_file_system(tmp_path / "run")
    assert found.list_missing() == ["hard links", "locks", "flushes of directories"]
    assert os.listdir(tmp_path / "run") == []


def test_a_store_works_without_the_missing_calls(code, tmp_path):
    store = LocalStore(tmp_path / "run")
    version = store.write_if("deep/name", b"first", ABSENT)
    with pytest.raises(FileExistsError):
        create_file(store, "deep/name", b"second")
    assert store.read_versioned("deep/name") == (b"first", version)
    second = store.write_if("deep/name", b"second", version)
    with pytest.raises(FileExistsError):
        store.write_if("deep/name", b"third", version)
    assert store.read_versioned("deep/name") == (b"second", second)
    append_line(tmp_path / "run" / "log.jsonl", b'{"n": 1}\n', is_durable=True)
    append_line(tmp_path / "run" / "log.jsonl", b'{"n": 2}\n')
    assert [row["n"] for row in read_log(store, "log")] == [1, 2]
    publish_once(tmp_path / "run" / "made", lambda: [b"made"], lambda: (tmp_path / "run" / "made").exists())
    store.move_tree("deep", "deeper")
    assert store.list_sizes("") == {"deeper/name": 6, "log.jsonl": 18, "made": 4}, "nothing else is left"


def test_a_corpus_is_made_without_the_missing_calls(tmp_path, monkeypatch):
    source = write_text_files(tmp_path / "text", ["one document", "another"])
    make_tokenise_job(tmp_path / "whole", **{"config.source": source})()
    take_calls_away(monkeypatch)
    make_tokenise_job(tmp_path / "corpus", **{"config.source": source})()
    whole, corpus = (LocalStore(tmp_path / name / "corpus") for name in ("whole", "corpus"))
    names = list(whole.list_sizes(""))
    assert list(corpus.list_sizes("")) == names
    assert all(corpus.read(name) == whole.read(name) for name in names if name.endswith(".bin"))


@pytest.mark.parametrize(
    ("call", "what"),
    [("excl", "create a file with O_EXCL"), ("fsyncfile", "flush a file"), ("rename", "rename a directory")],
)
def test_a_file_system_without_a_needed_call_is_refused(call, what, tmp_path):
    program = "import sys, pathlib\nfrom runner.attempts.environment import probe_file_system\n"
    program += "try: probe_file_system(pathlib.Path(sys.argv[1]))\nexcept Exception as e: print(type(e).__name__, e)"
    variables = os.environ | make_variables(tmp_path, call)
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    output = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    assert output.startswith(f"InvalidError {tmp_path}/run: its file system cannot {what}")
    assert os.listdir(tmp_path / "run") == []


@pytest.mark.parametrize("name", ["run", "group/run"])
def test_a_directory_that_no_start_can_make_is_invalid(name):
    with pytest.raises(WrongKindError, match="/proc takes no new directories"):
        probe_file_system(Path("/proc", name))


def test_a_failed_disk_is_not_taken_for_one_that_lacks_a_call(tmp_path, monkeypatch):
    take_calls_away(monkeypatch, errno.EIO)
    with pytest.raises(DiskError):
        probe_file_system(tmp_path / "run")
    with pytest.raises(OSError, match="Input/output error"):
        fsync(tmp_path)
    with pytest.raises(DiskError):
        create_file(LocalStore(tmp_path), "name", b"content")


def test_one_of_many_writers_creates_a_file_without_links(tmp_path, monkeypatch):
    take_calls_away(monkeypatch)
    monkeypatch.setattr(local, "_POLL_SECONDS", 0.001)
    store = LocalStore(tmp_path)

    def create(name, writer):
        try:
            create_file(store, name, f"{writer}".encode() * 100)
        except FileExistsError:
            return None
        return writer

    with ThreadPoolExecutor(8) as pool:
        for name in map(str, range(20)):
            found = list(pool.map(create, [name] * 8, range(8)))
            winners = [writer for writer in found if writer is not None]
            assert len(winners) == 1
            assert store.read(name) == f"{winners[0]}".encode() * 100
    assert sorted(os.listdir(tmp_path), key=int) == [f"{number}" for number in range(20)]


def test_writers_that_replace_a_file_take_turns_without_locks(tmp_path, monkeypatch):
    take_calls_away(monkeypatch)
    monkeypatch.setattr(local, "_POLL_SECONDS", 0.001)
    inside, most = [], []

    def enter(_):
        with take_turns(tmp_path / "name"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.002)
            inside.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(12)))
    assert most == [1] * 12


def test_the_claim_of_a_killed_writer_is_taken_over(tmp_path, monkeypatch):
    take_calls_away(monkeypatch)
    monkeypatch.setattr(local, "_CLAIM_SECONDS", 0.1)
    store = LocalStore(tmp_path)
    for content in (b"", b"0123"):  # killed before and after it wrote its id
        (tmp_path / ".name.claim").write_bytes(content)
        create_file(store, "name", b"content")
        assert os.listdir(tmp_path) == ["name"]
        store.remove("name")


def test_a_writer_that_lost_its_claim_creates_nothing(tmp_path, monkeypatch):
    """It was suspended, and another process has taken the claim over meanwhile."""
    take_calls_away(monkeypatch)
    lexists = os.path.lexists

    def overtaken(path):
        (tmp_path / ".name.claim").write_bytes(b"of another")
        return lexists(path)

    monkeypatch.setattr(os.path, "lexists", overtaken)
    with pytest.raises(FileExistsError):
        create_file(LocalStore(tmp_path), "name", b"content")
    assert os.listdir(tmp_path) == [".name.claim"]


@pytest.mark.parametrize("num_failures", [1, 4])
def test_a_stale_handle_is_opened_again(num_failures, tmp_path, monkeypatch):
    (tmp_path / "name").write_bytes(b"content")
    opened, left = os.open, [num_failures]

    def fail(path, *arguments, **options):
        if left[0] and str(path).endswith("name"):
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", fail)
    assert LocalStore(tmp_path).read("name") == b"content"
    left[0] = num_failures
    append_line(tmp_path / "name", b"line\n")
    assert (tmp_path / "name").read_bytes() == b"content\nline\n"


def test_a_handle_that_stays_stale_is_an_error(tmp_path):
    tries = []

    def act():
        tries.append(1)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with pytest.raises(OSError, match="Stale"):
        retry_stale(act)
    assert len(tries) == 5


@pytest.mark.parametrize("every", [2, 3, 7])
def test_lines_are_read_to_the_end_although_handles_go_stale(every, tmp_path, monkeypatch):
    lines = [b"%05d %s\n" % (number, b"x" * (number % 50)) for number in range(3000)]
    (tmp_path / "log").write_bytes(b"".join(lines))
    store, count = LocalStore(tmp_path), itertools.count(1)

    class StaleFile(io.FileIO):
        def readinto(self, buffer):
            if next(count) % every == 0:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return super().readinto(memoryview(buffer)[:4096])

    monkeypatch.setattr(store, "open", lambda name: io.BufferedReader(StaleFile(tmp_path / name)))
    assert list(store.lines("log")) == lines
    assert next(count) > 20


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_lines_of_a_file_that_has_changed_while_its_handle_went_stale_are_an_error(change, tmp_path, monkeypatch):
    (tmp_path / "log").write_bytes(b"line\n" * 10)
    store = LocalStore(tmp_path)
    plain = store.open

    class StaleFile(io.FileIO):
        def readinto(self, buffer):
            (tmp_path / "new").write_bytes(b"other\n" * 10)
            os.replace(tmp_path / "new", tmp_path / "log")
            if change == "deleted":
                (tmp_path / "log").unlink()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    files = iter([io.BufferedReader(StaleFile(tmp_path / "log"))])
    monkeypatch.setattr(store, "open", lambda name: next(files, None) or plain(name))
    with pytest.raises(OSError, match="Stale" if change == "replaced" else "No such file"):
        list(store.lines("log"))
