"""`metrics.jsonl` on disk and in a bucket, the metrics window, and the progress line."""

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import re
import threading
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from runner.attempts.fence import Fence
from runner.errors import DivergedError, FencedError, RunnerError
from runner.metrics import file as bucket
from runner.metrics import file as disk
from runner.metrics import writers
from runner.metrics.file import METRICS_FILE, _BucketMetricsFile, _LocalMetricsFile, open_metrics_file, read_rows
from runner.metrics.rows import EncodedRow, RowTail
from runner.metrics.window import MetricsWindow
from runner.metrics.writers import _LiveProgress, _PlainProgress
from runner.storage import ABSENT, BackgroundWriter, DeniedError, LocalStore, encode_line
from tests.support.damage import ERRORS, inject_errors, list_damages
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket
from tests.support.tiny_jobs import make_gpt_spec


def make_row(step, **more):
    return {
        "step": step,
        "train/loss": 1.0 / step,
        "train/grad_norm": 0.5,
        "train/learning_rate": 1e-3,
        "train/tokens": step * 64,
        "perf/tokens_per_second": 1000.0,
    } | more


class IdleWriter(BackgroundWriter):
    """A background writer that sends nothing by itself, so that marked content waits for `sync`."""

    def mark(self, name, send):
        pass


@pytest.fixture(params=["disk", "bucket"])
def store(request, tmp_path):
    return LocalStore(tmp_path) if request.param == "disk" else make_memory_bucket()


def open_metrics(store, background=None):
    """Open the file of a new attempt."""
    fence = Fence(store)
    fence.claim()
    return open_metrics_file(store, background or IdleWriter(), fence)


def write_rows(store, *steps):
    file = open_metrics(store)
    file.rewind(0)
    for step in steps:
        file.append(make_row(step))
    file.sync()
    file.close()


def read_all_rows(store):
    return read_rows(store)


def read_steps(store):
    return [line["step"] for line in read_all_rows(store)]


def test_the_kind_of_file_follows_the_store(tmp_path):
    assert isinstance(open_metrics(LocalStore(tmp_path)), _LocalMetricsFile)
    assert isinstance(open_metrics(make_memory_bucket()), _BucketMetricsFile)


def test_rows_round_trip(store):
    loss = 0.1 + 0.2
    file = open_metrics(store)
    assert file.rewind(0) is None
    file.append(make_row(1, **{"train/loss": loss}))
    assert file.get_newest() == make_row(1, **{"train/loss": loss})
    file.sync()
    assert read_all_rows(store) == [make_row(1, **{"train/loss": loss})]


def test_a_new_file_has_no_rows(store):
    assert read_all_rows(store) == []
    file = open_metrics(store)
    assert file.rewind(0) is None
    assert file.get_newest() == {}
    assert read_all_rows(store) == []


def test_rewind_drops_the_rows_beyond_the_restored_step(store):
    write_rows(store, 10, 20, 30, 40)
    file = open_metrics(store)
    assert file.rewind(20) == make_row(20)
    assert read_steps(store) == [10, 20]
    file.append(make_row(30))
    file.sync()
    assert read_steps(store) == [10, 20, 30]
    assert file.get_newest() == make_row(30)


def test_a_local_row_is_written_at_once(tmp_path):
    store = LocalStore(tmp_path)
    file = open_metrics(store)
    file.rewind(0)
    for step in (10, 20):
        file.append(make_row(step))
        assert read_steps(store)[-1] == step


def test_rewind_to_a_step_that_was_not_logged_has_no_row_for_it(store):
    write_rows(store, 10, 20)
    assert open_metrics(store).rewind(15) is None
    assert read_steps(store) == [10]


