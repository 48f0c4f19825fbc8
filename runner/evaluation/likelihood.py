"""How probable a text is after another, in nats, by a model of tokens.

As lm-evaluation-harness counts it (https://github.com/EleutherAI/lm-evaluation-harness, `lm_eval/api/model.py`): spaces
at the end of the context belong to what follows; both are encoded as one text, and what follows is the ids behind those
of the context alone; of what is longer than the model's sequence the end is read; an empty context is the token that a
text begins after (and where what follows begins with that, it is the context).

Shape legend: B rows of a batch, T sequence length, V vocabulary.

Questions with choices, of which one is right, in a file of JSON lines as benchmarks ship them.

A line has one key of each row, under any of these names:

- `question`, `context`, `query` or `ctx`: the text that a choice goes on from;
- `choices`, `options` or `endings`: a list of texts, or `{"text": [...], "label": [...]}` as ARC has it;
- `answer`, `label`, `gold` or `answerKey`: the place of the right choice (0 is the first), or its label or letter.

How many questions are answered right: the answer is the choice that is most probable after the question.

As lm-evaluation-harness scores a `multiple_choice` task (`lm_eval/api/task.py`): a choice follows its question after a
space. `acc` takes the choice of the highest log likelihood, `acc_norm` divides it by the characters of the choice,
`acc_bytes` by its bytes. Of equal ones the first is taken.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.distributed.agreement import Hosts
from runner.errors import DataError
from runner.evaluation.generation import make_variables, replicate
from runner.parallel.mesh import BATCH_AXES, count_batch_shards, use_sharding_rules
from runner.storage import JsonObject, open_store
from runner.train.evaluators import EvaluationMetrics


class TextPair(NamedTuple):
    """The ids of a text, and of what may follow it; neither is empty."""

    context: Sequence[int]
    continuation: Sequence[int]


class LikelihoodResult(NamedTuple):
    """How probable what follows is, and whether it is what the most probable token at each place makes."""

    log_likelihood: float
    is_greedy: bool


def encode_pair(encode: Callable[[str], Sequence[int]], first: int, context: str, continuation: str) -> TextPair:
    """The ids of both. `first` is the token that a text begins after."""
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces:
        context, continuation = context[:-num_spaces], context[-num_spaces:] + continuation
    if not context:
        ids = list(encode(continuation))
        return TextPair(ids[:1], ids[1:]) if ids[0] == first else TextPair([first], ids)
    before = list(encode(context))
    return TextPair(before, list(encode(context + continuation))[len(before) :])


class LikelihoodScorer:
    """Of the model's weights on `mesh`, by one program. Made and called on every host, with the same pairs.

    `sequences_per_device` are read at once. `is_stopping` says between batches whether the job was asked to stop.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, length: int, sequences_per_device: int, is_stopping: Callable[[], bool]
    ):
        self._mesh, self._length, self._is_stopping = mesh, length, is_stopping
        self._num_rows = sequences_per_device * count_batch_shards(mesh)

        @jax.jit
        def score(variables: Any, x_BxT: Any, y_BxT: Any, mask_BxT: Any) -> tuple[jax.Array, jax.Array]:
            logits_BxTxV: Any = model.apply(variables, x_BxT, deterministic=True)
            logits_BxTxV = logits_BxTxV.astype(jnp.float32)
            is_label_BxTxV = jnp.arange(logits_BxTxV.shape[-1]) == y_BxT[..., None]
            label_BxT = jnp.sum(jnp.where(is_label_BxTxV, logits_BxTxV, 0), axis=-1)
            log_p_BxT = label_BxT - jax.nn.logsumexp(logits_BxTxV, axis=-1)
            is_best_BxT = jnp.argmax(logits_BxTxV, axis=-1) == y_BxT
            sum_B = jnp.sum(jnp.where(mask_BxT, log_p_BxT, 0), axis=-1)
            return replicate(sum_B, mesh), replicate(jnp.all(is_best_BxT | ~mask_BxT, axis=-1), mesh)

        self._score = score

    def score(self, weights: Any, pairs: Sequence[TextPair]) -> list[LikelihoodResult] | None:
        """The likelihood of each pair; None if the job was asked to stop. `weights` are those of a checkpoint."""
        variables, found = make_variables(weights), []
        for first in range(0, len(pairs), self._num_rows):
            if self._is_stopping():
                return None
            some = pairs[first : first + self._num_rows]
            with use_sharding_rules(self._mesh):
                sums, is_greedy = jax.device_get(self._score(variables, *self._batch(some)))
            found += [LikelihoodResult(float(a), bool(b)) for a, b in zip(sums, is_greedy, strict=True)][: len(some)]
        return found

    def _batch(self, pairs: Sequence[TextPair]) -> Iterator[jax.Array]:
        """x, y and mask (B, T); rows that are too many hold nothing."""
        shape = self._num_rows, self._length
        x, y, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
        for row, pair in enumerate(pairs):
            ids = [*pair.context, *pair.continuation][-(self._length + 1) :]
            end = len(ids) - 1
            x[row, :end], y[row, :end] = ids[:-1], ids[1:]
            mask[row, max(0, end - len(pair.continuation)) : end] = True
        sharding = NamedSharding(self._mesh, PartitionSpec(BATCH_AXES))
        for array in (x, y, mask):
            yield jax.make_array_from_callback(shape, sharding, array.__getitem__)


