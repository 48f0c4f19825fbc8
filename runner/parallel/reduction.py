"""Gradient reduction: the all-reduce over `data` once a step, and an order that does not depend on the device count.

**All-reduce over `data` once a step** (`run_per_data_shard`). No parameter is sharded over `data`, so a device can
accumulate its gradients over all micro-batches of a step, in float32, before any communication along `data`. The sums
are then all-reduced once, in float32 whatever the compute type. A table that is used twice (tied embeddings) has a
single gradient at that point.

Over the axes that shard parameters (`fsdp`, `sequence`, `expert`) the partitioner reduce-scatters gradients in each
micro-batch. To defer that to the end of the step, a device would have to hold all gradients in float32, although such
an axis was chosen because a device cannot hold all parameters. A device therefore holds only its shard of the
gradients, and only that shard is all-reduced over `data`, which is the outermost axis and the only one whose traffic
crosses slices.

On TPUs the all-reduce is deferred only if no other axis has more than one device. Otherwise libtpu turns what is
gathered along the other axes inside the loop into rings of small matmuls: for a Llama 8B on v5p-128 (data 8 x fsdp 16)
23,392 collective-permutes a step, with copies that cost more than the deferral saves. On other platforms it is deferred
if at most one other axis is larger than 1. With two such axes, XLA's partitioner (jax 0.10.2) aborts with a failed
check on models that do not constrain the sharding of their activations. In all other cases the partitioner reduces
gradients over `data` in each micro-batch.

**Order-deterministic reduction** (`run_per_batch_shard`, `sum_gradients`). Floating-point sums depend on their order,
which normally depends on the number of devices. With the spec key `train.same_bits_devices` (G) every gradient is the
result of the same additions of the same numbers:

1. A step has M micro-batches of one shape. Each is computed by one device alone: no sum inside it crosses devices.
2. They form G groups of equal size. The gradients of a group are accumulated one after another.
3. Groups are the leaves of a binary tree. Node (l, i) is the sum of groups i 2^l to (i + 1) 2^l - 1, as far as they
   exist, and the left child is the left operand of the addition.
4. Each of n devices, where n divides G, has G / n consecutive groups. It computes the sums of the maximal subtrees that
   consist only of its own groups (for a single group, the group itself).
5. An all-to-all gives every device its share of every array of all these subtrees. It sums the rest of the tree for its
   share, and the shares are all-gathered. If the groups of each device form one subtree, as they do if their number is
   a power of two, that costs the bytes of a usual all-reduce in float32; otherwise up to 2 log2(G / n) times as many
   before the all-gather.

While a device computes, it holds whole parameters, two whole gradients and the stack of subtrees. The losses, counts
and metadata of micro-batches are gathered, and each device then sums them in their order.

This makes the additions equal. The gradients of a micro-batch are equal only if the compiler generates the same code,
although its input program depends on the number of devices. Therefore each micro-batch is enclosed in optimization
barriers, and the whole step is traced through `runner.parallel.canonical.canonicalise`, so that programs for one and
for several devices reach XLA's simplifier in the same form. Tests check this on 1, 2 and 8 CPU devices for each kind of
model and the config keys that change a step.

Shape legend: S micro-batches of a step, B examples of a micro-batch, G groups, n devices that share the batch, c
micro-batches of a group, d slots of the stack of subtrees.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from runner.parallel.mesh import (
    BATCH_AXES,
    count_batch_shards,
    enter_shard_map,
    is_tpu_mesh,
    list_axes,
    list_manual_axes,
)

_DATA = "data"


def has_deferred_all_reduce(sizes: Mapping[str, int], *, is_tpu: bool) -> bool:
    """Return True if gradients are all-reduced over `data` once a step on a mesh of these sizes, devices by axis."""
    others = [axis for axis, size in sizes.items() if axis != _DATA and size > 1]
    return sizes[_DATA] > 1 and len(others) <= (0 if is_tpu else 1)


def run_per_data_shard(
    function: Callable[[Any, Any], tuple[Any, Any, Any]], whole: Any, batch: Any, specs: Sequence[Any] | None = None
) -> tuple[Any, Any, Any]:
    """Call `function(whole, batch)` on each shard along `data`, and all-reduce the first value that it returns.

    Inside `function` no sharding may name `data`. Without a deferred all-reduce there is one shard: the whole batch.
    `whole` is replicated along `data`, and B of the batch (S, B, ...) is sharded over it. The function returns (sums,
    last, own). The result is the sum over all shards, `last` of the last shard, and `own` of all shards, stacked along
    a new first axis.

    If `data` is the only axis with several devices, arrays are reduce-scattered by `specs`, which then has for each
    item of the tuple `sums` a tree of shardings, or None. With other axes the partitioner would gather an array along
    them first; there the arrays are all-reduced.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not has_deferred_all_reduce(mesh.shape, is_tpu=is_tpu_mesh(mesh)):
        sums, last, own = function(whole, batch)
        return sums, last, jax.tree.map(lambda leaf: leaf[None], own)

    specs = specs if mesh.shape[_DATA] == mesh.size else None

    def find_dimension(spec: PartitionSpec) -> int | None:
        return next((index for index, entry in enumerate(spec) if _DATA in list_axes(entry)), None)

    def reduce(array: jax.Array, spec: PartitionSpec) -> jax.Array:
        dimension = find_dimension(spec)
        if dimension is None:
            return lax.psum(array, _DATA)
        return lax.psum_scatter(array, _DATA, scatter_dimension=dimension, tiled=True)

    def keep(spec: PartitionSpec) -> PartitionSpec:
        dimension = find_dimension(spec)
        return PartitionSpec() if dimension is None else PartitionSpec(*[None] * dimension, _DATA)

    def run_shard(whole: Any, batch: Any) -> tuple[Any, Any, Any]:
        with enter_shard_map((_DATA,), mesh):
            sums, last, own = function(whole, batch)
        gather = functools.partial(lax.all_gather, axis_name=_DATA)
        if specs is None:
            total = lax.psum(sums, _DATA)
        else:
            pairs = zip(sums, specs, strict=True)
            total = tuple(lax.psum(each, _DATA) if of is None else jax.tree.map(reduce, each, of) for each, of in pairs)
        return (
            total,
            jax.tree.map(lambda x: gather(jnp.asarray(x))[-1], last),
            jax.tree.map(gather, own),
        )

    # The gathered values are the same on all devices, which the check of `shard_map` cannot see.
    in_specs, axes = (PartitionSpec(), PartitionSpec(None, _DATA)), list_manual_axes((_DATA,))
    out_specs: Any = PartitionSpec()
    if specs is not None:
        kept = tuple(PartitionSpec() if each is None else jax.tree.map(keep, each) for each in specs)
        out_specs = (kept, PartitionSpec(), PartitionSpec())
    return jax.shard_map(run_shard, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)(
        whole, batch
    )


