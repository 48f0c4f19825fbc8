"""Split of the global batch into micro-batches over the devices of a mesh. Independent of the compiled step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.config import TrainerConfig
from runner.data import Dataset, Fields, get_batch_fields, load_global_batch
from runner.parallel.mesh import (
    BATCH_AXES,
    count_batch_shards,
    format_batch_axes,
    list_micro_batch_sizes,
    make_batch_sharding,
    validate_same_bits_mesh,
    validate_sequence_sharding,
)
from runner.train.feature import Feature
from runner.train.features import make_features
from runner.train.loss import target_weights


@dataclass(frozen=True)
class BatchLayout:
    """Split of the global batch into S accumulation steps, each a micro-batch of B examples over all devices."""

    mesh: Mesh
    global_batch_examples: int  # examples of an optimizer step
    micro_batch_examples: int  # examples of a micro-batch per device
    fields: Fields  # arrays of a batch by name, as the data declare them: (S, B, T) for tokens, (S, B, ...) for others
    # True if sums have an order independent of the number of devices (`train.same_bits_devices`): then each
    # micro-batch is placed on one device, and a device computes its micro-batches one after another.
    is_ordered: bool = False
    # True if the gradients of a step can be compared with another computation of them (`train.replay_every_steps`).
    is_replayable: bool = False

    @property
    def micro_batch(self) -> int:
        """Examples of one micro-batch over all its devices: B."""
        return self.micro_batch_examples * (1 if self.is_ordered else count_batch_shards(self.mesh))

    @property
    def has_sequences(self) -> bool:
        """True if every array is (S, B, T) or (S, B, T, ...), so that context parallelism can shard T."""
        shapes = {field.shape for field in self.fields.values()}
        # Tokens have a mask of as many positions, and arrays one of no position.
        mask = self.fields.get("padding_mask")
        has_vectors = mask is not None and len(mask.shape) == 1 and {shape[:1] for shape in shapes} == {mask.shape}
        return has_vectors or all(len(shape) == 1 for shape in shapes)

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of (S, B, ...) batches: over B, or over S where each device has micro-batches of its own."""
        if self.is_ordered:
            return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))
        return make_batch_sharding(self.mesh, self.has_sequences)

    @property
    def accumulate_steps(self) -> int:
        """Micro-batches of a step: S."""
        return self.global_batch_examples // self.micro_batch

    @property
    def micro_batches_per_device(self) -> int:
        """Micro-batches that each device computes in a step, one after another."""
        return self.global_batch_examples // (self.micro_batch_examples * count_batch_shards(self.mesh))

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape, dtype and sharding of a (S, B, ...) batch."""
        leading, sharding = (self.accumulate_steps, self.micro_batch), self.sharding
        return {
            name: jax.ShapeDtypeStruct((*leading, *field.shape), field.dtype, sharding=sharding)
            for name, field in self.fields.items()
        }

    def batch(self, dataset: Dataset, slice: str, index: int) -> dict[str, jax.Array]:
        """Return the (S, B, ...) batch of a split, the one after `index` batches of the data. Called on every host."""
        return load_global_batch(
            dataset,
            slice,
            index,
            accumulate_steps=self.accumulate_steps,
            micro_batch=self.micro_batch,
            sharding=self.sharding,
        )

    def compute_target_weight(self, batch: Mapping[str, jax.Array]) -> jax.Array | None:
        """Return the total target weight of a batch; None if it is the same for all batches. To be traced."""
        if "padding_mask" not in self.fields or not {"segment", "loss_weight"} & {*self.fields}:
            return None
        if not self.has_sequences:  # examples of arrays, of which a training batch is full
            return None
        return jnp.sum(target_weights(batch), dtype=jnp.float32)


def list_batch_layouts(
    config: TrainerConfig,
    mesh: Mesh,
    micro_batch: int | None = None,
    fields: Fields | None = None,
    features: Sequence[Feature] | None = None,
) -> list[BatchLayout]:
    """Return every split of the global batch over `mesh` that the config allows, the largest micro-batch first.

    `micro_batch` is the size of the only split to return, if the config allows it. `fields` are by default those of
    `get_batch_fields`, and `features` those of the runner that the config switches on. Raises `InvalidError`, with the
    nearest valid numbers, if no split exists, or sequences do not divide over the devices that share one.
    """
    train, data = config.train, config.data
    validate_sequence_sharding(mesh, data.sequence_length, config.memory.loss_chunk_positions)
    shards, axes = count_batch_shards(mesh), format_batch_axes(mesh)
    sizes = list_micro_batch_sizes(train.global_batch_examples, train.micro_batch_examples, shards, axes)
    features = make_features(config) if features is None else features
    for feature in features:
        sizes = feature.select_micro_batches(sizes, shards)
    sizes = [micro_batch] if micro_batch in sizes else sizes
    is_ordered = train.same_bits_devices is not None
    if train.same_bits_devices is not None:
        validate_same_bits_mesh(mesh, train.same_bits_devices)
    layout = BatchLayout(
        mesh,
        train.global_batch_examples,
        sizes[0],
        get_batch_fields(data) if fields is None else fields,
        is_ordered,
        is_replayable=any(feature.compares_gradients for feature in features),
    )
    return [replace(layout, micro_batch_examples=size) for size in sizes]


def make_val_layout(config: TrainerConfig, layout: BatchLayout) -> BatchLayout:
    """Return the split of a validation batch; that of a training batch, `layout`, if no key changes it.

    Raises `InvalidError`, with the nearest valid numbers, if the batch does not divide over the devices, or into
    micro-batches.
    """
    batch_examples = config.eval.global_batch_examples or layout.global_batch_examples
    wanted = config.eval.micro_batch_examples
    if (batch_examples, wanted) == (layout.global_batch_examples, None):
        return layout
    shards, axes = count_batch_shards(layout.mesh), format_batch_axes(layout.mesh)
    if wanted is None and layout.is_ordered:
        # A size derived from the number of devices would change the order of the sums.
        wanted = layout.micro_batch_examples
    sizes = list_micro_batch_sizes(batch_examples, "auto" if wanted is None else wanted, shards, axes)
    if wanted is None:
        sizes = [size for size in sizes if size <= layout.micro_batch_examples]
    return replace(layout, global_batch_examples=batch_examples, micro_batch_examples=sizes[0])
