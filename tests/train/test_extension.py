"""A spec may change while a run is stopped, as long as no update up to the newest committed step changes."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from runner.attempts.layout import read_owner
from runner.checkpoint.inspect import find_best_name
from runner.checkpoint.manifest import read_manifest
from runner.errors import InvalidError, PreemptedError
from runner.spec import compute_trajectory
from runner.storage import LocalStore, read_log
from tests.data.datasets import write_bin
from tests.support.job_process import Job
from tests.support.tiny_jobs import StopAfter, make_gpt, make_gpt_document, read_outcome, read_trajectory, stop_after
from tests.test_values import TrainLookup

WSD = {"name": "wsd", "warmup_steps": 2, "decay_steps": 4}
SHARE = {"name": "constant", "warmup_share": 0.5}
SHORT, LONG = 12, 20
SETTINGS: dict[str, Any] = {
    "job": "tests.test_values:TrainLookup",
    "config.model.vocabulary_size": 256,
    "config.schedule": WSD,
    "config.train": {"global_batch_examples": 8, "total_steps": SHORT},
    "config.eval": {},
    "checkpoint.every_steps": 2,
    "logging.every_steps": 1,
}


def job(directory: Path, total_steps: int = SHORT, **changes: Any) -> TrainLookup:
    data = directory.parent / "data.bin"
    if not data.exists():
        write_bin(data, np.random.default_rng(0).integers(256, size=4000))
    source = {"source": str(data), "sequence_length": 16, "validation_fraction": 0}
    settings = SETTINGS | {"config.data": source, "config.train.total_steps": total_steps} | changes
    return make_gpt(directory, TrainLookup, **settings)


def read_spec_changes(directory: Path) -> list[tuple[int, list[str]]]:
    events = read_log(LocalStore(directory), "events")
    return [(event["step"], event["changes"]) for event in events if event["event"] == "spec_changed"]


@pytest.mark.soak
def test_a_run_extended_before_its_decay_equals_one_that_had_the_length_from_the_start(tmp_path: Path) -> None:
    job(tmp_path / "whole", LONG)()
    stop_after(job(tmp_path / "run"), 6)
    stop_after(job(tmp_path / "run", LONG), 11)  # past the step at which the short run would begin to decay
    job(tmp_path / "run", LONG)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")
    change = f"config.train.total_steps: {SHORT} -> {LONG}"
    assert read_spec_changes(tmp_path / "run") == [(6, [change])]
    # The short run has other weights: the test can fail.
    job(tmp_path / "short")()
    assert read_trajectory(tmp_path / "short")[9:] != read_trajectory(tmp_path / "whole")[9:SHORT]


@pytest.mark.soak
def test_the_length_may_change_back_until_the_change_takes_effect(tmp_path: Path) -> None:
    stop_after(job(tmp_path / "run"), 4)
    stop_after(job(tmp_path / "run", LONG), 6)
    stop_after(job(tmp_path / "run"), 7)
    assert [step for step, _ in read_spec_changes(tmp_path / "run")] == [4, 6]
    stop_after(job(tmp_path / "run", LONG), 10)
    with pytest.raises(InvalidError, match=r"differs from step 9 on, and step 10 is committed"):
        job(tmp_path / "run")()
    job(tmp_path / "run", LONG)()


def test_a_refused_change_leaves_the_directory_to_its_own_spec(tmp_path: Path) -> None:
    stop_after(job(tmp_path / "run"), 10)
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for changes in ({"total_steps": LONG}, {"config.optimizer.learning_rate": 1.0}, {"total_steps": 6}):
        with pytest.raises(InvalidError):
            job(tmp_path / "run", **changes)()
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files
    job(tmp_path / "run")()


@pytest.mark.soak
def test_a_finished_run_is_extended_only_where_its_last_steps_stay(tmp_path: Path) -> None:
    constant = {"config.schedule": {"name": "constant"}}
    job(tmp_path / "constant", **constant)()
    job(tmp_path / "constant", LONG, **constant)()
    job(tmp_path / "whole", LONG, **constant)()
    assert read_outcome(tmp_path / "constant") == read_outcome(tmp_path / "whole")
    with pytest.raises(InvalidError, match=r"has reached step 20, and the spec ends it at step 12"):
        job(tmp_path / "constant", **constant)()
    job(tmp_path / "wsd")()
    with pytest.raises(InvalidError, match=r"from step 9 on, and step 12 is committed.*wsd before its decay begins"):
        job(tmp_path / "wsd", LONG)()


# Steps between two rows, and between two evaluations, of a run that has first ended at step 12.
CADENCES = {"row at the end": (5, 5), "evaluation at the end": (4, 5), "evaluated": (5, 6), "logged, evaluated": (4, 4)}
DAILY_CADENCES = ("evaluation at the end",)


@pytest.mark.parametrize(
    ("row_steps", "evaluation_steps"),
    [
        pytest.param(*cadence, id=name, marks=() if name in DAILY_CADENCES else pytest.mark.soak)
        for name, cadence in CADENCES.items()
    ],
)
def test_an_extended_run_has_the_rows_of_one_that_had_the_length_from_the_start(
    tmp_path: Path, row_steps: int, evaluation_steps: int
) -> None:
    write_bin(tmp_path / "data.bin", np.random.default_rng(0).integers(256, size=4000))
    data = {"source": str(tmp_path / "data.bin"), "sequence_length": 16, "validation_fraction": 0.2}
    changes: dict[str, Any] = {
        "config.schedule": {"name": "constant"},
        "config.data": data,
        "config.eval": {"every_steps": evaluation_steps, "batches": 1},
        "logging.every_steps": row_steps,
        "checkpoint.keep_last": 100,
    }
    job(tmp_path / "whole", LONG, **changes)()
    job(tmp_path / "run", **changes)()
    last = read_trajectory(tmp_path / "run")[-1]
    assert last["step"] == SHORT
    assert "val/loss" in last
    shutil.copytree(tmp_path / "run", tmp_path / "parent")
    stop_after(job(tmp_path / "run", LONG, **changes), SHORT + 1)
    job(tmp_path / "run", LONG, **changes)()
    rows, result = read_outcome(tmp_path / "whole")
    assert read_outcome(tmp_path / "run") == (rows, result)
    fork = {"checkpoint.fork_from": {"run": str(tmp_path / "parent"), "step": SHORT}}
    job(tmp_path / "fork", LONG, **changes, **fork)()
    assert read_outcome(tmp_path / "fork") == ([row for row in rows if row["step"] > SHORT], result)


class Killed(BaseException):
    """The job was killed."""


def kill_after(run: TrainLookup, step: int) -> None:
    """Run `run` until it has written the row of a step, and then kill it."""
    save_or_stop = run.save_or_stop

    def kill() -> None:
        if run.step == step:
            raise Killed
        save_or_stop()

    run.save_or_stop = kill  # type: ignore[method-assign]
    with pytest.raises(Killed):
        run()


DIARY = {"hooks": [{"hook": "tests.support.hooks:DiaryHook"}]}
# Steps between two rows, and between two evaluations, of a run that ends at step 12: with a row of this step only
# because the run ends there, with such an evaluation, and with both anyway. The daily case is `row`, without extension.
RATES = {"row, extended": (5, 5), "evaluation": (4, 5), "nothing": (4, 6)}


def rates(name: str) -> dict[str, Any]:
    row_steps, evaluation_steps = RATES["row, extended" if name == "row" else name]
    return {
        "config.schedule": {"name": "constant"},
        "config.eval": {"every_steps": evaluation_steps, "batches": 1},
        "logging.every_steps": row_steps,
        "checkpoint": {"every_steps": 4, "keep_last": 100, "keep_best": {"metric": "val/loss", "mode": "min"}},
    }


def settings(directory: Path, name: str) -> dict[str, Any]:
    write_bin(directory / "data.bin", np.random.default_rng(0).integers(256, size=4000))
    data = {"source": str(directory / "data.bin"), "sequence_length": 16, "validation_fraction": 0.2}
    return rates(name) | {"config.data": data}


@pytest.mark.parametrize("name", ["row", *(pytest.param(each, marks=pytest.mark.soak) for each in RATES)])
def test_a_total_set_to_the_newest_step_gives_the_end_of_a_run_with_that_total(tmp_path: Path, name: str) -> None:
    changes = settings(tmp_path, name) | DIARY
    job(tmp_path / "whole", **changes)()
    stop_after(job(tmp_path / "run", LONG, **changes), SHORT)
    # Killed in the last evaluation, too.
    with pytest.raises(PreemptedError):
        job(tmp_path / "run", **changes)(stop=StopAfter(job(tmp_path / "run", **changes), 0))
    job(tmp_path / "run", **changes)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")
    assert find_best_name(LocalStore(tmp_path / "run")) == find_best_name(LocalStore(tmp_path / "whole"))
    if name == "row":
        return
    # And the extension of such an end.
    job(tmp_path / "run", LONG, **changes)()
    job(tmp_path / "long", LONG, **changes)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "long")
    assert find_best_name(LocalStore(tmp_path / "run")) == find_best_name(LocalStore(tmp_path / "long"))


@pytest.mark.parametrize("name", ["row", *(pytest.param(each, marks=pytest.mark.soak) for each in RATES)])
def test_a_run_extended_by_mistake_and_set_back_is_the_run_that_it_was(tmp_path: Path, name: str) -> None:
    changes = settings(tmp_path, name) | DIARY
    job(tmp_path / "run", **changes)()
    outcome = read_outcome(tmp_path / "run")
    # The first row beyond is that of step 15 or 16, and step 16 is the first one that is saved.
    for step in (SHORT + 3, SHORT + 1):
        kill_after(job(tmp_path / "run", LONG, **changes), step)
        assert (read_trajectory(tmp_path / "run") != outcome[0]) == (name != "nothing")
        extended = job(tmp_path / "run", **changes)
        assert not extended.done
        extended()
        assert read_outcome(tmp_path / "run") == outcome
        if name == "row":
            return
    job(tmp_path / "run", LONG, **changes)()
    job(tmp_path / "long", LONG, **changes)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "long")
    assert find_best_name(LocalStore(tmp_path / "run")) == find_best_name(LocalStore(tmp_path / "long"))


def test_a_step_of_an_earlier_version_cannot_become_the_last_one(tmp_path: Path) -> None:
    changes = settings(tmp_path, "row")
    run = tmp_path / "run"
    stop_after(job(run, LONG, **changes), SHORT)
    path = run / "checkpoints" / str(SHORT) / "manifest.json"
    manifest = read_manifest(LocalStore(run), f"checkpoints/{SHORT}")
    assert manifest.carry is not None
    carry = {key: value for key, value in manifest.carry.items() if key != "last"}
    path.write_bytes(replace(manifest, carry=carry).encode())
    with pytest.raises(InvalidError, match="without the metrics of its row; end the run at a later step"):
        job(run, **changes)()


def test_a_fork_that_is_killed_before_its_first_save_keeps_the_mean_of_its_first_row(tmp_path: Path) -> None:
    changes = settings(tmp_path, "row")
    stop_after(job(tmp_path / "parent", LONG, **changes), 10)
    job(tmp_path / "whole", LONG, **changes)()
    fork = {"checkpoint.fork_from": {"run": str(tmp_path / "parent"), "step": 10}}
    kill_after(job(tmp_path / "fork", LONG, **changes | fork), 12)
    with pytest.raises(InvalidError, match="was forked at step 10, and the spec ends it there"):
        job(tmp_path / "fork", 10, **changes | fork)()
    job(tmp_path / "fork", LONG, **changes | fork)()
    rows, result = read_outcome(tmp_path / "whole")
    assert read_outcome(tmp_path / "fork") == ([row for row in rows if row["step"] > 10], result)


# Schedule of the saved run, present schedule and total, first step with another learning rate (None: no such step).
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], int, int | None]] = {
    "longer wsd": (WSD, WSD, LONG, 9),
    "longer decay": (WSD, WSD | {"decay_steps": 6}, SHORT, 7),
    "other final rate": (WSD | {"warmup_steps": 0}, WSD | {"warmup_steps": 0, "final_learning_rate": 1e-4}, SHORT, 0),
    "other warm-up": (WSD, WSD | {"warmup_steps": 3}, SHORT, 1),
    "longer cosine": ({"name": "cosine"}, {"name": "cosine"}, LONG, 1),
    "longer cosine after a warm-up": (
        {"name": "cosine", "warmup_steps": 5},
        {"name": "cosine", "warmup_steps": 5},
        LONG,
        6,
    ),
    "longer linear": ({"name": "linear"}, {"name": "linear"}, LONG, 1),
    "longer polynomial": ({"name": "polynomial", "power": 2}, {"name": "polynomial", "power": 2}, LONG, 1),
    "longer warm-up share": (
        {"name": "constant", "warmup_share": 0.5},
        {"name": "constant", "warmup_share": 0.5},
        18,
        1,
    ),
    "constant to wsd": ({"name": "constant"}, {"name": "wsd", "decay_steps": 4}, SHORT, 9),
    "wsd to constant": ({"name": "wsd", "decay_steps": 4}, {"name": "constant"}, LONG, 9),
    "constant to linear": ({"name": "constant"}, {"name": "linear"}, SHORT, 1),
    "longer constant": ({"name": "constant"}, {"name": "constant"}, LONG, None),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_first_changed_step_is_found_for_each_schedule(tmp_path: Path, case: str) -> None:
    saved_schedule, schedule, total_steps, first = CHANGES[case]
    saved = job(tmp_path / "run", **{"config.schedule": saved_schedule})
    present = job(tmp_path / "run", total_steps, **{"config.schedule": schedule})
    identity = compute_trajectory(saved.spec, saved.config)
    run_identity = present.make_run_identity(compute_trajectory(present.spec, present.config))
    for step in range(SHORT):
        # A change from the first step on is refused in a run without a checkpoint too.
        assert run_identity.is_continued(identity, step) == (first is None or max(step, 1) <= first), step


OTHER_KEYS = {
    "seed": 1,
    "config.optimizer.learning_rate": 2e-3,
    "config.optimizer.weight_decay": 0.5,
    "config.train.global_batch_examples": 16,
    "config.model.vocabulary_size": 512,
}


@pytest.mark.parametrize(
    "key",
    [pytest.param(key, marks=[pytest.mark.soak] * (key != "config.optimizer.weight_decay")) for key in OTHER_KEYS],
)
def test_other_keys_change_the_first_update(tmp_path: Path, key: str) -> None:
    stop_after(job(tmp_path / "run"), 2)
    with pytest.raises(InvalidError, match=key.replace(".", r"\.")):
        job(tmp_path / "run", **{key: OTHER_KEYS[key]})()
    with pytest.raises(InvalidError, match=key.replace(".", r"\.")):
        job(tmp_path / "run", LONG, **{key: OTHER_KEYS[key]})()


def test_the_owner_of_the_directory_has_the_present_length(tmp_path: Path) -> None:
    stop_after(job(tmp_path / "run"), 2)
    stop_after(job(tmp_path / "run", LONG), 3)
    owner = read_owner(LocalStore(tmp_path / "run"))
    assert owner is not None
    assert owner.identity["config.train.total_steps"] == LONG


@pytest.mark.soak
def test_two_processes_compare_the_lengths_of_a_decay(tmp_path: Path) -> None:
    """Process 0 compares them with JAX, whose devices are those of all processes."""
    job(tmp_path / "run")()
    source = {"source": str(tmp_path / "data.bin"), "sequence_length": 16, "validation_fraction": 0}
    document = make_gpt_document(tmp_path / "run", **SETTINGS | {"config.data": source})
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(document))
    run = Job(str(tmp_path / "spec.yaml"), tmp_path / "run")
    attempt = run.with_options(f"config.train.total_steps={LONG}").launch(2)
    attempt.expect(2)
    assert f"and step {SHORT} is committed" in attempt.output
