"""`python -m tests.support.paused_runner` is `python -m runner`, but the job stands still where a test wants to strike.

So it is struck there however slow the machine is. HELD_IN says where: `step N`, once N steps are completed; `data N`,
where a GPT makes the batch of index N; `evaluation N I`, where it makes batch I of the evaluation after step N;
`result`, between the last commit and the word that the job is done. HELD_UNTIL names a file that ends the waiting when
it appears; without it the process is there to be killed.
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


def wait_in(place: str) -> None:
    """Return at once in every place but the one to be held in."""
    end = os.environ.get("HELD_UNTIL")
    while place == os.environ["HELD_IN"] and not (end and Path(end).exists()):
        time.sleep(POLL_SECONDS)


def get_batch_place(job: PretrainGPT, slice: str = "train", step: int | None = None) -> str:
    """`step` is the index of the batch."""
    return f"data {step}" if slice == "train" else f"evaluation {job.step} {step}"


def pause_before(kind: type, method: str, place_of: Callable[..., str]) -> None:
    """Wait before a method of a job, in the place that its arguments say."""
    original = getattr(kind, method)

    def held(self: Any, *arguments: Any, **named: Any) -> Any:
        wait_in(place_of(self, *arguments, **named))
        return original(self, *arguments, **named)

    setattr(kind, method, held)


if __name__ == "__main__":
    for kind in (Counter, PretrainGPT):
        pause_before(kind, "save_or_stop", lambda job: f"step {job.step}")
        pause_before(kind, "result", lambda job: "result")
    pause_before(PretrainGPT, "batch", get_batch_place)
    runpy.run_module("runner", run_name="__main__", alter_sys=True)
