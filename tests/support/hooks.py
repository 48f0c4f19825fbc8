"""Hooks for tests: hooks that record their calls, and hooks that each break one rule of the protocol."""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from pydantic import Field

from runner.hook import Act, Hook, HookConfig, Moment, Observer, Verdict


def append_to_diary(moment: Moment, directory: Any, line: str) -> None:
    """Append a line to the file `diary` in the run directory, on process 0."""
    if moment.hosts.is_main:
        with (directory / "diary").open("a") as file:
            file.write(f"{line} {moment.step}\n")


class DiaryHook(Hook):
    """Hook that counts its calls, sums the losses, and records each call in the diary."""

    def init(self) -> Any:
        """Return the calls by kind, and the sum of losses."""
        return {"calls": np.zeros(2, np.int32), "sum": np.float32(0)}

    def _count(self, moment: Moment, place: int) -> Verdict:
        append_to_diary(moment, self.job.store.root, ("row", "evaluation")[place])
        counters = moment.counters
        counters["calls"][place] += 1
        seen = np.float32(moment.row.get("val/loss", moment.row["train/loss"]))
        return Verdict(counters=counters | {"sum": counters["sum"] + seen})

    def on_row(self, moment: Moment) -> Verdict:
        """Count the row and add its loss."""
        return self._count(moment, 0)

    def on_evaluation(self, moment: Moment) -> Verdict:
        """Count the evaluation and add its loss."""
        return self._count(moment, 1)


class DiaryObserver(Observer):
    """Observer that records each call in the diary."""

    def on_start(self, moment: Moment) -> None:
        """Record the call."""
        append_to_diary(moment, self.job.store.root, "start")

    def on_row(self, moment: Moment) -> None:
        """Record the call."""
        append_to_diary(moment, self.job.store.root, "saw row")

    def on_evaluation(self, moment: Moment) -> None:
        """Record the call."""
        append_to_diary(moment, self.job.store.root, "saw evaluation")

    def on_checkpoint(self, moment: Moment) -> None:
        """Record the call."""
        append_to_diary(moment, self.job.store.root, "checkpoint")

    def on_end(self, moment: Moment) -> None:
        """Record the call."""
        append_to_diary(moment, self.job.store.root, "end")


def log_all_kinds(moment: Moment) -> None:
    """Log a number of every kind, and the number of keys of the row, which lacks what other hooks log."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(moment.weights)))
    moment.log({"weights/norm": norm, "keys": len(moment.row), "half": np.float16(0.5), "step": np.int64(moment.step)})
    moment.log({"none": None, "infinite": np.inf, "bf16": jnp.bfloat16(0.25)})


class LoggingObserver(Observer):
    """Observer that logs in each call for a row; process 0's numbers are written."""

    def on_row(self, moment: Moment) -> None:
        """Log."""
        log_all_kinds(moment)

    def on_evaluation(self, moment: Moment) -> None:
        """Log the loss of the evaluation."""
        moment.log({"twice": 2 * moment.row["val/loss"], "process": moment.hosts.process_id})


class LoggingHook(Hook):
    """Hook that counts its calls and logs the counters."""

    def init(self) -> Any:
        """Return the calls by kind."""
        return {"calls": np.zeros(2, np.int32)}

    def on_row(self, moment: Moment) -> Verdict:
        """Count the row, and log the number."""
        log_all_kinds(moment)
        counters = moment.counters
        counters["calls"][0] += 1
        moment.log({"calls": counters["calls"][0]})
        return Verdict(counters=counters)

    def on_evaluation(self, moment: Moment) -> Verdict:
        """Count the evaluation, and log the number."""
        counters = moment.counters
        counters["calls"][1] += 1
        moment.log({"calls": counters["calls"][1]})
        return Verdict(counters=counters)


class StepActionConfig(HookConfig):
    """Step and action of a `StepActionHook`."""

    step: int = 5
    act: str = Field(default="stop")


class StepActionHook(Hook):
    """Hook that requests an action at one step."""

    Config = StepActionConfig

    def on_row(self, moment: Moment) -> Verdict | None:
        """Request the action at the configured step."""
        if moment.step == self.config.step:
            return Verdict(Act(self.config.act), reason="it was time")
        return None


