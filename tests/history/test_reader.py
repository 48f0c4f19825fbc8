"""Histories of runs of older versions, throughput, stragglers, notices."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from runner.distributed.clock import TimeCategory
from runner.history.ledger import NOTICES, LedgerSummary, apply_events
from runner.history.reader import read_history
from runner.history.records import RunState
from runner.storage import LocalStore, encode_json, encode_line
from tests.history.test_life import check_sums
from tests.support import run_outcomes
from tests.support.memory_bucket import make_memory_bucket

OLD_RUNS = Path(__file__).parents[1] / "data" / "format_1"


def make_event(attempt: int, time: float, name: str, step: int | None = None, **details: object) -> bytes:
    return encode_line({"time": time, "attempt": attempt, "process": 0, "event": name, "step": step} | details)


def write_lines(directory: Path, name: str, lines: list[bytes]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(b"".join(lines))


@pytest.mark.parametrize(("name", "step", "total_steps"), [("counter", 4, 6), ("gpt", 2, 4), ("bucket", 4, 6)])
def test_a_run_of_an_older_version_is_reconstructed_from_events(name: str, step: int, total_steps: int) -> None:
    store = LocalStore(OLD_RUNS / name)
    if name == "bucket":
        store = make_memory_bucket()
        for path in (OLD_RUNS / name).rglob("*"):
            if path.is_file():
                store.write(path.relative_to(OLD_RUNS / name).as_posix(), path.read_bytes())
    history = read_history(store)
    assert (history.state, history.step, history.total_steps) == (RunState.PREEMPTED, step, total_steps)
    assert history.seconds[TimeCategory.STEPS] > 0
    assert history.seconds[TimeCategory.PROCESS_START] == 0
    check_sums(history)


def test_a_run_of_an_older_version_continues_with_a_clock(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_outcomes.stop_after_step(run, 20)
    (run / "attempts/1.clock").unlink()
    run_outcomes.make_job(run)()
    history = read_history(LocalStore(run))
    assert [each.state for each in history.attempts] == [RunState.PREEMPTED, RunState.DONE]
    assert [each.seconds[TimeCategory.SET_UP] > 0 for each in history.attempts] == [False, True]
    check_sums(history)


def test_throughput_uses_the_newest_rows_of_the_newest_attempt(tmp_path: Path) -> None:
    def row(step: int) -> bytes:
        attempt, pace = (1, 9.0) if step < 5 else (2, 0.5)
        common = {"step": step, "train/loss": 1.0, "train/tokens": step * 100, "perf/tokens_per_second": 800.0}
        return encode_line(common | {"perf/mfu": 0.5, "perf/time": 50.0 + step * pace, "perf/attempt": attempt})

    write_lines(tmp_path, "metrics.jsonl", [row(step) for step in range(1, 10)])
    start = {"total_steps": 29, "devices": 4}
    lines = [make_event(2, 10.0, "start", **start), make_event(2, 11.0, "init", 0), make_event(2, 60.0, "save", 9)]
    write_lines(tmp_path, "events.jsonl", lines)
    speed = read_history(LocalStore(tmp_path), now=61.0).speed
    assert (speed.step_seconds, speed.left_seconds) == (0.5, 10.0)
    assert (speed.tokens_per_second, speed.tokens_per_second_per_device, speed.mfu) == (200.0, 50.0, 0.125)


def test_throughput_without_rows_uses_the_clock(tmp_path: Path) -> None:
    write_lines(tmp_path, "events.jsonl", [make_event(1, 10.0, "init", 0), make_event(1, 30.0, "progress", 40)])
    assert read_history(LocalStore(tmp_path), now=31.0).speed.step_seconds == 0.5


def test_stragglers_are_named_until_all_are_on_time(tmp_path: Path) -> None:
    lines = [
        make_event(1, 1.0, "start", hosts=["a", "b"]),
        make_event(1, 2.0, "straggler", 7, late=[1], after_seconds=[0.0, 0.5]),
    ]
    write_lines(tmp_path, "events.jsonl", lines)
    found = read_history(LocalStore(tmp_path)).straggling
    assert found is not None
    assert (found.step, found.late) == (7, {"process 1 (b)": 0.5})
    write_lines(
        tmp_path, "events.jsonl", [*lines, make_event(1, 3.0, "straggler", 9, late=[], after_seconds=[0.0, 0.0])]
    )
    assert read_history(LocalStore(tmp_path)).straggling is None


def test_validation_uses_the_surviving_trajectory(tmp_path: Path) -> None:
    def evaluate(attempt: int, time: float, step: int, loss: float) -> bytes:
        return make_event(attempt, time, "evaluate", step, figures={"val/loss": loss})

    lines = [
        make_event(1, 1.0, "init", 0),
        evaluate(1, 2.0, 10, 3.0),
        evaluate(1, 3.0, 20, 1.0),
        make_event(2, 4.0, "restore", 15),
        evaluate(2, 5.0, 20, 2.0),
    ]
    write_lines(tmp_path, "events.jsonl", lines)
    history = read_history(LocalStore(tmp_path))
    assert (history.validation, history.best_validation) == (((10, 3.0), (20, 2.0)), (20, 2.0))


STAGES: list[Any] = [
    {"from_step": 10, "set": {"data.mixture": [{"name": "a", "weight": 3.0}, {"name": "b", "weight": 1}]}, "why": "b"},
    {"from_tokens": 250, "set": {"train.global_batch_examples": 4, "schedule": {"name": "linear", "power": 1}}},
    {"from_step": 40, "set": {"schedule.name": "constant", "later_key": None}, "a_key_of_later_versions": 1},
]


def write_run_with_stages(directory: Path, stages: Any, **train: Any) -> None:
    config = {"data": {"mixture": [{"name": "a", "weight": 1}], "sequence_length": 10}, "stages": stages}
    config |= {"schedule": {"name": "constant", "power": 1}, "train": {"global_batch_examples": 2} | train}
    directory.mkdir(exist_ok=True)
    (directory / "spec.yaml").write_bytes(encode_json({"config": config}))
    lines = [make_event(1, 1.0, "init", 0), make_event(1, 5.0, "stage", 10, number=1, from_step=10, why="b")]
    # This border was crossed twice, and then reached again.
    lines += [make_event(1, 7.0, "stage", 13, number=2, from_step=13), make_event(2, 8.0, "restore", 12)]
    lines += [make_event(2, 9.0, "stage", 12, number=1, from_step=10), make_event(2, 20.0, "progress", 12)]
    write_lines(directory, "events.jsonl", lines)


def test_the_stages_of_a_run_are_read_from_its_spec_and_events(tmp_path: Path) -> None:
    write_run_with_stages(tmp_path, STAGES)
    history = read_history(LocalStore(tmp_path))
    assert [(each.number, each.from_step, each.tokens, each.tokens_per_step) for each in history.stages] == [
        (1, 10, 200, 20),
        (2, 13, 260, 40),
        (3, 40, 1340, 40),
    ]
    assert [each.began for each in history.stages] == [5.0, None, None]
    assert [each.why for each in history.stages] == ["b", "", ""]
    assert [each.changes for each in history.stages] == [
        ("data.mixture: a 1 -> a 3, b 1",),
        ("train.global_batch_examples: 2 -> 4", "schedule.name: constant -> linear"),
        ("schedule.name: linear -> constant", "later_key: null"),
    ]
    assert [history.find_stage(step) for step in (0, 9, 10, 12, 13, 39, 40)] == [0, 0, 1, 1, 2, 2, 3]
    assert history.unread == ()


DAMAGED_STAGES: dict[str, tuple[Any, list[int]]] = {
    "no object": (["text", *STAGES], [10, 13, 40]),
    "no start": ([{"set": {"a": 1}}, *STAGES], [10, 13, 40]),
    "two starts": ([{"from_step": 3, "from_tokens": 9, "set": {"a": 1}}, *STAGES], [10, 13, 40]),
    "nothing set": ([*STAGES, {"from_step": 50}], [10, 13, 40]),
    "another type": ([*STAGES, {"from_step": [50], "set": {"a": 1}}], [10, 13, 40]),
    "a number that no step can be": ([*STAGES, {"from_step": 1 << 60, "set": {"a": 1}}], [10, 13, 40]),
    "more tokens than there can be": ([*STAGES, {"from_tokens": (1 << 62) - 1, "set": {"a": 1}}], [10, 13, 40]),
    "in the past": ([*STAGES, {"from_step": 12, "set": {"a": 1}}], [10, 13, 40]),
    "a key below no section": ([{"from_step": 5, "set": {"train.x.y.z": 1, "data.mixture.7": 2}}], [5]),
    "no list": ({"from_step": 5}, [10]),
}


@pytest.mark.parametrize("case", DAMAGED_STAGES)
def test_a_damaged_stage_costs_its_own_line(tmp_path: Path, case: str) -> None:
    stages, starts = DAMAGED_STAGES[case]
    write_run_with_stages(tmp_path, stages)
    history = read_history(LocalStore(tmp_path))
    assert [each.from_step for each in history.stages] == starts
    assert len(history.unread) == (case != "a key below no section")
    assert all("stages" in line for line in history.unread)


def test_stages_without_a_spec_are_those_of_the_events(tmp_path: Path) -> None:
    write_run_with_stages(tmp_path, [])
    (tmp_path / "spec.yaml").write_text("a: [")
    history = read_history(LocalStore(tmp_path))
    assert [(each.number, each.from_step, each.why) for each in history.stages] == [(1, 10, "b")]
    # A batch that is not known leaves tokens out, and stages that begin after a number of them.
    write_run_with_stages(tmp_path, STAGES, global_batch_examples=None)
    history = read_history(LocalStore(tmp_path))
    assert [(each.number, each.from_step, each.tokens) for each in history.stages] == [(1, 10, None), (2, 40, None)]


def test_a_copied_directory_has_the_same_history(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_outcomes.complete_run(run)
    shutil.copytree(run, tmp_path / "copy")
    now = read_history(LocalStore(run)).now
    first, second = (read_history(LocalStore(tmp_path / name), now) for name in ("run", "copy"))
    assert first.attempts == second.attempts
    assert first.checkpoints == second.checkpoints


@pytest.mark.parametrize(
    ("event", "details", "told"),
    [
        ("profile", {"start": 10, "path": "profiles/1.10-20"}, "steps after 10 up to 20: profiles/1.10-20"),
        ("sink_off", {"sink": "wandb", "reason": "no disk"}, "wandb gets no more rows: no disk"),
        ("fallback", {"rejected": "20", "reason": "torn"}, "checkpoint 20 was not restored: torn"),
    ],
)
def test_notable_events_are_notices(event, details, told):
    row = {"time": 1.0, "attempt": 1, "process": 0, "event": event, "step": 20}
    assert [notice.text for notice in apply_events(LedgerSummary(), [row | details]).notices] == [told]


@pytest.mark.parametrize("event", sorted(NOTICES))
def test_an_event_without_details_is_a_notice_too(event):
    (notice,) = apply_events(LedgerSummary(), [{"time": 1.0, "attempt": 1, "event": event}]).notices
    assert (notice.event, notice.step) == (event, None)
