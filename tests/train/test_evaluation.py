"""Schedule of several evaluators; one that fails loses its own metrics and prints one line, and the run goes on."""

import json
import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runner.distributed.clock import EVALUATION
from runner.errors import FailedError, InvalidError, PeerLostError, PreemptedError
from runner.hook import HookConfig, Observer
from runner.metrics.media import Image
from runner.storage import LocalStore, parse_lines
from runner.train.evaluators import EvaluatorSchedule, Validation
from runner.train.weights import LazyMergedWeights
from tests.support.attempt import make_attempt
from tests.support.mutation import MutatingEvaluator
from tests.support.tiny_jobs import are_leaves_equal, make_gpt, read_rows, read_trajectory
from tests.test_values import TrainLookup


class StubEvaluator:
    """An evaluator that returns or raises what it is given."""

    name = "some"

    def __init__(self, figures: Any, every_steps: int | None = None):
        self._figures, self.every_steps = figures, every_steps

    def evaluate(self, weights: Any, step: int, hosts: Any) -> Any:
        if isinstance(self._figures, BaseException):
            raise self._figures
        return self._figures() if callable(self._figures) else self._figures


def make_schedule(directory: Path, *evaluators: Any, **changes: Any) -> EvaluatorSchedule:
    config = make_gpt(directory / "job", **changes).config
    return EvaluatorSchedule(make_attempt(LocalStore(directory / "run")), config, evaluators)


class BrokenNumber:
    """A number whose conversion raises."""

    shape, dtype = (), np.dtype("float64")

    def __float__(self) -> float:
        raise RuntimeError("no number")


class BrokenMapping(dict[str, Any]):
    """A dictionary that cannot be iterated."""

    def __iter__(self) -> Any:
        raise RuntimeError("no keys")


