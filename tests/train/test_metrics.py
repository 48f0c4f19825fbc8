"""The rows of the surviving trajectory, and how people see them."""

import contextlib
import hashlib
import io
import json
import math
import re
import threading

import jax.numpy as jnp
import pytest
from rich.console import Console

from runner.attempt.fence import Fence
from runner.errors import DivergedError, FencedError, RunnerError
from runner.storage import ABSENT, BackgroundWriter, DeniedError, LocalStore, encode_line, parse_lines
from runner.train.metrics import sinks
from runner.train.metrics.file import BucketMetrics, MetricsFile, open_metrics
from runner.train.metrics.sinks import LiveProgress, PlainProgress
from runner.train.metrics.window import Window
from tests.support.damage import ERRORS, damages_of, give_errors
from tests.support.memory_bucket import MemoryDriver, memory_bucket


def row(step, **more):
    return {
        "step": step,
        "train/loss": 1.0 / step,
        "train/grad_norm": 0.5,
        "train/learning_rate": 1e-3,
        "train/tokens": step * 64,
        "perf/tokens_per_second": 1000.0,
    } | more


class Still(BackgroundWriter):
    """A background writer whose thread does not get to it: what is marked waits for `sync`."""

    def mark(self, name, send):
        pass


@pytest.fixture(params=["disk", "bucket"])
def store(request, tmp_path):
    return LocalStore(tmp_path) if request.param == "disk" else memory_bucket()


def open_file(store, background=None):
    """The file for a new attempt."""
    fence = Fence(store)
    fence.claim()
    return open_metrics(store, background or Still(), fence)


def write(store, *steps):
    file = open_file(store)
    file.rewind(0)
    for step in steps:
        file.append(row(step))
    file.sync()
    file.close()


def rows_in(store):
    return parse_lines(store.read("metrics.jsonl"))


def steps_in(store):
    return [line["step"] for line in rows_in(store)]


def test_the_kind_of_file_follows_the_store(tmp_path):
    assert isinstance(open_file(LocalStore(tmp_path)), MetricsFile)
    assert isinstance(open_file(memory_bucket()), BucketMetrics)


def test_rows_come_back_as_they_were_written(store):
    loss = 0.1 + 0.2
    file = open_file(store)
    assert file.rewind(0) is None
    file.append(row(1, **{"train/loss": loss}))
    assert file.rows()[-1] == row(1, **{"train/loss": loss})
    file.sync()
    assert open_file(store).rows() == rows_in(store) == [row(1, **{"train/loss": loss})]


def test_where_nothing_was_written_there_are_no_rows(store):
    assert open_file(store).rows() == []
    file = open_file(store)
    assert file.rewind(0) is None
    assert file.rows() == rows_in(store) == []


def test_rewind_drops_the_rows_beyond_the_restored_step(store):
    write(store, 10, 20, 30, 40)
    file = open_file(store)
    assert file.rewind(20) == row(20)
    assert steps_in(store) == [10, 20]
    file.append(row(30))
    file.sync()
    assert steps_in(store) == [10, 20, 30]
    assert file.rows() == [row(10), row(20), row(30)]


def test_on_a_disk_a_row_is_there_as_soon_as_it_is_appended(tmp_path):
    store = LocalStore(tmp_path)
    file = open_file(store)
    file.rewind(0)
    for step in (10, 20):
        file.append(row(step))
        assert steps_in(store)[-1] == step


def test_rewind_to_a_step_that_was_not_logged_has_no_row_for_it(store):
    write(store, 10, 20)
    assert open_file(store).rewind(15) is None
    assert steps_in(store) == [10]


def test_rewind_drops_torn_and_duplicate_and_foreign_rows(store):
    write(store, 10, 20)
    content = store.read("metrics.jsonl")
    content += json.dumps(row(20)).encode() + b"\n"
    content += json.dumps(row(10)).encode() + b"\n"
    content += b'[1]\n{"step": null}\n\xff\xff\n'
    content += json.dumps(row(30)).encode() + b"\n" + b'{"step": 40, "train/lo'
    store.write("metrics.jsonl", content)
    assert open_file(store).rewind(100) is None
    assert steps_in(store) == [10, 20, 30]
    kept = store.read("metrics.jsonl")
    assert not any(text in kept for text in (b"[1]", b"null", b"\xff", b"train/lo\n", b'"step": 40'))
    if store.root is not None:
        assert kept.count(b"\n") == 3


