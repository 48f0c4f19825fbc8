"""Common interface of disks and buckets: writes are atomic, retries are bounded, logs lose no rows."""

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
    JsonlLog,
    LocalStore,
    TransientError,
    append_line,
    compute_crc32c,
    create_file,
    encode_json,
    encode_line,
    open_store,
    parse_lines,
    probe_store,
    read_json,
    read_log,
    resolve_place,
    split_checkpoint,
    validate_url,
)
from runner.storage.store import retry_with_backoff
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket

NUM_RACERS = 8


def list_directory(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.fixture(autouse=True)
def _skip_retry_waits(monkeypatch):
    monkeypatch.setattr("runner.storage.store.FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr("runner.storage.bucket.PERIOD_SECONDS", 0.001)


@pytest.fixture(params=["disk", "bucket"])
def store(request, tmp_path):
    return LocalStore(tmp_path / "run") if request.param == "disk" else make_memory_bucket()


@pytest.fixture
def local_store(tmp_path):
    return LocalStore(tmp_path / "run")


@pytest.fixture
def driver():
    return MemoryDriver()


@pytest.fixture
def bucket(driver):
    return make_memory_bucket(driver)


# Atomic writes on disk and in a bucket.


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


def test_an_absent_file_has_no_content_and_the_absent_version(store):
    assert store.read_versioned("deep/x") == (b"", ABSENT)
    with pytest.raises(FileNotFoundError):
        store.read("deep/x")
    with pytest.raises(FileNotFoundError):
        store.compute_digest("deep/x")
    assert not store.exists("deep/x")


def test_write_if_replaces_only_the_given_version(store):
    first = store.write_if("deep/x", b"1", ABSENT)
    assert store.read_versioned("deep/x") == (b"1", first)
    second = store.write_if("deep/x", b"2", first)
    assert store.read_versioned("deep/x") == (b"2", second)
    for stale in (ABSENT, first):
        with pytest.raises(FileExistsError):
            store.write_if("deep/x", b"3", stale)
    assert store.read("deep/x") == b"2"
    assert store.list_sizes("") == {"deep/x": 1}


def test_write_if_detects_an_unconditional_replacement(store):
    version = store.write_if("x", b"1", ABSENT)
    store.write("x", b"2")
    with pytest.raises(FileExistsError):
        store.write_if("x", b"3", version)
    assert store.read("x") == b"2"


def test_write_if_does_not_recreate_a_deleted_file(store):
    version = store.write_if("x", b"1", ABSENT)
    store.remove("x")
    with pytest.raises(FileExistsError):
        store.write_if("x", b"2", version)
    assert not store.exists("x")
    store.write_if("x", b"3", ABSENT)
    assert store.read("x") == b"3"


@pytest.mark.parametrize("is_there", [False, True], ids=["creating", "replacing"])
def test_one_of_many_racing_writers_wins(store, is_there):
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


def test_a_missing_json_file_raises_file_not_found(store):
    with pytest.raises(FileNotFoundError):
        read_json(store, "x.json")


def test_json_round_trips(store):
    value = {"loss": 0.1 + 0.2, "shape": [2, 3], "none": None, "text": "é"}
    store.write("x.json", encode_json(value))
    assert read_json(store, "x.json") == value


# Listing and deletion.


def test_list_names_returns_direct_children(store):
    for name in ("a", "b/c", "b/d/e", "b/d/f", "bb/g"):
        store.write(name, b"")
    assert sorted(store.list_names("b")) == ["c", "d"]
    assert sorted(store.list_names("b/d")) == ["e", "f"]
    assert store.list_names("none") == []


def test_list_names_of_the_root_returns_the_run_directory(store):
    for name in ("a", "b/c", "bb/g"):
        store.write(name, b"")
    assert sorted(store.list_names("")) == ["a", "b", "bb"]


def test_list_sizes_returns_relative_names_in_order(store):
    for name in ("b", "a/c", "a/b/d"):
        store.write(name, name.encode())
    assert list(store.list_sizes("").items()) == [("a/b/d", 5), ("a/c", 3), ("b", 1)]
    assert list(store.list_sizes("a").items()) == [("b/d", 5), ("c", 3)]
    assert store.list_sizes("none") == {}


def test_exists_matches_the_exact_name(store):
    store.write("a/bc", b"")
    assert store.exists("a/bc")
    assert not store.exists("a/b")
    assert not store.exists("a/bcd")


def test_remove_deletes_one_file_and_is_idempotent(store):
    store.write("a/b", b"")
    store.write("a/bc", b"")
    for _ in range(2):
        store.remove("a/b")
        assert store.list_sizes("") == {"a/bc": 0}


def test_remove_tree_deletes_only_files_below_the_name(store):
    for name in ("1/a", "1/b/c", "10/a", "100"):
        store.write(name, b"")
    for _ in range(2):
        store.remove_tree("1")
        assert list(store.list_sizes("")) == ["10/a", "100"]


def test_move_tree_renames_only_files_below_the_name(local_store):
    for name in ("1/a", "1/b/c", "10/a"):
        local_store.write(name, name.encode())
    local_store.move_tree("1", "deep/2")
    assert list(local_store.list_sizes("")) == ["10/a", "deep/2/a", "deep/2/b/c"]
    assert local_store.read("deep/2/b/c") == b"1/b/c"


def test_the_digest_is_crc32c(store):
    assert compute_crc32c(b"123456789") == "e3069283"
    store.write("x", b"123456789")
    assert store.compute_digest("x") == "e3069283"
    store.write("x", b"")
    assert store.compute_digest("x") == compute_crc32c(b"") == "00000000"


def test_the_digest_is_computed_if_the_bucket_reports_none(driver, bucket):
    driver.reports_digests = False
    bucket.write("x", b"123456789")
    assert bucket.compute_digest("x") == "e3069283"


def test_upload_copies_a_local_file(store, tmp_path):
    source = tmp_path / "source"
    for content in (b"first" * 1000, b""):
        source.write_bytes(content)
        store.upload(source, "deep/x", 10.0)
        assert store.read("deep/x") == content
    assert source.exists()


# Write probe.


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
def test_a_denied_probe_is_an_invalid_spec_with_the_reason(store, monkeypatch, call, error, message):
    def refuse(*arguments):
        raise error

    monkeypatch.setattr(store, call, refuse)
    with pytest.raises(InvalidError, match=message) as caught:
        probe_store(store)
    assert store.url in str(caught.value)


def test_a_probe_detects_wrong_content(store, monkeypatch):
    monkeypatch.setattr(store, "read", lambda name: b"a login page")
    with pytest.raises(InvalidError, match="does not give back what was written"):
        probe_store(store)


def test_a_probe_of_an_unreachable_store_is_no_invalid_spec(driver, bucket):
    def down(verb, key):
        raise DeadlineError("not within 120 s")

    driver.before = down
    with pytest.raises(StorageError):
        probe_store(bucket)


# Disk only.


def test_writes_leave_no_temporary_files(local_store):
    version = ABSENT
    for content in (b"first", b"second"):
        local_store.write("deep/x.json", content)
        version = local_store.write_if("deep/y.json", content, version)
    for stale in (ABSENT, "0.0"):
        with pytest.raises(FileExistsError):
            local_store.write_if("deep/y.json", b"third", stale)
    assert list_directory(local_store.root / "deep") == ["x.json", "y.json"]


@pytest.mark.parametrize("conditional", [False, True], ids=["write", "write_if"])
def test_a_concurrent_reader_sees_complete_content(local_store, conditional):
    contents = {b"a" * 200_000, b"b" * 100_000}
    version = local_store.write_if("x", b"a" * 200_000, ABSENT)
    seen, stop = set(), threading.Event()

    def read():
        while not stop.is_set():
            seen.add(local_store.read("x"))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        for content in contents:
            if conditional:
                version = local_store.write_if("x", content, version)
            else:
                local_store.write("x", content)
    stop.set()
    reader.join()
    assert seen <= contents


def test_create_from_requires_its_directory(local_store):
    local_store.write("1/arrays/x", b"")
    local_store.create_from("1/arrays", "1/manifest.json", b"whole")
    with pytest.raises(FileExistsError):
        local_store.create_from("1/arrays", "1/manifest.json", b"again")
    assert local_store.read("1/manifest.json") == b"whole"
    assert list(local_store.list_sizes("1")) == ["arrays/x", "manifest.json"]
    local_store.write("2/other/x", b"")
    with pytest.raises(FileNotFoundError):
        local_store.create_from("2/arrays", "2/manifest.json", b"whole")
    assert list(local_store.list_sizes("2")) == ["other/x"]


def test_remove_tree_deletes_files_added_meanwhile(local_store):
    local_store.write("900/arrays/x", b"")
    stop = threading.Event()

    def keep_writing():
        for number in range(20):
            if stop.is_set():
                return
            try:
                local_store.write(f"900/arrays/{number}", b"x" * 1000)
            except OSError:
                continue

    writer = threading.Thread(target=keep_writing)
    writer.start()
    local_store.remove_tree("900")
    writer.join()
    local_store.remove_tree("900")
    local_store.remove_tree("900")
    assert not (local_store.root / "900").exists()


def test_torn_lines_are_skipped_without_losing_others(local_store):
    log = JsonlLog(local_store, "events", "000001.0", BackgroundWriter())
    log.append({"n": 1})
    with (local_store.root / "events.jsonl").open("ab") as file:
        file.write(b'{"n": 2, "torn": ')
    log.append({"n": 3})
    log.append({"n": 4})
    assert [row["n"] for row in read_log(local_store, "events")] == [1, 3, 4]


def test_rows_of_all_writers_are_in_one_file_in_append_order(local_store):
    for n, writer in enumerate(("000001.0", "000001.1", "000002.0")):
        JsonlLog(local_store, "events", writer, BackgroundWriter()).append({"n": n, "time": -n})
    assert parse_lines((local_store.root / "events.jsonl").read_bytes()) == read_log(local_store, "events")
    assert [row["n"] for row in read_log(local_store, "events")] == [0, 1, 2]


def test_lines_of_several_processes_never_mix(local_store):
    path = local_store.root / "events.jsonl"
    program = (
        "import sys; from pathlib import Path; from runner.storage import LocalStore, BackgroundWriter, JsonlLog\n"
        "log = JsonlLog(LocalStore(Path(sys.argv[1])), 'events', sys.argv[2], BackgroundWriter())\n"
        "for n in range(200): log.append({'process': sys.argv[2], 'n': n, 'pad': 'x' * 300})"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(local_store.root), str(process)]) for process in range(3)
    ]
    assert [writer.wait(timeout=600) for writer in writers] == [0, 0, 0]
    rows = read_log(local_store, "events")
    assert len([line for line in path.read_bytes().split(b"\n") if line]) == len(rows) == 600
    for process in "012":
        assert [row["n"] for row in rows if row["process"] == process] == list(range(200))


