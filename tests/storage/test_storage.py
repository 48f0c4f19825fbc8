"""One interface over a disk and a bucket: what is published is there whole or not at all."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.errors import InvalidError, StorageError
from runner.spec.imports import EXTRA_PACKAGES, format_install
from runner.storage import (
    ABSENT,
    BackgroundWriter,
    DeadlineError,
    DeniedError,
    LocalStore,
    TransientError,
    append_line,
    compute_crc32c,
    create_file,
    encode_json,
    encode_line,
    open_log,
    open_store,
    parse_lines,
    probe_store,
    read_json,
    read_log,
    split_checkpoint,
    validate_url,
)
from runner.storage.store import retry_with_backoff
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket

NUM_RACERS = 8


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.fixture(autouse=True)
def _no_time_is_lost_between_tries(monkeypatch):
    monkeypatch.setattr("runner.storage.store.FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr("runner.storage.bucket.PERIOD_SECONDS", 0.001)


@pytest.fixture(params=["disk", "bucket"])
def store(request, tmp_path):
    return LocalStore(tmp_path / "run") if request.param == "disk" else make_memory_bucket()


@pytest.fixture
def disk(tmp_path):
    return LocalStore(tmp_path / "run")


@pytest.fixture
def driver():
    return MemoryDriver()


@pytest.fixture
def bucket(driver):
    return make_memory_bucket(driver)


# Publishing: on a disk and in a bucket.


def test_write_replaces_the_whole_content(store):
    for content in (b"the first is longer", b"second", b""):
        store.write("deep/er/x.json", content)
        assert store.read("deep/er/x.json") == content
    assert store.list_sizes("") == {"deep/er/x.json": 0}


def test_create_never_overwrites(store):
    create_file(store, "manifest.json", b"first")
    with pytest.raises(FileExistsError):
        create_file(store, "manifest.json", b"second")
    assert store.read("manifest.json") == b"first"
    assert store.list_sizes("") == {"manifest.json": 5}


def test_what_is_absent_has_no_content_and_its_own_version(store):
    assert store.read_versioned("deep/x") == (b"", ABSENT)
    with pytest.raises(FileNotFoundError):
        store.read("deep/x")
    with pytest.raises(FileNotFoundError):
        store.compute_digest("deep/x")
    assert not store.exists("deep/x")


def test_write_if_replaces_the_version_that_it_names_and_no_other(store):
    first = store.write_if("deep/x", b"1", ABSENT)
    assert store.read_versioned("deep/x") == (b"1", first)
    second = store.write_if("deep/x", b"2", first)
    assert store.read_versioned("deep/x") == (b"2", second)
    for stale in (ABSENT, first):
        with pytest.raises(FileExistsError):
            store.write_if("deep/x", b"3", stale)
    assert store.read("deep/x") == b"2"
    assert store.list_sizes("") == {"deep/x": 1}


def test_write_if_sees_what_was_replaced_without_a_condition(store):
    version = store.write_if("x", b"1", ABSENT)
    store.write("x", b"2")
    with pytest.raises(FileExistsError):
        store.write_if("x", b"3", version)
    assert store.read("x") == b"2"


def test_write_if_does_not_bring_back_what_was_deleted(store):
    version = store.write_if("x", b"1", ABSENT)
    store.remove("x")
    with pytest.raises(FileExistsError):
        store.write_if("x", b"2", version)
    assert not store.exists("x")
    store.write_if("x", b"3", ABSENT)
    assert store.read("x") == b"3"


@pytest.mark.parametrize("is_there", [False, True], ids=["creating", "replacing"])
def test_only_one_of_many_racing_writers_wins(store, is_there):
    version = store.write_if("deep/1", b"before", ABSENT) if is_there else ABSENT
    winners, barrier = [], threading.Barrier(NUM_RACERS)

    def race(number):
        barrier.wait()
        try:
            store.write_if("deep/1", str(number).encode(), version)
        except FileExistsError:
            return
        winners.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(NUM_RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read("deep/1") == str(*winners).encode()
    assert store.list_sizes("") == {"deep/1": 1}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"text"', b"\xff"])
def test_a_file_that_is_not_a_json_object_is_a_value_error(store, content):
    store.write("x.json", content)
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is the contract, json words the rest
        read_json(store, "x.json")


def test_json_that_is_not_there_is_a_file_that_is_not_found(store):
    with pytest.raises(FileNotFoundError):
        read_json(store, "x.json")


def test_json_comes_back_as_it_was_published(store):
    value = {"loss": 0.1 + 0.2, "shape": [2, 3], "none": None, "text": "é"}
    store.write("x.json", encode_json(value))
    assert read_json(store, "x.json") == value


# What stands there.


def test_children_are_the_files_and_directories_directly_below(store):
    for name in ("a", "b/c", "b/d/e", "b/d/f", "bb/g"):
        store.write(name, b"")
    assert sorted(store.list_names("b")) == ["c", "d"]
    assert sorted(store.list_names("b/d")) == ["e", "f"]
    assert store.list_names("none") == []


def test_children_of_the_top_are_what_stands_in_the_runs_directory(store):
    for name in ("a", "b/c", "bb/g"):
        store.write(name, b"")
    assert sorted(store.list_names("")) == ["a", "b", "bb"]


def test_sizes_finds_every_file_by_relative_name_in_order(store):
    for name in ("b", "a/c", "a/b/d"):
        store.write(name, name.encode())
    assert list(store.list_sizes("").items()) == [("a/b/d", 5), ("a/c", 3), ("b", 1)]
    assert list(store.list_sizes("a").items()) == [("b/d", 5), ("c", 3)]
    assert store.list_sizes("none") == {}


def test_exists_asks_for_this_very_name(store):
    store.write("a/bc", b"")
    assert store.exists("a/bc")
    assert not store.exists("a/b")
    assert not store.exists("a/bcd")


def test_remove_deletes_one_file_and_may_be_repeated(store):
    store.write("a/b", b"")
    store.write("a/bc", b"")
    for _ in range(2):
        store.remove("a/b")
        assert store.list_sizes("") == {"a/bc": 0}


def test_remove_tree_deletes_all_below_one_name_and_nothing_beside_it(store):
    for name in ("1/a", "1/b/c", "10/a", "100"):
        store.write(name, b"")
    for _ in range(2):
        store.remove_tree("1")
        assert list(store.list_sizes("")) == ["10/a", "100"]


def test_move_tree_renames_all_below_one_name_and_nothing_beside_it(store):
    for name in ("1/a", "1/b/c", "10/a"):
        store.write(name, name.encode())
    store.move_tree("1", "deep/2")
    assert list(store.list_sizes("")) == ["10/a", "deep/2/a", "deep/2/b/c"]
    assert store.read("deep/2/b/c") == b"1/b/c"


def test_the_digest_is_the_castagnoli_crc(store):
    assert compute_crc32c(b"123456789") == "e3069283"
    store.write("x", b"123456789")
    assert store.compute_digest("x") == "e3069283"
    store.write("x", b"")
    assert store.compute_digest("x") == compute_crc32c(b"") == "00000000"


def test_a_bucket_that_reports_no_digest_is_read(driver, bucket):
    driver.reports_digests = False
    bucket.write("x", b"123456789")
    assert bucket.compute_digest("x") == "e3069283"


def test_upload_copies_a_file_of_this_machine(store, tmp_path):
    source = tmp_path / "source"
    for content in (b"first" * 1000, b""):
        source.write_bytes(content)
        store.upload(source, "deep/x", 10.0)
        assert store.read("deep/x") == content
    assert source.exists()


# May this run write here?


def test_a_probe_leaves_nothing(store):
    probe_store(store)
    assert store.list_sizes("") == {}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (DeniedError("403"), r"cannot be written: no permission \(403\)"),
        (PermissionError("read-only"), r"cannot be written: no permission \(read-only\)"),
        (FileNotFoundError("404"), r"cannot be written: the bucket does not exist \(404\)"),
    ],
)
@pytest.mark.parametrize("call", ["write", "read", "remove"])
def test_a_probe_that_is_refused_is_invalid_with_the_reason(store, monkeypatch, call, error, message):
    def refuse(*arguments):
        raise error

    monkeypatch.setattr(store, call, refuse)
    with pytest.raises(InvalidError, match=message) as caught:
        probe_store(store)
    assert store.url in str(caught.value)


def test_a_probe_sees_that_another_content_comes_back(store, monkeypatch):
    monkeypatch.setattr(store, "read", lambda name: b"a login page")
    with pytest.raises(InvalidError, match="does not give back what was written"):
        probe_store(store)


def test_a_probe_of_a_store_that_is_down_says_nothing_about_the_spec(driver, bucket):
    def down(verb, key):
        raise DeadlineError("not within 120 s")

    driver.before = down
    with pytest.raises(StorageError):
        probe_store(bucket)


# On a disk.


def test_nothing_is_left_beside_what_was_published(disk):
    version = ABSENT
    for content in (b"first", b"second"):
        disk.write("deep/x.json", content)
        version = disk.write_if("deep/y.json", content, version)
    for stale in (ABSENT, "0.0"):
        with pytest.raises(FileExistsError):
            disk.write_if("deep/y.json", b"third", stale)
    assert names(disk.root / "deep") == ["x.json", "y.json"]


@pytest.mark.parametrize("conditional", [False, True], ids=["write", "write_if"])
def test_a_reader_sees_the_old_content_or_the_new_and_never_a_part(disk, conditional):
    contents = {b"a" * 200_000, b"b" * 100_000}
    version = disk.write_if("x", b"a" * 200_000, ABSENT)
    seen, stop = set(), threading.Event()

    def read():
        while not stop.is_set():
            seen.add(disk.read("x"))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        for content in contents:
            if conditional:
                version = disk.write_if("x", content, version)
            else:
                disk.write("x", content)
    stop.set()
    reader.join()
    assert seen <= contents


def test_create_from_needs_its_directory_to_be_there(disk):
    disk.write("1/arrays/x", b"")
    disk.create_from("1/arrays", "1/manifest.json", b"whole")
    with pytest.raises(FileExistsError):
        disk.create_from("1/arrays", "1/manifest.json", b"again")
    assert disk.read("1/manifest.json") == b"whole"
    assert list(disk.list_sizes("1")) == ["arrays/x", "manifest.json"]
    disk.write("2/other/x", b"")
    with pytest.raises(FileNotFoundError):
        disk.create_from("2/arrays", "2/manifest.json", b"whole")
    assert list(disk.list_sizes("2")) == ["other/x"]


def test_remove_tree_deletes_what_a_dying_writer_still_adds(disk):
    disk.write("900/arrays/x", b"")
    stop = threading.Event()

    def keep_writing():
        for number in range(20):
            if stop.is_set():
                return
            try:
                disk.write(f"900/arrays/{number}", b"x" * 1000)
            except OSError:
                continue

    writer = threading.Thread(target=keep_writing)
    writer.start()
    disk.remove_tree("900")
    writer.join()
    disk.remove_tree("900")
    disk.remove_tree("900")
    assert not (disk.root / "900").exists()


def test_torn_lines_are_left_out_and_take_no_other_line_with_them(disk):
    log = open_log(disk, "events", "000001.0", BackgroundWriter())
    log.append({"n": 1})
    with (disk.root / "events.jsonl").open("ab") as file:
        file.write(b'{"n": 2, "torn": ')
    log.append({"n": 3})
    log.append({"n": 4})
    assert [row["n"] for row in read_log(disk, "events")] == [1, 3, 4]


def test_rows_of_all_writers_stand_in_one_file_in_the_order_of_their_appending(disk):
    for n, writer in enumerate(("000001.0", "000001.1", "000002.0")):
        open_log(disk, "events", writer, BackgroundWriter()).append({"n": n, "time": -n})
    assert parse_lines((disk.root / "events.jsonl").read_bytes()) == read_log(disk, "events")
    assert [row["n"] for row in read_log(disk, "events")] == [0, 1, 2]


def test_lines_of_several_processes_never_mix(disk):
    path = disk.root / "events.jsonl"
    program = (
        "import sys; from pathlib import Path; from runner.storage import LocalStore, BackgroundWriter, open_log\n"
        "log = open_log(LocalStore(Path(sys.argv[1])), 'events', sys.argv[2], BackgroundWriter())\n"
        "for n in range(200): log.append({'process': sys.argv[2], 'n': n, 'pad': 'x' * 300})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(disk.root), str(process)]) for process in range(3)]
    assert [writer.wait(timeout=600) for writer in writers] == [0, 0, 0]
    rows = read_log(disk, "events")
    assert len([line for line in path.read_bytes().split(b"\n") if line]) == len(rows) == 600
    for process in "012":
        assert [row["n"] for row in rows if row["process"] == process] == list(range(200))


def test_a_row_is_appended_to_a_log_whose_directory_is_missing(tmp_path):
    log = open_log(LocalStore(tmp_path / "deep"), "x", "0", BackgroundWriter())
    for n in range(2):
        log.append({"n": n})
    assert (tmp_path / "deep" / "x.jsonl").read_bytes() == b'{"n": 0}\n{"n": 1}\n'


def test_a_durable_line_is_written_whole_and_flushed(tmp_path, monkeypatch):
    path, write, flushed = tmp_path / "x.jsonl", os.write, []
    path.write_bytes(b'{"torn')
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:3]))  # as an almost full disk does
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(path.read_bytes()))
    append_line(path, encode_line({"n": 1}), is_durable=True)
    assert flushed == [b'{"torn\n{"n": 1}\n']
    with pytest.raises(FileNotFoundError):
        append_line(tmp_path / "deep" / "x.jsonl", b"{}\n", is_durable=True)


@pytest.mark.parametrize("content", [b"", b"\n\n", b'[1]\n"text"\n\xff\n{"n": ', b"null"])
def test_what_is_no_object_is_no_row(content):
    assert parse_lines(content) == []


# Try again.


def fail_each_name_once(driver, error):
    """Every first call for each (verb, key) fails. Returns the calls, in order."""
    calls = []

    def before(verb, key):
        calls.append((verb, key))
        if calls.count((verb, key)) == 1:
            raise error

    driver.before = before
    return calls


def test_every_call_tries_again_what_is_transient(driver, bucket, tmp_path):
    (tmp_path / "file").write_bytes(b"uploaded")
    fail_each_name_once(driver, TransientError("503"))
    bucket.write("a/x", b"1")
    assert bucket.read("a/x") == b"1"
    assert bucket.read_versioned("a/none") == (b"", ABSENT)
    version = bucket.write_if("a/y", b"2", ABSENT)
    assert bucket.read_versioned("a/y") == (b"2", version)
    bucket.upload(tmp_path / "file", "a/z", 10.0)
    assert bucket.compute_digest("a/z") == compute_crc32c(b"uploaded")
    assert bucket.exists("a/z")
    assert sorted(bucket.list_names("a")) == ["x", "y", "z"]
    bucket.move_tree("a", "b")
    bucket.remove("b/x")
    assert bucket.list_sizes("b") == {"y": 1, "z": 8}
    bucket.remove_tree("b")
    assert not driver.objects


def test_what_is_not_transient_is_not_tried_again():
    for error in (DeniedError("403"), PermissionError(), FileNotFoundError(), FileExistsError(), ValueError()):
        tries = []

        def act(earlier_tries, error=error, tries=tries):
            tries.append(earlier_tries)
            raise error

        with pytest.raises(type(error)) as caught:
            retry_with_backoff(act, "read x", 60.0)
        assert caught.value is error
        assert tries == [0]


def test_a_refusal_of_the_bucket_reaches_the_caller_at_once(driver, bucket):
    calls = fail_each_name_once(driver, DeniedError("403"))
    with pytest.raises(PermissionError):
        bucket.write("x", b"")
    with pytest.raises(PermissionError):
        bucket.read("x")
    with pytest.raises(FileNotFoundError):
        bucket.read("x")
    assert calls == [("put", "run/x"), ("get", "run/x"), ("get", "run/x")]


def test_a_try_is_told_how_many_were_before_it():
    tries = []

    def act(earlier_tries):
        tries.append(earlier_tries)
        if earlier_tries < 3:
            raise TransientError("503")
        return "answer"

    assert retry_with_backoff(act, "read x", 60.0) == "answer"
    assert tries == [0, 1, 2, 3]


def test_after_the_deadline_it_is_a_timeout_that_says_what_and_why():
    def act(earlier_tries):
        raise TransientError("503 Slow Down")

    with pytest.raises(
        TimeoutError, match=r"^write mem://x: not within 0 s and \d+ tries; the last: 503 Slow Down$"
    ) as caught:
        retry_with_backoff(act, "write mem://x", 0.02)
    assert isinstance(caught.value, StorageError)
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value.__cause__, TransientError)


def test_an_upload_ends_with_its_own_deadline(driver, bucket, tmp_path):
    def down(verb, key):
        raise TransientError("503")

    driver.before = down
    (tmp_path / "file").touch()
    with pytest.raises(TimeoutError, match=r"write mem://bucket/run/x: not within 0 s"):
        bucket.upload(tmp_path / "file", "x", 0.02)
    assert not driver.objects


class LosingDriver(MemoryDriver):
    """Does the first put and loses the answer; then another writer may come in between."""

    def __init__(self):
        super().__init__()
        self.lost = False
        self.in_between = lambda: None

    def put(self, key, content, version):
        answer = super().put(key, content, version)
        if not self.lost:
            self.lost = True
            self.in_between()
            raise TransientError("connection reset")
        return answer


@pytest.mark.parametrize("is_there", [False, True], ids=["creating", "replacing"])
def test_a_conditional_write_whose_answer_was_lost_has_succeeded(is_there):
    driver = LosingDriver()
    bucket = make_memory_bucket(driver)
    driver.lost = True
    before = bucket.write_if("x", b"before", ABSENT) if is_there else ABSENT
    driver.lost = False
    version = bucket.write_if("x", b"mine", before)
    assert driver.lost
    assert bucket.read_versioned("x") == (b"mine", version)
    bucket.write_if("x", b"the next", version)


def test_a_conditional_write_whose_answer_was_lost_and_that_was_replaced_has_lost():
    driver = LosingDriver()
    bucket = make_memory_bucket(driver)
    driver.in_between = lambda: bucket.write("x", b"another's")
    with pytest.raises(FileExistsError):
        bucket.write_if("x", b"mine", ABSENT)
    assert bucket.read("x") == b"another's"


def test_a_conditional_write_that_was_overtaken_while_it_was_tried_again_has_lost(driver, bucket):
    tries = []

    def before(verb, key):
        if verb == "put":
            tries.append(key)
            if len(tries) == 1:
                make_memory_bucket(driver).write_if("x", b"another's", ABSENT)
                raise TransientError("503")

    driver.before = before
    with pytest.raises(FileExistsError):
        bucket.write_if("x", b"mine", ABSENT)
    assert bucket.read("x") == b"another's"


# Logs in a bucket.


def test_a_log_in_a_bucket_has_parts_and_gives_back_all_rows(bucket, monkeypatch):
    monkeypatch.setattr("runner.storage.jsonl.PART_BYTES", 60)
    background = BackgroundWriter()
    log = open_log(bucket, "events", "000001.0", background)
    for n in range(20):
        log.append({"time": n, "n": n})
    background.flush()
    sizes = bucket.list_sizes("events")
    assert len(sizes) > 4
    assert all(name.startswith("000001.0.") for name in sizes)
    assert max(sizes.values()) < 60 + len(encode_line({"time": 19, "n": 19})) + 1
    assert [row["n"] for row in read_log(bucket, "events")] == list(range(20))


def test_rows_of_several_writers_come_in_the_order_of_their_time(bucket, monkeypatch):
    monkeypatch.setattr("runner.storage.jsonl.PART_BYTES", 60)
    writers = [BackgroundWriter(), BackgroundWriter()]
    logs = [open_log(bucket, "events", f"{number:06}.0", background) for number, background in enumerate(writers)]
    for n in range(20):
        logs[n % 2].append({"time": n, "n": n, "writer": n % 2})
    for background in writers:
        background.flush()
    rows = read_log(bucket, "events")
    assert [row["n"] for row in rows] == list(range(20))
    assert {row["writer"] for row in rows} == {0, 1}


def test_a_row_reaches_the_bucket_by_itself(bucket):
    arrived, write = threading.Event(), bucket.write

    def seen(name, content):
        write(name, content)
        arrived.set()

    bucket.write = seen
    open_log(bucket, "events", "000001.0", BackgroundWriter()).append({"n": 1})
    assert arrived.wait(600)
    assert read_log(bucket, "events") == [{"n": 1}]


class FirstMarkIsSlow(BackgroundWriter):
    """The thread that marks first is held up until another has marked too, or could not."""

    def __init__(self):
        super().__init__()
        self._num_marks = 0
        self.first_is_in, self._second_is_done = threading.Event(), threading.Event()

    def mark(self, name, send):
        self._num_marks += 1
        if self._num_marks == 1:
            self.first_is_in.set()
            self._second_is_done.wait(0.5)
            super().mark(name, send)
        else:
            super().mark(name, send)
            self._second_is_done.set()


def test_no_row_is_lost_when_two_threads_append_at_once(bucket):
    background = FirstMarkIsSlow()
    log = open_log(bucket, "events", "000001.0", background)
    first = threading.Thread(target=log.append, args=({"n": 1},))
    first.start()
    background.first_is_in.wait(600)
    log.append({"n": 2})
    first.join()
    background.flush()
    assert [row["n"] for row in read_log(bucket, "events")] == [1, 2]


def test_a_log_that_is_not_there_has_no_rows(store):
    assert read_log(store, "none") == []


def test_a_log_in_a_bucket_that_cannot_be_written_costs_no_caller_anything(driver, bucket):
    def refuse(verb, key):
        raise DeniedError("403")

    driver.before = refuse
    background = BackgroundWriter()
    log = open_log(bucket, "events", "000001.0", background)
    log.append({"n": 1})
    log.append({"n": 2})
    with pytest.raises(DeniedError):
        background.flush()
    driver.before = lambda verb, key: None
    background.flush()
    assert [row["n"] for row in read_log(bucket, "events")] == [1, 2]


# What grows in the background.


def test_content_that_is_overtaken_is_never_sent():
    background, sent = BackgroundWriter(), []
    busy, go_on = threading.Event(), threading.Event()

    def send_slowly():
        busy.set()
        go_on.wait(600)
        sent.append("first")

    background.mark("x", send_slowly)
    assert busy.wait(600)
    for content in ("second", "third", "fourth"):
        background.mark("x", lambda content=content: sent.append(content))
    background.mark("y", lambda: sent.append("another"))
    go_on.set()
    background.flush()
    assert sent == ["first", "fourth", "another"]


def test_flush_sends_what_has_changed_and_nothing_twice():
    background, sent = BackgroundWriter(), []
    background.flush()
    for n in range(5):
        background.mark(str(n), lambda n=n: sent.append(n))
    background.flush()
    background.flush()
    assert sorted(sent) == list(range(5))


def test_a_failure_is_raised_by_flush_said_once_and_sent_later(capsys):
    background, sent = BackgroundWriter(), []
    is_down, tries, tried_often = [True], [], threading.Event()

    def send():
        tries.append(1)
        if len(tries) > 5:
            tried_often.set()
        if is_down:
            raise OSError("the bucket is down")
        sent.append("x")

    background.mark("x", send)
    background.mark("y", lambda: sent.append("y"))
    assert tried_often.wait(600)
    with pytest.raises(OSError, match="the bucket is down"):
        background.flush()
    assert sent == ["y"]
    assert capsys.readouterr().err.count("cannot be written, will be tried again: the bucket is down") == 1
    is_down.clear()
    background.flush()
    assert sent == ["y", "x"]


def test_what_has_failed_does_not_come_back_over_newer_content():
    background, sent = BackgroundWriter(), []
    busy, go_on = threading.Event(), threading.Event()

    def fail_slowly():
        busy.set()
        go_on.wait(600)
        raise OSError("the bucket is down")

    background.mark("x", fail_slowly)
    assert busy.wait(600)
    background.mark("x", lambda: sent.append("newer"))
    go_on.set()
    background.flush()
    background.flush()
    assert sent == ["newer"]


# From what a spec says to a store.


def test_a_path_is_a_directory_that_need_not_be_there(tmp_path):
    assert open_store("runs/x").root == Path.cwd() / "runs" / "x"
    assert open_store("~/x").root == Path.home() / "x"
    assert open_store(str(tmp_path)).url == str(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidError, match="is a file, needs a directory"):
        open_store(str(tmp_path / "file"))


@pytest.mark.parametrize("ask", [validate_url, open_store])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://host/x", r"ftp:// is not known; got ftp://host/x, needs a local path or one of gs://, s3://, az://"),
        ("S3://bucket/x", r"S3:// is not known; got S3://bucket/x, needs a local path or one of gs://, s3://, az://"),
        ("://x", r":// is not known; got ://x, needs"),
        ("gs://", r"gs:// names no bucket; needs gs://BUCKET/PREFIX"),
        ("s3:///", r"s3:/// names no bucket; needs s3://BUCKET/PREFIX"),
        ("gs:///prefix", r"gs:///prefix names no bucket; needs gs://BUCKET/PREFIX"),
    ],
)
def test_a_url_that_names_no_directory_is_refused_without_touching_it(ask, text, message):
    with pytest.raises(InvalidError, match=message):
        ask(text)


@pytest.mark.parametrize(
    "text", ["runs/x", "/runs/x", "~/x", "x:y", "gs://bucket/x", "s3://bucket", "az://container/x/y"]
)
def test_a_path_and_a_url_of_a_bucket_are_fine(text):
    validate_url(text)


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("s3", "s3"), ("az", "azure")])
def test_a_package_that_is_missing_is_named_with_the_command_that_brings_it(monkeypatch, scheme, extra):
    package = EXTRA_PACKAGES[extra][0]

    def import_module(name):
        assert name.startswith("runner.storage.")
        raise ModuleNotFoundError(f"No module named '{package}.client'", name=f"{package}.client")

    monkeypatch.setattr("runner.spec.imports.importlib.import_module", import_module)
    with pytest.raises(InvalidError) as caught:
        open_store(f"{scheme}://bucket/x")
    assert str(caught.value).startswith(f"{scheme}://bucket/x: needs the package {package}.client; ")
    assert str(caught.value).endswith(format_install(extra))


def fake_module(make_driver):
    return lambda name: SimpleNamespace(S3Driver=make_driver)


def test_credentials_that_are_missing_are_refused_in_one_line(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    with pytest.raises(InvalidError) as caught:
        open_store("az://container/x")
    assert str(caught.value) == "az://container/x: no credentials: set AZURE_STORAGE_CONNECTION_STRING"


def test_a_url_opens_a_store_below_its_prefix(monkeypatch):
    driver = MemoryDriver()
    driver.prefix = "deep/run"

    def make_driver(url):
        assert url == "s3://bucket/deep/run"
        return driver

    monkeypatch.setattr("runner.spec.imports.importlib.import_module", fake_module(make_driver))
    store = open_store("s3://bucket/deep/run/")
    assert store.root is None
    assert store.url == "s3://bucket/deep/run"
    store.write("x", b"1")
    assert list(driver.objects) == ["deep/run/x"]


def test_a_whole_bucket_may_be_the_directory(monkeypatch):
    driver = MemoryDriver()
    driver.prefix = ""
    monkeypatch.setattr("runner.spec.imports.importlib.import_module", fake_module(lambda url: driver))
    store = open_store("s3://bucket")
    store.write("a/x", b"1")
    assert list(driver.objects) == ["a/x"]
    assert store.list_names("a") == ["x"]
    assert store.list_sizes("") == {"a/x": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/a", ("runs/a", None)),
        ("runs/a/", ("runs/a/", None)),
        ("runs/a/checkpoints/500", ("runs/a", "500")),
        ("runs/a/checkpoints/best/", ("runs/a", "best")),
        ("gs://bucket/run/checkpoints/500", ("gs://bucket/run", "500")),
        ("gs://bucket/run", ("gs://bucket/run", None)),
        ("runs/checkpoints/a/b", ("runs/checkpoints/a/b", None)),
        ("runs/checkpoints/a/checkpoints/7", ("runs/checkpoints/a", "7")),
        ("runs/a/checkpoints", ("runs/a/checkpoints", None)),
    ],
)
def test_a_source_names_a_run_or_one_of_its_checkpoints(text, expected):
    assert split_checkpoint(text) == expected
