"""Metric writers show the surviving trajectory, and their failures do not affect training."""

import csv
import io
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runner.cli.app import run_command
from runner.metrics import writers
from runner.metrics import writers as tensorboard
from runner.metrics.rows import Row
from runner.metrics.writers import _AsyncMetricWriter, _TensorBoardWriter
from runner.storage import LocalStore, encode_line, parse_lines, read_json, read_log
from tests.support import wandb_file
from tests.support.memory_bucket import make_memory_bucket
from tests.support.tiny_jobs import make_gpt
from tests.test_values import TrainLookup

SAVED_STEP, KILL_STEP = 3, 5
ALL_ON = {"logging.tensorboard": True, "logging.wandb": "online", "logging.wandb_tags": ["a tag"]}
CHANGES = {"checkpoint.every_steps": SAVED_STEP}


class KilledError(Exception):
    """Simulated kill of the process."""


class KilledLookup(TrainLookup):
    def save_or_stop(self) -> None:
        super().save_or_stop()
        self.checkpointer.wait_until_finished()
        if self.step == KILL_STEP:
            raise KilledError


def round_to_float32(row: Row) -> Row:
    """Convert a row to TensorBoard's float32 values, without the time."""
    return {key: struct.unpack("<f", struct.pack("<f", value))[0] for key, value in row.items() if key != "perf/time"}


def read_scalars(accumulator: EventAccumulator) -> list[Row]:
    """Return the scalars that TensorBoard would draw as rows, after checking that each tag is in order."""
    found: dict[int, Row] = {}
    for tag in accumulator.Tags()["scalars"]:
        events = accumulator.Scalars(tag)
        assert [event.step for event in events] == sorted({event.step for event in events})
        for event in events:
            found.setdefault(event.step, {"step": event.step})[tag] = event.value
    return [found[step] for step in sorted(found)]


def accumulate(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


class ResumedRun:
    """A run killed and resumed with all writers on, and a TensorBoard that is open all the time."""

    def __init__(self, directory: Path):
        self.directory = directory
        with pytest.raises(KilledError):
            make_gpt(directory, KilledLookup, **CHANGES, **ALL_ON)()
        self.lost = self.rows()[SAVED_STEP:]
        self.open_tensorboard = accumulate(directory / "tensorboard")
        assert len(read_scalars(self.open_tensorboard)) == KILL_STEP
        make_gpt(directory, TrainLookup, **CHANGES, **ALL_ON)()
        self.open_tensorboard.Reload()

    def rows(self) -> list[Row]:
        return parse_lines((self.directory / "metrics.jsonl").read_bytes())

    def wandb_files(self) -> list[Path]:
        return sorted(self.directory.glob("wandb/wandb/*run-*/run-*.wandb"))


@pytest.fixture(scope="module")
def resumed_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResumedRun]:
    base = tmp_path_factory.mktemp("sinks")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"WANDB_API_KEY": "", "NETRC": "/nonexistent", "WANDB_CACHE_DIR": str(base / "c")}.items():
            patch.setenv(name, value)
        for name in ("exit", "excepthook"):  # wandb replaces these functions
            patch.setattr(sys, name, getattr(sys, name))
        yield ResumedRun(base / "run")


def read_csv(life: ResumedRun) -> list[Row]:
    output = life.directory.with_suffix(".csv")
    assert run_command(["metrics", str(life.directory), "--csv", "-o", str(output)]) == 0
    rows = csv.DictReader(io.StringIO(output.read_text()))
    return [
        {key: int(value) if value.isdecimal() else float(value) for key, value in row.items() if value} for row in rows
    ]


def read_json_lines(life: ResumedRun) -> list[Row]:
    output = life.directory.with_suffix(".jsonl")
    assert run_command(["metrics", str(life.directory), "-o", str(output)]) == 0
    return parse_lines(output.read_bytes())


def read_wandb(life: ResumedRun) -> list[Row]:
    (path,) = life.wandb_files()
    return wandb_file.read_history(path)


# Reader of each writer's output, and conversion of a row to its precision.
RowReader = tuple[Callable[[ResumedRun], list[Row]], Callable[[Row], Row]]
READERS: dict[str, RowReader] = {
    "metrics": (read_json_lines, dict),
    "csv": (read_csv, dict),
    "tensorboard": (lambda life: read_scalars(accumulate(life.directory / "tensorboard")), round_to_float32),
    "tensorboard, open all the time": (lambda life: read_scalars(life.open_tensorboard), round_to_float32),
    "wandb": (read_wandb, dict),
}


def test_lost_rows_differ_from_recomputed_rows(resumed_run: ResumedRun) -> None:
    anew = resumed_run.rows()[SAVED_STEP:KILL_STEP]
    assert [row["step"] for row in resumed_run.lost] == [row["step"] for row in anew] == [SAVED_STEP + 1, KILL_STEP]
    assert all(row != other for row, other in zip(resumed_run.lost, anew, strict=True))  # the speed differs at least


@pytest.mark.parametrize("name", READERS)
def test_every_writer_shows_one_trajectory_after_a_rewind(resumed_run: ResumedRun, name: str) -> None:
    read, kept = READERS[name]
    assert [row["step"] for row in resumed_run.rows()] == list(range(1, 9))
    assert read(resumed_run) == [kept(row) for row in resumed_run.rows()]


def test_tensorboard_uses_the_time_of_the_row(resumed_run: ResumedRun) -> None:
    events = accumulate(resumed_run.directory / "tensorboard").Scalars("train/loss")
    assert [event.wall_time for event in events] == [row["perf/time"] for row in resumed_run.rows()]