def test_appending_a_row_creates_a_missing_directory(tmp_path):
    log = JsonlLog(LocalStore(tmp_path / "deep"), "x", "0", BackgroundWriter())
    for n in range(2):
        log.append({"n": n})
    assert (tmp_path / "deep" / "x.jsonl").read_bytes() == b'{"n": 0}\n{"n": 1}\n'


def test_a_durable_line_is_written_completely_and_flushed(tmp_path, monkeypatch):
    path, write, flushed = tmp_path / "x.jsonl", os.write, []
    path.write_bytes(b'{"torn')
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:3]))  # like a nearly full disk
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(path.read_bytes()))
    append_line(path, encode_line({"n": 1}), is_durable=True)
    assert flushed == [b'{"torn\n{"n": 1}\n']
    with pytest.raises(FileNotFoundError):
        append_line(tmp_path / "deep" / "x.jsonl", b"{}\n", is_durable=True)


@pytest.mark.parametrize("content", [b"", b"\n\n", b'[1]\n"text"\n\xff\n{"n": ', b"null"])
def test_lines_that_are_no_objects_are_skipped(content):
    assert parse_lines(content) == []


# Retries.


def fail_first_calls(driver, error):
    """Fail the first call for each verb and key, and return the list of all calls."""
    calls = []

    def before(verb, key):
        calls.append((verb, key))
        if calls.count((verb, key)) == 1:
            raise error

    driver.before = before
    return calls