def list_gradient_shards(mesh: jax.sharding.AbstractMesh, is_ordered: bool) -> list[list[int]]:
    """Return the devices that compute the gradients of each shard of a batch, before any sum over shards.

    They are indices into the flat array of the devices of the mesh. With `is_ordered` the order of the sums does not
    depend on the number of devices.
    """
    is_split = is_ordered or has_deferred_all_reduce(mesh.shape, is_tpu=is_tpu_mesh(mesh))
    axes = (BATCH_AXES if is_ordered else (_DATA,)) if is_split else ()
    sizes = dict(mesh.shape)
    indices = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    indices = np.moveaxis(indices, [list(sizes).index(axis) for axis in axes], range(len(axes)))
    shards: list[list[int]] = indices.reshape(math.prod(sizes[axis] for axis in axes), -1).tolist()
    return shards


def count_gradient_shards() -> int:
    """Return the number of shards over which `run_per_data_shard` splits a batch on the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else len(list_gradient_shards(mesh, is_ordered=False))


def rotate_shards(tree: Any, shift: jax.Array, axis: int, num_shards: int) -> Any:
    """Give each shard of arrays, split along `axis`, the values of the shard `shift` before it; `shift` is 0 to 2."""
    if num_shards == 1:
        return tree

    def rotate(count: int) -> Callable[[Any], Any]:
        return lambda tree: jax.tree.map(lambda x: jnp.roll(x, count * (x.shape[axis] // num_shards), axis), tree)

    return lax.switch(shift, [rotate(count) for count in range(3)], tree)


Node = tuple[int, int]  # (level, index)


class ReductionSchedule(NamedTuple):
    """Order in which a device sums consecutive groups with a stack of subtrees."""

    slots: tuple[int, ...]  # for each group, the slot of the stack that holds the subtree ending with it
    # For each group, the number of subtrees, from that slot on, that are added to it first, the last one first.
    merges: tuple[int, ...]
    nodes: tuple[Node, ...]  # the subtrees in the stack at the end


def get_root_node(num_groups: int) -> Node:
    """Return the node that is the sum of all groups."""
    return (num_groups - 1).bit_length(), 0


@functools.cache
def make_reduction_schedule(start: int, stop: int, is_alone: bool = False) -> ReductionSchedule:
    """Return the schedule for groups `start` to `stop` - 1; with `is_alone` these are all groups, up to the root."""
    slots, merges, stack = [], [], list[Node]()
    for group in range(start, stop):
        node, num_merged = (0, group), 0
        # A right child completes its parent if the left child is on top of the stack.
        while stack and node[1] % 2 == 1 and stack[-1] == (node[0], node[1] - 1):
            level, index = stack.pop()
            node, num_merged = (level + 1, index // 2), num_merged + 1
        slots.append(len(stack))
        merges.append(num_merged)
        stack.append(node)
    if is_alone:
        # The rest of an incomplete tree: the last group also takes in all subtrees left in the stack.
        slots[-1], merges[-1], stack = 0, merges[-1] + slots[-1], [get_root_node(stop)]
    return ReductionSchedule(tuple(slots), tuple(merges), tuple(stack))


def make_device_schedules(num_groups: int, num_devices: int) -> list[ReductionSchedule]:
    """Return the schedule of each device; every device has num_groups / num_devices groups."""
    own = num_groups // num_devices
    return [
        make_reduction_schedule(own * device, own * (device + 1), num_devices == 1) for device in range(num_devices)
    ]


def compute_stack_depth(num_groups: int, num_devices: int) -> int:
    """Return the largest number of subtrees that a device holds while it sums its groups."""
    schedules = make_device_schedules(num_groups, num_devices)
    pairs = [pair for each in schedules for pair in zip(each.slots, each.merges, strict=True)]
    return max((slot + max(num_merged, 1) for slot, num_merged in pairs), default=1)


def count_subtrees(num_groups: int, num_devices: int) -> int:
    """Return the largest number of subtrees that a device has left after its groups; every device sends this many."""
    return max(len(each.nodes) for each in make_device_schedules(num_groups, num_devices))


def compute_held_bytes(num_parameters: int, gathered_itemsize: int, num_groups: int, num_devices: int) -> int:
    """Return the bytes of whole parameters and gradients that a device holds during an order-deterministic step.

    `gathered_itemsize` is 0 if parameters are whole anyway, G `num_groups` and n `num_devices`.
    """
    return num_parameters * (gathered_itemsize + 4 * (2 + compute_stack_depth(num_groups, num_devices)))


def count_batch_devices() -> int:
    """Return n, the number of devices over which the current mesh shards examples."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else count_batch_shards(mesh)