def test_rewind_takes_the_rows_that_were_kept_with_the_restored_state_before_those_of_the_file(store):
    write(store, 10, 99)
    kept = b"".join(encode_line(row(step)) for step in (10, 20, 30))
    file = open_file(store)
    assert file.rewind(20, kept=kept) == row(20)
    assert steps_in(store) == [10, 20]
    file.append(row(25))
    file.sync()
    assert steps_in(store) == [10, 20, 25]


def test_rewind_may_be_repeated(store):
    write(store, 10, 20, 30)
    file = open_file(store)
    assert file.rewind(30) == row(30)
    assert file.rewind(10) == row(10)
    file.append(row(20))
    file.sync()
    assert steps_in(store) == [10, 20]


def test_on_a_disk_a_zombie_that_still_holds_the_file_writes_where_nobody_reads(tmp_path):
    store = LocalStore(tmp_path)
    zombie = MetricsFile(tmp_path)
    zombie.rewind(0)
    zombie.append(row(10))
    file = MetricsFile(tmp_path)
    file.rewind(10)
    zombie.append(row(999))
    zombie.sync()
    file.append(row(20))
    assert steps_in(store) == [10, 20]


def damaged(base, name):
    """A file of three rows that has come to harm."""
    (base / "elsewhere").mkdir(parents=True)
    store = LocalStore(base / "run")
    write(store, 10, 20, 30)
    if name not in ERRORS:
        damages_of(base / "run/metrics.jsonl")[name](base / "run/metrics.jsonl")
    return store


def test_a_damaged_file_leaves_the_rows_that_are_whole_or_is_refused_with_a_line(tmp_path):
    whole = tmp_path / "whole"
    write(LocalStore(whole), 10)
    outcomes = {}
    for name in (*damages_of(whole / "metrics.jsonl"), *ERRORS):
        store = damaged(tmp_path / name, name)
        with pytest.MonkeyPatch.context() as patch:
            if name in ERRORS:
                give_errors(patch, store.root / "metrics.jsonl", ERRORS[name])
            try:
                file = open_file(store)
                file.rewind(30)
                file.append(row(40))
                outcomes[name] = [line["step"] for line in file.rows()]
            except RunnerError as error:
                outcomes[name] = error.exit_code
    assert outcomes.pop("link to it") == [10, 20, 30, 40]
    assert outcomes.pop("torn") == [10, 40]
    assert [outcomes.pop(name) for name in ("missing", "empty", "no text")] == [[40], [40], [40]]
    assert outcomes == {"other kind": 2, "dangling link": 2, "loop of links": 2, "pipe": 2} | {
        name: 76 if name in ("EIO", "ESTALE") else 2 for name in ERRORS
    }


@pytest.mark.parametrize(
    "other", ['{"step": 20}', '{"step": true, "train/loss": 1.0}', '{"step": "20"}', "[" * 100_000]
)
def test_a_line_that_is_no_row_is_left_out(store, other):
    write(store, 10)
    store.write("metrics.jsonl", store.read("metrics.jsonl") + other.encode() + b"\n")
    file = open_file(store)
    assert file.rewind(30) is None
    assert [line["step"] for line in file.rows()] == [10]


class ContentVersions(MemoryDriver):
    """A service whose versions are digests of the content, as S3's entity tags are."""

    def put(self, key, content, version):
        self.before("put", key)
        if version is not None and version != self.objects.get(key, (b"", ABSENT))[1]:
            raise FileExistsError(key)
        self.objects[key] = (bytes(content), hashlib.md5(content).hexdigest())
        return self.objects[key][1]


def written_zombie(driver):
    """A bucket, and the metrics of an attempt that has written two rows and will be overtaken."""
    store = memory_bucket(driver)
    zombie = open_file(store)
    zombie.rewind(0)
    zombie.append(row(10))
    zombie.append(row(20))
    zombie.sync()
    return store, zombie