def test_rewind_drops_torn_duplicate_and_foreign_rows(store):
    write_rows(store, 10, 20)
    content = store.read("metrics.jsonl")
    content += json.dumps(make_row(20)).encode() + b"\n"
    content += json.dumps(make_row(10)).encode() + b"\n"
    content += b'[1]\n{"step": null}\n\xff\xff\n'
    content += json.dumps(make_row(30)).encode() + b"\n" + b'{"step": 40, "train/lo'
    store.write("metrics.jsonl", content)
    assert open_metrics(store).rewind(100) is None
    assert read_steps(store) == [10, 20, 30]
    kept = store.read("metrics.jsonl")
    assert not any(text in kept for text in (b"[1]", b"null", b"\xff", b"train/lo\n", b'"step": 40'))
    if store.root is not None:
        assert kept.count(b"\n") == 3


def test_rewind_accepts_the_tail_of_an_earlier_version(store):
    write_rows(store, 10, 99)
    kept = b"".join(encode_line(make_row(step)) for step in (10, 20, 30))
    file = open_metrics(store)
    assert file.rewind(20, RowTail.decode(kept)) == make_row(20)
    assert read_steps(store) == [10, 20]
    file.append(make_row(25))
    file.sync()
    assert read_steps(store) == [10, 20, 25]


def test_rewind_is_idempotent(store):
    write_rows(store, 10, 20, 30)
    file = open_metrics(store)
    assert file.rewind(30) == make_row(30)
    assert file.rewind(10) == make_row(10)
    file.append(make_row(20))
    file.sync()
    assert read_steps(store) == [10, 20]


def test_a_local_zombie_writes_to_the_replaced_file(tmp_path):
    store = LocalStore(tmp_path)
    zombie = open_metrics(store)
    zombie.rewind(0)
    zombie.append(make_row(10))
    file = open_metrics(store)
    file.rewind(10)
    zombie.append(make_row(999))
    with pytest.raises(FencedError):
        zombie.sync()
    file.append(make_row(20))
    assert read_steps(store) == [10, 20]


@pytest.mark.parametrize("change", ["rewind", "load", "replace_last"])
def test_a_zombie_that_was_suspended_replaces_no_rows(store, change):
    zombie = open_metrics(store)
    if change != "rewind":  # which happens at the start, between a restore and the first step
        zombie.rewind(0)
        zombie.append(make_row(10))
        zombie.sync()
    file = open_metrics(store)
    file.rewind(10)
    file.append(make_row(20))
    file.sync()
    file.close()
    with contextlib.suppress(FencedError):  # in a bucket `replace_last` waits for nothing
        zombie.replace_last(make_row(10, val=1.0)) if change == "replace_last" else zombie.rewind(0)
    with pytest.raises(FencedError):
        zombie.sync() if change == "replace_last" else zombie.rewind(0)
    assert read_steps(store)[-1:] == [20]


def make_damaged_content(base, name):
    """Return a file of three rows with the named damage."""
    (base / "elsewhere").mkdir(parents=True)
    store = LocalStore(base / "run")
    write_rows(store, 10, 20, 30)
    if name not in ERRORS:
        list_damages(base / "run/metrics.jsonl")[name](base / "run/metrics.jsonl")
    return store


def test_a_damaged_file_keeps_complete_rows_or_is_rejected(tmp_path):
    whole = tmp_path / "whole"
    write_rows(LocalStore(whole), 10)
    outcomes = {}
    for name in (*list_damages(whole / "metrics.jsonl"), *ERRORS):
        store = make_damaged_content(tmp_path / name, name)
        with pytest.MonkeyPatch.context() as patch:
            if name in ERRORS:
                inject_errors(patch, store.root / "metrics.jsonl", ERRORS[name])
            try:
                file = open_metrics(store)
                file.rewind(30)
                file.append(make_row(40))
                outcomes[name] = [line["step"] for line in read_rows(store)]
            except RunnerError as error:
                outcomes[name] = error.exit_code
    assert outcomes.pop("move behind link") == [10, 20, 30, 40]
    assert outcomes.pop("torn") == [10, 40]
    assert [outcomes.pop(name) for name in ("delete", "make empty", "no text")] == [[40], [40], [40]]
    rejected = ("change file type", "replace by dangling link", "replace by link loop", "replace by pipe")
    assert outcomes == dict.fromkeys(rejected, 2) | {name: 76 if name in ("EIO", "ESTALE") else 2 for name in ERRORS}


