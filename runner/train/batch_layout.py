"""How the examples of a step are split: over the devices of a mesh, and over micro-batches in time. Arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from runner.config import TrainerConfig
from runner.data import Dataset, get_batch_fields, load_global_batch
from runner.errors import InvalidError
from runner.parallel.mesh import (
    BATCH_AXES,
    count_batch_shards,
    format_batch_axes,
    list_micro_batch_sizes,
    make_batch_sharding,
    validate_same_bits_mesh,
    validate_sequence_sharding,
)
from runner.train.loss import target_weights


@dataclass(frozen=True)
class BatchLayout:
    """The split of the global batch into accumulation steps (S), each a micro-batch (B) over all devices.

    Attributes:
        micro_batch_examples: per device.
        fields: dtype of each array of a batch by its name, as the data declares them; all are (S, B, T).
        is_ordered: whether a micro-batch lies on one device, which has as many of them as its share of the batch makes.
    """

    mesh: Mesh
    global_batch_examples: int
    micro_batch_examples: int
    sequence_length: int
    fields: Mapping[str, DTypeLike]
    is_ordered: bool = False

    @property
    def micro_batch(self) -> int:
        """Examples of one micro-batch: B."""
        return self.micro_batch_examples * (1 if self.is_ordered else count_batch_shards(self.mesh))

    @property
    def sharding(self) -> NamedSharding:
        """How (S, B, T) batches lie: B over the devices, or S where each has micro-batches of its own."""
        if self.is_ordered:
            return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))
        return make_batch_sharding(self.mesh)

    @property
    def accumulate_steps(self) -> int:
        """Micro-batches in a step: S."""
        return self.global_batch_examples // self.micro_batch

    @property
    def micro_batches_per_device(self) -> int:
        """How many micro-batches a device computes in a step, one after another."""
        return self.global_batch_examples // (self.micro_batch_examples * count_batch_shards(self.mesh))

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of a (S, B, T) batch."""
        shape = (self.accumulate_steps, self.micro_batch, self.sequence_length)
        sharding = self.sharding
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in self.fields.items()}

    def batch(self, dataset: Dataset, slice: str, step: int) -> dict[str, jax.Array]:
        """The (S, B, T) batch of `slice` after `step` completed steps (`load_global_batch`). Called on every host."""
        return load_global_batch(
            dataset,
            slice,
            step,
            accumulate_steps=self.accumulate_steps,
            micro_batch=self.micro_batch,
            sharding=self.sharding,
        )

    def count(self, batch: Mapping[str, jax.Array]) -> jax.Array | None:
        """What the real targets of a batch count for together; None where all batches have as many. To be traced."""
        if "padding_mask" not in self.fields or not {"segment", "loss_weight"} & {*self.fields}:
            return None
        return jnp.sum(target_weights(batch), dtype=jnp.float32)


def list_batch_layouts(config: TrainerConfig, mesh: Mesh, micro_batch: int | None = None) -> list[BatchLayout]:
    """Every split of the global batch over `mesh` that the config allows, the largest micro-batch first.

    With `micro_batch` the one of so many examples a device alone, if the config allows it. Raises `InvalidError` with
    the nearest valid numbers if there is none, or if a row does not divide over the devices that share it.
    """
    train, data = config.train, config.data
    validate_sequence_sharding(mesh, data.sequence_length, config.memory.loss_chunk_positions)
    shards, axes = count_batch_shards(mesh), format_batch_axes(mesh)
    sizes = list_micro_batch_sizes(train.global_batch_examples, train.micro_batch_examples, shards, axes)
    if config.noise_scale is not None:
        sizes = _of_even_number(sizes, train.global_batch_examples, shards)
    fields = get_batch_fields(data)
    sizes = [micro_batch] if micro_batch in sizes else sizes
    is_ordered = train.same_bits_devices is not None
    if train.same_bits_devices is not None:
        validate_same_bits_mesh(mesh, train.same_bits_devices)
    return [
        BatchLayout(mesh, train.global_batch_examples, size, data.sequence_length, fields, is_ordered) for size in sizes
    ]


def _of_even_number(sizes: list[int], global_batch_examples: int, shards: int) -> list[int]:
    """Those of `sizes` that make an even number of micro-batches: a half of the batch is then half of them."""
    share = global_batch_examples // shards
    found = [size for size in sizes if share // size % 2 == 0]
    if not found:
        split = f"{global_batch_examples} examples over {shards} devices, micro_batch_examples={sizes[0]}"
        raise InvalidError(
            f"noise_scale compares two halves of each batch, and needs an even number of micro-batches; {split} make "
            f"{share // sizes[0]}; use "
            + (f"micro_batch_examples={share // 2}" if share % 2 == 0 else f"multiples of {2 * shards} examples")
        )
    return found