class HiddenStateHook(Hook):
    """Hook whose counter depends on an attribute that is not saved."""

    seen = 0

    def init(self) -> Any:
        """Return the counter of calls."""
        return {"seen": np.int32(0)}

    def on_row(self, moment: Moment) -> Verdict:
        """Count the call in the attribute and return its value."""
        self.seen += 1
        return Verdict(counters={"seen": np.int32(self.seen)})


class FaultyHookConfig(HookConfig):
    """Place and kind of the fault of a `FaultyHook`."""

    step: int = 3
    process: int | None = None
    method: str = "on_row"
    how: str = "raise"


class FaultyHook(Hook):
    """Hook that fails in one of its methods, on one process or on all."""

    Config = FaultyHookConfig

    def init(self) -> Any:
        """Return a counter, so that the hook can return a wrong one."""
        return {"n": np.int32(0)}

    def _fail_if_configured(self, moment: Moment, method: str) -> Any:
        rule = self.config
        here = rule.process in (None, moment.hosts.process_id)
        if rule.how == "alone" and not here and method == rule.method and moment.step >= rule.step:
            multihost_utils.process_allgather(np.zeros(1))  # which the faulty process never joins
        if not here or method != rule.method or moment.step < rule.step:
            return None
        match rule.how:
            case "raise" | "alone":
                raise ZeroDivisionError("a bug")
            case "base":
                raise GeneratorExit("an end")
            case "digits":
                return {"mine": 10**400}
            case "circle":
                found: dict[str, Any] = {}
                return found | {"mine": [found.setdefault("again", found)]}
            case "exit":
                sys.exit(0)
            case "hang":
                time.sleep(10_000)
            case "stop":
                return Verdict(Act.STOP, reason=f"process {moment.hosts.process_id}")
            case "number":
                return 3
            case "tree":
                return Verdict(counters=[np.int32(1)])
            case "shape":
                return Verdict(counters={"n": np.zeros(2, np.int32)})
            case "type":
                return Verdict(counters={"n": np.float32(0.5)})
            case "array":
                return {"mine": np.zeros(2)}
            case "text":
                moment.log({"note": "text"})
            case "taken":
                return {"step": 3}
        return None

    def on_start(self, moment: Moment) -> None:
        """Fail if configured."""
        return self._fail_if_configured(moment, "on_start")

    def on_row(self, moment: Moment) -> Verdict | None:
        """Fail if configured."""
        return self._fail_if_configured(moment, "on_row")

    def on_evaluation(self, moment: Moment) -> Verdict | None:
        """Fail if configured."""
        return self._fail_if_configured(moment, "on_evaluation")

    def on_checkpoint(self, moment: Moment) -> None:
        """Fail if configured."""
        return self._fail_if_configured(moment, "on_checkpoint")

    def on_end(self, moment: Moment) -> Any:
        """Fail if configured."""
        return self._fail_if_configured(moment, "on_end")


class VerdictObserver(Observer):
    """Observer that returns a verdict, which only a hook may."""

    def on_row(self, moment: Moment) -> Verdict:  # type: ignore[override]
        """Return a verdict to stop."""
        return Verdict(Act.STOP)


class Float64Hook(Hook):
    """Hook with a float64 counter, which the train state cannot hold."""

    def init(self) -> Any:
        return {"n": np.float64(0)}


class LargeStateHook(Hook):
    """Hook with more bytes of counters than the limit."""

    def init(self) -> Any:
        """Return 400,000 bytes."""
        return {"n": np.zeros(100_000, np.int32)}


class SleepingObserverConfig(HookConfig):
    """Duration of the sleep."""

    seconds: float = 0.2


class SleepingObserver(Observer):
    """Observer that sleeps at every row."""

    Config = SleepingObserverConfig

    def on_row(self, moment: Moment) -> None:
        time.sleep(self.config.seconds)


class RowCounter(Hook):
    """Hook that counts rows and tracks the best loss, without writing files."""

    def init(self) -> Any:
        """Return the count of rows and the best loss."""
        return {"rows": np.int32(0), "best": np.float32(np.inf)}

    def on_row(self, moment: Moment) -> Verdict:
        """Count the row and update the best loss."""
        best = np.float32(min(moment.counters["best"], moment.row["train/loss"]))
        return Verdict(counters={"rows": np.int32(moment.counters["rows"] + 1), "best": best})