def replicate(tree: Any) -> Any:
    """Replicate arrays on every device, so that sums over their elements do not depend on their sharding."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree

    def constrain(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, PartitionSpec()), tree)

    return constrain(lax.optimization_barrier(constrain(tree)))


def replicate_flat(tree: Any) -> Any:
    """Replicate arrays as vectors.

    A gathered array may have a column-major layout, which the order of later sums would follow; a vector has only one.
    """
    return lax.optimization_barrier(jax.tree.map(jnp.ravel, replicate(tree)))


def run_per_batch_shard(function: Callable[..., Any], whole: Any, batch: Any) -> Any:
    """Call `function(whole, batch)` on every device with all of `whole` and the device's shard of `batch`.

    All other axes of the mesh have size 1, so logical axis names have no effect inside. Without a mesh there is one
    device. Results are the same on all devices, and the arrays of the batch are sharded along their first axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(whole, batch)

    def run_shard(flat: Any, batch: Any) -> Any:
        with enter_shard_map(BATCH_AXES, mesh):
            return function(jax.tree.map(lambda vector, leaf: vector.reshape(jnp.shape(leaf)), flat, whole), batch)

    specs, axes = (PartitionSpec(), PartitionSpec(BATCH_AXES)), list_manual_axes(BATCH_AXES)
    return jax.shard_map(run_shard, in_specs=specs, out_specs=PartitionSpec(), axis_names=axes, check_vma=False)(
        replicate_flat(whole), batch
    )


