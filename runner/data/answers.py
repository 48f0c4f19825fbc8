"""Which tokens of a corpus of dialogues are of answers, and so count in the loss. A byte a token."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from runner.data.store import TokenFile, Tokens
from runner.errors import DataError

TrainOn = Literal["answers", "all"]
LOSS_WEIGHT = "loss_weight"


class Answers:
    """The files `.answers` of a corpus, as one sequence beside its tokens. Read from several threads."""

    def __init__(self, parts: Sequence[TokenFile]) -> None:
        self._marks = Tokens(parts)
        self.bytes_fetched_per_token = self._marks.bytes_fetched_per_token

    def weights(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """What the tokens of each stretch count for: 1 of an answer, else 0, float32. Of objects all at once.

        Raises `DataError` naming the place of what is neither, and as `Tokens.read_ranges` does.
        """
        found = self._marks.read_ranges(ranges)
        for (start, _), marks in zip(ranges, found, strict=True):
            if len(marks) and marks.max() > 1:
                place = int((marks > 1).argmax())
                raise DataError(
                    f"{self._marks.describe_position(start + place)} is {marks[place]}, needs 1 (of an answer) or 0: "
                    "the file is not the one that the corpus was written with"
                )
        return [marks.astype(np.float32) for marks in found]

    def check(self) -> None:
        """Raise `DataError` if a file has changed since the job began."""
        self._marks.check()


def refuse_train_on(train_on: TrainOn | None, has_answers: bool) -> None:
    """Raise `DataError` where a corpus does not say which tokens are of answers and is asked, or it says and is not."""
    if train_on is not None and not has_answers:
        raise DataError(
            f"data.train_on={train_on}: nothing reads it, the corpus does not say which tokens are of answers; leave "
            "it out, or tokenise dialogues with config.chat"
        )
    if train_on is None and has_answers:
        raise DataError(
            "the corpus says which tokens are of answers; say data.train_on: answers, so that these alone count in the "
            "loss, or all"
        )