def test_every_call_retries_transient_errors(driver, bucket, tmp_path):
    (tmp_path / "file").write_bytes(b"uploaded")
    fail_first_calls(driver, TransientError("503"))
    bucket.write("a/x", b"1")
    assert bucket.read("a/x") == b"1"
    assert bucket.read_versioned("a/none") == (b"", ABSENT)
    version = bucket.write_if("a/y", b"2", ABSENT)
    assert bucket.read_versioned("a/y") == (b"2", version)
    bucket.upload(tmp_path / "file", "a/z", 10.0)
    assert bucket.compute_digest("a/z") == compute_crc32c(b"uploaded")
    assert bucket.exists("a/z")
    assert sorted(bucket.list_names("a")) == ["x", "y", "z"]
    bucket.remove("a/x")
    assert bucket.list_sizes("a") == {"y": 1, "z": 8}
    bucket.remove_tree("a")
    assert not driver.objects


@pytest.mark.parametrize("error", [FileNotFoundError("404"), OSError("501"), PermissionError("one object")])
def test_a_tree_is_deleted_without_batches_where_they_fail(driver, bucket, error):
    def fail_batches(verb, key):
        if verb == "delete_batch":
            raise error

    for name in ("1/a", "1/b", "2/a"):
        bucket.write(name, b"")
    driver.before = fail_batches
    bucket.remove_tree("1")
    assert bucket.list_sizes("") == {"2/a": 0}