def gather_micro_batches(values: Any, num_devices: int) -> Any:
    """All-gather arrays whose first axis is the micro-batches of a device. Call it inside `run_per_batch_shard`."""
    if num_devices > 1:
        values = jax.tree.map(lambda leaf: lax.all_gather(leaf, BATCH_AXES, axis=0, tiled=True), values)
    # Without the barrier XLA fuses later sums with the computation of their terms, and changes their order.
    return lax.optimization_barrier(values)


def sum_gradients(
    add_group: Callable[[Any], tuple[Any, Any]], batch: Any, zeros: Any, num_groups: int, num_devices: int
) -> tuple[Any, Any]:
    """Sum the gradients of all groups in an order that does not depend on n. Call it inside `run_per_batch_shard`.

    `add_group` takes the micro-batches (c, ...) of a group, and returns the sum of their gradients, a pytree like
    `zeros`, and other values (c, ...). Of the batch each device has (S / n, ...), where n is `num_devices`. The result
    is the sum of all `num_groups` groups, and the other values of all micro-batches, (S, ...).
    """
    own, schedules = num_groups // num_devices, make_device_schedules(num_groups, num_devices)
    device = lax.axis_index(BATCH_AXES) if num_devices > 1 else 0
    slots, merges = (jnp.array([getattr(each, name) for each in schedules])[device] for name in ("slots", "merges"))
    depth = compute_stack_depth(num_groups, num_devices)

    def push_group(stack: Any, part: tuple[jax.Array, jax.Array, Any]) -> tuple[Any, Any]:
        slot, num_merged, batch = part
        gradient, others = add_group(batch)

        def merge(count: jax.Array, gradient: Any) -> Any:
            left = jax.tree.map(lambda leaf: leaf[slot + num_merged - 1 - count], stack)
            return jax.tree.map(jnp.add, left, gradient)

        gradient = lax.fori_loop(0, num_merged, merge, gradient)
        return jax.tree.map(lambda leaf, new: leaf.at[slot].set(new), stack, gradient), others

    # The stack has a static depth, since all devices run one program with different schedules.
    stack = jax.tree.map(lambda leaf: jnp.zeros((depth, *leaf.shape), leaf.dtype), zeros)
    in_groups = jax.tree.map(lambda leaf: leaf.reshape(own, -1, *leaf.shape[1:]), batch)
    stack, others = lax.scan(push_group, stack, (slots, merges, in_groups))
    others = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), others)
    nodes = [each.nodes for each in schedules]
    subtrees = jax.tree.map(lambda leaf: leaf[: count_subtrees(num_groups, num_devices)], stack)
    total = jax.tree.map(functools.partial(_sum_tree, num_groups, nodes), subtrees)
    return total, gather_micro_batches(others, num_devices)


def _sum_tree(num_groups: int, nodes: Sequence[Sequence[Node]], stack: jax.Array) -> jax.Array:
    """Return the root of the tree for one array, from the subtrees (d, ...) of all devices."""
    num_devices, shape = len(nodes), stack.shape[1:]
    # Arrays are treated as vectors, so that any shape can be split into equal shares.
    flat = stack.reshape(stack.shape[0], -1)
    # Each device sums one share of the array, so that it receives no more than that share of every subtree.
    shares = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % num_devices))).reshape(stack.shape[0], num_devices, -1)
    is_alone = num_devices == 1
    received = shares.swapaxes(0, 1) if is_alone else lax.all_to_all(shares, BATCH_AXES, split_axis=1, concat_axis=0)
    known = {node: received[device, slot] for device, each in enumerate(nodes) for slot, node in enumerate(each)}
    share = _sum_node(get_root_node(num_groups), num_groups, known)
    total = share if is_alone else lax.all_gather(share, BATCH_AXES, axis=0, tiled=True)
    return total[: flat.shape[1]].reshape(shape)


def _sum_node(node: Node, num_groups: int, known: Mapping[Node, jax.Array]) -> jax.Array:
    """Return the sum at a node of the tree; `known` holds the sums of the subtrees below it."""
    if node in known:
        return known[node]
    level, index = node
    left = _sum_node((level - 1, 2 * index), num_groups, known)
    if (2 * index + 1) << (level - 1) >= num_groups:
        return left  # The right child would begin after the last group.
    return left + _sum_node((level - 1, 2 * index + 1), num_groups, known)
