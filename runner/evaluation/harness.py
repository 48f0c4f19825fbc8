"""Weights as a model of lm-evaluation-harness, for the harness's own tasks: `config.eval.harness`, `--harness`.

Needs `pip install -e '.[lm-eval]'`, and is imported only on request, because nothing else needs the harness. Runs in
one process or in several, each of which makes the same requests in the same order.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import jax
import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from runner.config import TrainerConfig
from runner.distributed.agreement import Hosts
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
from runner.evaluation.likelihood import EvaluationContext, LikelihoodScorer, TextPair, encode_pair
from runner.storage import JsonObject
from runner.train.evaluators import EvaluationMetrics

_DEFAULT_NUM_TOKENS = 256  # of a generated text, if the task sets no limit


class _StoppedError(Exception):
    """The job was asked to stop during an evaluation."""


class HarnessModel(LM):
    """Model for the harness: log-likelihoods and greedy texts. Made and called alike on every host."""

    def __init__(self, context: EvaluationContext, config: TrainerConfig[Any]):
        super().__init__()
        self._codec = load_data_codec(config.data)
        self._start_token = find_start_token(self._codec, config.data)
        self._encode = partial(encode_prompt, self._codec)
        self._length, self._is_stopping = config.data.tokens_per_example, context.is_stopping
        self._weights: Any = None
        self._likelihood = LikelihoodScorer(
            context.model, context.mesh, self._length, context.sequences_per_device, context.is_stopping
        )
        dtype = config.precision.compute
        self._make_decoder = partial(make_decoder, context.model, length=self._length, dtype=dtype, mesh=context.mesh)
        self._decoder: Any = None
        self._choose = Sampler(temperature=0.0).make_chooser(self._codec.tokenizer.vocabulary_size)

    def set_weights(self, weights: Any) -> None:
        """Use these weights from now on; None frees their memory. The compiled programs stay."""
        self._weights = weights
        if weights is None and self._decoder is not None:
            self._decoder.set_weights(None)  # training needs the memory

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return for each request the log-likelihood of its continuation, and True if greedy decoding generates it."""
        return self._score([encode_pair(self._encode, self._start_token, *request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each whole text, summed over disjoint windows."""
        found = []
        for request in requests:
            ids = self._encode(request.args[0])
            # The first window begins with the start token, which a corpus may also put before its documents.
            ids = ids[1:] if ids[:1] == [self._codec.begin] else ids
            windows = get_rolling_token_windows(ids, self._start_token, self._length, 1)
            scores = self._score([TextPair(*make_disjoint_window(window)) for window in windows])
            found.append(sum(log_likelihood for log_likelihood, _ in scores))
        return found

    def _score(self, pairs: Sequence[TextPair]) -> list[tuple[float, bool]]:
        found = self._likelihood.score(self._weights, pairs)
        if found is None:
            raise _StoppedError
        return [(each.log_likelihood, each.is_greedy) for each in found]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return a greedy text for each request, up to its first stop string; any temperature is ignored."""
        texts = []
        for request in requests:
            context, options = request.args
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else stops
            ids = self._encode(context) or [self._start_token]
            num_tokens = int(options.get("max_gen_toks", _DEFAULT_NUM_TOKENS))
            if self._is_stopping():
                raise _StoppedError
            # Each request begins with an empty cache.
            if self._decoder is None:
                self._decoder = self._make_decoder(make_variables(self._weights))
            self._decoder.set_weights(make_variables(self._weights))
            text = ""
            for piece in stream_text(
                generate(self._decoder, self._choose, ids, num_tokens, self._length), ids, self._codec.tokenizer.decode
            ):
                text += piece
                # A stop string may cross the border of two pieces, so the whole text is searched.
                if found := [place for stop in stops if stop and (place := text.find(stop)) >= 0]:
                    text = text[: min(found)]
                    break
            texts.append(text)
        return texts


class _KeptTasks(TaskManager):
    """Manager that loads its tasks, and so their data, once."""

    loaded: Any = None

    def load(self, *arguments: Any, **options: Any) -> Any:
        self.loaded = self.loaded or super().load(*arguments, **options)
        return self.loaded


@dataclass(frozen=True)
class HarnessTasks:
    """Names of tasks, and the manager of the harness that knows them. `place` is the option or key that names them."""

    names: Sequence[str]
    manager: TaskManager
    place: str = "--harness"

    def load(self) -> None:
        """Load the tasks with their data. Raises `InvalidError` if they are not there."""
        try:
            self.manager.load([*self.names])
        except Exception as error:
            raise InvalidError(
                f"{self.place}: cannot load {', '.join(self.names)}: {format_error(error)}; put the data of the tasks "
                "on this host first, for example by `lm_eval validate` or a first `evaluate --harness`"
            ) from error

    def evaluate(self, model: HarnessModel, weights: Any, limit: int | None = None) -> JsonObject | None:
        """Return the metrics of each task; None if the job was asked to stop. Called on every host.

        Raises InvalidError if a task has no data.
        """
        model.set_weights(weights)
        # The harness seeds the generators of the process, which data sets of the user may use.
        states = random.getstate(), np.random.get_state()
        try:
            found: Any = simple_evaluate(
                model,
                tasks=[*self.names],
                task_manager=self.manager,
                bootstrap_iters=0,
                log_samples=False,
                limit=limit,
            )
        except _StoppedError:
            return None
        except (OSError, KeyError, TypeError) as error:  # from the data, which the harness may want to download
            raise InvalidError(f"{self.place} {','.join(self.names)}: {format_error(error)}") from error
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        results: JsonObject = jax.tree.map(
            lambda value: value if isinstance(value, str | bool | int | None) else float(value), found["results"]
        )
        return results


def load_tasks(names: Sequence[str], include_path: str | None, place: str = "--harness") -> HarnessTasks:
    """Return tasks of the harness, or of a directory of the user's own. Raises `InvalidError` if one is unknown."""
    manager = _KeptTasks(include_path=include_path)
    known = [*manager.all_tasks]
    if unknown := sorted({*names} - {*known}):
        near = get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else "see its `lm_eval ls tasks`"
        raise InvalidError(f"{place}: lm-evaluation-harness knows no task {unknown[0]!r}; {hint}")
    return HarnessTasks(names, manager, place)


class HarnessScores:
    """Evaluator with the metrics `eval/<task>/<metric>` of `config.eval.harness`. Made and called on every host."""

    name = "harness"

    def __init__(self, context: EvaluationContext, config: TrainerConfig[Any], tasks: HarnessTasks):
        assert config.eval.harness is not None, "made only with the key"
        self.every_steps, self._limit = config.eval.harness.every_steps, config.eval.harness.limit
        self._tasks, self._model = tasks, HarnessModel(context, config)

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> EvaluationMetrics | None:
        """Return the metrics by their key in a row, without standard errors; None if the job was asked to stop."""
        results = self._tasks.evaluate(self._model, weights, self._limit)
        self._model.set_weights(None)
        if results is None:
            return None
        # The harness names a metric and the filter of the answers: `exact_match,strict-match`.
        return {
            f"eval/{task}/{key.removesuffix(',none').replace(',', '/')}": value
            for task, found in results.items()
            for key, value in found.items()
            if isinstance(value, float) and "_stderr" not in key
        }
