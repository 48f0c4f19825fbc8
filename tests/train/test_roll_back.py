"""Roll-back: runs that go back before a spike and pass over its data, and what a kill at any moment leaves of that."""

import os
import pkgutil
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner import BaseTrainer
from runner.checkpoint.inspect import find_best_name
from runner.config import RollBackConfig
from runner.data import SkippedBatches
from runner.distributed.preemption import StopNotice
from runner.errors import DivergedError, InvalidError, PreemptedError, RunnerError, SpecError
from runner.storage import LocalStore, parse_lines, read_json
from runner.train.feature import RewindError
from runner.train.features.stability import plan_roll_back
from tests.support import same_bits
from tests.support.damage import JSON_DAMAGES, list_damages
from tests.support.job_process import Job, run_runner
from tests.support.tiny_jobs import (
    environment,
    get_job_name,
    read_outcome,
    read_rows,
    read_trajectory,
    stop_after,
)
from tests.train.test_stability import CleanLookup, SpikedLookup, make_poisoned, make_poisoned_document

# With this seed the first poisoned step is the tenth, so that a window of eight steps is full before it.
SPREAD: dict[str, Any] = {
    "seed": 5,
    "config.optimizer": {"name": "sgd", "learning_rate": 3.0, "clip_norm": None},
    "config.schedule": {"name": "constant", "warmup_steps": 0},
    "checkpoint.every_steps": 2,
}
NAN: dict[str, Any] = SPREAD | {
    "config.stability": {"non_finite": "roll_back", "roll_back": {"skip_examples": 20, "over_steps": 8}},
    "checkpoint.keep_last": 4,
}
SPIKE: dict[str, Any] = SPREAD | {
    "config.stability": {"roll_back": {"after_steps": 3, "skip_examples": 40, "over_steps": 8, "at_most": 16}},
}


def read_roll_backs(directory: Path) -> list[Any]:
    events = parse_lines((directory / "events.jsonl").read_bytes())
    return [event for event in events if event["event"] == "roll_back"]


def list_steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir())


# Arithmetic.


@pytest.mark.parametrize(
    ("first", "before", "examples", "made", "stretch"),
    [
        (10, 1, 32, (), (8, 3)),
        (10, 1, 33, (), (8, 4)),
        (10, 0, 32, (), (9, 2)),
        (10, 0, 1, (), (9, 1)),
        (10, 5, 16, (), (4, 6)),
        (1, 1, 16, (), (0, 1)),
        (10, 1, 32, (SkippedBatches(3, 9),), (8, 3)),
        (10, 5, 32, (SkippedBatches(7, 9),), (7, 4)),
    ],
)
def test_a_stretch_covers_the_spike_and_the_steps_before(
    first: int, before: int, examples: int, made: Any, stretch: tuple[int, int]
) -> None:
    config = RollBackConfig(skip_examples=examples, steps_before=before)
    assert plan_roll_back(config, first, 16, made) == stretch


# Runs.


def test_a_shard_that_is_not_finite_is_passed(tmp_path: Path) -> None:
    changes = NAN | {"config.train.total_steps": 14}
    job = make_poisoned(tmp_path / "run", **changes)
    job()
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [*range(1, 15)]
    # The batch behind the first stretch is poisoned too.
    assert [row["train/roll_backs"] for row in rows] == [0] * 8 + [2] * 6
    assert all(row["train/loss"] is not None for row in rows)
    events = [
        [event[key] for key in ("step", "batches", "first", "detected")] for event in read_roll_backs(tmp_path / "run")
    ]
    assert events == [[8, 3, 10, 10], [8, 2, 9, 9]]
    assert [job.get_data_step(step) for step in (7, 8)] == [7, 13]


@pytest.mark.soak
def test_a_spike_that_ruins_a_run_is_passed_with_a_roll_back(tmp_path: Path) -> None:
    longer = {"config.train.total_steps": 92, "config.eval.every_steps": 92}
    make_poisoned(tmp_path / "clean", CleanLookup, **SPREAD | longer)()
    make_poisoned(tmp_path / "policy", SpikedLookup, **SPIKE | longer)()
    clean, policed = (read_trajectory(tmp_path / name)[-1]["val/loss"] for name in ("clean", "policy"))
    assert policed == pytest.approx(clean, rel=0.01)
    assert read_roll_backs(tmp_path / "policy")[0]["first"] == 10
    try:
        make_poisoned(tmp_path / "without", SpikedLookup, **SPREAD | longer)()
    except DivergedError:
        return
    assert read_trajectory(tmp_path / "without")[-1]["val/loss"] > 2 * clean


