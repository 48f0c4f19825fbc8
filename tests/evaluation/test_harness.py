"""`config.eval.harness`, with a stand-in for lm-evaluation-harness that asks two tasks of its own."""

import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.distributed.preemption import StopNotice
from runner.errors import PreemptedError, SpecError
from tests.support.bigram import BIGRAM_OPTIONS, BigramTrainer
from tests.support.images import CHANGES, Classify
from tests.support.tiny_jobs import make_gpt, read_outcome, read_rows, stop_after

QUESTIONS = [("7 squared", " is 49"), ("8 squared", " is 64"), ("9 squared", " is 81")]


class StandInManager:
    """Manager that knows two tasks, and counts how often it loads them."""

    num_loads = 0
    problem: Exception | None = None

    def __init__(self, include_path: str | None = None):
        self.all_tasks = ["squares", "roots"]

    def load(self, names: list[str]) -> dict[str, Any]:
        if self.problem is not None:
            raise self.problem
        StandInManager.num_loads += 1
        return {"tasks": dict.fromkeys(names)}


def evaluate_stand_in(model: Any, tasks: list[str], task_manager: Any, limit: int | None, **options: Any) -> Any:
    """Answer the questions as the harness does: seed the generators, load the tasks, ask the model."""
    random.seed(0)
    np.random.seed(0)
    task_manager.load(tasks)
    requests = [types.SimpleNamespace(args=each) for each in QUESTIONS[:limit]]
    scores = [score for score, _ in model.loglikelihood(requests)]
    (text,) = model.generate_until([types.SimpleNamespace(args=("7 squared", {"until": [], "max_gen_toks": 3}))])
    figures = {
        "alias": "x",
        "score,none": np.float64(sum(scores)),
        "score_stderr,none": 0.5,
        "n,some": float(limit or 3),
    }
    return {"results": {task: figures | {"text,none": float(len(text))} for task in tasks}}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules: dict[str, dict[str, Any]] = {
        "lm_eval": {"simple_evaluate": evaluate_stand_in},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": object},
        "lm_eval.tasks": {"TaskManager": StandInManager},
        "lm_eval.utils": {"get_rolling_token_windows": None, "make_disjoint_window": None},
    }
    for name, attributes in modules.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("runner.evaluation.harness", "runner.inference.harness"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(StandInManager, "num_loads", 0)
    monkeypatch.setattr(StandInManager, "problem", None)
    yield
    # The modules that were imported with the stand-in.
    for name in ("runner.evaluation.harness", "runner.inference.harness"):
        sys.modules.pop(name, None)


def make_job(directory: Path, **harness: Any) -> BigramTrainer:
    asked = {"config.eval.harness": {"tasks": ["squares"], **harness}} if harness is not None else {}
    job = make_gpt(directory, BigramTrainer, **BIGRAM_OPTIONS, **{"config.train.total_steps": 6}, **asked)
    assert isinstance(job, BigramTrainer)
    return job


def read_tasks(directory: Path) -> dict[int, dict[str, Any]]:
    found = {
        row["step"]: {key: value for key, value in row.items() if key.startswith("eval/")}
        for row in read_rows(directory)
    }
    return {step: tasks for step, tasks in found.items() if tasks}


def test_tasks_are_in_the_rows_at_their_steps(harness: None, tmp_path: Path) -> None:
    make_job(tmp_path / "run", tasks=["squares", "roots"], limit=2, every_steps=2)()
    found = read_tasks(tmp_path / "run")
    assert [*found] == [2, 4, 6]
    names = [f"eval/{task}/{key}" for task in ("roots", "squares") for key in ("n/some", "score", "text")]
    assert sorted(found[2]) == names
    assert found[2]["eval/squares/n/some"] == 2
    assert found[2]["eval/squares/score"] < found[6]["eval/squares/score"] < 0  # training raises the likelihood
    assert StandInManager.num_loads == 1


def test_a_resumed_run_has_the_rows_and_bits_of_an_undisturbed_one(harness: None, tmp_path: Path) -> None:
    make_job(tmp_path / "whole", every_steps=1)()
    stop_after(make_job(tmp_path / "run", every_steps=1), 3)
    make_job(tmp_path / "run", every_steps=1)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")


def test_training_and_its_random_generators_are_left_alone(harness: None, tmp_path: Path) -> None:
    random.seed(7)
    np.random.seed(7)
    make_job(tmp_path / "asked", every_steps=1)()
    drawn = random.random(), np.random.random()
    random.seed(7)
    np.random.seed(7)
    usual = make_gpt(tmp_path / "usual", BigramTrainer, **BIGRAM_OPTIONS, **{"config.train.total_steps": 6})
    usual()
    assert (random.random(), np.random.random()) == drawn
    asked = [{key: row[key] for key in row if key.startswith("train/")} for row in read_rows(tmp_path / "asked")]
    assert asked == [
        {key: row[key] for key in row if key.startswith("train/")} for row in read_rows(tmp_path / "usual")
    ]
    results = [read_outcome(tmp_path / name)[1]["fingerprint"] for name in ("asked", "usual")]
    assert results[0] == results[1]


def test_a_stop_within_the_tasks_is_made_up_for_by_the_next_attempt(
    harness: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_job(tmp_path / "whole", every_steps=2)()
    poll, is_asked = StopNotice.poll, [False]
    monkeypatch.setattr(StopNotice, "poll", lambda self: is_asked[0] or poll(self))
    module: Any = sys.modules["runner.evaluation.harness"]
    evaluate = module.HarnessTasks.evaluate

    def stop_first(*arguments: Any) -> Any:
        is_asked[0] = True
        found = evaluate(*arguments)
        assert found is None
        return found

    monkeypatch.setattr(module.HarnessTasks, "evaluate", stop_first)
    with pytest.raises(PreemptedError):
        make_job(tmp_path / "run", every_steps=2)()
    assert read_tasks(tmp_path / "run") == {}
    is_asked[0] = False
    monkeypatch.setattr(module.HarnessTasks, "evaluate", evaluate)
    make_job(tmp_path / "run", every_steps=2)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    ("problem", "tasks", "line"),
    [
        (
            None,
            ["squars"],
            "config.eval.harness: tasks: lm-evaluation-harness knows no task 'squars'; did you mean sq",
        ),
        (OSError("no network"), ["roots"], "config.eval.harness: tasks: cannot load roots: OSError: no network"),
        (None, [], "config.eval.harness.tasks"),
    ],
    ids=["unknown", "missing data", "none"],
)
def test_impossible_tasks_are_rejected_before_anything_is_written(
    problem: Exception | None,
    tasks: list[str],
    line: str,
    harness: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StandInManager, "problem", problem)
    with pytest.raises(SpecError) as caught:
        make_job(tmp_path / "run", tasks=tasks)()
    assert line in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "runner.evaluation.harness", raising=False)
    with pytest.raises(SpecError, match=r"config\.eval\.harness: needs the package lm_eval; install it with .*lm-eval"):
        make_job(tmp_path / "run", every_steps=1)()
    assert not (tmp_path / "run").exists()


def test_a_job_without_text_is_refused(harness: None, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"config\.eval\.harness"):
        make_gpt(tmp_path / "run", Classify, **CHANGES | {"config.eval": {"harness": {"tasks": ["squares"]}}})()
    assert not (tmp_path / "run").exists()
