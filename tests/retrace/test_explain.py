"""Explanation of a step: a poisoned document is found and passed by, and origins are those of the batch."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from runner.cli.app import run_command
from runner.config import SpikeConfig
from runner.errors import InvalidError
from runner.history.reader import HistoryReader
from runner.retrace.explain import Explainer, find_deviation, list_advice
from runner.retrace.losses import ExampleScorer
from runner.retrace.origin import ExampleReader, adopt_past, find_document_start
from runner.retrace.scratch import RetraceRequest, open_job, retrace
from runner.storage import LocalStore
from tests.retrace.runs import DAILY, RUNS, SAVES
from tests.support.job_process import hash_tree
from tests.support.tiny_jobs import make_gpt, read_rows, stop_after

TRUST = ("tests",)
LENGTH, STEPS = 32, 50  # tokens of an example, steps of a run
SOURCES = ("prose", "code", "lists")


def explain_step(directory: Path, step: int, is_data_only: bool = False, top: int = 3) -> Any:
    job, store = open_job(str(directory), TRUST), LocalStore(directory)
    explainer = Explainer(job, HistoryReader(store).read())
    if is_data_only:
        return explainer.explain(step, None, top)
    with retrace(RetraceRequest(str(directory), step, trust=TRUST)) as retracing:
        return explainer.explain(step, retracing, top)


# A poisoned document.


def write_sources(folder: Path, num_documents: int) -> None:
    """Write three sources of documents of 29 to 31 characters, a file each."""
    chance = np.random.default_rng(5)
    for place, source in enumerate(SOURCES):
        (folder / source).mkdir(parents=True)
        for number in range(num_documents // len(SOURCES)):
            words = [f"{word}{place}" for word in chance.choice(["tree", "leaf", "root", "twig"], 6)]
            (folder / source / f"{number:05}.txt").write_text(" ".join(words)[:30].ljust(30, "."))


def make_changes(folder: Path) -> dict[str, Any]:
    """Return the keys of a run on the mixture, with a stage border at step 12."""
    mixture = [
        {"name": source, "source": str(folder / source / "*.txt"), "weight": weight}
        for source, weight in zip(SOURCES, (2.0, 1.0, 1.0), strict=True)
    ]
    return {
        "config.data": {"mixture": mixture, "sequence_length": LENGTH, "packing": "documents"},
        "config.train": {"total_steps": STEPS, "global_batch_examples": 8},
        "config.optimizer.learning_rate": 1.0e-2,
        "config.stages": [{"from_step": 12, "set": {"optimizer.learning_rate": 5.0e-3}}],
        # The statistic of the run, which never skips: no loss is so high.
        "config.stability": {"skip_update": {"loss_above": {"over_steps": 8, "sigmas": 1e6}}},
        "config.eval.every_steps": STEPS,
        "checkpoint.every_steps": 5,
        "checkpoint.keep_last": 99,
    }


@pytest.mark.parametrize("num_documents", [900, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_poisoned_document_is_found_and_passed_by(num_documents, tmp_path, capfd):
    poisoned_step = 45
    write_sources(tmp_path, num_documents)
    changes = make_changes(tmp_path)
    # The document of an example of that step, which keeps its length, so that no other example changes.
    example = ExampleReader(make_gpt(tmp_path / "unused", **changes)).read(poisoned_step)[3]
    document = Path(example.parts[0].place.partition(" of ")[2])
    document.write_bytes(bytes(np.random.default_rng(1).integers(128, 256, document.stat().st_size, np.uint8)))
    for step in (7, 14):
        stop_after(make_gpt(tmp_path / "run", **changes), step)
    make_gpt(tmp_path / "run", **changes)()

    capfd.readouterr()
    assert run_command(["explain", str(tmp_path / "run"), "--spike", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["step"] == poisoned_step
    assert found["deviation"]["sigmas"] > 6
    worst = found["examples"][0]
    assert (worst["source"], worst["number"], worst["stands_out"]) == (example.source, 3, True)
    assert str(document) in worst["parts"][0]["place"]
    assert sum(each["stands_out"] for each in found["examples"]) == 1
    assert worst["loss_share"] > 0.3

    # For people: the same, and lines to paste.
    assert run_command(["explain", str(tmp_path / "run"), "--spike", "--top", "1"]) == 0
    shown = capfd.readouterr().out
    assert f"step {poisoned_step}, loss" in shown
    assert str(document) in shown.replace("\n", "")
    advice: dict[str, Any] = {}
    for line in shown.split("another directory:\n")[1].splitlines():
        advice |= {name: advice.get(name, {}) | values for name, values in yaml.safe_load(line).items()}
    assert advice["config"]["train"]["skip_steps"] == [[44, 45]]
    fork = {"checkpoint.fork_from": advice["checkpoint"]["fork_from"]}
    fork["config.train.skip_steps"] = advice["config"]["train"]["skip_steps"]
    make_gpt(tmp_path / "fork", **changes | fork)()
    before, after = ({row["step"]: row["train/loss"] for row in read_rows(tmp_path / name)} for name in ("run", "fork"))
    assert min(after) == 41
    assert after[44] == before[44]
    assert max(after.values()) < before[poisoned_step] - 0.5
    reader = open_job(str(tmp_path / "fork"), ())
    adopt_past(reader, LocalStore(tmp_path / "fork"))
    for step in range(41, STEPS + 1):
        places = [part.place for each in ExampleReader(reader).read(step) for part in each.parts]
        assert not any(str(document) in place for place in places)


# What a step has seen.


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in DAILY else pytest.mark.soak) for kind in RUNS])
def test_the_origins_are_those_of_the_examples_of_the_batch(kind, run_of):
    directory = run_of(kind)
    steps = [row["step"] for row in read_rows(directory)]
    step = steps[-1]
    explained = explain_step(directory, step, is_data_only=True)
    job = open_job(str(directory), TRUST)
    with retrace(RetraceRequest(str(directory), step, trust=TRUST)) as retracing:
        retracing.advance_to(step - 1)
        arrays = retracing.load_arrays(step - 1)
        program, _ = job.programs.locate_batch(step - 1)
        sources = {train.name: train.source for train in job.programs.get_dataset(program.plan.number).train_sources}
        assert len(explained.examples) == len(next(iter(arrays.values())))
        for each in explained.examples:
            example = each.example
            if "x" not in arrays:
                assert example.fields.keys() == arrays.keys()
                continue
            ids = arrays["x"][example.number][arrays["padding_mask"][example.number]]
            parts = [
                sources[example.source].read(part.position, part.position + part.num_tokens) for part in example.parts
            ]
            assert np.array_equal(np.concatenate(parts), ids)


def test_the_losses_of_the_examples_sum_to_that_of_the_step(run_of):
    directory = run_of("stages")
    rows = {row["step"]: row for row in read_rows(directory)}
    for step in (1, 5, 7):
        explained = explain_step(directory, step)
        losses = [each.loss for each in explained.examples]
        mean = sum(each.loss_sum for each in losses) / sum(each.num_targets for each in losses)
        assert mean == pytest.approx(rows[step]["train/loss"], rel=1e-5)
        assert sum(each.loss_share for each in explained.examples) == pytest.approx(1)
        assert [each.loss.loss_sum for each in explained.examples] == sorted(
            (each.loss_sum for each in losses), reverse=True
        )
        tokens = explained.examples[0].worst_tokens
        assert len(tokens) == 5
        assert all(loss <= explained.examples[0].loss.loss_sum for _, loss in tokens)
        assert (explained.before is None) == (step == 1)


def test_the_gradient_of_an_example_is_that_of_its_loss(run_of):
    with retrace(RetraceRequest(str(run_of("killed")), 5)) as retracing:
        retracing.advance_to(4)
        job, arrays = retracing.job, retracing.load_arrays(4)
        scorer, params = ExampleScorer(job, 5), job.state.params
        for number in (0, 9):
            batch = {name: values[number : number + 1] for name, values in arrays.items()}
            batch["example"] = np.arange(1)

            def compute(params: Any, batch: Any = batch) -> Any:
                return job.forward(job.state.apply_fn, params, batch, None)[0]

            loss, grads = jax.value_and_grad(compute)(params)
            norm = np.sqrt(sum(float((grad**2).sum()) for grad in jax.tree.leaves(jax.device_get(grads))))
            found = scorer.score({name: values[number] for name, values in arrays.items()})
            assert found.loss_sum == pytest.approx(float(loss), rel=1e-5)
            assert found.grad_norm == pytest.approx(norm, rel=1e-4)


# What changed there.


def test_stages_restarts_and_rates_are_named(run_of):
    changes = explain_step(run_of("stages"), 5, is_data_only=True).changes
    assert "stage 1 begins after step 4" in changes
    assert "a restart: attempt 3 went on from step 4" in explain_step(run_of("killed"), 5, is_data_only=True).changes
    assert explain_step(run_of("stages"), 6, is_data_only=True).changes == []
    rates = explain_step(run_of("stages"), 7, is_data_only=True).changes
    assert [change.partition(":")[0] for change in rates] == ["stage 2 begins after step 6", "learning rate"]


@pytest.mark.parametrize(
    ("losses", "sigmas"),
    [
        ([1, 3] * 4 + [2], 0.0),
        ([1, 3] * 4 + [10], 7.48),
        ([1, 3, None, float("inf")] * 4 + [10], 7.48),
        ([1, 3] * 4 + [float("inf")], float("inf")),
        ([1, 3] * 3 + [10], None),
        ([2] * 9, None),
        ([1, 3] * 4 + [None], None),
    ],
)
def test_a_loss_is_judged_by_the_rows_before_it(losses, sigmas):
    rows = [{"step": step, "train/loss": loss} for step, loss in enumerate(losses, 1)]
    found = find_deviation(rows, len(rows) - 1, SpikeConfig())
    assert found is None if sigmas is None else found.sigmas == pytest.approx(sigmas, abs=0.01)


def test_the_window_is_that_of_the_run():
    rows = [
        {"step": step, "train/loss": loss} for step, loss in enumerate([100.0, 0.0] * 9 + [1.0, 3.0] * 4 + [10.0], 1)
    ]
    assert find_deviation(rows, len(rows) - 1, SpikeConfig(over_steps=8)).sigmas > 7
    assert find_deviation(rows, len(rows) - 1, SpikeConfig(over_steps=200)).sigmas < 0


# Refusals.


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "needs one of --step K, --steps A-B and --spike"),
        (["--step", "2", "--spike"], "needs one of --step K, --steps A-B and --spike"),
        (["--step", "9"], "--step 9: the run has made the steps 1 to 8"),
        (["--steps", "7-9"], "--step 9: the run has made the steps 1 to 8"),
        (["--steps", "3-2"], "--steps 3-2: needs two steps, such as 20-24"),
        (["--steps", "3"], "--steps 3: needs two steps, such as 20-24"),
        (["--steps", f"1-{'9' * 5000}"], "needs two steps, such as 20-24"),
        (["--step", "2", "--top", "0"], "--top 0: needs at least 1"),
        (["--spike"], "--spike needs 9 rows with a loss, and there are 8"),
    ],
)
def test_a_wrong_request_is_refused(words, problem, run_of):
    with pytest.raises(InvalidError) as caught:
        run_command(["explain", str(run_of("stages")), *words])
    assert problem in str(caught.value)


def test_a_run_without_its_data_says_so(tmp_path):
    make_gpt(tmp_path / "run", **SAVES)()
    (tmp_path / "text.txt").unlink()
    with pytest.raises(InvalidError, match=r"no file matches.* holds no text\.txt"):
        run_command(["explain", str(tmp_path / "run"), "--step", "3", "--data-only"])


@pytest.mark.soak
def test_without_checkpoints_the_steps_are_repeated_from_the_beginning(tmp_path):
    make_gpt(tmp_path / "run", **SAVES)()
    whole = explain_step(tmp_path / "run", 5)
    shutil.rmtree(tmp_path / "run/checkpoints")
    before = hash_tree(tmp_path / "run")
    again = explain_step(tmp_path / "run", 5)
    assert [each.loss for each in again.examples] == [each.loss for each in whole.examples]
    assert hash_tree(tmp_path / "run") == before


def test_ranges_that_are_skipped_already_stay_in_the_advice(tmp_path):
    config = make_gpt(tmp_path / "unused", **{"config.train.skip_steps": [[2, 4]]}).config
    assert list_advice("r", 6, config, None) == ["config: {train: {skip_steps: [[2, 4], [5, 6]]}}"]
    # A range of the config counts the steps of the run with the ranges before it.
    assert [list_advice("r", step, config, None) for step in (2, 3, 4)] == [[], [], []]
    for url in ("/t/run [1]", "/t/a: b", "/t/a #b", "/t/{x}", "/t/a, b", 'gs://b/"x"'):
        lines = list_advice(url, 6, config, 3)
        assert yaml.safe_load(lines[0])["checkpoint"]["fork_from"]["run"] == url


def test_a_copy_of_a_run_is_explained_by_its_own_files(run_of, tmp_path):
    copied = tmp_path / "run [1]"
    shutil.copytree(run_of("stages"), copied)
    rows = read_rows(copied)
    rows[4]["train/loss"] = 99.0
    (copied / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    explained = explain_step(copied, 5)
    assert explained.row["train/loss"] == 99.0
    assert yaml.safe_load(explained.advice[0])["checkpoint"]["fork_from"]["run"] == str(copied)


@pytest.mark.parametrize("value", [[1], {}, None, "x", True])
def test_rows_and_events_of_any_type_are_no_error(value, run_of, tmp_path):
    shutil.copytree(run_of("stages"), tmp_path / "run")
    rows = [row | {"perf/attempt": value, "train/learning_rate": value} for row in read_rows(tmp_path / "run")]
    (tmp_path / "run/metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with (tmp_path / "run/events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 2e9, "attempt": 1, "event": "changed", "step": 4, "changes": value}) + "\n")
    assert explain_step(tmp_path / "run", 5, is_data_only=True).examples


@pytest.mark.parametrize("separator", ["none", "newline"])
@pytest.mark.parametrize("empty", [0, 1, 3])
def test_the_file_of_a_position_is_named_beside_empty_files(empty, separator, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / f"texts/{number}.txt").write_text("" if number == empty else f"file {number} " * 500)
    data = {"source": str(tmp_path / "texts/*.txt"), "sequence_length": 16, "document_separator": separator}
    source = make_gpt(tmp_path / "run", **{"config.data": data}).dataset.train_sources[0].source
    for number in (each for each in range(4) if each != empty):
        position = source.read(0, len(source)).tobytes().index(f"file {number} ".encode())
        assert source.describe_position(position) == f"position 0 of {tmp_path}/texts/{number}.txt"
        assert source.describe_position(position + 9) == f"position 9 of {tmp_path}/texts/{number}.txt"


class Ends:
    """Source with documents that end at given positions."""

    def __init__(self, ends):
        self.ends = np.array(ends)

    def document_ends(self, start, stop):
        return self.ends[(self.ends > start) & (self.ends <= stop)]


@pytest.mark.parametrize(
    ("position", "start"),
    [(0, 0), (5, 0), (9, 0), (10, 10), (11, 10), (60_000, 10), (70_000, 70_000), (70_001, 70_000)],
)
def test_the_beginning_of_a_document_is_found(position, start):
    assert find_document_start(Ends([10, 70_000, 90_000]), position) == start
