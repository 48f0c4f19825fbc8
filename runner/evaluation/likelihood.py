"""Likelihood of texts under a model of tokens, in nats, and the accuracy of multiple-choice tasks.

**Likelihood**, as lm-evaluation-harness defines it (https://github.com/EleutherAI/lm-evaluation-harness,
`lm_eval/api/model.py`): spaces at the end of the context belong to the continuation; both are encoded as one text, and
the continuation is the ids after those of the context alone; a text that is longer than the model's sequence is
truncated on the left; an empty context is replaced by the start token (and if the continuation begins with that token,
the token is the context).

**Multiple choice**, as lm-evaluation-harness scores a `multiple_choice` task (`lm_eval/api/task.py`): a choice follows
its question after a space, and the answer is the most probable choice. `acc` selects the choice with the highest log
likelihood; `acc_norm` divides the log likelihood by the characters of the choice, `acc_bytes` by its bytes. Of equal
choices the first is selected.

**Questions** are JSON lines, as benchmarks ship them. A line has one key of each group:

- `question`, `context`, `query` or `ctx`: text before a choice;
- `choices`, `options` or `endings`: list of texts, or `{"text": [...], "label": [...]}` as in ARC;
- `answer`, `label`, `gold` or `answerKey`: index of the correct choice (0 is the first), or its label or letter.

Shape legend: B sequences of a batch, T sequence length, V vocabulary.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.errors import DataError
from runner.evaluation.generation import make_variables, replicate
from runner.parallel.mesh import BATCH_AXES, count_batch_shards, use_sharding_rules
from runner.storage import open_store
from runner.train.loss import compute_log_probs

_DELIMITER = " "  # between a question and a choice
_CONTEXTS = ("question", "context", "query", "ctx")
_CHOICES = ("choices", "options", "endings")
_ANSWERS = ("answer", "label", "gold", "answerKey")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class EvaluationContext:
    """Model and devices of an evaluation."""

    model: nn.Module
    mesh: Mesh  # device mesh on which its weights are placed
    sequences_per_device: int  # sequences of a batch on each device
    vocabulary_size: int
    is_stopping: Callable[[], bool]  # function that returns True if the job was asked to stop


class TextPair(NamedTuple):
    """Ids of a context and of its continuation; neither is empty."""

    context: Sequence[int]
    continuation: Sequence[int]


class LikelihoodResult(NamedTuple):
    """Log likelihood of a continuation; `is_greedy` if each of its tokens is the most probable one."""

    log_likelihood: float
    is_greedy: bool


def encode_pair(encode: Callable[[str], Sequence[int]], first: int, context: str, continuation: str) -> TextPair:
    """Encode a context and its continuation. `first` is the start token, which replaces an empty context."""
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces:
        context, continuation = context[:-num_spaces], context[-num_spaces:] + continuation
    if not context:
        ids = list(encode(continuation))
        return TextPair(ids[:1], ids[1:]) if ids[0] == first else TextPair([first], ids)
    # Encoded together, because a tokenizer may merge characters across the boundary.
    context_ids = list(encode(context))
    return TextPair(context_ids, list(encode(context + continuation))[len(context_ids) :])


class LikelihoodScorer:
    """Scorer of texts by the weights of a model, with one compiled program. Made and called alike on every host."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, length: int, sequences_per_device: int, is_stopping: Callable[[], bool]
    ):
        """Prepare the scorer for sequences of `length` tokens; `is_stopping` is called between batches."""
        self._mesh, self._length, self._is_stopping = mesh, length, is_stopping
        self._batch_size = sequences_per_device * count_batch_shards(mesh)

        @jax.jit
        def score(variables: Any, x_BxT: Any, y_BxT: Any, mask_BxT: Any) -> tuple[jax.Array, jax.Array]:
            logits_BxTxV: Any = model.apply(variables, x_BxT, deterministic=True)
            logits_BxTxV = logits_BxTxV.astype(jnp.float32)
            log_p_BxT = compute_log_probs(logits_BxTxV, y_BxT)
            is_best_BxT = jnp.argmax(logits_BxTxV, axis=-1) == y_BxT
            sum_B = jnp.sum(jnp.where(mask_BxT, log_p_BxT, 0), axis=-1)
            return replicate(sum_B, mesh), replicate(jnp.all(is_best_BxT | ~mask_BxT, axis=-1), mesh)

        self._score = score

    def score(self, weights: Any, pairs: Sequence[TextPair]) -> list[LikelihoodResult] | None:
        """Return the likelihood of each pair with the weights of a checkpoint; None if the job was asked to stop."""
        variables = make_variables(weights)
        results: list[LikelihoodResult] = []
        for first in range(0, len(pairs), self._batch_size):
            if self._is_stopping():
                return None
            batch = pairs[first : first + self._batch_size]
            with use_sharding_rules(self._mesh):
                sums, is_greedy = jax.device_get(self._score(variables, *self._make_batch(batch)))
            # The sequences beyond the last pair are padding.
            results += [LikelihoodResult(float(a), bool(b)) for a, b in zip(sums, is_greedy, strict=True)][: len(batch)]
        return results

    def _make_batch(self, pairs: Sequence[TextPair]) -> Iterator[jax.Array]:
        """Yield x, y and mask (B, T); sequences without a pair are empty."""
        shape = self._batch_size, self._length
        x, y, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
        for index, pair in enumerate(pairs):
            # Texts that are too long are truncated on the left, as in the harness.
            ids = [*pair.context, *pair.continuation][-(self._length + 1) :]
            end = len(ids) - 1
            x[index, :end], y[index, :end] = ids[:-1], ids[1:]
            mask[index, max(0, end - len(pair.continuation)) : end] = True
        sharding = NamedSharding(self._mesh, PartitionSpec(BATCH_AXES))
        for array in (x, y, mask):
            yield jax.make_array_from_callback(shape, sharding, array.__getitem__)