@pytest.mark.parametrize(
    "other", ['{"step": 20}', '{"step": true, "train/loss": 1.0}', '{"step": "20"}', "[" * 100_000]
)
def test_lines_that_are_no_rows_are_skipped(store, other):
    write_rows(store, 10)
    store.write("metrics.jsonl", store.read("metrics.jsonl") + other.encode() + b"\n")
    file = open_metrics(store)
    assert file.rewind(30) is None
    assert [line["step"] for line in read_rows(store)] == [10]


class ContentVersionDriver(MemoryDriver):
    """A service whose versions are digests of the content, like S3's entity tags."""

    def put(self, key, content, version):
        self.before("put", key)
        if version is not None and version != self.objects.get(key, (b"", ABSENT))[1]:
            raise FileExistsError(key)
        self.objects[key] = (bytes(content), hashlib.md5(content).hexdigest())
        return self.objects[key][1]


def make_zombie(driver):
    """Return a bucket and the metrics file of an attempt with two rows that will be overtaken."""
    store = make_memory_bucket(driver)
    zombie = open_metrics(store)
    zombie.rewind(0)
    zombie.append(make_row(10))
    zombie.append(make_row(20))
    zombie.sync()
    return store, zombie


@pytest.mark.parametrize("driver_class", [MemoryDriver, ContentVersionDriver])
@pytest.mark.parametrize("restored", [10, 20])
def test_a_bucket_zombie_is_fenced_after_a_rewind(driver_class, restored):
    store, zombie = make_zombie(driver_class())
    file = open_metrics(store)
    assert file.rewind(restored) == make_row(restored)
    before = store.read("metrics.jsonl")
    zombie.append(make_row(999))
    for _ in range(2):
        with pytest.raises(FencedError, match="attempt 2 has taken over"):
            zombie.sync()
        assert store.read("metrics.jsonl") == before
    file.append(make_row(30))
    file.sync()
    assert read_steps(store) == [*range(10, restored + 1, 10), 30]


def test_a_bucket_zombie_is_fenced_once_a_newer_attempt_begins():
    store, zombie = make_zombie(MemoryDriver())
    open_metrics(store)
    zombie.append(make_row(999))
    with pytest.raises(FencedError):
        zombie.sync()
    assert read_steps(store) == [10, 20]


def test_a_bucket_zombie_is_fenced_in_the_background():
    store, background = make_memory_bucket(), BackgroundWriter()
    zombie = open_metrics(store, background)
    zombie.rewind(0)
    open_metrics(store).rewind(0)
    zombie.append(make_row(10))
    background.flush()
    assert read_steps(store) == []
    with pytest.raises(FencedError):
        zombie.sync()


def overtake_before_write(driver, store, zombie, restored):
    """Rewind a newer attempt's file between the zombie's fence check and its write; return that file in a list."""
    files = []

    def overtake(verb, key):
        if verb == "put" and key.endswith("metrics.jsonl"):
            driver.before = lambda verb, key: None
            files.append(open_metrics(store))
            files[0].rewind(restored)

    driver.before = overtake
    zombie.append(make_row(999))
    return files


@pytest.mark.parametrize("restored", [10, 20])
def test_a_bucket_zombie_past_the_fence_is_stopped_by_the_version(restored):
    driver = MemoryDriver()
    store, zombie = make_zombie(driver)
    files = overtake_before_write(driver, store, zombie, restored)
    with pytest.raises(FencedError, match="attempt 2 has taken over"):
        zombie.sync()
    assert read_steps(store) == list(range(10, restored + 1, 10))
    (file,) = files
    file.append(make_row(30))
    file.sync()
    assert read_steps(store) == [*range(10, restored + 1, 10), 30]


