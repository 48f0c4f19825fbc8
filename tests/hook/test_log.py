"""`Moment.log`: the values and keys that it takes, their places in a row, and what remains after errors and changes."""

from decimal import Decimal
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from runner.distributed.agreement import Hosts
from runner.errors import HookError
from runner.hook import Hook, Moment, Observer
from runner.hook.hooks import LOGGED_MAX
from runner.metrics.file import read_rows
from runner.storage import LocalStore
from tests.hook.small_job import make_job

HOOKS_MODULE = "tests.support.hooks"


def make_moment(logged: dict[str, float | None] | None) -> Moment:
    return Moment(3, {"step": 3}, {}, {}, Hosts.single_process(), 0.0, logged)


VALUES: list[tuple[Any, float | None]] = [
    (1, 1),
    (0.1, 0.1),
    (-0.0, 0.0),
    (None, None),
    (float("nan"), None),
    (float("-inf"), None),
    (np.float32(0.5), 0.5),
    (np.float16(0.5), 0.5),
    (np.int64(2**40), 2**40),
    (np.uint8(200), 200),
    (np.array(7), 7),
    (jnp.float32(0.25), 0.25),
    (jnp.bfloat16(0.25), 0.25),
    (jnp.int32(3), 3),
    (jnp.array(np.nan), None),
    (2**63 - 1, 2**63 - 1),
    (2**63, float(2**63)),
    (Decimal("0.5"), 0.5),
]


@pytest.mark.parametrize(("value", "expected"), VALUES, ids=lambda value: f"{type(value).__name__} {value}")
def test_a_number_of_any_kind_is_logged(value: Any, expected: float | None) -> None:
    moment = make_moment({})
    moment.log({"a": value})
    assert moment.logged == {"a": expected}


@pytest.mark.parametrize(
    "value",
    ["1", b"1", True, np.bool_(True), jnp.array(True), 1j, np.complex64(1), [1],  (), {}, np.zeros(1), object()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"log: a is .*needs a number"):
        make_moment({}).log({"a": value})


@pytest.mark.parametrize("key", ["a", "A-1_b.c", "a/b/c", "0"])
def test_a_key_of_parts_is_taken(key: str) -> None:
    moment = make_moment({})
    moment.log({key: 1})
    assert moment.logged == {key: 1}


@pytest.mark.parametrize("key", ["", "/", "a/", "/a", "a//b", "a b", "a\n", "\u00e9", "a:b", 3, None])
def test_a_key_of_other_characters_is_refused(key: Any) -> None:
    with pytest.raises(ValueError, match="log: got the key"):
        make_moment({}).log({key: 1})


def test_the_number_of_metrics_is_bounded() -> None:
    moment = make_moment({})
    moment.log({str(number): number for number in range(LOGGED_MAX)})
    moment.log({"0": 5})
    with pytest.raises(ValueError, match=f"needs at most {LOGGED_MAX}"):
        moment.log({"more": 1})


class StartLogger(Observer):
    """Observer that logs where there is no row to add to."""

    def on_start(self, moment: Moment) -> None:
        """Log."""
        moment.log({"a": 1})


class FailingLogger(Observer):
    """Observer that logs, and fails at step 4."""

    def on_row(self, moment: Moment) -> None:
        """Log, then fail."""
        moment.log({"a": moment.step})
        if moment.step == 4:
            raise ZeroDivisionError("a bug")


class ValidationLogger(Observer):
    """Observer that logs at each evaluation."""

    def on_evaluation(self, moment: Moment) -> None:
        """Log."""
        moment.log({"twice": 2 * moment.row["val/loss"]})


def read_own_rows(directory: Any) -> list[dict[str, Any]]:
    return read_rows(LocalStore(directory))


def name_hook(hook: type[Hook]) -> str:
    return f"tests.hook.test_log:{hook.__name__}"


def test_metrics_are_in_the_row_of_their_step_once(tmp_path) -> None:
    make_job(tmp_path / "run", f"{HOOKS_MODULE}:LoggingObserver", f"{HOOKS_MODULE}:LoggingHook")()
    rows = read_own_rows(tmp_path / "run")
    assert [row["step"] for row in rows if "val/loss" in row] == [2, 4, 6, 8]
    for row in rows:
        for name in ("LoggingObserver", "LoggingHook"):
            assert row[f"hook/{name}/step"] == row["step"]
            assert row[f"hook/{name}/weights/norm"] > 0
            assert row[f"hook/{name}/infinite"] is None
            assert row[f"hook/{name}/none"] is None
            # A hook sees the row without what others have logged.
            assert row[f"hook/{name}/keys"] < len(row) - 10
        assert row["hook/LoggingHook/calls"] == row["step"]
        assert row.get("val/LoggingHook/calls") == (row["step"] // 2 if "val/loss" in row else None)
        assert ("val/LoggingObserver/twice" in row) == ("val/loss" in row)


def test_only_calls_for_a_row_can_log(tmp_path) -> None:
    with pytest.raises(HookError, match="TypeError: log adds to a row"):
        make_job(tmp_path / "run", name_hook(StartLogger))()


def test_the_row_of_a_step_whose_hook_fails_is_written_without_its_metrics(tmp_path) -> None:
    with pytest.raises(HookError, match="ZeroDivisionError: a bug"):
        make_job(tmp_path / "run", name_hook(FailingLogger))()
    rows = read_own_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row.get("hook/FailingLogger/a") for row in rows] == [1, 2, 3, None]
    assert "val/loss" in rows[-1]


@pytest.mark.parametrize("every_steps", [1, 3])
def test_an_extended_run_has_the_metrics_of_an_undisturbed_one(every_steps: int, tmp_path) -> None:
    def make(name: str, total_steps: int) -> Any:
        hooks = [name_hook(ValidationLogger), f"{HOOKS_MODULE}:LoggingHook"]
        changes = {
            "config.schedule": {"name": "constant"},
            "config.train.total_steps": total_steps,
            "logging.every_steps": every_steps,
            "config.eval.every_steps": 4,
        }
        return make_job(tmp_path / name, *hooks, **changes)

    make("run", 5)()
    assert "val/ValidationLogger/twice" in read_own_rows(tmp_path / "run")[-1]  # evaluated because the run ends there
    make("run", 8)()
    make("plain", 8)()

    def read(name: str) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in row.items() if not key.startswith("perf/")}
            for row in read_own_rows(tmp_path / name)
        ]

    assert read("run") == read("plain")
