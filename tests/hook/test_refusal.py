"""What is wrong with hooks is one line, before step 1 if that can be; else it ends the run, and names the hook."""

import re
from typing import Any

import pytest

from runner import ExecutionSpec
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Progress
from runner.errors import HookError, InvalidError
from runner.hook.builtin import MetricReader
from runner.hook.dispatch import call_hook
from runner.hook.listing import ListedHook
from runner.hook.protocol import Moment
from runner.spec import parse_document, read_spec
from tests.hook.small import job
from tests.support.tiny_jobs import make_counter, make_gpt_document
from tests.test_values import TrainLookup

HERE = "tests.support.hooks"
SPEC = """
name: tiny
job: tests.test_values:TrainLookup
directory: {directory}
topology: {{}}
hooks:
  - runner.hook:StopAtTime
  - hook: runner.hook:EarlyStopping
    config:
      patiense: 3
"""


class Unjudged(TrainLookup):
    """Is never evaluated."""

    def evaluator(self) -> None:
        """Nothing."""


def early(**config: Any) -> dict[str, Any]:
    return {"hook": "runner.hook:EarlyStopping", "config": config}


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        (["runner.hook.EarlyStopping"], "needs the form module.path:Class"),
        ([{"hook": "runner.hook:EarlyStopping", "konfig": {}}], "unknown key; did you mean config?"),
        ([{"config": {}}], "missing key hook"),
        ([{"hook": "runner.hook:EarlyStopping", "name": "a.b"}], "a letter, and then letters"),
    ],
)
def test_an_entry_that_is_none_is_refused_with_its_place(hooks: Any, words: str, tmp_path) -> None:
    text = "\n".join(f"{key}: {value!r}" for key, value in make_gpt_document(tmp_path / "run", hooks=hooks).items())
    (tmp_path / "spec.yaml").write_text(text)
    with pytest.raises(InvalidError) as caught:
        read_spec(tmp_path / "spec.yaml")
    assert words in str(caught.value)
    assert "hooks" in str(caught.value)


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        (
            ["runner.hook:EarlyStoping"],
            r"hooks.0: module runner.hook has no EarlyStoping; did you mean EarlyStopping\?",
        ),
        (["runner.job:RestoreableJob"], "hooks.0: runner.job:RestoreableJob is not a subclass of Hook"),
        (["runner.hock:Hook"], r"hooks.0: no module runner.hock; did you mean runner.hook\?"),
        ([early(patiense=3)], r"hooks.0.config.patiense: unknown key; did you mean patience\?"),
        ([early(patience=0)], "hooks.0.config.patience: got 0, needs a number above 0"),
        (["runner.hook:StopAtLoss"], "hooks.0.config: missing key value"),
        ([{"hook": "runner.hook:StopAtTime", "config": {}}], "needs one of at and after_hours"),
        ([{"hook": "runner.hook:StopAtTime", "config": {"at": "2030-01-31T18:00:00"}}], "has no time zone"),
        ([{"hook": "runner.hook:StopAtTime", "config": {"at": "soon"}}], "Invalid isoformat string: 'soon'"),
        ([early(), early()], "hooks.1: a hook is called EarlyStopping already; give this one a name of its own"),
        ([early() | {"name": "fired"}], "a hook is called fired already"),
        (["runner.hook:BestAtEnd"], "hooks.0: BestAtEnd needs checkpoint.keep_best"),
        ([f"{HERE}:Float64Hook"], "hooks.0: init returns an array of float64"),
        ([f"{HERE}:LargeStateHook"], "hooks.0: init returns 400,000 bytes of counters; a hook may have 65,536"),
    ],
)
def test_what_is_known_from_the_spec_is_refused_before_anything_begins(hooks: Any, words: str, tmp_path) -> None:
    with pytest.raises(InvalidError, match=words):
        job(tmp_path / "run", *hooks)
    assert not (tmp_path / "run").exists()


def test_all_of_it_has_its_line(tmp_path) -> None:
    document = parse_document(SPEC.format(directory=tmp_path / "run"), "some.yaml")
    document.data["config"] = make_gpt_document(tmp_path / "run")["config"]
    spec = ExecutionSpec.model_validate(document.data)
    with pytest.raises(InvalidError, match=r"^some.yaml:7: hooks.0.config: needs one of"):
        TrainLookup(spec, document)
    document.data["hooks"][0] = "runner.hook:EarlyStopping"
    document.data["hooks"][1]["name"] = "another"
    spec = ExecutionSpec.model_validate(document.data)
    with pytest.raises(
        InvalidError, match=r"^some.yaml:10: hooks.1.config.patiense: unknown key; did you mean patience"
    ):
        TrainLookup(spec, document)


def test_a_job_that_calls_no_hooks_refuses_them(tmp_path) -> None:
    with pytest.raises(InvalidError, match="hooks: Counter calls no hooks"):
        make_counter(tmp_path / "run", hooks=["runner.hook:EarlyStopping"])


def test_a_hook_that_waits_for_evaluations_is_refused_where_nothing_is_evaluated(tmp_path) -> None:
    with pytest.raises(InvalidError, match="hooks: EarlyStopping waits for evaluations"):
        job(tmp_path / "run", early(), job_class=Unjudged)()


