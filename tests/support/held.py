"""Jobs that stand still where a test says, so that it strikes there however slow the machine is.

HELD_IN says where: the index of a step, or `result` for what comes between the last commit and the word that the job is
done. HELD_UNTIL names a file that ends the waiting when it appears; without it the process is there to be killed.
"""

import os
import time
from pathlib import Path
from typing import Any, Literal

from experiments.gpt import PretrainGPT
from runner.train.step import Batch
from tests.support.faulty import Stepwise

POLL_SECONDS = 0.01


def wait_in(place: object) -> None:
    """Return at once in every place but the one to be held in."""
    end = os.environ.get("HELD_UNTIL")
    while str(place) == os.environ.get("HELD_IN") and not (end and Path(end).exists()):
        time.sleep(POLL_SECONDS)


class HeldCounter(Stepwise):
    """A counter that waits before it counts."""

    def one_step(self) -> None:
        """Count, later."""
        wait_in(self.step)
        super().one_step()

    def result(self) -> dict[str, Any]:
        """The result of the parent, later."""
        wait_in("result")
        return super().result()


class HeldGPT(PretrainGPT):
    """A GPT that waits for the data of a step."""

    def batch(self, slice: Literal["train", "validation"] = "train", step: int | None = None) -> Batch:
        """The batch of the parent, later."""
        if slice == "train" and step is not None:
            wait_in(step)
        return super().batch(slice, step)

    def result(self) -> dict[str, Any]:
        """The result of the parent, later."""
        wait_in("result")
        return super().result()
