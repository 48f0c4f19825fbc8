"""A run's weights as a model of lm-evaluation-harness, for its own tasks (`pip install 'runner[lm-eval]'`).

Imported where it is asked for alone: nothing else needs the harness. One process or several, each of which makes the
same requests in the same order.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from runner.errors import InvalidError, format_error
from runner.evaluation.generation import (
    Sampler,
    encode_prompt,
    find_start_token,
    generate,
    load_data_codec,
    make_decoder,
    make_variables,
    stream_text,
)
from runner.evaluation.likelihood import LikelihoodScorer, TextPair, encode_pair
from runner.inference.evaluate import make_evaluation_context
from runner.inference.open_run import ReadOnlyRun, parse_step
from runner.storage import JsonObject

_MOST_TOKENS = 256  # of a text, where a task does not say


class HarnessModel(LM):
    """What the harness asks for: likelihoods, and greedy texts."""

    def __init__(self, run: ReadOnlyRun, checkpoint: str):
        super().__init__()
        job, (place, abstract) = run.job, make_evaluation_context(run)
        self._language = load_data_codec(job.config.data)
        self._first = find_start_token(self._language, job.config.data)
        self._encode = partial(encode_prompt, self._language)
        self._length = job.config.data.sequence_length
        self._weights = run.load_weights(checkpoint, abstract)
        self._likelihood = LikelihoodScorer(
            place.model, place.mesh, self._length, place.sequences_per_device, place.is_stopping
        )
        dtype = job.config.precision.compute
        self._read = make_decoder(place.model, make_variables(self._weights), self._length, dtype, place.mesh)
        self._choose = Sampler(temperature=0.0).make_chooser(self._language.tokenizer.vocabulary_size)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """See `LM`."""
        return self._of([encode_pair(self._encode, self._first, *request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """See `LM`."""
        found = []
        for request in requests:
            windows = get_rolling_token_windows(self._encode(request.args[0]), self._first, self._length, 1)
            found.append(
                sum(likely for likely, _ in self._of([TextPair(*make_disjoint_window(each)) for each in windows]))
            )
        return found

    def _of(self, pairs: Sequence[TextPair]) -> list[tuple[float, bool]]:
        likely = self._likelihood.score(self._weights, pairs)
        assert likely is not None, "nobody asks it to stop"
        return [(each.log_likelihood, each.is_greedy) for each in likely]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """See `LM`. The most probable token is taken, whatever the task says of temperature."""
        return [self._text(*request.args) for request in requests]

    def _text(self, context: str, options: JsonObject) -> str:
        ends = options.get("until") or []
        ends = [ends] if isinstance(ends, str) else ends
        ids = self._encode(context) or [self._first]
        self._read.set_weights(make_variables(self._weights))
        tokens = generate(self._read, self._choose, ids, int(options.get("max_gen_toks", _MOST_TOKENS)), self._length)
        text = ""
        for piece in stream_text(tokens, ids, self._language.tokenizer.decode):
            text += piece
            if found := [place for end in ends if end and (place := text.find(end)) >= 0]:
                return text[: min(found)]
        return text


def evaluate_tasks(run: ReadOnlyRun, checkpoint: str, tasks: Sequence[str], include_path: str | None) -> JsonObject:
    """The harness's figures of one checkpoint by task. Raises `InvalidError` for a task that it does not know."""
    manager = TaskManager(include_path=include_path)
    if unknown := sorted({*tasks} - {*manager.all_tasks}):
        raise InvalidError(f"--harness: lm-evaluation-harness knows no task {unknown[0]!r}; see its `lm_eval ls tasks`")
    try:
        found: Any = simple_evaluate(
            HarnessModel(run, checkpoint), tasks=list(tasks), task_manager=manager, bootstrap_iters=0, log_samples=False
        )
    except (OSError, KeyError, TypeError) as error:  # of the data of a task, which it may want to download
        raise InvalidError(f"--harness {','.join(tasks)}: {format_error(error)}") from error
    return {"step": parse_step(checkpoint), "harness": jax.tree.map(_plain, found["results"])}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | bool | int | None) else float(value)


def format_record(record: JsonObject) -> list[str]:
    """For a person: a line for each task."""
    lines = []
    for task, figures in record["harness"].items():
        numbers = [f"{key.split(',')[0]} {value:.4f}" for key, value in figures.items() if isinstance(value, float)]
        lines.append(f"step {record['step']} {task}: {', '.join(numbers)}")
    return lines
