"""Sums over the micro-batches of a step in one order, whatever number of devices computes them. Pure.

Floating-point sums depend on their order, and that of a usual step on how many devices share it. Here (spec key
`train.same_bits_devices`: G) every gradient is made of the same additions of the same numbers:

1. A step has M micro-batches of one shape, which each device computes alone: no sum within one crosses devices.
2. They make up G groups of as many. The gradients of a group are added up one after another.
3. Groups are the leaves of a binary tree: node (l, i) is the sum of groups i 2^l to (i + 1) 2^l - 1, as far as there
   are that many, and of two nodes the left one stands on the left of the addition.
4. Each of n devices, where n divides G, has G / n groups that follow each other. It adds up the subtrees that lie whole
   among its own, and holds the largest of them; of one group that is the group.
5. Every device gets its share of every array of all these subtrees, adds up the rest of the tree for it, and all shares
   are gathered. Where the groups of each device make up one subtree, as they do if their number is a power of two, that
   costs the bytes of a usual reduction in float32; else up to 2 log2(G / n) times as many before the gathering.

Every device has whole parameters and gradients while it computes them: two gradients, and the stack of subtrees.
Losses, counts and meta of micro-batches are gathered, and then added up by each device, all in their order.

That the additions are the same is arithmetic; that each micro-batch gives the same gradient is up to the compiler, to
which it comes in another program on each number of devices. So it stands between barriers, and the whole step is traced
in the form of `merged`, in which a program of one device reaches XLA's simplifier as one of several does. Seen on CPU
devices: every kind of model and every value of a key that the tests have, on 1, 2 and 8.

Shape legend: S micro-batches of a step, G groups, n devices over which they are spread, c micro-batches of a group.

Sums over what the devices along `data` have computed, taken once a step. Pure.

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

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from runner.parallel.mesh import BATCH_AXES, count_batch_shards, enter_shard_map, is_tpu_mesh, list_manual_axes

DATA = "data"


def has_deferred_all_reduce(sizes: Mapping[str, int], *, is_tpu: bool) -> bool:
    """Whether sums over `data` are taken once a step on a mesh of these sizes, devices by axis."""
    others = [axis for axis, size in sizes.items() if axis != DATA and size > 1]
    return sizes[DATA] > 1 and len(others) <= (0 if is_tpu else 1)


def run_per_data_shard(function: Callable[[Any, Any], tuple[Any, Any]], whole: Any, batch: Any) -> tuple[Any, Any]:
    """Call `function(whole, batch)` along `data`, with its own part of each micro-batch of a batch (S, B, ...).

    Of the pair that it returns, the first is added up over all parts, and of the second it is the last part's that is
    returned. Inside, `data` is no axis that a sharding may name; of the others see `along`. Where no sum waits there is
    one part.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not has_deferred_all_reduce(mesh.shape, is_tpu=is_tpu_mesh(mesh)):
        return function(whole, batch)

    def on_part(whole: Any, batch: Any) -> tuple[Any, Any]:
        with enter_shard_map((DATA,), mesh):
            sums, last = function(whole, batch)
        return lax.psum(sums, DATA), jax.tree.map(lambda leaf: lax.all_gather(jnp.asarray(leaf), DATA)[-1], last)

    specs, axes = (PartitionSpec(), PartitionSpec(None, DATA)), list_manual_axes((DATA,))
    return jax.shard_map(on_part, in_specs=specs, out_specs=PartitionSpec(), axis_names=axes, check_vma=False)(
        whole, batch
    )


Node = tuple[int, int]  # (level, index)


class ReductionSchedule(NamedTuple):
    """How a device adds up groups that follow each other, with a stack of subtrees.

    Attributes:
        places: for each group the place in the stack of the subtree that ends with it.
        joined: for each group how many subtrees, those right behind that place, are added to it first, the last first.
        nodes: the subtrees in the stack at the end.
    """

    places: tuple[int, ...]
    joined: tuple[int, ...]
    nodes: tuple[Node, ...]


def get_root_node(num_groups: int) -> Node:
    """The node that is the sum of all groups."""
    return (num_groups - 1).bit_length(), 0


@functools.cache
def make_reduction_schedule(start: int, stop: int, is_alone: bool = False) -> ReductionSchedule:
    """For groups `start` to `stop` - 1; where these are all, so that a device is alone, up to the root."""
    places, joined, stack = [], [], list[Node]()
    for group in range(start, stop):
        node, number = (0, group), 0
        while stack and node[1] % 2 == 1 and stack[-1] == (node[0], node[1] - 1):
            level, index = stack.pop()
            node, number = (level + 1, index // 2), number + 1
        places.append(len(stack))
        joined.append(number)
        stack.append(node)
    if is_alone:
        places[-1], joined[-1], stack = 0, joined[-1] + places[-1], [get_root_node(stop)]
    return ReductionSchedule(tuple(places), tuple(joined), tuple(stack))


def make_device_schedules(num_groups: int, num_devices: int) -> list[ReductionSchedule]:
    """Of each device, where as many devices have the same number of groups."""
    own = num_groups // num_devices
    return [
        make_reduction_schedule(own * device, own * (device + 1), num_devices == 1) for device in range(num_devices)
    ]


def compute_stack_depth(num_groups: int, num_devices: int) -> int:
    """Subtrees that a device holds at most while it adds up its groups."""
    pairs = [
        pair
        for each in make_device_schedules(num_groups, num_devices)
        for pair in zip(each.places, each.joined, strict=True)
    ]
    return max((place + max(number, 1) for place, number in pairs), default=1)


def count_subtrees(num_groups: int, num_devices: int) -> int:
    """Subtrees that a device has at most when it has added up its groups, which all of them then send."""
    return max(len(each.nodes) for each in make_device_schedules(num_groups, num_devices))


def compute_held_bytes(num_parameters: int, gathered_itemsize: int, num_groups: int, num_devices: int) -> int:
    """What a device holds of whole parameters, gathered in this type (of 0 bytes if they are), and of gradients."""
    return num_parameters * (gathered_itemsize + 4 * (2 + compute_stack_depth(num_groups, num_devices)))


def count_batch_devices() -> int:
    """Devices over which the caller's mesh spreads examples: n."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else count_batch_shards(mesh)


def replicate(tree: Any) -> Any:
    """Arrays of which each device has all, so that sums over their elements do not depend on how they are cut."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree

    def whole(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, PartitionSpec()), tree)

    return whole(lax.optimization_barrier(whole(tree)))