def test_wandb_without_a_key_logs_offline(resumed_run: ResumedRun) -> None:
    run_id = read_json(LocalStore(resumed_run.directory), "job.json")["id"]
    (path,) = resumed_run.wandb_files()
    assert (path.name, path.parent.name.partition("-")[0]) == (f"run-{run_id}.wandb", "offline")
    told = wandb_file.read_config(path)
    assert told["config"]["train"]["micro_batch_examples"] == 2
    assert told["tags"] == ["a tag"]
    assert {"versions", "hosts", "cpus"} <= told["environment"].keys()


def test_only_files_of_the_newest_attempt_remain(resumed_run: ResumedRun) -> None:
    sizes = [path.stat().st_size for path in sorted((resumed_run.directory / "tensorboard").iterdir())]
    assert (len(sizes), sizes[0], sizes[1] > 0) == (2, 0, True)


# Failing writers.


class BrokenWriter:
    """A writer that fails in one way."""

    def __init__(self, way: str, free: threading.Event):
        self._way, self._free = way, free
        if way == "raises when it is opened":
            raise RuntimeError("no such server\nand more")

    def add(self, row: Row) -> None:
        if self._way == "raises at a row":
            raise KeyError(row["step"])
        self._free.wait()

    def supersede(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


FAILURES = {
    "hangs": "it has not finished 0.1 s after the last row",
    "fills up": "2 rows wait for it",
    "raises at a row": "KeyError: 1",
    "raises when it is opened": "RuntimeError: no such server",
}


@pytest.mark.parametrize("way", FAILURES)
def test_a_failing_writer_is_switched_off_once_without_waiting(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "CLOSE_SECONDS", 0.1 if way == "hangs" else 600.0)
    monkeypatch.setattr(writers, "_QUEUE_ROWS", 2 if way == "fills up" else 100)
    free, heard = threading.Event(), []
    aside = _AsyncMetricWriter(
        "some", lambda: BrokenWriter(way, free), lambda: [], lambda name, reason: heard.append((name, reason))
    )
    for step in range(1, 9):
        aside.show({"step": step})
    aside.close()
    free.set()
    assert heard == [("some", FAILURES[way])]


def test_failing_writers_print_a_line_and_leave_the_run_bit_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_gpt(tmp_path / "undisturbed", TrainLookup)()
    monkeypatch.setattr(writers, "CLOSE_SECONDS", 0.1)
    free, told = threading.Event(), {}

    def broken(name: str, _: Any, earlier: Any, on_off: Any) -> _AsyncMetricWriter:
        way = list(FAILURES)[len(told) * 2]
        told[name] = FAILURES[way]
        return _AsyncMetricWriter(name, lambda: BrokenWriter(way, free), earlier, on_off)

    monkeypatch.setattr(writers, "_AsyncMetricWriter", broken)
    make_gpt(tmp_path / "run", TrainLookup, **ALL_ON)()
    free.set()
    assert sorted(told) == sorted(READERS.keys() & {"tensorboard", "wandb"})
    store = LocalStore(tmp_path / "run")
    assert read_json(store, "result.json") == read_json(LocalStore(tmp_path / "undisturbed"), "result.json")
    lines = [line for line in capsys.readouterr().err.splitlines() if " is switched off: " in line]
    assert sorted(lines) == sorted(f"{name} is switched off: {reason}" for name, reason in told.items())
    events = [event for event in read_log(store, "events") if event["event"] == "sink_off"]
    assert [(event["sink"], event["reason"]) for event in events] == [
        tuple(line.split(" is switched off: ")) for line in lines
    ]


# Wrapper and event files.


class RecordingWriter:
    """A writer that records its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def add(self, row: Row) -> None:
        self.told.append(row)

    def supersede(self) -> None:
        self.told.append("superseded")

    def finish(self) -> None:
        self.told.append("finished")


def test_a_completed_row_adds_only_new_keys() -> None:
    noting, earlier = RecordingWriter(), [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}]
    aside = _AsyncMetricWriter("noting", lambda: noting, lambda: earlier, lambda name, reason: None)
    aside.show({"step": 2, "a": 2.0, "val/loss": 3.0})
    aside.show({"step": 3, "a": 2.0})
    aside.close()
    assert noting.told == [*earlier, "superseded", {"step": 2, "val/loss": 3.0}, {"step": 3, "a": 2.0}, "finished"]


def test_a_bucket_holds_only_the_newest_event_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tensorboard, "UPLOAD_SECONDS", 0.0)
    store = make_memory_bucket()
    for attempt in (8, 9, 10):
        file = _TensorBoardWriter(store, "job1234", attempt)
        file.supersede()
        for step in range(1, attempt):
            file.add({"step": step, "train/loss": 1e300, "val/x": None})
        *before, name = sorted(store.list_names("tensorboard"))
        assert [store.read(f"tensorboard/{other}") for other in before] == [b""] * (attempt > 8)
        (tmp_path / name).write_bytes(store.read(f"tensorboard/{name}"))
        assert read_scalars(accumulate(tmp_path / name)) == [
            {"step": step, "train/loss": float("inf")} for step in range(1, attempt)
        ]
        file.finish()
    assert name == "events.out.tfevents.0000000010"


def test_keys_cannot_control_the_terminal(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    store = LocalStore(tmp_path)
    store.write("job.json", b'{"id": "x", "name": "x", "identity": {}}')
    row = {"step": 1, "train/loss": 0.1 + 0.2, "train/\x1b[2J\n\ud800": 1}
    store.write("metrics.jsonl", encode_line(row))
    assert run_command(["metrics", str(tmp_path), "--csv"]) == 0
    assert capfdbinary.readouterr().out == b"step,train/loss,train/\\x1b[2J\\n\\ud800\n1,0.30000000000000004,1\n"
