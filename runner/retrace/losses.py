"""Losses and gradients of single examples, by the job's own `forward`, without dropout.

Shape legend: n shards of the batch axes of the mesh, T tokens of an example. An example is computed on all devices at
once: the batch has a row for each shard, and all rows but the first are padding.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from runner.parallel.mesh import count_batch_shards, make_batch_sharding
from runner.train import step as step_functions
from runner.train.loss import document_arguments
from runner.train.state import TrainState
from runner.train.step import Batch
from runner.trainer import BaseTrainer

_MASK = "padding_mask"


class ExampleLoss(NamedTuple):
    """Loss of one example, summed over its targets."""

    loss_sum: float
    num_targets: float  # their total weight
    grad_norm: float  # of the gradient of the sum


class ExampleScorer:
    """Losses of examples with the state of a job, which is between two steps. Compiles at the first call."""

    def __init__(self, job: BaseTrainer, step: int):
        """Use the model and the loss of the step that ends with `step` completed ones."""
        setup, stage = job.programs.at(step - 1).train_setup, job.at_step(step)
        self._setup, self._state = setup, job.state
        self._num_shards = count_batch_shards(setup.mesh)
        self.is_language_model = job.setup_builder.is_language_model(setup)

        def compute(params: Any, state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
            loss_sum, count, _ = step_functions.val_step(stage.forward, state.replace(params=params), batch)
            return loss_sum, count

        def score(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
            (loss_sum, count), grads = jax.value_and_grad(compute, has_aux=True, allow_int=True)(
                state.params, state, batch
            )
            squares = [
                jnp.sum(jnp.square(grad.astype(jnp.float32)))
                for grad in jax.tree.leaves(grads)
                if grad.dtype != jax.dtypes.float0
            ]
            return loss_sum, count, jnp.sqrt(sum(squares))

        def score_tokens(state: TrainState, batch: Batch) -> jax.Array:
            apply_fn = step_functions.bind_variables(state.apply_fn, step_functions.get_variables(state))
            params, first = step_functions.make_params_merger(state)(state.params), {k: v[0] for k, v in batch.items()}
            logits: Any = apply_fn(
                {"params": params}, first["x"], **document_arguments(apply_fn, first), deterministic=True
            )
            log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
            return -jnp.take_along_axis(log_p, first["y"][..., None], axis=-1)[0, :, 0]

        self._score, self._score_tokens = jax.jit(score), jax.jit(score_tokens)

    def _make_batch(self, example: Mapping[str, np.ndarray]) -> Batch:
        has_sequences = all(values.ndim == 1 for values in example.values())
        sharding = make_batch_sharding(self._setup.mesh, has_sequences)
        batch = {}
        for name, values in example.items():
            rows = np.broadcast_to(values, (1, self._num_shards, *values.shape)).copy()
            if name == _MASK:
                rows[:, 1:] = False
            batch[name] = jax.device_put(rows, sharding)
        return batch

    def score(self, example: Mapping[str, np.ndarray]) -> ExampleLoss:
        """Return the loss of an example, whose arrays are given by field. Waits for the devices."""
        with self._setup.sharding_rules():
            found = self._score(self._state, self._make_batch(example))
        # Without a mask the rows of all shards count.
        num_rows = 1 if _MASK in example else self._num_shards
        return ExampleLoss(*(float(value) / num_rows for value in jax.device_get(found)))

    def score_tokens(self, example: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the loss of each token of an example of a language model: float32 (T,). Waits for the devices."""
        with self._setup.sharding_rules():
            found = self._score_tokens(self._state, self._make_batch(example))
        return np.asarray(found)