def outcome(listed: ListedHook, method: str, step: int = 4) -> str | None:
    """Why the run cannot go on after this call; None if it can."""
    hosts = Hosts.single_process()
    return call_hook(listed, method, Moment(step, {"step": step}, {}, listed.counters, hosts, 0.0))[1]


@pytest.mark.parametrize(
    ("method", "how", "words"),
    [
        ("on_row", "raise", r"ZeroDivisionError: a bug \(at .*hooks.py:\d+\)$"),
        ("on_row", "exit", "SystemExit: 0"),
        ("on_row", "base", "GeneratorExit: an end"),
        ("on_end", "digits", "ValueError: returned an integer of 401 digits"),
        ("on_end", "circle", "ValueError: Circular reference detected"),
        ("on_row", "number", "TypeError: returned a int, needs a Verdict or None"),
        ("on_row", "tree", "ValueError: returned counters of .*, init of"),
        ("on_row", "shape", r"ValueError: returned counters with int32 of shape \(2,\), where init has int32 of shape"),
        ("on_row", "type", r"ValueError: returned counters with float32 of shape \(\), where init has int32"),
        ("on_evaluation", "raise", "ZeroDivisionError"),
        ("on_evaluation", "number", "TypeError: returned a int, needs a Verdict or None"),
        ("on_start", "raise", "ZeroDivisionError"),
        ("on_start", "number", "TypeError: returned a int, needs None"),
        ("on_checkpoint", "stop", "TypeError: returned a Verdict, needs None"),
        ("on_end", "number", "TypeError: returned a int, needs a mapping or None"),
        ("on_end", "array", "TypeError: Object of type ndarray is not JSON serializable"),
    ],
)
def test_what_a_call_may_not_do_is_one_line(method: str, how: str, words: str, tmp_path) -> None:
    hook = {"hook": f"{HERE}:FaultyHook", "config": {"how": how, "method": method}}
    (listed,) = job(tmp_path / "run", hook).hooks.listed
    problem = outcome(listed, method)
    assert re.match(words, str(problem)), problem
    assert "\n" not in str(problem)
    assert outcome(listed, method, step=2) is None


@pytest.mark.parametrize(
    ("method", "step", "how", "saved"),
    [
        ("on_row", 4, "raise", [3]),
        pytest.param("on_checkpoint", 6, "raise", [3], marks=pytest.mark.soak),
        pytest.param("on_end", 8, "raise", [3, 6, 8], marks=pytest.mark.soak),
        ("on_end", 8, "taken", [3, 6, 8]),
    ],
)
def test_a_hook_that_fails_ends_the_run_with_1_and_what_was_saved_is_good(method, step, how, saved, tmp_path) -> None:
    hook = {"hook": f"{HERE}:FaultyHook", "config": {"how": how, "method": method, "step": step}}
    words = (
        "FaultyHook: result.json has step already" if how == "taken" else f"FaultyHook in {method} at step {step}: Zero"
    )
    with pytest.raises(HookError, match=f"^hook {words}") as caught:
        job(tmp_path / "run", hook, **{"checkpoint.every_steps": 3})()
    assert caught.value.exit_code == 1
    manifests = (tmp_path / "run" / "checkpoints").glob("*/manifest.json")
    assert sorted(int(path.parent.name) for path in manifests) == saved
    assert not (tmp_path / "run" / "result.json").exists()


def test_an_observer_has_no_say(tmp_path) -> None:
    (listed,) = job(tmp_path / "run", f"{HERE}:VerdictObserver").hooks.listed
    assert "TypeError: returned a verdict, which an Observer cannot" in str(outcome(listed, "on_row"))


def test_a_row_without_the_metric_is_passed_over_and_the_first_is_told_with_the_nearest(capsys) -> None:
    metric, row = MetricReader("val/los"), {"step": 4, "train/loss": 1.0, "val/loss": 2.0}
    assert [
        metric.read(row),
        metric.read(row),
        metric.read({"val/los": None, **row}),
        metric.read({"val/los": 0.5}),
    ] == [
        None,
        None,
        None,
        0.5,
    ]
    assert capsys.readouterr().err == (
        "hooks wait for val/los, which the row of step 4 lacks; did you mean val/loss?\n"
    )


def test_a_call_is_a_phase_of_its_own_and_told_of_once_if_it_takes_long(tmp_path, monkeypatch, capsys) -> None:
    names: list[str] = []
    monkeypatch.setattr(Progress, "report_phase", spying(Progress.report_phase, names))
    monkeypatch.setattr("runner.hook.dispatch._SLOW_SECONDS", 0.0)
    monkeypatch.setattr("runner.hook.dispatch._SLOW_STEPS", 0.0)
    found = job(tmp_path / "run", f"{HERE}:DiaryObserver")
    found()
    told = [line for line in capsys.readouterr().err.splitlines() if "took" in line]
    assert len([line for line in told if "hook DiaryObserver took" in line and "in on_row at step 1" in line]) == 1
    assert len([line for line in told if "in on_row" in line]) == 1
    assert {"hook DiaryObserver.on_start", "hook DiaryObserver.on_row", "hook DiaryObserver.on_end"} <= {*names}


def spying(report_phase: Any, names: list[str]) -> Any:
    def spy(progress: Progress, phase: Any) -> Any:
        names.append(phase.name)
        return report_phase(progress, phase)

    return spy
