"""Outputs of a run's model for each example of a data set, in the order of the data, as one file.

The outputs are those of `predict` of the job. A file ends in `.jsonl`, one object per example, which needs no memory
for the whole, or in `.npz`, one array (N, ...) per name, which is read at once by NumPy.

Shape legend: N examples of the data, S micro-batches of a batch, B examples of a micro-batch, T sequence length.
"""

import dataclasses
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from runner.config import TokenSource
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError, format_place
from runner.evaluation.generation import replicate
from runner.inference.evaluate import DATA_SET, Scorer, load_evaluation_data, warn_left_out
from runner.inference.open_run import ReadOnlyRun
from runner.storage import JsonObject, LocalStore, encode_line
from runner.train.state import PARAMS, VARIABLES, bind_variables
from runner.train_recipe import TrainRecipe

_TOKENS, _START = "tokens", "start"  # inputs of a sequence, and the position of its first in the tokens of the data
_RESERVED = ("example", _TOKENS, _START)


class PredictionWriter:
    """Outputs of one checkpoint as a file: a `CheckpointEvaluator`. Process 0 writes the file."""

    def __init__(self, run: ReadOnlyRun, source: TokenSource, path: Path, hosts: Hosts, weights: str):
        self.weights, self._path, self._hosts, self._job = weights, path, hosts, run.job
        # Packed documents are in no order of the data, and attention does not cross them: each gets a sequence.
        data = load_evaluation_data(run, source, is_in_order=True)
        scorer = Scorer(run, data.dataset)
        self._examples, self._dataset = data.dataset.validation[DATA_SET], data.dataset
        self._has_tokens = run.job.config.data.has_tokens
        owner = next(each for each in type(run.job).__mro__ if "predict" in vars(each))
        if self._has_tokens and owner is TrainRecipe and not scorer.is_language_model:
            raise InvalidError(
                f"{run.store.url}: its job {run.job.spec.job} trains no language model, whose log-probabilities "
                "predict would write; override predict of the job"
            )
        if hosts.is_main:
            warn_left_out(data, source)
        # An order of sums that does not depend on devices is that of the loss; there is none here.
        self._layout = dataclasses.replace(scorer.layout, is_ordered=False)
        self.abstract, self._setup = scorer.abstract, scorer.train_setup
        self._predict = jax.jit(self._predict_batch)

    def evaluate(self, step: int, weights: Any) -> JsonObject | None:
        """Write the outputs of these weights, and return what was written; None on processes other than 0."""
        batches = self._iterate(weights)
        if not self._hosts.is_main:
            for _ in batches:
                pass
            return None
        if self._path.suffix == ".jsonl":
            chunks = self._format_lines(batches)
        else:
            parts, content = list(batches), io.BytesIO()
            arrays: Any = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            np.savez(content, **arrays)
            chunks = iter([content.getvalue()])
        LocalStore(self._path.parent).write_chunks(self._path.name, chunks)
        return {"step": step, "examples": self._examples.num_examples, "file": str(self._path)}

    def _predict_batch(self, weights: Any, batch: Mapping[str, jax.Array], first: jax.Array) -> dict[str, jax.Array]:
        """Return the outputs (S, B, ...) of a batch whose first example is `first`. Traced."""
        apply_fn = bind_variables(self._job.model().apply, weights.get(VARIABLES, {}))
        S, B = self._layout.accumulate_steps, self._layout.micro_batch

        def predict_micro_batch(micro: dict[str, jax.Array]) -> dict[str, jax.Array]:
            found = self._job.predict(apply_fn, weights[PARAMS], micro)
            place = format_place(self._job.predict)
            for name, output in found.items() if isinstance(found, dict) else [("outputs", found)]:
                shape = getattr(output, "shape", None)
                if not isinstance(found, dict) or shape is None or shape[:1] != (B,) or name in _RESERVED:
                    what = f"a {type(output).__name__}" if shape is None else f"an array of shape {shape}"
                    raise InvalidError(
                        f"{place}: returns {what} as {name!r}, needs a dict of arrays with {B} examples first, and "
                        f"names other than {', '.join(_RESERVED)}; override predict of the job"
                    )
            lengths = {_TOKENS: jnp.sum(micro["padding_mask"], axis=-1)} if self._has_tokens else {}
            # NumPy has no bfloat16.
            return lengths | {
                name: output.astype(jnp.float32) if jnp.issubdtype(output.dtype, jnp.floating) else output
                for name, output in found.items()
            }

        numbered = {**batch, "example": first + jnp.arange(S * B).reshape(S, B)}
        outputs: dict[str, jax.Array] = lax.map(predict_micro_batch, numbered)
        return {name: replicate(output, self._layout.mesh) for name, output in outputs.items()}

    def _iterate(self, weights: Any) -> Iterator[dict[str, np.ndarray]]:
        """Yield the outputs by name, of as many examples as a batch has real ones. Called on every host."""
        num_examples, size = self._examples.num_examples, self._layout.global_batch_examples
        for first in range(0, num_examples, size):
            batch = self._layout.batch(self._dataset, DATA_SET, first // size)
            with self._setup.sharding_rules():
                found = jax.device_get(self._predict(weights, batch, np.int32(first)))
            number = min(size, num_examples - first)
            numbers = range(first, first + number)
            starts = [int(self._examples.get_spans(each)[0, 0]) for each in numbers] if self._has_tokens else []
            places = {"example": np.array(numbers), **({_START: np.array(starts)} if starts else {})}
            yield places | {name: each.reshape(size, *each.shape[2:])[:number] for name, each in found.items()}

    def _format_lines(self, batches: Iterator[dict[str, np.ndarray]]) -> Iterator[bytes]:
        T = self._dataset.units_per_example
        for batch in batches:
            for number in range(len(batch["example"])):
                record = {}
                for name, array in batch.items():
                    # Positions beyond the sequence are padding, which is at its end.
                    is_per_token = self._has_tokens and array.shape[1:2] == (T,)
                    value = np.asarray(array[number][: batch[_TOKENS][number]] if is_per_token else array[number])
                    values = value.astype(object)
                    if np.issubdtype(value.dtype, np.floating):
                        values[~np.isfinite(value)] = None  # JSON has no other numbers
                    record[name] = values.tolist()
                yield encode_line(record)
