"""Hooks for tests: some that count, some that break a rule each in one way."""

import sys
import time
from typing import Any

import numpy as np
from jax.experimental import multihost_utils
from pydantic import Field

from runner.hook import Act, Hook, HookConfig, Moment, Observer, Verdict


def append_to_diary(moment: Moment, directory: Any, line: str) -> None:
    """Append a line to a file beside the run, on the main host."""
    if moment.hosts.is_main:
        with (directory / "diary").open("a") as file:
            file.write(f"{line} {moment.step}\n")


class DiaryHook(Hook):
    """Counts its calls and sums what it sees, and writes each call down."""

    def init(self) -> Any:
        """Calls by kind, and a sum of losses."""
        return {"calls": np.zeros(2, np.int32), "sum": np.float32(0)}

    def _count(self, moment: Moment, place: int) -> Verdict:
        append_to_diary(moment, self.job.store.root, ("row", "evaluation")[place])
        counters = moment.counters
        counters["calls"][place] += 1
        seen = np.float32(moment.row.get("val/loss", moment.row["train/loss"]))
        return Verdict(counters=counters | {"sum": counters["sum"] + seen})

    def on_row(self, moment: Moment) -> Verdict:
        """Count the row, and whether it is whole."""
        return self._count(moment, 0)

    def on_evaluation(self, moment: Moment) -> Verdict:
        """Count the evaluation."""
        return self._count(moment, 1)


class DiaryObserver(Observer):
    """Writes each call down."""

    def on_start(self, moment: Moment) -> None:
        """Note it."""
        append_to_diary(moment, self.job.store.root, "start")

    def on_row(self, moment: Moment) -> None:
        """Note it."""
        append_to_diary(moment, self.job.store.root, "saw row")

    def on_evaluation(self, moment: Moment) -> None:
        """Note it."""
        append_to_diary(moment, self.job.store.root, "saw evaluation")

    def on_checkpoint(self, moment: Moment) -> None:
        """Note it."""
        append_to_diary(moment, self.job.store.root, "checkpoint")

    def on_end(self, moment: Moment) -> None:
        """Note it."""
        append_to_diary(moment, self.job.store.root, "end")


class StepActionConfig(HookConfig):
    """When, and what."""

    step: int = 5
    act: str = Field(default="stop")


class StepActionHook(Hook):
    """Asks for something at one step."""

    Config = StepActionConfig

    def on_row(self, moment: Moment) -> Verdict | None:
        """Ask."""
        if moment.step == self.config.step:
            return Verdict(Act(self.config.act), reason="it was time")
        return None


class HiddenStateHook(Hook):
    """Counts in an attribute, which nobody saves."""

    seen = 0

    def init(self) -> Any:
        """What it shows of it."""
        return {"seen": np.int32(0)}

    def on_row(self, moment: Moment) -> Verdict:
        """Count."""
        self.seen += 1
        return Verdict(counters={"seen": np.int32(self.seen)})


class FaultyHookConfig(HookConfig):
    """Where it falls ill."""

    step: int = 3
    process: int | None = None
    method: str = "on_row"
    how: str = "raise"


class FaultyHook(Hook):
    """Falls ill in one call of its, on one process or all."""

    Config = FaultyHookConfig

    def init(self) -> Any:
        """A counter, so that it may return a wrong one."""
        return {"n": np.int32(0)}

    def _act(self, moment: Moment, method: str) -> Any:
        rule = self.config
        here = rule.process in (None, moment.hosts.process_id)
        if rule.how == "alone" and not here and method == rule.method and moment.step >= rule.step:
            multihost_utils.process_allgather(np.zeros(1))  # where the one that is ill never comes
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
            case "taken":
                return {"step": 3}
        return None

    def on_start(self, moment: Moment) -> None:
        """See `_act`."""
        return self._act(moment, "on_start")

    def on_row(self, moment: Moment) -> Verdict | None:
        """See `_act`."""
        return self._act(moment, "on_row")

    def on_evaluation(self, moment: Moment) -> Verdict | None:
        """See `_act`."""
        return self._act(moment, "on_evaluation")

    def on_checkpoint(self, moment: Moment) -> None:
        """See `_act`."""
        return self._act(moment, "on_checkpoint")

    def on_end(self, moment: Moment) -> Any:
        """See `_act`."""
        return self._act(moment, "on_end")


class VerdictObserver(Observer):
    """Returns a verdict, which it may not."""

    def on_row(self, moment: Moment) -> Verdict:  # type: ignore[override]
        """Stop."""
        return Verdict(Act.STOP)


class Float64Hook(Hook):
    """Counts in 64 bits, which the state does not have."""

    def init(self) -> Any:
        """A float64."""
        return {"n": np.float64(0)}


class LargeStateHook(Hook):
    """Wants more memory than counters get."""

    def init(self) -> Any:
        """Too much."""
        return {"n": np.zeros(100_000, np.int32)}


class SleepingObserverConfig(HookConfig):
    """How long."""

    seconds: float = 0.2


class SleepingObserver(Observer):
    """Takes its time at every row."""

    Config = SleepingObserverConfig

    def on_row(self, moment: Moment) -> None:
        """Sleep."""
        time.sleep(self.config.seconds)


class RowCounter(Hook):
    """Counts rows, and writes nothing down."""

    def init(self) -> Any:
        """How many."""
        return {"rows": np.int32(0), "best": np.float32(np.inf)}

    def on_row(self, moment: Moment) -> Verdict:
        """Count, and compare."""
        best = np.float32(min(moment.counters["best"], moment.row["train/loss"]))
        return Verdict(counters={"rows": np.int32(moment.counters["rows"] + 1), "best": best})