class BrokenError(Exception):
    """An error without a message."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


def make_histogram(counts: Any, edges: Any) -> dict[str, Any]:
    return {"val/a": {"counts": counts, "edges": edges}}


RECURSIVE: list[Any] = [1.0]
RECURSIVE.append(RECURSIVE)
NULL = "val/a: not finite; null in the row"
NEEDS = "a row needs a number"

FAILURES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "an integer beyond every float": ({"val/a": 10**400}, NULL, {"val/a": None}),
    "such an integer in a list": ({"val/a": [1, -(10**400)]}, NULL, {"val/a": [1, None]}),
    "a number whose conversion raises": ({"val/a": BrokenNumber()}, "RuntimeError: no number; its metrics are not", {}),
    "such a number in a list": ({"val/a": [BrokenNumber()]}, "RuntimeError: no number; its metrics are not", {}),
    "a dictionary that cannot be read": (BrokenMapping({"val/a": 1.0}), "RuntimeError: no keys; its metrics", {}),
    "an error without a message": (BrokenError(), "BrokenError: its message cannot be formatted; its metrics", {}),
    "sys.exit": (SystemExit(3), "SystemExit: 3; its metrics are not in the row", {}),
    "an error that is none": (GeneratorExit("end"), "GeneratorExit: end; its metrics are not in the row", {}),
    "a complex number": ({"val/a": 1 + 2j}, f"it returns as val/a a complex; {NEEDS}", {}),
    "a complex array": ({"val/a": np.complex64(1)}, f"it returns as val/a a complex64; {NEEDS}", {}),
    "a huge array": ({"val/a": np.ones(1 << 20)}, f"it returns as val/a a ndarray; {NEEDS}", {}),
    "bytes": ({"val/a": b"x"}, f"it returns as val/a a bytes; {NEEDS}", {}),
    "a set": ({"val/a": {1.0}}, f"it returns as val/a a set; {NEEDS}", {}),
    "a list of texts": ({"val/a": ["x"]}, f"it returns as val/a a str; {NEEDS}", {}),
    "a recursive list": ({"val/a": RECURSIVE}, f"it returns as val/a a list; {NEEDS}", {}),
    "another dictionary": ({"val/a": {"b": 1.0}}, f"it returns as val/a a dict; {NEEDS}", {}),
    "edges that are not finite": (make_histogram([1], [0.0, math.nan]), NULL, {"val/a": None}),
    "counts that are not finite": (make_histogram([math.inf], [0.0, 1.0]), NULL, {"val/a": None}),
    "edges that descend": (
        make_histogram([1], [1.0, 0.0]),
        "it returns as val/a a histogram whose edges do not ascend",
        {},
    ),
    "edges of another number": (
        make_histogram([1], [0.0]),
        "it returns as val/a a histogram of 1 counts and 1 edges",
        {},
    ),
    "bins of texts": (make_histogram(["x"], [0.0, 1.0]), f"it returns as val/a a str; {NEEDS}", {}),
    "bins in a number": (make_histogram(1, 2), f"it returns as val/a a histogram of a int; {NEEDS}", {}),
    "too many bins": (
        make_histogram([1] * 5000, [0] * 5001),
        f"it returns as val/a a histogram of a list; {NEEDS}",
        {},
    ),
    "too many metrics": ({f"val/{n}": 1.0 for n in range(2000)}, "it returns more than 1,000 metrics", {}),
    "a long key": ({"val/" + "a" * 500: 1.0}, "it returns a metric named 'val/aaa", {}),
    "raises": (ValueError("no\nsuch"), "ValueError: no; its metrics are not in the row of this step", {}),
    "divides by zero": (lambda: 1 / 0, "ZeroDivisionError: division by zero; its metrics are not in the row", {}),
    "divides numpy by zero": (
        {"val/a": np.float64("nan"), "val/b": 1.0},
        "val/a: not finite; null in the row",
        {"val/a": None, "val/b": 1.0},
    ),
    "a list that is not finite": (
        {"val/a": [1.0, math.inf]},
        "val/a: not finite; null in the row",
        {"val/a": [1.0, None]},
    ),
    "no dictionary": ([1.0], "it returns a list, needs a dictionary", {}),
    "a key of the runner's": ({"train/loss": 1.0}, "it returns a metric named 'train/loss', needs a key such as", {}),
    "a key of no kind": ({"loss": 1.0}, "it returns a metric named 'loss', needs a key such as", {}),
    "a key that is no text": ({7: 1.0}, "it returns a metric named 7, needs a key such as", {}),
    "a matrix": ({"val/a": np.ones((2, 2))}, "it returns as val/a a ndarray; a row needs a number", {}),
    "a long list": ({"val/a": [0.0] * 65}, "it returns as val/a a list; a row needs a number", {}),
    "a long text": ({"val/a": "x" * 20_000}, "it returns as val/a a text of 20,000 characters; a row needs", {}),
}


@pytest.mark.parametrize(("figures", "line", "row"), FAILURES.values(), ids=FAILURES)
def test_a_failing_evaluator_prints_one_line_and_loses_its_own_metrics(
    figures: Any, line: str, row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = make_schedule(tmp_path, StubEvaluator(figures), StubEvaluator({"val/other": 2.0})).evaluate(None, 8)
    assert found == row | {"val/other": 2.0}
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"evaluator some at step 8: {line}")
    events = parse_lines((tmp_path / "run" / "events.jsonl").read_bytes())
    assert [event["evaluator"] for event in events if event["event"] == "evaluation_problem"] == ["some"]


def test_two_evaluators_cannot_return_the_same_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = make_schedule(tmp_path, StubEvaluator({"val/a": 1.0}), StubEvaluator({"val/a": 2.0})).evaluate(None, 8)
    assert found == {"val/a": 1.0}
    assert "it returns val/a, which another evaluator has returned" in capsys.readouterr().err


@pytest.mark.parametrize("is_first", [True, False])
def test_an_accuracy_of_the_job_replaces_the_builtin_one(
    is_first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = StubEvaluator({"val/accuracy": 0.5})
    validation = Validation.__new__(Validation)
    builtin = {"val/loss": 2.0, "val/accuracy": 0.25}
    validation.evaluate = StubEvaluator(lambda: dict(builtin)).evaluate  # type: ignore[method-assign]
    assert make_schedule(tmp_path, validation).evaluate(None, 8) == builtin
    evaluators = [own, validation] if is_first else [validation, own]
    assert make_schedule(tmp_path, *evaluators).evaluate(None, 8) == builtin | {"val/accuracy": 0.5}
    assert capsys.readouterr().err == ""
    make_schedule(tmp_path, validation, own, own).evaluate(None, 8)
    assert "val/accuracy, which another evaluator" in capsys.readouterr().err


def test_metrics_of_every_type_are_converted_to_json(tmp_path: Path) -> None:
    figures = {"val/a": np.float32(0.5), "val/b": np.int64(3), "val/c": "text", "val/d": (1, 2.5), "val/e": None}
    figures |= {"val/f": jnp.bfloat16(1.5), "val/g": True, "val/h": 2**70, "val/i": "\ud800", "val/j": jnp.int32(7)}
    figures["val/k"] = {"counts": np.array([1, 2]), "edges": jnp.arange(3.0)}
    found = make_schedule(tmp_path, StubEvaluator(figures)).evaluate(None, 8)
    expected = {"val/a": 0.5, "val/b": 3.0, "val/c": "text", "val/d": [1, 2.5], "val/e": None, "val/f": 1.5}
    expected |= {"val/g": 1, "val/h": 2.0**70, "val/i": "?", "val/j": 7.0}
    assert found == expected | {"val/k": {"counts": [1, 2], "edges": [0.0, 1.0, 2.0]}}
    assert {type(value) for value in found.values()} <= {int, float, str, list, dict, type(None)}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize(
    ("evaluator", "words"),
    [
        (object(), "a object, which has no method evaluate"),
        ("val/loss", "a str, which has no method evaluate"),
        *((StubEvaluator({}, interval), "every_steps is") for interval in (0, -1, 2.5, "5", True)),
    ],
)
def test_invalid_evaluators_are_rejected_at_the_start(evaluator: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=words):
        make_schedule(tmp_path, evaluator)


@pytest.mark.parametrize(
    "who",
    [
        "evaluator",
        *(pytest.param(f"on_{name}", marks=pytest.mark.soak) for name in ("row", "evaluation", "checkpoint", "start")),
    ],
)
def test_a_keyboard_interrupt_stops_the_run_like_a_signal(who: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"config.eval": {"every_steps": 2, "batches": 1}, "checkpoint.every_steps": 3}
    counts = ["tests.support.hooks:RowCounter"]
    hook = {"hook": f"{__name__}:InterruptsHook", "config": {"method": who}}
    job_class = InterruptingGPT if who == "evaluator" else TrainLookup
    job = make_gpt(tmp_path / "run", job_class, **changes, hooks=[*counts, hook])
    InterruptingEvaluator.left = 1
    with pytest.raises(PreemptedError, match="is saved; run the same command again"):
        job()
    again = make_gpt(tmp_path / "run", job_class, **changes, hooks=[*counts, hook])
    again()
    whole = make_gpt(tmp_path / "whole", job_class, **changes, hooks=[*counts, hook])
    whole()
    assert are_leaves_equal(again.state, whole.state)
    assert read_trajectory(tmp_path / "run") == read_trajectory(tmp_path / "whole")


class InterruptingEvaluator:
    """Raises KeyboardInterrupt at its first call from step 4 on."""

    left = 0

    def evaluate(self, weights: Any, step: int, hosts: Any) -> dict[str, Any]:
        if step >= 4 and InterruptingEvaluator.left:
            InterruptingEvaluator.left -= 1
            raise KeyboardInterrupt
        return {"val/own": float(step)}


class InterruptingGPT(TrainLookup):
    """A job with the interrupting evaluator."""

    def evaluator(self) -> Any:
        return [*self.builtin_evaluators, InterruptingEvaluator()]


class InterruptsConfig(HookConfig):
    """The hook method that raises."""

    method: str


class InterruptsHook(Observer):
    """A hook that raises KeyboardInterrupt in one of its methods."""

    Config = InterruptsConfig

    def _act(self, method: str, moment: Any) -> None:
        if method == self.config.method:
            InterruptingEvaluator().evaluate(None, 8 if method == "on_start" else moment.step, None)

    def on_start(self, moment: Any) -> None:
        self._act("on_start", moment)

    def on_row(self, moment: Any) -> None:
        self._act("on_row", moment)

    def on_evaluation(self, moment: Any) -> None:
        self._act("on_evaluation", moment)

    def on_checkpoint(self, moment: Any) -> None:
        self._act("on_checkpoint", moment)


@pytest.mark.parametrize("error", [InvalidError("no such key"), PeerLostError("process 1")])
def test_errors_of_the_runner_are_not_attributed_to_the_evaluator(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        make_schedule(tmp_path, StubEvaluator(error)).evaluate(None, 8)


def test_an_evaluator_that_stops_early_ends_the_evaluation(tmp_path: Path) -> None:
    after = StubEvaluator(ValueError("asked"))
    assert make_schedule(tmp_path, StubEvaluator(lambda: None), after).evaluate(None, 8) is None


SCHEDULES: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "as before": ({"every_steps": 4}, [4, 8], [3, 6, 8]),
    "at the start": ({"every_steps": 4, "at_start": True}, [0, 4, 8], [0, 3, 6, 8]),
    "not at the end": ({"every_steps": 5, "at_end": False}, [5], [3, 6]),
    "at the end alone": ({"every_steps": None}, [8], [3, 6, 8]),
    "never": ({"every_steps": None, "at_end": False}, [], [3, 6]),
}


@pytest.mark.parametrize(("rule", "default", "own"), SCHEDULES.values(), ids=SCHEDULES)
def test_evaluators_run_at_their_own_interval_and_at_start_and_end(
    rule: dict[str, Any], default: list[int], own: list[int], tmp_path: Path
) -> None:
    first, second = StubEvaluator({}), StubEvaluator({}, every_steps=3)
    found = make_schedule(tmp_path, first, second, **{"config.eval": rule})
    assert [step for step in range(9) if first in found.list_due(step)] == default
    assert [step for step in range(9) if second in found.list_due(step)] == own


def test_progress_reports_evaluation_as_its_own_phase(tmp_path: Path) -> None:
    seen = []
    attempt = make_attempt(LocalStore(tmp_path / "run"))
    watching = StubEvaluator(lambda: seen.append(attempt.progress.phase) or {})
    EvaluatorSchedule(attempt, make_gpt(tmp_path / "job").config, [watching]).evaluate(None, 8)
    assert seen == [EVALUATION]


class ThreadedHosts:
    """Two processes of a job as threads that can gather values."""

    def __init__(self) -> None:
        self.barrier, self.values = threading.Barrier(2), {}

    def host(self, process: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self.values[process] = value
            self.barrier.wait(60)
            found = [self.values[0], self.values[1]]
            self.barrier.wait(60)
            return found

        told = {"process_id": process, "num_processes": 2, "is_main": process == 0, "gather": staticmethod(gather)}
        return type("Host", (), told)()


@pytest.mark.parametrize(
    ("others", "line", "row"),
    [
        ({"val/a": 2.0}, "process 1 has other metrics than process 0; the row has those of process 0", {"val/a": 1.0}),
        (ValueError("here alone"), "ValueError: here alone on process 1; its metrics are not in the row", {}),
        (lambda: None, None, None),
    ],
)
def test_process_0_reports_a_process_with_different_results(
    others: Any, line: str | None, row: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several, found = ThreadedHosts(), {}

    def evaluate(process: int, figures: Any) -> None:
        attempt = replace(make_attempt(LocalStore(tmp_path / f"run{process}")), hosts=several.host(process))
        config = make_gpt(tmp_path / f"job{process}").config
        found[process] = EvaluatorSchedule(attempt, config, [StubEvaluator(figures)]).evaluate(None, 8)

    threads = [threading.Thread(target=evaluate, args=each) for each in enumerate([{"val/a": 1.0}, others])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == row
    told = capsys.readouterr().err.splitlines()
    assert len(told) == (line is not None)
    assert line is None or told[0].startswith(f"evaluator some at step 8: {line}")


def test_images_are_those_of_process_0_and_others_may_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several, found = ThreadedHosts(), {}

    def evaluate(process: int, value: Any) -> None:
        attempt = replace(make_attempt(LocalStore(tmp_path / f"run{process}")), hosts=several.host(process))
        config = make_gpt(tmp_path / f"job{process}").config
        found[process] = EvaluatorSchedule(attempt, config, [StubEvaluator({"val/x": value})]).evaluate(None, 8)

    # Process 1 does not encode its value, which could not be shown.
    for other in (None, Image("nothing")):
        values = enumerate([Image(np.zeros((2, 3), np.uint8)), other])
        threads = [threading.Thread(target=evaluate, args=each) for each in values]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        row = {"val/x": {"image": "media/00000008/val~x.png", "width": 3, "height": 2}}
        assert found == {0: row, 1: row}
    assert capsys.readouterr().err == ""
    assert [path.parts[-4] for path in tmp_path.rglob("*.png")] == ["run0"]


@flax.struct.dataclass
class Node:
    """A dataclass that contains arrays, as the train state does."""

    leaf: Any
    inner: Any = ()


def leaf(value: float) -> Any:
    return jnp.full(3, value)


LAZY = "weights that are merged when they are read"
CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "a dictionary": lambda inner: {"leaf": leaf(0.5), "inner": inner},
    "an ordered dictionary": lambda inner: OrderedDict(leaf=leaf(0.5), inner=inner),
    "a default dictionary": lambda inner: defaultdict(dict, leaf=leaf(0.5), inner=inner),
    "a frozen dictionary": lambda inner: flax.core.FrozenDict(leaf=leaf(0.5), inner=inner),
    "a list": lambda inner: [leaf(0.5), inner],
    "a tuple": lambda inner: (leaf(0.5), inner),
    "a dataclass": lambda inner: Node(leaf(0.5), inner),
    LAZY: lambda inner: LazyMergedWeights({"leaf": lambda: inner}),
    "an array of NumPy": lambda inner: {"leaf": np.full(3, 0.5), "inner": inner},
}


def unfold(tree: Any) -> Any:
    return {key: unfold(value) for key, value in tree.items()} if isinstance(tree, LazyMergedWeights | dict) else tree


@pytest.mark.parametrize("outer", CONTAINERS)
def test_an_evaluator_cannot_modify_the_weights_of_others(outer: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Reader:
        def evaluate(self, weights: Any, step: int, hosts: Any) -> dict[str, Any]:
            seen.append(jax.tree.map(np.array, unfold(weights)))
            return {}

    schedule = make_schedule(tmp_path, MutatingEvaluator(), Reader())
    for inner in [kind for kind in CONTAINERS if kind != LAZY]:

        def make(inner: str = inner) -> Any:
            return {"params": CONTAINERS[outer](CONTAINERS[inner]({"deep": [leaf(1.5), {"deeper": leaf(2.5)}]}))}

        weights = make()
        assert schedule.evaluate(weights, 8) == {"val/vandal": 8.0}
        for found in (seen.pop(), unfold(weights)):
            assert str(jax.tree.structure(found)) == str(jax.tree.structure(unfold(make()))), inner
            assert are_leaves_equal(found, unfold(make())), inner


class VandalGPT(TrainLookup):
    """A job whose evaluators overwrite the weights that they are given."""

    def evaluator(self) -> Any:
        return [MutatingEvaluator(), *self.builtin_evaluators, MutatingEvaluator()]


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("ema", "adapter"))]
)
def test_evaluators_and_hooks_that_overwrite_their_inputs_leave_the_run_bit_identical(
    kind: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"config.eval": {"every_steps": 2, "at_start": True, "batches": 1}}
    changes |= {"config.train.total_steps": 4, "checkpoint.every_steps": 2}
    if kind != "plain":
        changes["config.ema"] = {"decays": [0.9], "evaluate": True}
    if kind == "adapter":
        base = make_gpt(tmp_path / "base", TrainLookup, **{"config.train.total_steps": 1, "config.schedule": {}})
        base()
        changes |= {"checkpoint.init_from": str(tmp_path / "base"), "config.adapter": {"targets": ["Embed_0"]}}
    plain = make_gpt(tmp_path / "plain", TrainLookup, **changes)
    plain()
    hooks = ["tests.support.mutation:MutatingHook", "tests.support.mutation:MutatingObserver"]
    shown = make_gpt(tmp_path / "shown", VandalGPT, **changes, hooks=hooks)
    shown()
    assert are_leaves_equal(plain.state.params, shown.state.params)
    assert are_leaves_equal(plain.state.opt_state, shown.state.opt_state)
    assert are_leaves_equal(plain.state.riders, {name: shown.state.riders[name] for name in plain.state.riders})
    rows = [{key: row[key] for key in row if key != "val/vandal"} for row in read_trajectory(tmp_path / "shown")]
    assert rows == read_trajectory(tmp_path / "plain")


class Donor:
    """An evaluator and hook callback that donates the buffers of the weights."""

    name = "donor"

    def evaluate(self, weights: Any, step: int, hosts: Any) -> dict[str, Any]:
        jax.jit(lambda tree: jax.tree.map(jnp.add, tree, tree), donate_argnums=0)(weights["params"])
        return {}


class DonorGPT(TrainLookup):
    """A job with the donating evaluator."""

    def evaluator(self) -> Any:
        return Donor()


class DonorHook(Observer):
    """A hook that donates the weights."""

    def on_row(self, moment: Any) -> None:
        Donor().evaluate(moment.weights, moment.step, moment.hosts)


@pytest.mark.parametrize(
    ("job_class", "hooks", "culprit"),
    [
        (DonorGPT, [], "evaluator donor at step 4"),
        (TrainLookup, [f"{__name__}:DonorHook"], "hook DonorHook in on_row at step 1"),
    ],
)
def test_the_error_names_the_evaluator_or_hook_that_donated_the_weights(
    job_class: Any, hooks: Any, culprit: str, tmp_path: Path
) -> None:
    with pytest.raises(FailedError, match=f"{culprit}: it has donated the weights"):
        make_gpt(tmp_path / "run", job_class, hooks=hooks)()


def test_a_row_has_the_speed_of_its_evaluation_as_long_as_it_has_the_evaluation(tmp_path: Path) -> None:
    rule = {"config.eval": {"every_steps": None, "at_start": True}, "config.schedule": {"name": "constant"}}
    speeds = []
    for total_steps in (2, 4):
        make_gpt(tmp_path / "run", **rule, **{"config.train.total_steps": total_steps})()
        speeds.append(
            {row["step"]: row.get("perf/eval_tokens_per_second", 0) > 0 for row in read_rows(tmp_path / "run")}
        )
    assert speeds == [{0: True, 1: False, 2: True}, {0: True, 1: False, 2: False, 3: False, 4: True}]