@pytest.mark.soak
@pytest.mark.parametrize("case", ["stop", "rows", "saves"])
def test_a_roll_back_does_not_depend_on_stops_rows_or_saves(case: str, tmp_path: Path) -> None:
    shorter = SPIKE | {"config.train.total_steps": 16, "config.eval.every_steps": 16}
    job = make_poisoned(tmp_path / "run", SpikedLookup, **shorter)
    job()
    assert len(read_roll_backs(tmp_path / "run")) > 0
    outcome = read_outcome(tmp_path / "run")
    if case == "stop":
        # Each stop makes one more checkpoint, before, in and behind the spike.
        for step in range(1, 16):
            directory = tmp_path / str(step)
            stop_after(make_poisoned(directory, SpikedLookup, **shorter), step)
            make_poisoned(directory, SpikedLookup, **shorter)()
            assert read_outcome(directory) == outcome
    for every in (2, 3, 5, 16) if case == "rows" else ():
        directory = tmp_path / str(every)
        other = make_poisoned(directory, SpikedLookup, **shorter | {"logging.every_steps": every})
        other()
        assert other.programs.data_position.skipped == job.programs.data_position.skipped
        assert read_outcome(directory)[1]["fingerprint"] == outcome[1]["fingerprint"]
    for every in (1, 3, 8) if case == "saves" else ():
        directory = tmp_path / str(every)
        make_poisoned(
            directory, SpikedLookup, **shorter | {"checkpoint.every_steps": every, "checkpoint.keep_last": 9}
        )()
        assert read_outcome(directory) == outcome


# The spike begins at step 10, and is long enough at step 12.
@pytest.mark.soak
@pytest.mark.parametrize(
    ("start", "stretch"),
    [(9, [9, 2]), (10, [8, 4]), (11, [8, 4]), (12, [8, 4]), (13, [8, 4])],
    ids=["first_step", "last_step", "across", "at_its_end", "behind"],
)
def test_a_roll_back_at_a_border_of_stages_does_not_depend_on_stops_rows_or_saves(
    start: int, stretch: list[int], tmp_path: Path
) -> None:
    batch = {"train.global_batch_examples": 32}
    changes = SPIKE | {"config.train.total_steps": 16, "config.stages": [{"from_step": start, "set": batch}]}
    changes |= {"config.eval": {"at_end": False}, "checkpoint.keep_last": 9}
    job = make_poisoned(tmp_path / "run", SpikedLookup, **changes)
    job()
    first = read_roll_backs(tmp_path / "run")[0]
    # Data before the stage of the spike are other data, and its batches are those that skip_examples counts.
    assert [first[key] for key in ("first", "detected", "step", "batches")] == [10, 12, *stretch]
    outcome = read_outcome(tmp_path / "run")
    # The start of the stage stays a step, wherever the data go on.
    assert [row["train/tokens"] for row in outcome[0]] == [
        16 * (16 * min(step, start) + 32 * max(step - start, 0)) for step in range(1, 17)
    ]
    for step in sorted({8, start, 11, 14}):
        directory = tmp_path / f"stop-{step}"
        stop_after(make_poisoned(directory, SpikedLookup, **changes), step)
        make_poisoned(directory, SpikedLookup, **changes)()
        assert read_outcome(directory) == outcome
    for every in (5, 16):
        directory = tmp_path / f"rows-{every}"
        # Only rows and saves fetch the losses, so the spike is found late.
        late = {"logging.every_steps": every, "checkpoint.every_steps": 8}
        other = make_poisoned(directory, SpikedLookup, **changes | late)
        other()
        assert other.programs.data_position.skipped == job.programs.data_position.skipped
        assert read_outcome(directory)[1]["fingerprint"] == outcome[1]["fingerprint"]


# Ends.