@pytest.mark.parametrize("driver_class", [MemoryDriver, ContentVersions])
@pytest.mark.parametrize("restored", [10, 20])
def test_in_a_bucket_a_zombie_is_fenced_after_a_newer_attempts_rewind(driver_class, restored):
    store, zombie = written_zombie(driver_class())
    file = open_file(store)
    assert file.rewind(restored) == row(restored)
    before = store.read("metrics.jsonl")
    zombie.append(row(999))
    for _ in range(2):
        with pytest.raises(FencedError, match="attempt 2 has taken over"):
            zombie.sync()
        assert store.read("metrics.jsonl") == before
    file.append(row(30))
    file.sync()
    assert steps_in(store) == [*range(10, restored + 1, 10), 30]


def test_in_a_bucket_a_zombie_is_fenced_as_soon_as_a_newer_attempt_has_begun():
    store, zombie = written_zombie(MemoryDriver())
    open_file(store)
    zombie.append(row(999))
    with pytest.raises(FencedError):
        zombie.sync()
    assert steps_in(store) == [10, 20]


def test_in_a_bucket_a_zombie_whose_rows_are_sent_in_the_background_does_no_harm_there():
    store, background = memory_bucket(), BackgroundWriter()
    zombie = open_file(store, background)
    zombie.rewind(0)
    open_file(store).rewind(0)
    zombie.append(row(10))
    background.flush()
    assert steps_in(store) == []
    with pytest.raises(FencedError):
        zombie.sync()


def overtaken(driver, store, zombie, restored):
    """Let the zombie pass its last look at the fence; before it writes, the newer attempt rewinds. That one's file."""
    files = []

    def overtake(verb, key):
        if verb == "put" and key.endswith("metrics.jsonl"):
            driver.before = lambda verb, key: None
            files.append(open_file(store))
            files[0].rewind(restored)

    driver.before = overtake
    zombie.append(row(999))
    return files


@pytest.mark.parametrize("restored", [10, 20])
def test_in_a_bucket_a_zombie_that_has_passed_the_fence_is_stopped_by_the_version(restored):
    driver = MemoryDriver()
    store, zombie = written_zombie(driver)
    files = overtaken(driver, store, zombie, restored)
    with pytest.raises(FencedError, match="attempt 2 has taken over"):
        zombie.sync()
    assert steps_in(store) == list(range(10, restored + 1, 10))
    (file,) = files
    file.append(row(30))
    file.sync()
    assert steps_in(store) == [*range(10, restored + 1, 10), 30]


@pytest.mark.parametrize("restored", [10, 20])
def test_in_a_bucket_what_a_zombie_has_put_over_equal_content_is_written_over_by_the_owner(restored):
    """Where versions are digests, those of two attempts are the same as long as their rows are."""
    driver = ContentVersions()
    store, zombie = written_zombie(driver)
    files = overtaken(driver, store, zombie, restored)
    with contextlib.suppress(FencedError):
        zombie.sync()
    (file,) = files
    for step in (30, 40):
        file.append(row(step))
        file.sync()
        zombie.append(row(1000))
        with pytest.raises(FencedError):
            zombie.sync()
    assert steps_in(store) == [*range(10, restored + 1, 10), 30, 40]


def test_in_a_bucket_rewind_goes_over_a_write_of_a_dead_attempt_that_was_still_on_its_way():
    driver = MemoryDriver()
    store = memory_bucket(driver)
    write(store, 10, 20)

    def overtake(verb, key):
        if verb == "put" and key.endswith("metrics.jsonl"):
            driver.before = lambda verb, key: None
            store.write("metrics.jsonl", b"".join(encode_line(row(step)) for step in (10, 20, 999)))

    file = open_file(store)
    driver.before = overtake
    assert file.rewind(20) == row(20)
    assert steps_in(store) == [10, 20]
    file.append(row(25))
    file.sync()
    assert steps_in(store) == [10, 20, 25]


def test_replace_last_completes_the_newest_row_and_more_can_follow(store):
    write(store, 10, 20)
    file = open_file(store)
    file.rewind(20)
    file.replace_last(row(20, **{"val/loss": 2.0}))
    file.append(row(30))
    file.sync()
    file.close()
    assert rows_in(store) == [row(10), row(20, **{"val/loss": 2.0}), row(30)]