@pytest.mark.parametrize("error", [DeniedError("403"), TransientError("503")])
def test_a_tree_is_not_deleted_one_by_one_from_a_bucket_that_refuses_or_is_down(driver, bucket, error, monkeypatch):
    monkeypatch.setattr("runner.storage.bucket.CALL_SECONDS", 0.1)

    def fail_deletes(verb, key):
        assert verb != "delete"
        if verb == "delete_batch":
            raise error

    for name in ("1/a", "1/b"):
        bucket.write(name, b"")
    driver.before = fail_deletes
    with pytest.raises(StorageError):
        bucket.remove_tree("1")


def test_other_errors_are_not_retried():
    for error in (DeniedError("403"), PermissionError(), FileNotFoundError(), FileExistsError(), ValueError()):
        tries = []

        def act(earlier_tries, error=error, tries=tries):
            tries.append(earlier_tries)
            raise error

        with pytest.raises(type(error)) as caught:
            retry_with_backoff(act, "read x", 60.0)
        assert caught.value is error
        assert tries == [0]


def test_denied_requests_are_not_retried(driver, bucket):
    calls = fail_first_calls(driver, DeniedError("403"))
    with pytest.raises(PermissionError):
        bucket.write("x", b"")
    with pytest.raises(PermissionError):
        bucket.read("x")
    with pytest.raises(FileNotFoundError):
        bucket.read("x")
    assert calls == [("put", "run/x"), ("get", "run/x"), ("get", "run/x")]


def test_an_attempt_receives_the_number_of_earlier_ones():
    tries = []

    def act(earlier_tries):
        tries.append(earlier_tries)
        if earlier_tries < 3:
            raise TransientError("503")
        return "answer"

    assert retry_with_backoff(act, "read x", 60.0) == "answer"
    assert tries == [0, 1, 2, 3]