@pytest.mark.soak
def test_a_run_ends_after_too_many_roll_backs_and_goes_on_with_more(tmp_path: Path) -> None:
    def make(at_most: int) -> BaseTrainer:
        policy = NAN["config.stability"] | {"roll_back": NAN["config.stability"]["roll_back"] | {"at_most": at_most}}
        return make_poisoned(tmp_path / "run", **NAN | {"config.train.total_steps": 14, "config.stability": policy})

    for _ in range(2):  # and again after a restart
        with pytest.raises(DivergedError, match="have been made, and skipped 3 batches after step 8"):
            make(1)()
        assert len(read_roll_backs(tmp_path / "run")) == 1
    make(2)()
    make_poisoned(tmp_path / "other", **NAN | {"config.train.total_steps": 14})()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "other")


@pytest.mark.soak
def test_a_spike_before_every_checkpoint_ends_the_run(tmp_path: Path) -> None:
    changes = NAN | {"checkpoint.every_steps": 100}
    for _ in range(2):
        with pytest.raises(DivergedError, match="no checkpoint of step 8 or earlier") as error:
            make_poisoned(tmp_path / "run", **changes)()
        assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "roll_backs").exists()
    assert read_roll_backs(tmp_path / "run") == []


@pytest.mark.soak
@pytest.mark.parametrize("keep_last", [1, 3])
def test_stops_inside_a_spike_keep_the_checkpoint_before_it(keep_last: int, tmp_path: Path) -> None:
    policy = SPIKE["config.stability"]["roll_back"] | {"after_steps": 6}
    shorter = {"config.train.total_steps": 18, "config.eval.every_steps": 18, "checkpoint.keep_last": keep_last}
    changes = SPIKE | shorter | {"config.stability": {"roll_back": policy}, "checkpoint.every_steps": 4}
    make_poisoned(tmp_path / "whole", SpikedLookup, **changes)()
    first = read_roll_backs(tmp_path / "whole")[0]
    assert [first[key] for key in ("first", "detected", "step")] == [10, 15, 8]
    # Each stop saves, inside of the spike.
    for step in (9, 10, 11, 12, 13, 14):
        stop_after(make_poisoned(tmp_path / "run", SpikedLookup, **changes), step)
    make_poisoned(tmp_path / "run", SpikedLookup, **changes)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")
    # The last checkpoint needs none before it any more.
    assert len(list_steps(tmp_path / "run")) <= keep_last + 1


@pytest.mark.soak
def test_a_damaged_checkpoint_before_the_spike_is_passed_over(tmp_path: Path) -> None:
    changes = NAN | {"config.train.total_steps": 14}
    make_poisoned(tmp_path / "run", **changes)()
    job, damaged = make_poisoned(tmp_path / "damaged", **changes), list[Path]()
    (feature,) = job.features
    rewind = feature.rewind  # called when no save is in progress

    def damage_and_rewind(*arguments: Any) -> list[int]:
        files = [path for path in (tmp_path / "damaged" / "checkpoints" / "8").rglob("*") if path.is_file()]
        damaged.append(max(files, key=lambda path: path.stat().st_size))
        damaged[-1].write_bytes(b"damaged")
        return rewind(*arguments)

    feature.rewind = damage_and_rewind  # type: ignore[method-assign]
    job()
    assert damaged
    outcomes = [read_outcome(tmp_path / name) for name in ("run", "damaged")]
    assert outcomes[0] == outcomes[1]


# What judges a run.


class Witness:
    """Evaluator that keeps the steps it was shown."""

    name = "witness"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def evaluate(self, weights: Any, step: int, hosts: Any) -> dict[str, float]:
        self.steps.append(step)
        return {"val/witness": float(len(self.steps))}


class WitnessedLookup(SpikedLookup):
    def evaluator(self) -> Any:
        self.witness = Witness()
        return [*super().evaluator(), self.witness]


@pytest.mark.soak
def test_no_step_of_a_spike_is_evaluated_or_best(tmp_path: Path) -> None:
    best = {"metric": "val/witness", "mode": "max"}
    shorter = {"config.train.total_steps": 16, "config.eval.every_steps": 1, "checkpoint.keep_best": best}
    job = make_poisoned(tmp_path / "run", WitnessedLookup, **SPIKE | shorter)
    job()
    ends = [event["first"] for event in read_roll_backs(tmp_path / "run")]
    shown = job.witness.steps
    # Step 9 lies before the spike, and is repeated with other data.
    assert ends[0] == 10
    assert shown[:11] == [*range(1, 10), 9, 10]
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [*range(1, 17)]