@pytest.mark.parametrize("restored", [10, 20])
def test_the_owner_overwrites_what_a_bucket_zombie_has_written(restored):
    """If versions are digests, two attempts have equal versions as long as their rows are equal."""
    driver = ContentVersionDriver()
    store, zombie = make_zombie(driver)
    files = overtake_before_write(driver, store, zombie, restored)
    with contextlib.suppress(FencedError):
        zombie.sync()
    (file,) = files
    for step in (30, 40):
        file.append(make_row(step))
        file.sync()
        zombie.append(make_row(1000))
        with pytest.raises(FencedError):
            zombie.sync()
    assert read_steps(store) == [*range(10, restored + 1, 10), 30, 40]


def test_rewind_overwrites_a_late_write_of_a_dead_attempt():
    driver = MemoryDriver()
    store = make_memory_bucket(driver)
    write_rows(store, 10, 20)

    def overtake(verb, key):
        if verb == "put" and key.endswith("metrics.jsonl"):
            driver.before = lambda verb, key: None
            store.write("metrics.jsonl", b"".join(encode_line(make_row(step)) for step in (10, 20, 999)))

    file = open_metrics(store)
    driver.before = overtake
    assert file.rewind(20) == make_row(20)
    assert read_steps(store) == [10, 20]
    file.append(make_row(25))
    file.sync()
    assert read_steps(store) == [10, 20, 25]


