"""The rows of the surviving trajectory, and how people see them."""

import io
import json
import math
import re

import jax.numpy as jnp
import pytest
from rich.console import Console

from runner import metrics
from runner.errors import DivergedError
from runner.metrics import LiveProgress, MetricsFile, PlainProgress, Window
from runner.storage import read_lines


def row(step, **more):
    return {
        "step": step,
        "train/loss": 1.0 / step,
        "train/grad_norm": 0.5,
        "train/learning_rate": 1e-3,
        "train/tokens": step * 64,
        "perf/tokens_per_second": 1000.0,
    } | more


def write(directory, *steps):
    file = MetricsFile(directory)
    file.rewind(0)
    for step in steps:
        file.append(row(step))
    file.close()
    return directory / "metrics.jsonl"


def steps_in(directory):
    return [line["step"] for line in read_lines(directory / "metrics.jsonl")]


def test_rows_come_back_as_they_were_written(tmp_path):
    loss = 0.1 + 0.2
    file = MetricsFile(tmp_path)
    assert file.rewind(0) is None
    file.append(row(1, **{"train/loss": loss}))
    assert file.last() == row(1, **{"train/loss": loss})


def test_rewind_drops_the_rows_beyond_the_restored_step(tmp_path):
    write(tmp_path, 10, 20, 30, 40)
    file = MetricsFile(tmp_path)
    assert file.rewind(20) == row(20)
    assert steps_in(tmp_path) == [10, 20]
    file.append(row(30))
    assert steps_in(tmp_path) == [10, 20, 30]


def test_rewind_to_a_step_that_was_not_logged_has_no_row_for_it(tmp_path):
    write(tmp_path, 10, 20)
    assert MetricsFile(tmp_path).rewind(15) is None
    assert steps_in(tmp_path) == [10]


def test_rewind_drops_torn_and_duplicate_and_foreign_rows(tmp_path):
    path = write(tmp_path, 10, 20)
    with path.open("ab") as file:
        file.write(json.dumps(row(20)).encode() + b"\n")
        file.write(json.dumps(row(10)).encode() + b"\n")
        file.write(b'[1]\n{"step": null}\n\xff\xff\n')
        file.write(json.dumps(row(30)).encode() + b"\n" + b'{"step": 40, "train/lo')
    assert MetricsFile(tmp_path).rewind(100) is None
    assert steps_in(tmp_path) == [10, 20, 30]
    assert path.read_bytes().count(b"\n") == 3


def test_a_zombie_that_still_holds_the_file_writes_where_nobody_reads(tmp_path):
    zombie = MetricsFile(tmp_path)
    zombie.rewind(0)
    zombie.append(row(10))
    file = MetricsFile(tmp_path)
    file.rewind(10)
    zombie.append(row(999))
    file.append(row(20))
    assert steps_in(tmp_path) == [10, 20]


def test_replace_last_completes_the_newest_row_and_more_can_follow(tmp_path):
    write(tmp_path, 10, 20)
    file = MetricsFile(tmp_path)
    file.rewind(20)
    file.replace_last(row(20, **{"val/loss": 2.0}))
    file.append(row(30))
    file.sync()
    file.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [row(10), row(20, **{"val/loss": 2.0}), row(30)]


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
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
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
    assert isinstance(metrics.make_progress("x", 10, 0, 64), PlainProgress)