# Refusals.


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"config.stability": {"non_finite": "roll_back"}}, "roll_back needs the section"),
        ({"config.stability": {"roll_back": {}}}, "skip_examples"),
        ({"config.stability": {"roll_back": {"skip_examples": 0}}}, "skip_examples"),
        ({"config.stability": {"roll_back": {"skip_examples": 9, "at_most": 17}}}, "at_most"),
        ({"config.stability": {"roll_back": {"skip_examples": 9, "after_steps": 0}}}, "after_steps"),
    ],
)
def test_an_invalid_roll_back_is_refused_in_one_line(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=key) as error:
        make_poisoned(tmp_path / "run", **changes)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_a_damaged_record_changes_no_bit_or_is_refused(tmp_path: Path) -> None:
    changes = NAN | {"config.train.total_steps": 14}
    make_poisoned(tmp_path / "whole", **changes)()
    whole = read_outcome(tmp_path / "whole")
    (tmp_path / "elsewhere").mkdir()
    stop_after(make_poisoned(tmp_path / "stopped", **changes), 11)
    problems, outcomes = {}, {}
    for name in ("roll_backs", "roll_backs/1", "roll_backs/2"):
        path = tmp_path / "stopped" / name
        for damage, function in (list_damages(path) | (JSON_DAMAGES if path.is_file() else {})).items():
            run = tmp_path / "run"
            shutil.copytree(tmp_path / "stopped", run)
            function(run / name)
            try:
                make_poisoned(run, **changes)()
                outcomes[name, damage] = "same bits" if read_outcome(run) == whole else "other bits"
            except RunnerError as error:
                outcomes[name, damage] = str(error.exit_code)
            except Exception as error:  # noqa: BLE001 - whatever a start lets out is what this test looks for
                problems[name, damage] = f"{type(error).__name__}: {error}"[:300]
            shutil.rmtree(run)
            shutil.rmtree(tmp_path / "elsewhere")
            (tmp_path / "elsewhere").mkdir()
    assert not problems, "\n".join(f"{case}: {problem}" for case, problem in problems.items())
    allowed = {"move behind link": {"same bits"}, "newer format": {"same bits"}}
    for (name, damage), outcome in outcomes.items():
        assert outcome in allowed.get(damage, {"same bits", "2"}), (name, damage)


# Real processes.

KILL_IN = "TEST_ROLL_BACK_KILL_IN"
MOMENTS = {
    f"{when} {name}": (place, when)
    for name, place in {
        "create_file": "runner.train.features.stability.create_file",
        "_append_event": "runner.train.features.stability._append_event",
        "load_checkpoint": "runner.checkpoint.save.load_checkpoint",
        "forget_after": "runner.checkpoint.policy.Retention.forget_after",
        "quarantine": "runner.checkpoint.save.quarantine",
        "go_back": "runner.checkpoint.save.Checkpointer.go_back",
        "replace_skipped_batches": "runner.train.features.stability.replace_skipped_batches",
        "resume": "runner.train.report.Report.resume",
        "complete_roll_backs": "runner.train.features.stability.complete_roll_backs",
    }.items()
    for when in ("before", "after")
}


class KilledLookup(SpikedLookup):
    """Job that kills its process the first time that the function in the environment is called after a spike."""

    is_rolling_back = False

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        place, when = MOMENTS.get(os.environ.get(KILL_IN, ""), ("", ""))
        if not place:
            return
        owner, _, name = place.rpartition(".")
        holder = pkgutil.resolve_name(owner)
        function, mark = getattr(holder, name), self.store.root.with_suffix(".killed")

        def kill() -> None:
            is_after_spike = self.is_rolling_back or "complete" in name
            if is_after_spike and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        def call(*arguments: Any, **named: Any) -> Any:
            if when == "before":
                kill()
            result = function(*arguments, **named)
            if when == "after":
                kill()
            return result

        setattr(holder, name, call)
        go_back = self.session.go_back

        def watch(cause: RewindError) -> None:
            self.is_rolling_back = True
            go_back(cause)
            self.is_rolling_back = False

        self.session.go_back = watch  # type: ignore[method-assign]