def test_a_row_is_completed_while_the_disk_flushes_the_former_one(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    file = open_metrics(store)
    file.rewind(0)
    file.append(make_row(10))
    is_completed, flush = threading.Event(), os.fsync
    completing = threading.Thread(
        target=lambda: (file.replace_last(make_row(10, **{"val/loss": 2.0})), is_completed.set())
    )

    def flush_slowly(descriptor):
        if threading.current_thread() is not completing and not completing.ident:
            completing.start()
            is_completed.wait(0.3)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", flush_slowly)
    file.sync()
    completing.join()
    file.append(make_row(20))
    file.sync()
    assert [(row["step"], row.get("val/loss")) for row in read_all_rows(store)] == [(10, 2.0), (20, None)]
    assert file.get_tail().lines == []


def test_replace_last_completes_the_newest_row(store):
    write_rows(store, 10, 20)
    file = open_metrics(store)
    file.rewind(20)
    file.replace_last(make_row(20, **{"val/loss": 2.0}))
    file.append(make_row(30))
    file.sync()
    file.close()
    assert read_all_rows(store) == [make_row(10), make_row(20, **{"val/loss": 2.0}), make_row(30)]


def test_a_row_replaced_while_being_sent_is_sent_again():
    driver = MemoryDriver()
    store = make_memory_bucket(driver)
    file = open_metrics(store)
    file.rewind(0)
    file.append(make_row(10))

    completed = threading.Thread(target=file.replace_last, args=(make_row(10, **{"val/loss": 2.0}),))

    def complete(verb, key):
        if verb == "put":
            driver.before = lambda verb, key: None
            completed.start()
            completed.join(0.5)  # it may block until the write ends

    driver.before = complete
    file.sync()
    completed.join()
    file.sync()
    assert read_all_rows(store) == [make_row(10, **{"val/loss": 2.0})]


def test_bucket_rows_are_sent_in_the_background():
    background, store = BackgroundWriter(), make_memory_bucket()
    file = open_metrics(store, background)
    file.rewind(0)
    for step in (10, 20, 30):
        file.append(make_row(step))
    background.flush()
    assert read_all_rows(store) == [make_row(10), make_row(20), make_row(30)]


def test_rows_are_kept_if_the_bucket_rejects_them():
    driver = MemoryDriver()
    store = make_memory_bucket(driver)
    file = open_metrics(store)
    file.rewind(0)

    def refuse(verb, key):
        raise DeniedError("403")

    driver.before = refuse
    file.append(make_row(10))
    file.append(make_row(20))
    with pytest.raises(DeniedError):
        file.sync()
    assert file.get_newest() == make_row(20)
    driver.before = lambda verb, key: None
    file.sync()
    assert read_steps(store) == [10, 20]


# Bucket files split into parts.


class KilledError(Exception):
    """Simulated kill of the process."""


@pytest.fixture
def small_parts(monkeypatch):
    """Limit parts to about six rows, and the main object to the names of three parts."""
    monkeypatch.setattr(bucket, "PART_BYTES", 1000)
    monkeypatch.setattr(bucket, "_PARTS_MAX", 3)


def trigger_before(driver, verb, number, act):
    """Call `act` once, before the `number`-th call of this verb."""
    calls = [0]

    def look(present, key):
        calls[0] += present == verb
        if calls[0] == number:
            driver.before = lambda verb, key: None
            act()

    driver.before = look


def append_and_sync(file, steps, synced):
    for step in steps:
        file.append(make_row(step))
        file.sync()
        synced.append(step)


def check_later_attempt(store, step):
    """Check that an attempt restored at `step` has every row up to it once and can continue over many parts."""
    file = open_metrics(store)
    file.rewind(step)
    assert read_all_rows(store) == [make_row(number) for number in range(1, step + 1)]
    append_and_sync(file, range(step + 1, step + 30), [])
    assert read_all_rows(store) == [make_row(number) for number in range(1, step + 30)]


def test_the_cost_of_a_bucket_row_is_bounded(small_parts):
    driver, sizes = MemoryDriver(), []
    store = make_memory_bucket(driver)
    file = open_metrics(store)
    file.rewind(0)
    put = driver.put
    driver.put = lambda key, content, version: sizes.append(len(content)) or put(key, content, version)
    append_and_sync(file, range(1, 1001), [])
    assert max(sizes) < 1000 + 300, "one part and the names of three"
    assert len(sizes) < 1000 + 200
    assert len(file.get_tail().lines) == 0
    assert len(file._lines) < 10
    assert len(driver.objects) < 1000 / 5
    assert read_all_rows(store) == [make_row(step) for step in range(1, 1001)]
    assert open_metrics(store).rewind(500) == make_row(500)
    assert read_all_rows(store) == [make_row(step) for step in range(1, 501)]


def test_parts_beyond_the_restored_step_are_deleted(small_parts):
    driver = MemoryDriver()
    store = make_memory_bucket(driver)
    write_rows(store, *range(1, 101))
    num_objects = len(driver.objects)
    file = open_metrics(store)
    file.rewind(7)
    append_and_sync(file, range(8, 101), [])
    assert len(driver.objects) <= num_objects + 2
    assert read_all_rows(store) == [make_row(step) for step in range(1, 101)]


def test_a_large_object_of_an_earlier_version_is_continued(small_parts):
    store = make_memory_bucket()
    store.write("metrics.jsonl", b"".join(encode_line(make_row(step)) for step in range(1, 201)))
    check_later_attempt(store, 150)
    assert len(store.read("metrics.jsonl")) < 1300


@pytest.mark.parametrize("is_answer_lost", [False, True])
@pytest.mark.parametrize("number", range(1, 14))
def test_a_kill_in_any_write_loses_no_synced_row(small_parts, number, is_answer_lost):
    driver, synced = MemoryDriver(), [0]
    store = make_memory_bucket(driver)
    write_rows(store, *range(1, 21))
    file = open_metrics(store)
    file.rewind(20)

    def die():
        raise KilledError

    put = driver.put

    def put_and_die(key, content, version):
        driver.put = put
        put(key, content, version)
        raise KilledError

    if is_answer_lost:
        trigger_before(driver, "put", number, lambda: setattr(driver, "put", put_and_die))
    else:
        trigger_before(driver, "put", number, die)
    with contextlib.suppress(KilledError):
        append_and_sync(file, range(21, 60), synced)
    assert 20 < synced[-1] < 59 or number == 1
    for restored in (max(synced[-1], 20), 20, 13, 7, 1, 0):
        check_later_attempt(make_memory_bucket(copy_bucket(driver)), restored)


@pytest.mark.parametrize(("verb", "number"), [("put", 1), ("put", 2), ("delete", 1), ("delete", 2)])
def test_a_kill_during_a_rewind_loses_no_other_row(small_parts, verb, number):
    driver = MemoryDriver()
    store = make_memory_bucket(driver)
    write_rows(store, *range(1, 101))
    file = open_metrics(store)

    def die():
        raise KilledError

    trigger_before(driver, verb, number, die)
    with contextlib.suppress(KilledError):
        file.rewind(9)
    driver.before = lambda verb, key: None
    for restored in (9, 5, 0):
        check_later_attempt(make_memory_bucket(copy_bucket(driver)), restored)


def copy_bucket(driver):
    """Return a copy of the bucket, so that a test can continue from it several times."""
    other = type(driver)()
    other.objects = dict(driver.objects)
    other._versions = driver._versions
    return other


@pytest.mark.parametrize("driver_class", [MemoryDriver, ContentVersionDriver])
@pytest.mark.parametrize("num_rows", [0, 1, 25])
@pytest.mark.parametrize("number", range(1, 9))
def test_a_zombie_that_resumes_in_any_write_harms_no_row(small_parts, driver_class, num_rows, number):
    driver = driver_class()
    store = make_memory_bucket(driver)
    write_rows(store, *range(1, 21))
    zombie, owner, synced = open_metrics(store), [], [15]
    zombie.rewind(20)

    def overtake():
        file = open_metrics(store)
        file.rewind(15)
        append_and_sync(file, range(16, 16 + num_rows), synced)
        owner.append(file)

    trigger_before(driver, "put", number, overtake)
    with contextlib.suppress(FencedError):
        append_and_sync(zombie, range(21, 60), [])
    for restored in (synced[-1], 15, 8):
        check_later_attempt(make_memory_bucket(copy_bucket(driver)), restored)
    append_and_sync(owner[0], range(synced[-1] + 1, 60), [])
    zombie.append(make_row(1000))
    with pytest.raises(FencedError):
        zombie.sync()
    assert read_all_rows(store) == [make_row(step) for step in range(1, 60)]


def test_a_reader_beside_a_writer_sees_each_row_once(small_parts):
    driver = MemoryDriver()
    store = make_memory_bucket(driver)
    write_rows(store, *range(1, 101))

    def go_back():
        file = open_metrics(store)
        file.rewind(50)
        append_and_sync(file, range(51, 80), [])

    trigger_before(driver, "get", 2, go_back)
    assert read_all_rows(store) == [make_row(step) for step in range(1, 80)]


# Tail of rows in the fast tier.


def reopen(store, tail):
    """Open the file of a new attempt with the tail that the fast tier has saved."""
    file = open_metrics(store)
    kept = RowTail.decode(tail)
    assert kept.after is None or file.has_step(kept.after)
    return file, kept


@pytest.mark.parametrize("num_synced", [0, 1, 2, 3, 20])
def test_the_tail_holds_the_rows_since_the_last_sync(small_parts, store, num_synced):
    file = open_metrics(store)
    file.rewind(0)
    append_and_sync(file, range(1, num_synced + 1), [])
    for step in range(num_synced + 1, num_synced + 4):
        file.append(make_row(step))
    tail = file.get_tail().encode()
    assert tail.count(b"\n") == 4
    for restored in (num_synced + 3, num_synced + 2):
        again, kept = reopen(store, tail)
        assert again.rewind(restored, kept) == make_row(restored)
        assert read_all_rows(store) == [make_row(step) for step in range(1, restored + 1)]


def test_a_row_completed_after_sending_is_in_the_tail_again(store):
    file = open_metrics(store)
    file.rewind(0)
    append_and_sync(file, [1, 2], [])
    file.replace_last(make_row(2, **{"val/loss": 2.0}))
    again, kept = reopen(store, file.get_tail().encode())
    assert again.rewind(2, kept) == make_row(2, **{"val/loss": 2.0})
    assert read_all_rows(store) == [make_row(1), make_row(2, **{"val/loss": 2.0})]


def test_a_tail_does_not_follow_a_file_that_was_rewound(small_parts, store):
    file = open_metrics(store)
    file.rewind(0)
    append_and_sync(file, range(1, 31), [])
    assert file.get_tail().after == 30
    later = open_metrics(store)
    later.rewind(20)
    append_and_sync(later, range(21, 25), [])
    assert [open_metrics(store).has_step(step) for step in (1, 20, 24, 25, 30)] == [True, True, True, False, False]


def test_a_torn_tail_is_rejected():
    whole = RowTail(4, [EncodedRow.from_row(make_row(5)), EncodedRow.from_row(make_row(6))]).encode()
    assert RowTail.decode(whole).lines[-1].row == make_row(6)
    for size in range(1, len(whole) - 1):
        with pytest.raises(ValueError, match="not whole"):
            RowTail.decode(whole[:size])


def test_the_tail_on_a_disk_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_UNSYNCED_BYTES_MAX", 1000)
    file = open_metrics(LocalStore(tmp_path))
    file.rewind(0)
    for step in range(1, 1001):
        file.append(make_row(step))
        assert len(file.get_tail().encode()) < 1300
        assert len(file._written) + len(file._unwritten) < 10
    (tmp_path / "metrics.jsonl").unlink()
    assert file.get_newest() == make_row(1000)
    assert file.get_tail().lines[-1].step == 1000


# Deletion and replacement by others.


def delete(path):
    path.unlink()


def replace(path):
    path.with_name("other").write_text('{"step": 999}\n')
    path.with_name("other").rename(path)


@pytest.mark.parametrize("strike_at", [delete, replace])
def test_a_deleted_local_file_is_restored_with_one_warning(tmp_path, capsys, strike_at):
    store = LocalStore(tmp_path)
    write_rows(store, 10, 20)
    file = open_metrics(store)
    file.rewind(20)
    file.append(make_row(30))
    strike_at(tmp_path / "metrics.jsonl")
    file.append(make_row(40))
    for _ in range(2):
        file.sync()
    assert read_steps(store) == [10, 20, 30, 40]
    assert capsys.readouterr().err.count("metrics.jsonl was deleted or replaced while the job runs") == 1
    file.append(make_row(50))
    file.sync()
    assert read_steps(store) == [10, 20, 30, 40, 50]


def test_a_truncated_local_file_is_continued_with_one_warning(tmp_path, capsys):
    store = LocalStore(tmp_path)
    file = open_metrics(store)
    file.rewind(0)
    file.append(make_row(10))
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    for _ in range(2):
        file.sync()
    file.append(make_row(20))
    assert read_steps(store) == [20]
    assert capsys.readouterr().err.count("metrics.jsonl was cut from ") == 1


def test_a_local_zombie_does_not_restore_over_a_newer_attempt(tmp_path):
    store = LocalStore(tmp_path)
    zombie = open_metrics(store)
    zombie.rewind(0)
    zombie.append(make_row(10))
    open_metrics(store).rewind(0)
    with pytest.raises(FencedError):
        zombie.sync()
    assert read_steps(store) == []


def make_meta(grad_norm=1.0):
    return {"grad_norm": jnp.float32(grad_norm), "learning_rate": jnp.float32(0.25)}


def test_a_window_closes_with_the_newest_step_and_the_tokens_so_far():
    window = MetricsWindow(step=4)
    for step in (5, 6):
        window.add(step, jnp.float32(step), make_meta(step + 0.5))
    closed = window.close(lambda step: 64 * step)
    assert closed.pop("perf/tokens_per_second") > 0
    expected = {
        "train/loss": 6.0,
        "train/loss_mean": 5.5,
        "train/grad_norm": 6.5,
        "train/learning_rate": 0.25,
        "train/tokens": 384,
    }
    assert closed == {"step": 6} | expected


def test_speed_is_the_tokens_of_the_window_over_its_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    window = MetricsWindow(step=10)
    now[0] = 150.0
    window.restart_clock()
    now[0] = 152.0
    for step in (11, 12, 13):
        window.add(step, jnp.float32(1), make_meta())
    assert window.close(lambda step: 64 * step)["perf/tokens_per_second"] == pytest.approx(3 * 64 / 2)
    now[0] = 156.0
    window.add(14, jnp.float32(1), make_meta())
    assert window.close(lambda step: 64 * step)["perf/tokens_per_second"] == pytest.approx(64 / 4)


def test_meta_is_in_the_row_and_null_if_not_finite():
    window = MetricsWindow()
    window.add(1, jnp.float32(1), make_meta() | {"balance": jnp.float32(0.25), "dropped": jnp.int32(3), "odd": jnp.nan})
    closed = window.close(lambda step: 64 * step)
    assert (closed["train/balance"], closed["train/dropped"], closed["train/odd"]) == (0.25, 3, None)
    assert "NaN" not in json.dumps(closed)


def test_a_step_need_not_return_the_norm_of_its_gradient():
    window = MetricsWindow()
    window.add(1, jnp.float32(1), {"learning_rate": jnp.float32(0.25)})
    assert "train/grad_norm" not in window.close(lambda step: 64 * step)
    window.add(2, jnp.float32(math.nan), {})
    with pytest.raises(DivergedError, match="step 2"):
        window.fetch()


@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_the_first_step_that_is_not_finite_is_named(loss, grad_norm):
    window = MetricsWindow()
    window.add(1, jnp.float32(1), make_meta())
    window.add(2, jnp.float32(loss), make_meta(grad_norm))
    window.add(3, jnp.float32(math.nan), make_meta())
    with pytest.raises(DivergedError, match="step 2: training diverged"):
        window.fetch()


def test_plain_progress_shows_step_loss_speed_and_time_left(capsys):
    progress = _PlainProgress(lambda step: 50 * step, total_steps=200)
    progress.show(make_row(100, **{"train/loss": 1.23456}))
    progress.show(make_row(200, **{"train/loss": 1.0, "val/loss": 2.5}))
    progress.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 100/200  loss 1.2346  1,000 tokens/s  5 s left"
    assert second == "step 200/200  loss 1.0000  val 2.5000  1,000 tokens/s  0 s left"


def test_live_progress_shows_name_step_loss_speed_and_time_left():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    progress = _LiveProgress("gpt_nano", total_steps=200, step=40, console=console)
    progress.show(make_row(100, **{"train/loss": 1.23456}))
    progress.show(make_row(150, **{"val/loss": 2.5}))
    progress.close()
    text = console.file.getvalue()
    assert "40/200" in text
    assert "step 150  loss 0.0067  val 2.5000" in text
    last_line = r"gpt_nano .* 150/200 loss 0.0067  val 2.5000  1,000 tokens/s +[\d-]+:[\d-]{2}:[\d-]{2}"
    assert re.search(last_line, text)


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "form"), [(io.StringIO, "text"), (io.StringIO, "json"), (Screen, "json")])
def test_progress_is_plain_without_a_terminal(stream, form, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", stream())
    spec = make_gpt_spec(tmp_path / "run", **{"logging.format": form})
    assert isinstance(writers.make_progress(spec, 10, 0, lambda step: 64 * step), _PlainProgress)


def test_a_stale_handle_at_the_opening_of_the_new_file_is_tried_again(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    failures, plain = iter([True, True]), Path.open

    def open_file(path, *arguments, **options):
        if path.name == METRICS_FILE and next(failures, False):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return plain(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_file)
    metrics = open_metrics(store)
    metrics.rewind(0)
    metrics.append(make_row(1))
    metrics.sync()
    assert next(failures, None) is None
    assert read_steps(store) == [1]
