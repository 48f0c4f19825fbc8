"""How many questions are answered right: the answer is the choice that is most probable after the question.

As lm-evaluation-harness scores a `multiple_choice` task (`lm_eval/api/task.py`): a choice follows its question after a
space. `acc` takes the choice of the highest log likelihood, `acc_norm` divides it by the characters of the choice,
`acc_bytes` by its bytes. Of equal ones the first is taken.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from runner.hosts.agreement import Hosts
from runner.judge.likelihood import Likelihood, Likely, Pair, encode_pair
from runner.judge.question import Question
from runner.train.evaluation import Figures

DELIMITER = " "  # between a question and a choice


class MultipleChoice:
    """An evaluator: the figures `val/<name>/acc`, `acc_norm` and `acc_bytes`. Made and called on every host."""

    def __init__(
        self,
        name: str,
        questions: Sequence[Question],
        encode: Callable[[str], Sequence[int]],
        first: int,
        likelihood: Likelihood,
        every_steps: int | None = None,
    ):
        self.name, self.every_steps = name, every_steps
        self._questions, self._likelihood = questions, likelihood
        self._pairs = pairs_of(questions, encode, first)

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> Figures | None:
        """See `Evaluator`."""
        found = self.ask(weights)
        return None if found is None else {f"val/{self.name}/{key}": value for key, value in found.items()}

    def ask(self, weights: Any) -> dict[str, float] | None:
        """The figures by their own names; None if the job was asked to stop. Called on every host."""
        likely = self._likelihood.of(weights, self._pairs)
        return None if likely is None else accuracies(self._questions, likely)


def pairs_of(questions: Sequence[Question], encode: Callable[[str], Sequence[int]], first: int) -> list[Pair]:
    """A pair for each choice of each question, in order."""
    return [
        encode_pair(encode, first, question.context, DELIMITER + choice)
        for question in questions
        for choice in question.choices
    ]


def accuracies(questions: Sequence[Question], likely: Sequence[Likely]) -> dict[str, float]:
    """The shares of right answers, from the likelihood of each choice of each question, in order."""
    right = {"acc": 0, "acc_norm": 0, "acc_bytes": 0}
    first = 0
    for question in questions:
        choices = question.choices
        found = np.array([each.log_likelihood for each in likely[first : first + len(choices)]])
        first += len(choices)
        lengths = {
            "acc": np.ones(len(choices)),
            "acc_norm": np.array([float(len(choice)) for choice in choices]),
            "acc_bytes": np.array([float(len(choice.encode())) for choice in choices]),
        }
        for key, length in lengths.items():
            right[key] += int(np.argmax(found / length) == question.answer)
    return {key: number / len(questions) for key, number in right.items()}