def run_process(tmp_path: Path, name: str, moment: str = "", **changes: Any) -> int:
    shorter = {"config.train.total_steps": 16, "config.eval.every_steps": 16, "job": get_job_name(KilledLookup)}
    document = make_poisoned_document(tmp_path / name, **SPIKE | shorter | changes)
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
    code, output = run_runner(environment(1, **{KILL_IN: moment}), str(tmp_path / f"{name}.yaml"))
    assert "Traceback" not in output
    return code


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run with a roll-back that nothing has disturbed."""
    directory = tmp_path_factory.mktemp("roll_back")
    assert run_process(directory, "whole") == 0
    return directory / "whole"


@pytest.mark.soak
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_of_a_roll_back_ends_in_the_same_bits(
    moment: str, undisturbed: Path, tmp_path: Path
) -> None:
    codes = [run_process(tmp_path, "killed", moment) for _ in range(2)]
    assert codes == [-signal.SIGKILL, 0]
    assert read_outcome(tmp_path / "killed") == read_outcome(undisturbed)
    numbers, expected = (
        {event["number"] for event in read_roll_backs(each)} for each in (tmp_path / "killed", undisturbed)
    )
    assert numbers == expected


@pytest.mark.soak
def test_status_and_report_show_roll_backs_and_discarded_rows(undisturbed: Path, tmp_path: Path) -> None:
    code, status = run_runner(environment(1), "status", str(undisturbed))
    assert code == 0
    assert "1 roll-backs" in status
    assert "rolled back because of loss" in status
    assert "steps lost" in status
    code, output = run_runner(environment(1), "report", str(undisturbed), "-o", str(tmp_path / "report.html"))
    assert code == 0, output
    page = (tmp_path / "report.html").read_text()
    assert '"label": "discarded, 1"' in page or '"label":"discarded, 1"' in page
    # Behind the beginning of the stretch, up to the last row before the decision.
    record = read_json(LocalStore(undisturbed), "roll_backs/1")
    assert [row["step"] for row in record["rows"]] == [9, 10, 11]


@pytest.mark.soak
def test_two_processes_roll_back_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = {"config.train.total_steps": 16, "config.eval.every_steps": 16, "job": get_job_name(KilledLookup)}
    outcomes = []
    for name, moment in (("whole", ""), ("record", "after create_file"), ("load", "after go_back")):
        document = make_poisoned_document(tmp_path / name, **SPIKE | shorter)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
        monkeypatch.setenv(KILL_IN, moment)
        Job(str(tmp_path / f"{name}.yaml"), tmp_path / name).launch(2, max_restarts=3).expect(0)
        assert (tmp_path / f"{name}.killed").exists() == bool(moment)
        outcomes.append(read_outcome(tmp_path / name))
    assert len(read_roll_backs(tmp_path / "whole")) > 0
    assert outcomes[1] == outcomes[2] == outcomes[0]


@pytest.mark.soak
def test_parts_in_the_fast_tier_behind_a_roll_back_are_ignored(tmp_path: Path) -> None:
    outcomes = []
    for name, moment in (("whole", ""), ("killed", "after create_file")):
        tier = {"checkpoint.local_directory": str(tmp_path / f"{name}.fast"), "checkpoint.local_every_steps": 1}
        codes = [run_process(tmp_path, name, moment, **tier) for _ in range(1 + bool(moment))]
        assert codes == ([-signal.SIGKILL, 0] if moment else [0])
        outcomes.append(read_outcome(tmp_path / name))
    assert outcomes[0] == outcomes[1]
    (event,) = (
        row for row in parse_lines((tmp_path / "killed" / "events.jsonl").read_bytes()) if row["event"] == "restore"
    )
    # The tier has parts up to step 11, which were discarded.
    assert event["step"] == 8


@pytest.mark.soak
def test_a_fork_inherits_the_data_that_were_skipped(tmp_path: Path) -> None:
    shorter = SPIKE | {"config.train.total_steps": 16, "config.eval.every_steps": 16, "checkpoint.keep_last": 9}
    job = make_poisoned(tmp_path / "run", SpikedLookup, **shorter)
    job()
    # One from before the stretch finds the spike itself, and one from behind it does not.
    for step in (6, 14):
        fork = {"checkpoint.fork_from": {"run": str(tmp_path / "run"), "step": step}}
        other = make_poisoned(tmp_path / str(step), SpikedLookup, **shorter | fork)
        other()
        assert other.programs.data_position.skipped == job.programs.data_position.skipped
        assert read_outcome(tmp_path / str(step))[1] == read_outcome(tmp_path / "run")[1]
    again = make_poisoned(tmp_path / "14", SpikedLookup, **shorter | fork | {"config.stability.roll_back.at_most": 9})
    again()


@pytest.mark.soak
def test_a_fork_that_inherits_a_roll_back_restarts_after_one_of_its_own(tmp_path: Path) -> None:
    longer = SPIKE | {"config.train.total_steps": 40, "checkpoint.keep_last": 9}
    parent = make_poisoned(tmp_path / "run", SpikedLookup, **longer | {"config.train.total_steps": 16})
    parent()
    fork = longer | {
        "checkpoint.fork_from": {"run": str(tmp_path / "run"), "step": 14, "changes": ["config.train.total_steps"]}
    }
    make_poisoned(tmp_path / "whole", SpikedLookup, **fork)()
    # Its epochs go on, and meet the same data again.
    numbers = [event["number"] for event in read_roll_backs(tmp_path / "whole")]
    assert numbers[:1] == [len(parent.programs.data_position.skipped) + 1]
    for step in (32, 36):
        stop_after(make_poisoned(tmp_path / "stopped", SpikedLookup, **fork), step)
    make_poisoned(tmp_path / "stopped", SpikedLookup, **fork)()
    assert read_outcome(tmp_path / "stopped") == read_outcome(tmp_path / "whole")


@pytest.mark.soak
@pytest.mark.parametrize("start", [None, 9, 14])
def test_verify_resume_kills_a_job_in_its_roll_back(start: int | None, tmp_path: Path) -> None:
    stages = [] if start is None else [{"from_step": start, "set": {"train.global_batch_examples": 32}}]
    changes = SPIKE | {"job": get_job_name(SpikedLookup), "config.stages": stages}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(make_poisoned_document(tmp_path / "run", **changes)))
    code, output = run_runner(
        environment(1), "verify-resume", str(tmp_path / "spec.yaml"), "--steps", "17", "--kills", "8"
    )
    assert code == 0, output
    assert "-9 to process 0 in a roll-back" in output
    # Its steps take milliseconds, so a kill after a stage begins may come too late for that stage.
    assert ("before a stage" in output) == bool(stages)
    assert "SAME BITS after 8 kills" in output


# Bits.


@pytest.mark.soak
def test_roll_backs_are_bit_identical_on_one_two_and_eight_devices(tmp_path: Path) -> None:
    changes = SPIKE | same_bits.SAME_BITS_OPTIONS | {"config.train.total_steps": 16, "job": get_job_name(SpikedLookup)}
    fingerprints = set()
    for devices in same_bits.DEVICE_COUNTS:
        document = make_poisoned_document(tmp_path / str(devices), **changes)
        (tmp_path / f"{devices}.yaml").write_text(yaml.safe_dump(document))
        code, output = run_runner(environment(devices), str(tmp_path / f"{devices}.yaml"))
        assert code == 0, output
        assert read_roll_backs(tmp_path / str(devices))
        fingerprints.add(read_outcome(tmp_path / str(devices))[1]["fingerprint"])
    assert len(fingerprints) == 1


# Changes of the spec.

DIARY_HOOK = "tests.support.hooks:DiaryHook"
LATE: dict[str, Any] = SPIKE | {
    "config.train.total_steps": 16,
    "config.eval": {"every_steps": 11, "batches": 1},
    "checkpoint.keep_last": 9,
}


# Where the run is interrupted by the change: right behind its roll-back, whose range the state has not yet, or later.
INTERRUPTED = {"without the range": 8, "with the range": 7}


@pytest.mark.soak
@pytest.mark.parametrize(
    "case", ["with the range", pytest.param("without the range", marks=pytest.mark.soak)], ids=lambda case: str(case)
)
def test_a_range_that_does_not_follow_from_a_new_stage_is_not_skipped(case: str, tmp_path: Path) -> None:
    """The spike is detected at step 12, and batches behind step 8 are skipped; a stage with other data begins there."""
    stage = {"from_step": 8, "set": {"train.global_batch_examples": 32}}
    saves = {"checkpoint.every_steps": 3} if case == "with the range" else {}
    changes = LATE | saves | {"config.stages": [stage]}
    rolled_back = make_poisoned(tmp_path / "run", SpikedLookup, **LATE | saves)
    if saves:
        with pytest.raises(PreemptedError):
            rolled_back(stop=StopBehindRollBack(rolled_back))
    else:
        with pytest.raises(Killed):
            kill_behind_roll_back(rolled_back)
    assert list_steps(tmp_path / "run")[-1] == INTERRUPTED[case]
    assert (tmp_path / "run" / "roll_backs" / "1").exists()
    shutil.copytree(tmp_path / "run", tmp_path / "parent")
    make_poisoned(tmp_path / "run", SpikedLookup, **changes)()
    make_poisoned(tmp_path / "whole", SpikedLookup, **changes)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")


@pytest.mark.soak
def test_a_range_follows_or_not_in_a_fork_and_behind_the_detection(tmp_path: Path) -> None:
    stage = {"from_step": 8, "set": {"train.global_batch_examples": 32}}
    settings = LATE | {"checkpoint.every_steps": 3}
    rolled_back = make_poisoned(tmp_path / "parent", SpikedLookup, **settings)
    with pytest.raises(PreemptedError):
        rolled_back(stop=StopBehindRollBack(rolled_back))
    changes = settings | {"config.stages": [stage]}
    make_poisoned(tmp_path / "whole", SpikedLookup, **changes)()
    fork = {"checkpoint.fork_from": {"run": str(tmp_path / "parent"), "step": 7}}
    make_poisoned(tmp_path / "fork", SpikedLookup, **changes | fork)()
    assert read_outcome(tmp_path / "fork")[1] == read_outcome(tmp_path / "whole")[1]
    # A stage behind the detection changes nothing of the range.
    late = settings | {"config.stages": [stage | {"from_step": 12}]}
    make_poisoned(tmp_path / "late", SpikedLookup, **late)()
    make_poisoned(tmp_path / "parent", SpikedLookup, **late)()
    assert read_outcome(tmp_path / "parent") == read_outcome(tmp_path / "late")
    assert (tmp_path / "parent" / "roll_backs" / "1").exists()


class Killed(BaseException):
    """The job was killed."""


def kill_behind_roll_back(job: BaseTrainer) -> None:
    """Run a job, and kill it before the first step behind its roll-back."""
    go_back = job.session.go_back

    def go_back_and_kill(cause: RewindError) -> None:
        go_back(cause)
        raise Killed

    job.session.go_back = go_back_and_kill  # type: ignore[method-assign]
    job()


def test_a_run_behind_a_range_that_no_longer_follows_is_refused(tmp_path: Path) -> None:
    job = make_poisoned(tmp_path / "run", SpikedLookup, **LATE)
    with pytest.raises(PreemptedError):
        job(stop=StopBehindRollBack(job, 10))
    for changes in (
        {"config.stages": [{"from_step": 11, "set": {"optimizer.weight_decay": 0.5}}]},
        {"config.train.total_steps": 11},
    ):
        with pytest.raises(InvalidError, match=r"detected at step 12; .* change it from step 12 on"):
            make_poisoned(tmp_path / "run", SpikedLookup, **LATE | changes)()
    assert not list((tmp_path / "run" / "roll_backs").glob("*withdrawn*"))


class StopBehindRollBack(StopNotice):
    """Stop notice that arrives at a step, once the job was rolled back."""

    def __init__(self, job: BaseTrainer, step: int = 7):
        super().__init__()
        self._job, self._step = job, step

    def poll(self) -> bool:
        return bool(self._job.programs.data_position.skipped) and self._job.step >= self._step


@pytest.mark.soak
def test_an_extension_during_a_spike_removes_the_evaluation_of_a_suspect_step(tmp_path: Path) -> None:
    """The spike lasts from step 10 to the end, and is too short for a roll-back."""
    policy = LATE["config.stability"]["roll_back"] | {"after_steps": 20}
    changes = LATE | {"config.stability": {"roll_back": policy}}
    changes |= {"checkpoint.keep_best": {"metric": "val/loss", "mode": "max"}, "hooks": [{"hook": DIARY_HOOK}]}
    make_poisoned(tmp_path / "run", SpikedLookup, **changes | {"config.train.total_steps": 11})()
    last = read_trajectory(tmp_path / "run")[-1]
    assert last["train/high_loss_steps"] == 2
    assert "val/loss" in last
    make_poisoned(tmp_path / "whole", SpikedLookup, **changes)()
    make_poisoned(tmp_path / "run", SpikedLookup, **changes)()
    rows, result = read_outcome(tmp_path / "run")
    assert "val/loss" not in rows[10]
    assert (rows, result) == read_outcome(tmp_path / "whole")
    assert find_best_name(LocalStore(tmp_path / "run")) == find_best_name(LocalStore(tmp_path / "whole"))
