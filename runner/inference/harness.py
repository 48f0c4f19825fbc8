"""A run's weights as a model of lm-evaluation-harness, for the harness's own tasks.

Needs `pip install -e '.[lm-eval]'`, and is imported only on request, because nothing else needs the harness. Runs in
one process or in several, each of which makes the same requests in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from runner.distributed.agreement import Hosts
from runner.errors import InvalidError, format_error
from runner.evaluation.generation import (
    Sampler,
    encode_prompt,
    find_start_token,
    generate,
    infer_vocabulary_size,
    load_data_codec,
    make_decoder,
    make_variables,
    stream_text,
)
from runner.evaluation.likelihood import LikelihoodScorer, TextPair, encode_pair
from runner.inference.evaluate import make_evaluation_context
from runner.inference.open_run import ReadOnlyRun
from runner.spec import PARAMS
from runner.storage import JsonObject

_DEFAULT_NUM_TOKENS = 256  # of a generated text, if the task sets no limit


class _HarnessModel(LM):
    """Model for the harness: log-likelihoods and greedy texts."""

    def __init__(self, run: ReadOnlyRun):
        super().__init__()
        job, (context, self.abstract) = run.job, make_evaluation_context(run)
        infer_vocabulary_size(context.model, make_variables(self.abstract), job.config.data.tokens_per_example)
        self._codec = load_data_codec(job.config.data)
        self._start_token = find_start_token(self._codec, job.config.data)
        self._encode = partial(encode_prompt, self._codec)
        self._length = job.config.data.tokens_per_example
        self._weights: Any = None
        self._likelihood = LikelihoodScorer(
            context.model, context.mesh, self._length, context.sequences_per_device, context.is_stopping
        )
        dtype = job.config.precision.compute
        self._make_decoder = partial(make_decoder, context.model, length=self._length, dtype=dtype, mesh=context.mesh)
        self._decoder: Any = None
        self._choose = Sampler(temperature=0.0).make_chooser(self._codec.tokenizer.vocabulary_size)

    def set_weights(self, weights: Any) -> None:
        """Use these weights from now on; they are like `abstract`. The compiled programs stay."""
        self._weights, variables = weights, make_variables(weights)
        if self._decoder is None:
            self._decoder = self._make_decoder(variables)
        else:
            self._decoder.set_weights(variables)

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
        assert found is not None, "a command is never asked to stop"
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
            # Each request begins with an empty cache.
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


@dataclass(frozen=True)
class HarnessTasks:
    """Names of tasks, and the manager of the harness that knows them."""

    names: Sequence[str]
    manager: TaskManager


def load_tasks(names: Sequence[str], include_path: str | None) -> HarnessTasks:
    """Return tasks of the harness, or of a directory of the user's own. Raises `InvalidError` if one is unknown."""
    manager = TaskManager(include_path=include_path)
    if unknown := sorted({*names} - {*manager.all_tasks}):
        raise InvalidError(f"--harness: lm-evaluation-harness knows no task {unknown[0]!r}; see its `lm_eval ls tasks`")
    return HarnessTasks(names, manager)


class HarnessEvaluator:
    """Evaluation by tasks of the harness, a `CheckpointEvaluator`."""

    weights = PARAMS

    def __init__(self, run: ReadOnlyRun, hosts: Hosts, tasks: HarnessTasks):
        self._hosts, self._tasks = hosts, tasks
        self.model = _HarnessModel(run)
        self.abstract = self.model.abstract

    def evaluate(self, step: int, weights: Any) -> JsonObject | None:
        """Return the harness's metrics by task; None on processes but 0. Raises InvalidError if a task has no data."""
        self.model.set_weights(weights)
        try:
            found: Any = simple_evaluate(
                self.model,
                tasks=[*self._tasks.names],
                task_manager=self._tasks.manager,
                bootstrap_iters=0,
                log_samples=False,
            )
        except (OSError, KeyError, TypeError) as error:  # from the data, which the harness may want to download
            raise InvalidError(f"--harness {','.join(self._tasks.names)}: {format_error(error)}") from error
        results = jax.tree.map(
            lambda value: value if isinstance(value, str | bool | int | None) else float(value), found["results"]
        )
        return {"step": step, "harness": results} if self._hosts.is_main else None


def format_record(record: JsonObject) -> list[str]:
    """Format a record for the terminal, one line for each task."""
    lines = []
    for task, metrics in record["harness"].items():
        numbers = [f"{key.split(',')[0]} {value:.4f}" for key, value in metrics.items() if isinstance(value, float)]
        lines.append(f"step {record['step']} {task}: {', '.join(numbers)}")
    return lines
