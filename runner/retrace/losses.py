"""Losses and gradients of single examples, by the job's own `forward`, without dropout.

Shape legend: n shards of the batch axes of the mesh, T tokens of an example. An example is computed on all devices at
once: the batch has a row for each shard, and all rows but the first are padding.
"""

from collections.abc import Callable, Mapping
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
Loss = Callable[[Any, TrainState, Batch], tuple[jax.Array, jax.Array]]


class ExampleLoss(NamedTuple):
    """Loss of one example, summed over its targets."""

    loss_sum: float
    num_targets: float  # their total weight
    grad_norm: float  # of the gradient of the sum


def make_loss(job: BaseTrainer, step: int) -> Loss:
    """Return the loss sum and the number of targets of a batch (S, B, ...), as in the step that ends at `step`."""
    forward = job.at_step(step).forward

    def compute(params: Any, state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        loss_sum, count, _ = step_functions.val_step(forward, state.replace(params=params), batch)
        return loss_sum, count

    return compute


class ExampleScorer:
    """Losses of examples with the present state of a job, for the steps of one stage. Compiles at the first call."""

    def __init__(self, job: BaseTrainer, step: int):
        """Use the model and the loss of the stage that makes the step which ends with `step` completed ones."""
        self._job, self._setup = job, job.programs.at(step - 1).train_setup
        self._num_shards = count_batch_shards(self._setup.mesh)
        self.is_language_model = job.setup_builder.is_language_model(self._setup)
        compute = make_loss(job, step)

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

        self._compute = jax.jit(lambda state, batch: compute(state.params, state, batch))
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

    def _run(self, program: Callable[..., Any], example: Mapping[str, np.ndarray]) -> list[float]:
        with self._setup.sharding_rules():
            found = jax.device_get(program(self._job.state, self._make_batch(example)))
        # Without a mask the rows of all shards count.
        num_rows = 1 if _MASK in example else self._num_shards
        return [float(value) / num_rows for value in found]

    def score(self, example: Mapping[str, np.ndarray]) -> ExampleLoss:
        """Return the loss of an example, whose arrays are given by field. Waits for the devices."""
        return ExampleLoss(*self._run(self._score, example))

    def compute_mean(self, example: Mapping[str, np.ndarray]) -> float | None:
        """Return the loss per target, without a gradient; None if there is no target. Waits for the devices."""
        loss_sum, num_targets = self._run(self._compute, example)
        return loss_sum / num_targets if num_targets else None

    def score_tokens(self, example: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the loss of each token of an example of a language model: float32 (T,). Waits for the devices."""
        with self._setup.sharding_rules():
            found = self._score_tokens(self._job.state, self._make_batch(example))
        return np.asarray(found)
