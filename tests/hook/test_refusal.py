"""What is wrong with hooks is one line, before step 1 where that can be known; else it ends the run and names the hook."""

from typing import Any

import pytest

from runner import ExecutionSpec
from runner.errors import HookError, InvalidError
from runner.hosts.progress import Progress
from runner.spec import parse_document, read_spec
from tests.support.hooked import job
from tests.support.tiny import counter, gpt_document
from tests.test_values import TrainLookup

HERE = "tests.support.hooked"
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
    text = "\n".join(f"{key}: {value!r}" for key, value in gpt_document(tmp_path / "run", hooks=hooks).items())
    with pytest.raises(InvalidError) as caught:
        (tmp_path / "spec.yaml").write_text(text)
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
        ([f"{HERE}:Wide"], "hooks.0: init returns an array of float64"),
        ([f"{HERE}:Large"], "hooks.0: init returns 400,000 bytes of counters; a hook may have 65,536"),
    ],
)
def test_what_is_known_from_the_spec_is_refused_before_anything_begins(hooks: Any, words: str, tmp_path) -> None:
    with pytest.raises(InvalidError, match=words):
        job(tmp_path / "run", *hooks)
    assert not (tmp_path / "run").exists()


def test_all_of_it_has_its_line(tmp_path) -> None:
    document = parse_document(SPEC.format(directory=tmp_path / "run"), "some.yaml")
    document.data["config"] = gpt_document(tmp_path / "run")["config"]
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
    with pytest.raises(InvalidError, match="hooks: nothing reads it: Counter is no BaseTrainer"):
        counter(tmp_path / "run", hooks=["runner.hook:EarlyStopping"])


def test_a_hook_that_waits_for_evaluations_is_refused_where_nothing_is_evaluated(tmp_path) -> None:
    with pytest.raises(InvalidError, match="hooks: EarlyStopping waits for evaluations, and nothing evaluates"):
        job(tmp_path / "run", early(), job_class=Unjudged)()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", r"ZeroDivisionError: a bug \(at .*hooked.py:\d+\)"),
        ("exit", "SystemExit: 0"),
        ("number", "TypeError: returned a int, needs a Verdict or None"),
        ("tree", "ValueError: returned counters of .*, init of"),
        ("shape", r"ValueError: returned counters with int32 of shape \(2,\), where init has int32 of shape \(\)"),
        ("type", r"ValueError: returned counters with float32 of shape \(\), where init has int32 of shape \(\)"),
    ],
)
def test_a_hook_that_fails_is_named_and_what_was_saved_is_good(how: str, words: str, tmp_path) -> None:
    hook = {"hook": f"{HERE}:Sick", "config": {"how": how, "step": 4}}
    with pytest.raises(HookError, match=rf"^hook Sick in on_row at step 4: {words}") as caught:
        job(tmp_path / "run", hook, **{"checkpoint.every_steps": 3})()
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    assert (tmp_path / "run" / "checkpoints" / "3" / "manifest.json").exists()
    assert not (tmp_path / "run" / "checkpoints" / "4").exists()


@pytest.mark.parametrize(
    ("method", "how", "words"),
    [
        ("on_start", "raise", "on_start at step 0: ZeroDivisionError"),
        ("on_evaluation", "raise", "on_evaluation at step 4: ZeroDivisionError"),
        ("on_checkpoint", "raise", "on_checkpoint at step 8: ZeroDivisionError"),
        ("on_checkpoint", "stop", "on_checkpoint at step 8: TypeError: returned a Verdict, needs None"),
        ("on_end", "number", "on_end at step 8: TypeError: returned a int, needs a mapping or None"),
    ],
)
def test_every_call_may_fail(method: str, how: str, words: str, tmp_path) -> None:
    hook = {"hook": f"{HERE}:Sick", "config": {"how": how, "method": method, "step": 0 if method == "on_start" else 3}}
    with pytest.raises(HookError, match=f"^hook Sick in {words}"):
        job(tmp_path / "run", hook)()
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_key_of_the_result_cannot_be_taken(tmp_path) -> None:
    hook = {"hook": f"{HERE}:Sick", "config": {"how": "taken", "method": "on_end"}}
    with pytest.raises(HookError, match=r"^hook Sick: result.json has step already"):
        job(tmp_path / "run", hook)()
    assert (tmp_path / "run" / "checkpoints" / "8" / "manifest.json").exists()


def test_an_observer_has_no_say(tmp_path) -> None:
    with pytest.raises(HookError, match=r"^hook Bossy in on_row at step 1: TypeError: .* an Observer only looks"):
        job(tmp_path / "run", f"{HERE}:Bossy")()


def test_a_metric_that_no_row_has_is_named_with_the_nearest(tmp_path) -> None:
    with pytest.raises(HookError, match=r"KeyError: .*has no val/los; did you mean val/loss\?"):
        job(tmp_path / "run", early(metric="val/los"))()


def test_a_call_that_takes_long_is_told_of_once(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("runner.hook.call._SLOW_SECONDS", 0.0)
    monkeypatch.setattr("runner.hook.call._SLOW_STEPS", 0.0)
    found = job(tmp_path / "run", f"{HERE}:Watcher")
    found()
    told = [line for line in capsys.readouterr().err.splitlines() if "took" in line]
    assert len([line for line in told if "hook Watcher took" in line and "in on_row at step 1" in line]) == 1
    assert len([line for line in told if "in on_row" in line]) == 1


def test_a_call_is_a_phase_of_its_own_which_the_watchdog_names(tmp_path, monkeypatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(Progress, "during", spying(Progress.during, names))
    job(tmp_path / "run", f"{HERE}:Watcher")()
    assert "hook Watcher.on_row" in names
    assert "hook Watcher.on_end" in names


def spying(during: Any, names: list[str]) -> Any:
    def spy(progress: Progress, phase: Any) -> Any:
        names.append(phase.name)
        return during(progress, phase)

    return spy