_CONTEXTS = ("question", "context", "query", "ctx")
_CHOICES = ("choices", "options", "endings")
_ANSWERS = ("answer", "label", "gold", "answerKey")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """A text, what may follow it, and which of these is right."""

    context: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: str, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a file, or all. Raises `DataError` naming file and line."""
    folder, _, name = path.rpartition("/")
    try:
        content = open_store(folder or ("/" if path.startswith("/") else ".")).read(name)
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    found: list[Question] = []
    for number, line in enumerate(content.splitlines(), 1):
        if len(found) == limit:
            break
        if line.strip():
            try:
                found.append(_question(json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: {error}") from error
    if not found:
        raise DataError(f"{path}: holds no question")
    return found


def _question(record: Any) -> Question:
    """Raises `ValueError`."""
    if not isinstance(record, dict):
        raise ValueError("needs a JSON object")
    context, answer = _first(record, _CONTEXTS), _first(record, _ANSWERS)
    choices: Any = _first(record, _CHOICES)
    labels: Sequence[Any] = _LETTERS
    if isinstance(choices, dict):
        choices, labels = choices.get("text"), choices.get("label", _LETTERS)
    if not isinstance(context, str) or not isinstance(choices, list) or len(choices) < 2:
        raise ValueError("needs a question that is text, and a list of at least two choices")
    if bad := [choice for choice in choices if not isinstance(choice, str) or not choice.strip()]:
        raise ValueError(f"got {bad[0]!r} as a choice, needs a text that is not blank")
    for text in (context, *choices):
        text.encode()  # JSON can write halves of characters, which no tokenizer takes
    return Question(context, tuple(choices), _place(answer, labels, len(choices)))


def _first(record: JsonObject, names: Sequence[str]) -> Any:
    found = next((name for name in names if name in record), None)
    if found is None:
        raise ValueError(f"has no {' or '.join(names)}")
    return record[found]


def _place(answer: Any, labels: Sequence[Any], number: int) -> int:
    """The index that an answer means: a number, or else a label, or else digits."""
    place: Any = answer
    if isinstance(answer, str):
        known = [str(label) for label in labels][:number]
        place = known.index(answer) if answer in known else int(answer) if answer.isdecimal() else None
    if type(place) is not int or not 0 <= place < number:
        raise ValueError(f"got {answer!r} as the answer, needs the index of one of {number} choices, or its letter")
    return place


def compute_questions_digest(questions: Sequence[Question]) -> str:
    """Tells lists of questions apart."""
    return hashlib.sha256(repr(list(questions)).encode()).hexdigest()


DELIMITER = " "  # between a question and a choice


class MultipleChoice:
    """An evaluator: the figures `val/<name>/acc`, `acc_norm` and `acc_bytes`. Made and called on every host."""

    def __init__(
        self,
        name: str,
        questions: Sequence[Question],
        encode: Callable[[str], Sequence[int]],
        first: int,
        likelihood: LikelihoodScorer,
        every_steps: int | None = None,
    ):
        self.name, self.every_steps = name, every_steps
        self._questions, self._likelihood = questions, likelihood
        self._pairs = make_pairs(questions, encode, first)

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> EvaluationMetrics | None:
        """See `Evaluator`."""
        found = self.score(weights)
        return None if found is None else {f"val/{self.name}/{key}": value for key, value in found.items()}

    def score(self, weights: Any) -> dict[str, float] | None:
        """The figures by their own names; None if the job was asked to stop. Called on every host."""
        likely = self._likelihood.score(weights, self._pairs)
        return None if likely is None else compute_accuracies(self._questions, likely)


def make_pairs(questions: Sequence[Question], encode: Callable[[str], Sequence[int]], first: int) -> list[TextPair]:
    """A pair for each choice of each question, in order."""
    return [
        encode_pair(encode, first, question.context, DELIMITER + choice)
        for question in questions
        for choice in question.choices
    ]


def compute_accuracies(questions: Sequence[Question], likely: Sequence[LikelihoodResult]) -> dict[str, float]:
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