def test_the_timeout_names_operation_and_cause():
    def act(earlier_tries):
        raise TransientError("503 Slow Down")

    with pytest.raises(
        TimeoutError, match=r"^write mem://x: not within 0 s and \d+ tries; the last: 503 Slow Down$"
    ) as caught:
        retry_with_backoff(act, "write mem://x", 0.02)
    assert isinstance(caught.value, StorageError)
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value.__cause__, TransientError)


def test_an_upload_has_its_own_deadline(driver, bucket, tmp_path):
    def down(verb, key):
        raise TransientError("503")

    driver.before = down
    (tmp_path / "file").touch()
    with pytest.raises(TimeoutError, match=r"write mem://bucket/run/x: not within 0 s"):
        bucket.upload(tmp_path / "file", "x", 0.02)
    assert not driver.objects


class LostResponseDriver(MemoryDriver):
    """A driver that applies the first put but loses its response; then another writer may replace the object."""

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
def test_a_conditional_write_with_a_lost_response_succeeds(is_there):
    driver = LostResponseDriver()
    bucket = make_memory_bucket(driver)
    driver.lost = True
    before = bucket.write_if("x", b"before", ABSENT) if is_there else ABSENT
    driver.lost = False
    version = bucket.write_if("x", b"mine", before)
    assert driver.lost
    assert bucket.read_versioned("x") == (b"mine", version)
    bucket.write_if("x", b"the next", version)


def test_a_replaced_conditional_write_with_a_lost_response_fails():
    driver = LostResponseDriver()
    bucket = make_memory_bucket(driver)
    driver.in_between = lambda: bucket.write("x", b"another's")
    with pytest.raises(FileExistsError):
        bucket.write_if("x", b"mine", ABSENT)
    assert bucket.read("x") == b"another's"


def test_a_conditional_write_overtaken_between_retries_fails(driver, bucket):
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


def test_a_log_in_a_bucket_is_split_into_parts(bucket, monkeypatch):
    monkeypatch.setattr("runner.storage.jsonl.PART_BYTES", 60)
    background = BackgroundWriter()
    log = JsonlLog(bucket, "events", "000001.0", background)
    for n in range(20):
        log.append({"time": n, "n": n})
    background.flush()
    sizes = bucket.list_sizes("events")
    assert len(sizes) > 4
    assert all(name.startswith("000001.0.") for name in sizes)
    assert max(sizes.values()) < 60 + len(encode_line({"time": 19, "n": 19})) + 1
    assert [row["n"] for row in read_log(bucket, "events")] == list(range(20))


def test_rows_of_several_writers_are_sorted_by_time(bucket, monkeypatch):
    monkeypatch.setattr("runner.storage.jsonl.PART_BYTES", 60)
    writers = [BackgroundWriter(), BackgroundWriter()]
    logs = [JsonlLog(bucket, "events", f"{number:06}.0", background) for number, background in enumerate(writers)]
    for n in range(20):
        logs[n % 2].append({"time": n, "n": n, "writer": n % 2})
    for background in writers:
        background.flush()
    rows = read_log(bucket, "events")
    assert [row["n"] for row in rows] == list(range(20))
    assert {row["writer"] for row in rows} == {0, 1}


def test_a_row_is_sent_to_the_bucket_in_the_background(bucket):
    arrived, write = threading.Event(), bucket.write

    def seen(name, content):
        write(name, content)
        arrived.set()

    bucket.write = seen
    JsonlLog(bucket, "events", "000001.0", BackgroundWriter()).append({"n": 1})
    assert arrived.wait(600)
    assert read_log(bucket, "events") == [{"n": 1}]


class DelayedWriter(BackgroundWriter):
    """A writer that delays the first thread to mark until another thread has marked or is blocked."""

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
    background = DelayedWriter()
    log = JsonlLog(bucket, "events", "000001.0", background)
    first = threading.Thread(target=log.append, args=({"n": 1},))
    first.start()
    background.first_is_in.wait(600)
    log.append({"n": 2})
    first.join()
    background.flush()
    assert [row["n"] for row in read_log(bucket, "events")] == [1, 2]


