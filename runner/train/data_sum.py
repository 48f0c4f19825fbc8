"""Sums over what the devices along `data` have computed, taken once a step. Pure.

No parameter is cut over `data`, so along it a device can compute its part of all micro-batches of a step before it
tells the others anything. It adds up its own gradients in float32, and these sums are reduced once, whatever the number
of micro-batches, in float32 whatever the type of compute. A table that is used twice has one gradient by then.

Over the axes that cut parameters (`fsdp`, `sequence`, `expert`) the partitioner scatters gradients in each micro-batch.
To wait for the end of the step a device would have to hold all gradients in float32, where such an axis was chosen
since it cannot hold all parameters. So it holds its shard of them, and no more than that is reduced over `data`: that
axis comes first, and nothing else crosses slices.

On TPUs this is so where no other axis has more than one device. Else libtpu would make rings of small matmuls of what
is gathered along the others inside: of a Llama 8B on v5p-128 (data 8 x fsdp 16) 23,392 collective-permutes a step, with
copies that cost more than the waiting saves. On all platforms it is so beside one other axis at most. Beside two, XLA's
partitioner (jax 0.10.2) dies of a failed check on a model that says nothing of how its activations are cut. Elsewhere
the partitioner reduces gradients over `data` in each micro-batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from runner.train.along import inside, is_of_tpus, named_axes

DATA = "data"


def waits(sizes: Mapping[str, int], *, is_tpu: bool) -> bool:
    """Whether sums over `data` are taken once a step on a mesh of these sizes, devices by axis."""
    others = [axis for axis, size in sizes.items() if axis != DATA and size > 1]
    return sizes[DATA] > 1 and len(others) <= (0 if is_tpu else 1)


def on_parts(function: Callable[[Any, Any], tuple[Any, Any]], whole: Any, batch: Any) -> tuple[Any, Any]:
    """Call `function(whole, batch)` along `data`, with its own part of each micro-batch of a batch (S, B, ...).

    Of the pair that it returns, the first is added up over all parts, and of the second it is the last part's that is
    returned. Inside, `data` is no axis that a sharding may name; of the others see `along`. Where no sum waits there is
    one part.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not waits(mesh.shape, is_tpu=is_of_tpus(mesh)):
        return function(whole, batch)

    def on_part(whole: Any, batch: Any) -> tuple[Any, Any]:
        with inside((DATA,), mesh):
            sums, last = function(whole, batch)
        return lax.psum(sums, DATA), jax.tree.map(lambda leaf: lax.all_gather(jnp.asarray(leaf), DATA)[-1], last)

    specs, axes = (PartitionSpec(), PartitionSpec(None, DATA)), named_axes((DATA,))
    return jax.shard_map(on_part, in_specs=specs, out_specs=PartitionSpec(), axis_names=axes, check_vma=False)(
        whole, batch
    )