def replicate_flat(tree: Any) -> Any:
    """Whole arrays as vectors: one that was gathered may lie by columns, and what is computed of it goes by them."""
    return lax.optimization_barrier(jax.tree.map(jnp.ravel, replicate(tree)))


def run_per_batch_shard(function: Callable[..., Any], whole: Any, batch: Any) -> Any:
    """Return `function(whole, batch)`, called on every device with all of `whole` and its own part of `batch`.

    `batch` is cut along its first axis; the results must be the same on all devices. Without a mesh this is one device.
    Inside logical names of axes mean nothing: all other axes of the mesh are 1.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(whole, batch)

    def on_device(rows: Any, batch: Any) -> Any:
        with enter_shard_map(BATCH_AXES, mesh):
            return function(jax.tree.map(lambda row, leaf: row.reshape(jnp.shape(leaf)), rows, whole), batch)

    specs, axes = (PartitionSpec(), PartitionSpec(BATCH_AXES)), list_manual_axes(BATCH_AXES)
    return jax.shard_map(on_device, in_specs=specs, out_specs=PartitionSpec(), axis_names=axes, check_vma=False)(
        replicate_flat(whole), batch
    )


def gather_micro_batches(values: Any, num_devices: int) -> Any:
    """Of arrays with an axis of micro-batches in front, those of all devices. Inside `run_per_batch_shard`."""
    if num_devices > 1:
        values = jax.tree.map(lambda leaf: lax.all_gather(leaf, BATCH_AXES, axis=0, tiled=True), values)
    return lax.optimization_barrier(values)  # else sums of them become one with how they came about, in another order


def sum_gradients(
    add_group: Callable[[Any], tuple[Any, Any]], batch: Any, zeros: Any, num_groups: int, num_devices: int
) -> tuple[Any, Any]:
    """Return the sum of the gradients of all groups, and what else `add_group` gives, of all groups.

    `batch` is this device's, (S / n, ...). `add_group` takes the micro-batches (c, ...) of a group, and returns the sum
    of their gradients, of the form of `zeros`, and other values (c, ...).
    """
    own, courses = num_groups // num_devices, make_device_schedules(num_groups, num_devices)
    here = lax.axis_index(BATCH_AXES) if num_devices > 1 else 0
    places, joined = (jnp.array([getattr(each, name) for each in courses])[here] for name in ("places", "joined"))
    depth = compute_stack_depth(num_groups, num_devices)

    def of_group(stack: Any, part: tuple[jax.Array, jax.Array, Any]) -> tuple[Any, Any]:
        place, number, batch = part
        gradient, others = add_group(batch)

        def join(count: jax.Array, gradient: Any) -> Any:
            left = jax.tree.map(lambda leaf: leaf[place + number - 1 - count], stack)
            return jax.tree.map(jnp.add, left, gradient)

        gradient = lax.fori_loop(0, number, join, gradient)
        return jax.tree.map(lambda leaf, new: leaf.at[place].set(new), stack, gradient), others

    stack = jax.tree.map(lambda leaf: jnp.zeros((depth, *leaf.shape), leaf.dtype), zeros)
    in_groups = jax.tree.map(lambda leaf: leaf.reshape(own, -1, *leaf.shape[1:]), batch)
    stack, others = lax.scan(of_group, stack, (places, joined, in_groups))
    others = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), others)
    nodes = [each.nodes for each in courses]
    left = jax.tree.map(lambda leaf: leaf[: count_subtrees(num_groups, num_devices)], stack)
    return jax.tree.map(functools.partial(_sum_tree, num_groups, nodes), left), gather_micro_batches(
        others, num_devices
    )


def _sum_tree(num_groups: int, nodes: Sequence[Sequence[Node]], stack: jax.Array) -> jax.Array:
    """The root of the tree, of one array, from the subtrees of all devices."""
    num_devices, shape = len(nodes), stack.shape[1:]
    flat = stack.reshape(stack.shape[0], -1)
    shares = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % num_devices))).reshape(stack.shape[0], num_devices, -1)
    is_alone = num_devices == 1
    came = shares.swapaxes(0, 1) if is_alone else lax.all_to_all(shares, BATCH_AXES, split_axis=1, concat_axis=0)
    known = {node: came[device, place] for device, each in enumerate(nodes) for place, node in enumerate(each)}
    share = _sum_node(get_root_node(num_groups), num_groups, known)
    whole = share if is_alone else lax.all_gather(share, BATCH_AXES, axis=0, tiled=True)
    return whole[: flat.shape[1]].reshape(shape)


def _sum_node(node: Node, num_groups: int, known: Mapping[Node, jax.Array]) -> jax.Array:
    """The sum at a node, by the rule of the tree."""
    if node in known:
        return known[node]
    level, index = node
    left = _sum_node((level - 1, 2 * index), num_groups, known)
    if (2 * index + 1) << (level - 1) >= num_groups:
        return left
    return left + _sum_node((level - 1, 2 * index + 1), num_groups, known)