def test_in_a_bucket_a_row_that_is_replaced_while_it_is_on_its_way_is_sent_again():
    driver = MemoryDriver()
    store = memory_bucket(driver)
    file = open_file(store)
    file.rewind(0)
    file.append(row(10))

    completed = threading.Thread(target=file.replace_last, args=(row(10, **{"val/loss": 2.0}),))

    def complete(verb, key):
        if verb == "put":
            driver.before = lambda verb, key: None
            completed.start()
            completed.join(0.5)  # it may have to wait until the write is over

    driver.before = complete
    file.sync()
    completed.join()
    file.sync()
    assert rows_in(store) == [row(10, **{"val/loss": 2.0})]


def test_in_a_bucket_rows_arrive_by_themselves():
    background, store = BackgroundWriter(), memory_bucket()
    file = open_file(store, background)
    file.rewind(0)
    for step in (10, 20, 30):
        file.append(row(step))
    background.flush()
    assert rows_in(store) == file.rows() == [row(10), row(20), row(30)]


def test_in_a_bucket_that_refuses_rows_are_kept_and_sync_says_why():
    driver = MemoryDriver()
    store = memory_bucket(driver)
    file = open_file(store)
    file.rewind(0)

    def refuse(verb, key):
        raise DeniedError("403")

    driver.before = refuse
    file.append(row(10))
    file.append(row(20))
    with pytest.raises(DeniedError):
        file.sync()
    assert file.rows() == [row(10), row(20)]
    driver.before = lambda verb, key: None
    file.sync()
    assert steps_in(store) == [10, 20]


def meta(grad_norm=1.0):
    return {"grad_norm": jnp.float32(grad_norm), "learning_rate": jnp.float32(0.25)}


def test_a_window_closes_with_the_newest_step_and_the_tokens_so_far():
    window = Window(step=4)
    for step in (5, 6):
        window.add(step, jnp.float32(step), meta(step + 0.5))
    closed = window.close(tokens_per_step=64)
    assert closed.pop("perf/tokens_per_second") > 0
    expected = {"train/loss": 6.0, "train/grad_norm": 6.5, "train/learning_rate": 0.25, "train/tokens": 384}
    assert closed == {"step": 6} | expected


def test_speed_is_the_tokens_of_the_window_over_its_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    window = Window(step=10)
    now[0] = 150.0
    window.restart_clock()
    now[0] = 152.0
    for step in (11, 12, 13):
        window.add(step, jnp.float32(1), meta())
    assert window.close(tokens_per_step=64)["perf/tokens_per_second"] == pytest.approx(3 * 64 / 2)
    now[0] = 156.0
    window.add(14, jnp.float32(1), meta())
    assert window.close(tokens_per_step=64)["perf/tokens_per_second"] == pytest.approx(64 / 4)


@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_the_first_step_that_is_not_finite_is_named(loss, grad_norm):
    window = Window()
    window.add(1, jnp.float32(1), meta())
    window.add(2, jnp.float32(loss), meta(grad_norm))
    window.add(3, jnp.float32(math.nan), meta())
    with pytest.raises(DivergedError, match="step 2: training diverged"):
        window.fetch()


def test_plain_progress_shows_step_loss_speed_and_time_left(capsys):
    progress = PlainProgress(tokens_per_step=50, total_steps=200)
    progress.show(row(100, **{"train/loss": 1.23456}))
    progress.show(row(200, **{"train/loss": 1.0, "val/loss": 2.5}))
    progress.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 100/200  loss 1.2346  1,000 tokens/s  5 s left"
    assert second == "step 200/200  loss 1.0000  val 2.5000  1,000 tokens/s  0 s left"


def test_live_progress_shows_name_step_loss_speed_and_time_left():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    progress = LiveProgress("gpt_nano", total_steps=200, step=40, console=console)
    progress.show(row(100, **{"train/loss": 1.23456}))
    progress.show(row(150, **{"val/loss": 2.5}))
    progress.close()
    text = console.file.getvalue()
    assert "40/200" in text
    assert "step 150  loss 0.0067  val 2.5000" in text
    last_line = r"gpt_nano .* 150/200 loss 0.0067  val 2.5000  1,000 tokens/s +[\d-]+:[\d-]{2}:[\d-]{2}"
    assert re.search(last_line, text)


def test_progress_is_plain_where_output_is_no_terminal(capsys):
    assert isinstance(sinks.make_progress("x", 10, 0, 64), PlainProgress)
