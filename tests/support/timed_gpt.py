"""Tiny GPT that measures its phases independently of the runner's clock.

It wraps the methods of the phases and appends the seconds of each to the file `TIMED_FILE` after every step. With
`TIMED_HOLD=ATTEMPT:STEP` it sleeps after that step until it is killed.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from experiments.gpt import PretrainGPT
from runner.data.batches import Prefetcher
from runner.train.evaluators import Validation

BATCH_SECONDS = 0.005

_seconds: dict[str, float] = {}
_depth = [0]


@contextlib.contextmanager
def measure_seconds(name: str) -> Iterator[None]:
    """Add the time of a block to `name`, except the time of measured blocks inside it."""
    began, before = time.time(), sum(_seconds.values())
    _depth[0] += 1
    try:
        yield
    finally:
        _depth[0] -= 1
        inner = sum(_seconds.values()) - before
        _seconds[name] = _seconds.get(name, 0.0) + time.time() - began - inner


def add_measurement(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        with measure_seconds(name):
            return function(*arguments, **named)

    return call


Prefetcher.__next__ = add_measurement("data_wait", Prefetcher.__next__)  # type: ignore[method-assign]
Validation.evaluate = add_measurement("evaluation", Validation.evaluate)  # type: ignore[method-assign]


class TimedGPT(PretrainGPT):
    """GPT that records the seconds of its phases after each step."""

    def batch(self, slice: str = "train", step: int | None = None) -> Any:
        if slice == "train":
            time.sleep(BATCH_SECONDS)
        return super().batch(slice, step)

    def prepare(self) -> None:
        self.checkpointer.save = add_measurement("save_stall", self.checkpointer.save)  # type: ignore[method-assign]
        self.checkpointer.wait_until_finished = add_measurement(  # type: ignore[method-assign]
            "save_stall", self.checkpointer.wait_until_finished
        )
        self.lifecycle.restore_or_init = add_measurement(  # type: ignore[method-assign]
            "restore", self.lifecycle.restore_or_init
        )
        finish = self.lifecycle.finish

        def finish_and_measure() -> None:
            finish()
            self.append_line(step=self.step, finished=dict(_seconds))

        self.lifecycle.finish = finish_and_measure  # type: ignore[method-assign]
        self.append_line(prepared=time.time())
        with measure_seconds("compile"):
            super().prepare()

    def run(self) -> None:
        self.since = time.time()
        self.before = sum(_seconds.values())
        super().run()

    def save_or_stop(self) -> None:
        try:
            super().save_or_stop()
        finally:
            passed = time.time() - self.since - (sum(_seconds.values()) - self.before)
            self.append_line(step=self.step, seconds=_seconds | {"steps": passed})
        if os.environ.get("TIMED_HOLD") == f"{self.attempt.number}:{self.step}":
            self.append_line(held=time.time())
            time.sleep(3600)

    def append_line(self, **line: Any) -> None:
        with open(os.environ["TIMED_FILE"], "a") as file:
            file.write(json.dumps(line | {"time": time.time(), "attempt": self.attempt.number}) + "\n")
