"""Data that `train.skip_steps` skips: the batches that are drawn, what is counted, and ranges added to a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from runner import BaseTrainer
from runner.data import DataPosition
from runner.errors import InvalidError
from tests.support.job_process import run_runner
from tests.support.tiny_jobs import (
    environment,
    get_job_name,
    make_gpt,
    make_gpt_document,
    read_outcome,
    read_rows,
    stop_after,
)
from tests.test_values import TrainLookup

RANGES = [[2, 4], [5, 6]]
DRAWN = [0, 1, 4, 5, 6, 8, 9, 10]  # numbers of the batches of eight steps
SKIP: dict[str, Any] = {"config.train.skip_steps": RANGES}
TEXTS = {"one": "".join(f"{n} is odd.\n" for n in range(1, 900, 2)), "two": "".join(f"{n}!\n" for n in range(900))}


class RecordingLookup(TrainLookup):
    """Lookup-table job that keeps the batches that were drawn, by step."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.drawn: dict[int, bytes] = {}

    def batch(self, slice: str = "train", step: int | None = None) -> Any:
        batch = super().batch(slice, step)
        if slice == "train" and step is not None:
            self.drawn[step] = np.asarray(batch["x"]).tobytes()
        return batch


def make(directory: Path, job_class: type[BaseTrainer] = TrainLookup, **changes: Any) -> BaseTrainer:
    return make_gpt(directory, job_class, **changes)


# Arithmetic.


@pytest.mark.parametrize(
    ("ranges", "drawn"),
    [
        ([], [0, 1, 2, 3]),
        ([[0, 1]], [1, 2, 3, 4]),
        ([[2, 5]], [0, 1, 5, 6]),
        ([[1, 2], [2, 4]], [0, 2, 5, 6]),
        ([[1, 3], [3, 4]], [0, 3, 4, 6]),
        ([[3, 4]], [0, 1, 2, 4]),
        (RANGES, DRAWN),
    ],
)
def test_batches_in_a_range_are_skipped(ranges: Any, drawn: list[int]) -> None:
    position = DataPosition.from_ranges(ranges)
    assert [position.get_data_step(step) for step in range(len(drawn))] == drawn
    # What was drawn and what was skipped are together all data up to the last batch.
    for step in range(1, len(drawn) + 1):
        num_examples, skipped = position.count_examples(step, 10)
        missing = [batch for batch in range(num_examples // 10) if batch not in drawn[:step]]
        assert num_examples == 10 * (drawn[step - 1] + 1)
        assert [batch for first, end in skipped for batch in range(first // 10, end // 10)] == missing


@pytest.mark.parametrize(
    ("one", "other", "step"),
    [
        ([], [], None),
        ([], [[3, 4]], 3),
        ([[3, 4]], [[3, 5]], 3),
        ([[3, 4]], [[3, 4], [7, 9]], 7),
        ([[3, 4], [7, 9]], [[5, 6], [7, 9]], 3),
        ([[3, 4], [7, 9]], [[3, 4], [6, 7]], 6),
    ],
)
def test_the_first_change_is_where_batches_begin_to_differ(one: Any, other: Any, step: int | None) -> None:
    first, second = map(DataPosition.from_ranges, (one, other))
    assert first.find_first_change(second) == second.find_first_change(first) == step
    pairs = zip(*([position.get_data_step(each) for each in range(12)] for position in (first, second)), strict=True)
    assert next((number for number, (a, b) in enumerate(pairs) if a != b), None) == step


# Runs.


def test_a_run_draws_the_batches_behind_the_ranges(tmp_path: Path) -> None:
    for name in TEXTS:
        (tmp_path / f"{name}.txt").write_text(TEXTS[name])
    sources = [{"name": name, "source": str(tmp_path / f"{name}.txt"), "weight": 1 + 2 * len(name)} for name in TEXTS]
    sources[1]["weight"] = 3
    mixture = {"config.data": {"mixture": sources, "sequence_length": 16}, "config.eval.every_steps": 8}
    job = make(tmp_path / "run", RecordingLookup, **mixture, **SKIP)
    job()
    batches = [job.dataset.read("train", 16 * number, 16)["x"] for number in DRAWN]
    assert [job.drawn[step] for step in range(8)] == [batch.tobytes() for batch in batches]
    # Counted example by example, with the source of each by its content.
    other = make(tmp_path / "other", **mixture)
    owner = [int(other.dataset._mixture.locate(index, 1)[0][0]) for index in range(16 * 11)]
    for row in read_rows(tmp_path / "run"):
        drawn = DRAWN[: row["step"]]
        for number, train in enumerate(job.dataset.train_sources):
            read = sum(owner[index] == number for batch in drawn for index in range(16 * batch, 16 * batch + 16))
            reached = owner[: 16 * (drawn[-1] + 1)].count(number)
            assert row[f"data/{train.name}/tokens"] == 16 * read
            assert row[f"data/{train.name}/epochs"] == reached / train.examples.num_examples


@pytest.mark.soak
def test_a_range_that_is_added_in_place_gives_the_bits_of_one_from_the_start(tmp_path: Path) -> None:
    make(tmp_path / "whole", **SKIP)()
    stop_after(make(tmp_path / "added"), 2)
    stop_after(make(tmp_path / "added", **{"config.train.skip_steps": RANGES[:1]}), 4)
    make(tmp_path / "added", **SKIP)()
    make(tmp_path / "without")()
    whole, added, without = (read_outcome(tmp_path / name) for name in ("whole", "added", "without"))
    assert whole == added
    assert whole[0][:2] == without[0][:2]
    assert whole[0][2] != without[0][2]
    events = (tmp_path / "added" / "events.jsonl").read_text()
    assert events.count("spec_changed") == 2


@pytest.mark.parametrize(
    "ranges",
    [[[3, 4]], *(pytest.param(each, marks=pytest.mark.soak) for each in ([[0, 1]], [[3, 4], [6, 7]]))],
    ids=str,
)
def test_a_range_in_the_past_is_refused_with_the_first_possible_step(ranges: Any, tmp_path: Path) -> None:
    stop_after(make(tmp_path / "run"), 4)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with pytest.raises(InvalidError, match="may change from step 4 on") as error:
        make(tmp_path / "run", **{"config.train.skip_steps": ranges})()
    _, _, advice = str(error.value).split("\n")
    assert advice.strip().startswith("to go on with other values in another directory, set checkpoint.fork_from: ")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}


@pytest.mark.soak
def test_a_run_with_ranges_resumes_bit_identically_at_every_step(tmp_path: Path) -> None:
    make(tmp_path / "whole", **SKIP)()
    for step in range(1, 8):
        stop_after(make(tmp_path / str(step), **SKIP), step)
        make(tmp_path / str(step), **SKIP)()
        assert read_outcome(tmp_path / str(step)) == read_outcome(tmp_path / "whole")


@pytest.mark.soak
def test_an_invalid_range_ends_a_process_with_2_and_writes_nothing(tmp_path: Path) -> None:
    for number, ranges in enumerate(([[0, 8]], [[5, 3]], [[1, 4], [3, 5]], [[1, 9]])):
        document = make_gpt_document(
            tmp_path / "run", job=get_job_name(TrainLookup), **{"config.train.skip_steps": ranges}
        )
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(document))
        code, output = run_runner(environment(1), str(tmp_path / f"{number}.yaml"))
        assert code == 2, output
        assert "skip_steps" in output
        assert "Traceback" not in output
        assert not (tmp_path / "run").exists()