@dataclass(frozen=True)
class Question:
    """Multiple-choice question."""

    context: str  # text before a choice
    choices: tuple[str, ...]  # texts that may follow
    answer: int  # index of the correct choice


def read_questions(path: str, limit: int | None = None) -> list[Question]:
    """Read the first `limit` questions of a file, or all. Raises `DataError` that names file and line."""
    folder, _, name = path.rpartition("/")
    try:
        content = open_store(folder or ("/" if path.startswith("/") else ".")).read(name)
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    questions: list[Question] = []
    for number, line in enumerate(content.splitlines(), 1):
        if len(questions) == limit:
            break
        if line.strip():
            try:
                questions.append(_parse_question(json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: {error}") from error
    if not questions:
        raise DataError(f"{path}: holds no question")
    return questions


def _parse_question(record: Any) -> Question:
    """Parse a line of a file of questions. Raises `ValueError`."""
    if not isinstance(record, dict):
        raise ValueError("needs a JSON object")

    def get(names: Sequence[str]) -> Any:
        found = next((name for name in names if name in record), None)
        if found is None:
            raise ValueError(f"has no {' or '.join(names)}")
        return record[found]

    context, answer = get(_CONTEXTS), get(_ANSWERS)
    choices: Any = get(_CHOICES)
    labels: Sequence[Any] = _LETTERS
    if isinstance(choices, dict):
        choices, labels = choices.get("text"), choices.get("label", _LETTERS)
    if not isinstance(context, str) or not isinstance(choices, list) or len(choices) < 2:
        raise ValueError("needs a question that is text, and a list of at least two choices")
    if bad := [choice for choice in choices if not isinstance(choice, str) or not choice.strip()]:
        raise ValueError(f"got {bad[0]!r} as a choice, needs a text that is not blank")
    for text in (context, *choices):
        text.encode()  # JSON can contain lone surrogates, which no tokenizer encodes

    # An answer is an index, or else a label, or else digits.
    place: Any = answer
    if isinstance(answer, str):
        known = [str(label) for label in labels][: len(choices)]
        place = known.index(answer) if answer in known else int(answer) if answer.isdecimal() else None
    if type(place) is not int or not 0 <= place < len(choices):
        raise ValueError(
            f"got {answer!r} as the answer, needs the index of one of {len(choices)} choices, or its letter"
        )
    return Question(context, tuple(choices), place)


def make_pairs(questions: Sequence[Question], encode: Callable[[str], Sequence[int]], first: int) -> list[TextPair]:
    """Return a pair for each choice of each question, in order."""
    return [
        encode_pair(encode, first, question.context, _DELIMITER + choice)
        for question in questions
        for choice in question.choices
    ]


def compute_accuracies(questions: Sequence[Question], results: Sequence[LikelihoodResult]) -> dict[str, float]:
    """Return the shares of right answers, from the likelihood of each choice of each question, in order."""
    num_right = {"acc": 0, "acc_norm": 0, "acc_bytes": 0}
    first = 0
    for question in questions:
        choices = question.choices
        scores = np.array([each.log_likelihood for each in results[first : first + len(choices)]])
        first += len(choices)
        # np.argmax returns the first of equal scores, as the harness does.
        lengths = {
            "acc": np.ones(len(choices)),
            "acc_norm": np.array([float(len(choice)) for choice in choices]),
            "acc_bytes": np.array([float(len(choice.encode())) for choice in choices]),
        }
        for key, length in lengths.items():
            num_right[key] += int(np.argmax(scores / length) == question.answer)
    return {key: number / len(questions) for key, number in num_right.items()}
