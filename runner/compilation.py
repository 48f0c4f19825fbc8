"""The compiled steps: traced from abstract shapes, never from arrays, and the micro-batch that fits a device.

Compiled ahead of the first step, so nothing is ever traced again. Knows no model and no data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.errors import InvalidError
from runner.state import sharding_rules, shardings_of
from runner.step import Batch
from runner.topology import batch_sharding, num_batch_shards


@dataclass(frozen=True)
class Layout:
    """How the examples of a step are split: over the devices of a mesh, and over micro-batches in time."""

    mesh: Mesh
    global_batch_examples: int
    micro_batch_examples: int  # per device
    sequence_length: int

    @property
    def micro_batch(self) -> int:
        """Examples of one micro-batch over all devices: B."""
        return self.micro_batch_examples * num_batch_shards(self.mesh)

    @property
    def accumulate_steps(self) -> int:
        """Micro-batches in a step: S."""
        return self.global_batch_examples // self.micro_batch

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of a (S, B, T) batch."""
        shape = (self.accumulate_steps, self.micro_batch, self.sequence_length)
        dtypes = {"x": jnp.int32, "y": jnp.int32, "padding_mask": jnp.bool_}
        sharding = batch_sharding(self.mesh)
        return {field: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for field, dtype in dtypes.items()}


def compile_train_step(
    train_step: Callable[..., Any], schedule: optax.Schedule, abstract: TrainState, key: jax.Array, layout: Layout
) -> Any:
    """Compile `(state, batch, key) -> (state, loss, meta)`, the state donated and coming back as it went in.

    `key` is the run's: the random key of step k is `fold_in(key, k)`.
    """

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, jax.Array, Any]:
        step_key = jax.random.fold_in(key, state.step)
        learning_rate = jnp.asarray(schedule(state.step), jnp.float32)
        state, loss, meta = train_step(state, batch, step_key, layout.accumulate_steps)
        return state, loss, meta | {"learning_rate": learning_rate}

    replicated = NamedSharding(layout.mesh, PartitionSpec())
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings_of(abstract), replicated, replicated))
    with sharding_rules(layout.mesh):
        return jitted.lower(abstract, layout.abstract_batch(), key).compile()


def compile_val_step(val_step: Callable[..., Any], abstract: TrainState, layout: Layout) -> Any:
    """Compile `(state, batch) -> (loss_sum, token_count, last_meta)`."""
    with sharding_rules(layout.mesh):
        return jax.jit(val_step).lower(abstract, layout.abstract_batch()).compile()


def compile_to_fit(compile_step: Callable[[int], Any], sizes: list[int], limit_bytes: int) -> Any:
    """Compile with the largest of `sizes` (descending) whose arguments, outputs and temporaries fit, and return that.

    After one that does not fit, the next guess is the size whose share of the temporaries would fit. Raises
    `InvalidError` with the numbers if the smallest does not fit.
    """
    while True:
        compiled = compile_step(sizes[0])
        analysis = compiled.memory_analysis()
        resident_bytes = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        needed_bytes = resident_bytes + analysis.temp_size_in_bytes
        if needed_bytes <= limit_bytes:
            return compiled
        if len(sizes) == 1:
            raise InvalidError(
                f"a step with {sizes[0]} example(s) a device needs {needed_bytes / 2**30:.2f} GiB on each device and "
                f"{limit_bytes / 2**30:.2f} GiB are there; use a smaller micro_batch_examples, more devices, or a "
                "larger fsdp or tensor axis"
            )
        share = max(limit_bytes - resident_bytes, 0) / analysis.temp_size_in_bytes
        sizes = [size for size in sizes[1:] if size <= sizes[0] * share] or sizes[-1:]
