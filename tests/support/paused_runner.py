"""`python -m runner`, but paused at a given place, so that a test can kill it there however slow the machine is.

PAUSE_AT is the place:

- `step N`: after N steps are completed
- `data N`: before a GPT makes the training batch of index N
- `evaluation N I`: before a GPT makes batch I of the evaluation after step N
- `result`: after the last commit, before result.json is written

PAUSE_UNTIL is a file whose appearance ends the pause; without it, the process waits to be killed.
"""

import os
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.counter import Counter
from experiments.gpt import PretrainGPT

POLL_SECONDS = 0.01


def pause_if_at(place: str) -> None:
    """Pause if `place` is PAUSE_AT; otherwise return at once."""
    end = os.environ.get("PAUSE_UNTIL")
    while place == os.environ["PAUSE_AT"] and not (end and Path(end).exists()):
        time.sleep(POLL_SECONDS)


def get_batch_place(job: PretrainGPT, slice: str = "train", step: int | None = None) -> str:
    """Return the place of a call of `batch`, whose `step` is the index of the batch."""
    return f"data {step}" if slice == "train" else f"evaluation {job.step} {step}"


def pause_before(kind: type, method: str, place_of: Callable[..., str]) -> None:
    """Wrap a method of a job class so that it may pause first; `place_of` maps its arguments to the place."""
    original = getattr(kind, method)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        pause_if_at(place_of(self, *arguments, **named))
        return original(self, *arguments, **named)

    setattr(kind, method, call)


if __name__ == "__main__":
    for kind in (Counter, PretrainGPT):
        pause_before(kind, "save_or_stop", lambda job: f"step {job.step}")
        pause_before(kind, "result", lambda job: "result")
    pause_before(PretrainGPT, "batch", get_batch_place)
    runpy.run_module("runner", run_name="__main__", alter_sys=True)
