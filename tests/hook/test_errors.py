"""Invalid hooks: one line, before step 1 if possible; otherwise the run ends and the hook is named."""

import re
from typing import Any

import pytest

from runner import ExecutionSpec
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Progress
from runner.errors import HookError, InvalidError
from runner.hook.dispatch import call_hook
from runner.hook.hooks import MetricReader, Moment
from runner.hook.listing import ListedHook
from runner.spec import parse_document, read_spec
from tests.hook.small_job import make_job
from tests.support.tiny_jobs import make_counter, make_gpt_document
from tests.test_values import TrainLookup

HOOKS_MODULE = "tests.support.hooks"
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


class UnevaluatedGPT(TrainLookup):
    """A job without evaluators."""

    def evaluator(self) -> None:
        """Return None."""


def make_early_stopping(**config: Any) -> dict[str, Any]:
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
def test_an_invalid_entry_is_rejected_with_its_position(hooks: Any, words: str, tmp_path) -> None:
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
        ([make_early_stopping(patiense=3)], r"hooks.0.config.patiense: unknown key; did you mean patience\?"),
        ([make_early_stopping(patience=0)], "hooks.0.config.patience: got 0, needs a number above 0"),
        (["runner.hook:StopAtLoss"], "hooks.0.config: missing key value"),
        ([{"hook": "runner.hook:StopAtTime", "config": {}}], "needs one of at and after_hours"),
        ([{"hook": "runner.hook:StopAtTime", "config": {"at": "2030-01-31T18:00:00"}}], "has no time zone"),
        ([{"hook": "runner.hook:StopAtTime", "config": {"at": "soon"}}], "Invalid isoformat string: 'soon'"),
        (
            [make_early_stopping(), make_early_stopping()],
            "hooks.1: a hook is called EarlyStopping already; give this one a name of its own",
        ),
        ([make_early_stopping() | {"name": "fired"}], "a hook is called fired already"),
        (["runner.hook:BestAtEnd"], "hooks.0: BestAtEnd needs checkpoint.keep_best"),
        ([f"{HOOKS_MODULE}:Float64Hook"], "hooks.0: init returns an array of float64"),
        ([f"{HOOKS_MODULE}:LargeStateHook"], "hooks.0: init returns 400,000 bytes of counters; a hook may have 65,536"),
    ],
)
def test_errors_known_from_the_spec_are_rejected_before_the_run_starts(hooks: Any, words: str, tmp_path) -> None:
    with pytest.raises(InvalidError, match=words):
        make_job(tmp_path / "run", *hooks)
    assert not (tmp_path / "run").exists()


def test_every_problem_has_its_own_line(tmp_path) -> None:
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


def test_a_job_without_hook_calls_rejects_hooks(tmp_path) -> None:
    with pytest.raises(InvalidError, match="hooks: Counter calls no hooks"):
        make_counter(tmp_path / "run", hooks=["runner.hook:EarlyStopping"])


def test_a_hook_that_needs_evaluations_is_rejected_without_them(tmp_path) -> None:
    with pytest.raises(InvalidError, match="hooks: EarlyStopping waits for evaluations"):
        make_job(tmp_path / "run", make_early_stopping(), job_class=UnevaluatedGPT)()


def call_once(listed: ListedHook, method: str, step: int = 4) -> str | None:
    """Return the reason why the run cannot continue after this call, or None."""
    hosts = Hosts.single_process()
    return call_hook(listed, method, Moment(step, {"step": step}, {}, listed.counters, hosts, 0.0, logged={}))[1]


@pytest.mark.parametrize(
    ("method", "how", "words"),
    [
        ("on_row", "raise", r"ZeroDivisionError: a bug \(at .*hooks.py:\d+\)$"),
        ("on_row", "exit", "SystemExit: 0"),
        ("on_row", "base", "GeneratorExit: an end"),
        ("on_end", "digits", "ValueError: returned an integer of 401 digits"),
        ("on_end", "circle", "ValueError: Circular reference detected"),
        (
            "on_row",
            "number",
            r"TypeError: returned a int, needs a Verdict or None \(at tests/support/hooks\.py:\d+: \S*on_row",
        ),
        ("on_row", "text", r"TypeError: log: note is 'text', needs a number \(at .*tests/support/hooks\.py:\d+\)$"),
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
def test_invalid_results_and_exceptions_of_a_hook_are_one_line(method: str, how: str, words: str, tmp_path) -> None:
    hook = {"hook": f"{HOOKS_MODULE}:FaultyHook", "config": {"how": how, "method": method}}
    (listed,) = make_job(tmp_path / "run", hook).hooks.listed
    problem = call_once(listed, method)
    assert re.match(words, str(problem)), problem
    assert "\n" not in str(problem)
    assert call_once(listed, method, step=2) is None


@pytest.mark.parametrize(
    ("method", "step", "how", "saved"),
    [
        ("on_row", 4, "raise", [3]),
        pytest.param("on_checkpoint", 6, "raise", [3], marks=pytest.mark.soak),
        pytest.param("on_end", 8, "raise", [3, 6, 8], marks=pytest.mark.soak),
        ("on_end", 8, "taken", [3, 6, 8]),
    ],
)
def test_a_failing_hook_ends_the_run_with_1_and_keeps_its_checkpoints(method, step, how, saved, tmp_path) -> None:
    hook = {"hook": f"{HOOKS_MODULE}:FaultyHook", "config": {"how": how, "method": method, "step": step}}
    words = (
        "FaultyHook: result.json has step already" if how == "taken" else f"FaultyHook in {method} at step {step}: Zero"
    )
    with pytest.raises(HookError, match=f"^hook {words}") as caught:
        make_job(tmp_path / "run", hook, **{"checkpoint.every_steps": 3})()
    assert caught.value.exit_code == 1
    manifests = (tmp_path / "run" / "checkpoints").glob("*/manifest.json")
    assert sorted(int(path.parent.name) for path in manifests) == saved
    assert not (tmp_path / "run" / "result.json").exists()


def test_the_verdict_of_an_observer_is_ignored(tmp_path) -> None:
    (listed,) = make_job(tmp_path / "run", f"{HOOKS_MODULE}:VerdictObserver").hooks.listed
    assert "TypeError: returned a verdict, which an Observer cannot" in str(call_once(listed, "on_row"))


def test_a_missing_metric_is_reported_once_with_the_nearest_name(capsys) -> None:
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


def test_a_hook_call_is_its_own_phase_and_reported_once_if_slow(tmp_path, monkeypatch, capsys) -> None:
    names: list[str] = []
    monkeypatch.setattr(Progress, "report_phase", make_spy(Progress.report_phase, names))
    monkeypatch.setattr("runner.hook.dispatch._SLOW_SECONDS", 0.0)
    monkeypatch.setattr("runner.hook.dispatch._SLOW_STEPS", 0.0)
    found = make_job(tmp_path / "run", f"{HOOKS_MODULE}:DiaryObserver")
    found()
    told = [line for line in capsys.readouterr().err.splitlines() if "took" in line]
    assert len([line for line in told if "hook DiaryObserver took" in line and "in on_row at step 1" in line]) == 1
    assert len([line for line in told if "in on_row" in line]) == 1
    assert {"hook DiaryObserver.on_start", "hook DiaryObserver.on_row", "hook DiaryObserver.on_end"} <= {*names}


def make_spy(report_phase: Any, names: list[str]) -> Any:
    def spy(progress: Progress, phase: Any) -> Any:
        names.append(phase.name)
        return report_phase(progress, phase)

    return spy