def test_a_missing_log_has_no_rows(store):
    assert read_log(store, "none") == []


def test_an_unwritable_log_in_a_bucket_does_not_fail_its_callers(driver, bucket):
    def refuse(verb, key):
        raise DeniedError("403")

    driver.before = refuse
    background = BackgroundWriter()
    log = JsonlLog(bucket, "events", "000001.0", background)
    log.append({"n": 1})
    log.append({"n": 2})
    with pytest.raises(DeniedError):
        background.flush()
    driver.before = lambda verb, key: None
    background.flush()
    assert [row["n"] for row in read_log(bucket, "events")] == [1, 2]


# Background writes.


def test_superseded_content_is_not_sent():
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


def test_flush_sends_each_change_once():
    background, sent = BackgroundWriter(), []
    background.flush()
    for n in range(5):
        background.mark(str(n), lambda n=n: sent.append(n))
    background.flush()
    background.flush()
    assert sorted(sent) == list(range(5))


def test_a_failed_send_is_reported_once_and_retried(capsys):
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


def test_a_failed_send_does_not_overwrite_newer_content():
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


# Paths and URLs.


def test_a_path_can_be_a_missing_directory(tmp_path):
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
def test_an_invalid_url_is_rejected_without_a_request(ask, text, message):
    with pytest.raises(InvalidError, match=message):
        ask(text)


@pytest.mark.parametrize(
    "text", ["runs/x", "/runs/x", "~/x", "x:y", "gs://bucket/x", "s3://bucket", "az://container/x/y"]
)
def test_paths_and_bucket_urls_are_accepted(text):
    validate_url(text)


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("s3", "s3"), ("az", "azure")])
def test_a_missing_package_is_reported_with_its_install_command(monkeypatch, scheme, extra):
    package = EXTRA_PACKAGES[extra][0]

    def import_module(name):
        assert name.startswith("runner.storage.")
        raise ModuleNotFoundError(f"No module named '{package}.client'", name=f"{package}.client")

    monkeypatch.setattr("runner.spec.imports.importlib.import_module", import_module)
    with pytest.raises(InvalidError) as caught:
        open_store(f"{scheme}://bucket/x")
    assert str(caught.value).startswith(f"{scheme}://bucket/x: needs the package {package}.client; ")
    assert str(caught.value).endswith(format_install(extra))


def make_fake_module(make_driver):
    return lambda name: SimpleNamespace(S3Driver=make_driver)


def test_missing_credentials_are_rejected_in_one_line(monkeypatch):
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

    monkeypatch.setattr("runner.spec.imports.importlib.import_module", make_fake_module(make_driver))
    store = open_store("s3://bucket/deep/run/")
    assert store.root is None
    assert store.url == "s3://bucket/deep/run"
    store.write("x", b"1")
    assert list(driver.objects) == ["deep/run/x"]


def test_a_whole_bucket_can_be_the_directory(monkeypatch):
    driver = MemoryDriver()
    driver.prefix = ""
    monkeypatch.setattr("runner.spec.imports.importlib.import_module", make_fake_module(lambda url: driver))
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
def test_a_source_is_a_run_or_one_of_its_checkpoints(text, expected):
    assert split_checkpoint(text) == expected


def test_all_names_of_one_directory_resolve_to_one(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "gone").symlink_to("nothing")
    monkeypatch.chdir(tmp_path)
    for text in ("run", "./run/", f"{tmp_path}/run", f"/{tmp_path}//run/", "link", "link/../run", "link/../link/"):
        assert resolve_place(text) == f"{tmp_path.resolve()}/run"
    assert resolve_place("gone") == f"{tmp_path.resolve()}/nothing"
    for text in ("gs://bucket/a/b", "gs://bucket/a/b/", "gs://bucket//a/b//"):
        assert resolve_place(text) == "gs://bucket/a/b"
    # These slashes belong to the names of objects.
    assert resolve_place("gs://bucket/a//b") == "gs://bucket/a//b"
    assert resolve_place("s3://bucket/") == "s3://bucket"
