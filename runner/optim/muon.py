"""Muon and its variants: the update of each matrix is orthogonalised, with the matrices dealt out over the devices.

optax's version has bias-corrected momentum, updates the other parameters by Adam with Nesterov momentum and a separate
weight decay, and keeps its coefficients in the state. This is the published version, with one learning rate for all
parameters. O is the orthogonalised momentum of a matrix, and u its update before the learning rate:

- muon, arXiv:2502.16982: u = 0.2 sqrt(max(M, N)) O.
- normuon, arXiv:2510.05491: v is the moving average of the mean square of O over the inputs of a neuron, P = O /
  (sqrt(v) + eps), and u = 0.2 sqrt(M N) P / |P|. A neuron is a column, since matrices are inputs x outputs.
- muonh, arXiv:2606.16899: u = O / |O|. A step leads to the point of the sphere of the initial norm R in the direction
  of W - rate R u, so the learning rate is relative to R, and weight decay would have no effect.

The iteration multiplies a matrix by itself, so a device needs whole matrices. Left to the partitioner, each iteration
would gather every matrix on every device. Instead stacks of matrices that are sharded alike are dealt out: an
all-to-all over the axes that shard a matrix gives each device whole matrices, devices that hold the same shards each
take a part of these, and the results go the same way back. What is sent does not depend on the number of iterations.
Numbers of matrices that do not divide are padded with zeros.

With `train.same_bits_devices` a device computes its matrices one at a time: the products of a batch may depend on the
size of the batch, that is on the number of devices. The norms of W - rate R u, whose matrices are sharded, are then
computed from gathered matrices.

Shape legend: M x N a matrix, m x n a device's shard of it, K matrices of one or several stacks. Leading axes stack
matrices.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec

from runner.optim.groups import Parameter
from runner.parallel.mesh import fit_sharding, get_active_rules, list_axes
from runner.parallel.reduction import replicate, replicate_flat

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_NORM_MIN = 1e-7
_RMS = 0.2  # root mean square of an adamw update, so that learning rate and weight decay of adamw suit Muon


class _Sharding(NamedTuple):
    """Size of the matrices of a stack, and the mesh axes over which they are sharded. Equal ones are dealt together."""

    shape: tuple[int, int]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    others: tuple[str, ...]  # axes along which devices hold the same shards, the fastest first


class NeuronState(NamedTuple):
    """State of `orthogonalise` for normuon."""

    neurons: Any  # tree with the second moments (..., N) of the neurons of each stack of matrices, in float32


@struct.dataclass
class SphereState:
    """State of `keep_norms`."""

    norms: Any  # tree with the initial Frobenius norms (...) of the matrices of each stack
    is_ordered: bool = struct.field(pytree_node=False)


# From matrices (K, M, N), and for normuon the second moments (K, N), to their updates and new second moments.
_Update = Callable[[jax.Array, jax.Array | None], tuple[jax.Array, jax.Array | None]]


def orthogonalise(
    parameters: Sequence[Parameter], kind: str = "muon", b2: float = 0.0, eps: float = 0.0, is_ordered: bool = False
) -> optax.GradientTransformation:
    """Return a transformation that makes each matrix nearly orthogonal, scaled as `kind` does (module docstring).

    The last two axes of an update are those of matrices. It runs five Newton-Schulz iterations in float32, as
    published, in the default precision of the platform's matmuls (TF32 on GPUs, bfloat16 on TPUs); the singular values
    of the result are between 0.7 and 1.2. `parameters` are those of the updates, in the order of their leaves. Normuon
    reads `b2` and `eps`. With `is_ordered` the bits do not depend on the number of devices.
    """

    def update_matrices(matrices: jax.Array, neurons: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        *_, M, N = matrices.shape
        x = _iterate(matrices)
        if kind == "muon":
            return x * (_RMS * math.sqrt(max(M, N))), None
        if kind == "muonh":
            return x / _compute_safe_norm(x), None
        assert neurons is not None, "normuon has second moments"
        neurons = b2 * neurons + (1 - b2) * jnp.mean(x * x, axis=-2)
        x = x / (jnp.sqrt(neurons) + eps)[..., None, :]
        return x * (_RMS * math.sqrt(M * N) / _compute_safe_norm(x)), neurons

    def update_one(both: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        # XLA unrolls a loop over one matrix. The barriers keep it from fusing the matrix with what is around the loop.
        return lax.optimization_barrier(update_matrices(*lax.optimization_barrier(both)))

    def update_in_order(matrices: jax.Array, neurons: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        *stack, M, N = matrices.shape
        flat = matrices.reshape(-1, M, N), None if neurons is None else neurons.reshape(-1, N)
        x, moments = lax.map(update_one, flat)
        return x.reshape(matrices.shape), None if moments is None else moments.reshape(*stack, N)

    def init(params: Any) -> Any:
        if kind != "normuon":
            return optax.EmptyState()
        return NeuronState(jax.tree.map(lambda p: jnp.zeros((*p.shape[:-2], p.shape[-1]), jnp.float32), params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(updates)
        moments, state_structure = jax.tree.flatten(state)
        work = update_in_order if is_ordered else update_matrices
        leaves, moments = _update_leaves(work, leaves, moments, parameters)
        return jax.tree.unflatten(structure, leaves), jax.tree.unflatten(state_structure, moments)

    return optax.GradientTransformation(init, update)


def keep_norms(is_ordered: bool = False) -> optax.GradientTransformation:
    """Return a transformation that moves each matrix on the sphere of its initial Frobenius norm.

    It comes last: its updates are to be added to the parameters, and those that it takes are relative to the norm. A
    matrix that begins at zero has no sphere: its updates are not a number.
    """

    def init(params: Any) -> SphereState:
        return SphereState(jax.tree.map(lambda p: _compute_norm(p, is_ordered), params), is_ordered)

    def update(updates: Any, state: SphereState, params: Any) -> tuple[Any, SphereState]:
        def move(update: jax.Array, param: jax.Array, norm: jax.Array) -> jax.Array:
            moved = param + norm[..., None, None] * update
            return moved * (norm / _compute_norm(moved, is_ordered))[..., None, None] - param

        return jax.tree.map(move, updates, params, state.norms), state

    return optax.GradientTransformation(init, update)


def restart_norms(params: Any, state: SphereState) -> SphereState:
    """Return the state of `keep_norms` for other parameters than it was made with; the rest of them is masked."""

    def restart(norm: Any, param: jax.Array) -> Any:
        is_masked = isinstance(norm, optax.MaskedNode)
        return norm if is_masked else _compute_norm(param.astype(jnp.float32), state.is_ordered)

    norms = jax.tree.map(restart, state.norms, params, is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode))
    return SphereState(norms, state.is_ordered)


def _compute_norm(matrices_MxN: jax.Array, is_ordered: bool) -> jax.Array:
    *stack, _, _ = matrices_MxN.shape
    if not is_ordered:
        return jnp.linalg.norm(matrices_MxN, axis=(-2, -1))
    # Whole matrices on every device, so that the order of the sum does not depend on how they are sharded.
    rows = replicate_flat(matrices_MxN).reshape(math.prod(stack), -1)
    norms: jax.Array = replicate(jnp.sqrt(jnp.sum(rows * rows, axis=1)))
    return norms.reshape(stack)


def _compute_safe_norm(x: jax.Array) -> jax.Array:
    # Matrices of zeros, such as those of padding, stay zeros.
    return jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), _NORM_MIN)


def _update_leaves(
    work: _Update, leaves: Sequence[jax.Array], moments: Sequence[jax.Array], parameters: Sequence[Parameter]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the updates of stacks of matrices and their new second moments; `moments` is empty if there are none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        pairs = [work(leaf, old) for leaf, old in itertools.zip_longest(leaves, moments)]
        return [leaf for leaf, _ in pairs], [new for _, new in pairs if new is not None]
    groups, specs = defaultdict(list), []
    for number, (leaf, parameter) in enumerate(zip(leaves, parameters, strict=True)):
        spec = nn.logical_to_mesh_axes(parameter.axes, get_active_rules())
        specs.append(fit_sharding(leaf.shape, spec or PartitionSpec(), mesh).spec)
        axes = [tuple(axis for axis in list_axes(entry) if mesh.shape[axis] > 1) for entry in specs[-1]]
        used = {axis for each in axes for axis in each}
        others = tuple(axis for axis in reversed(mesh.axis_names) if axis not in used and mesh.shape[axis] > 1)
        groups[_Sharding((leaf.shape[-2], leaf.shape[-1]), axes[-2], axes[-1], others)].append(number)
    found, new = dict[int, jax.Array](), dict[int, jax.Array]()
    for sharding, numbers in groups.items():
        own = tuple(specs[number] for number in numbers)
        # Second moments are small: every device has those of all its shards, and computes those of its matrices.
        whole = tuple(PartitionSpec(*specs[number][:-2]) for number in numbers if moments)
        deal = jax.shard_map(
            functools.partial(_update_shards, work, sharding, mesh.shape),
            in_specs=(own, whole),
            out_specs=(own, whole),
            check_vma=False,
        )
        of_group = tuple(moments[number] for number in numbers if moments)
        updates, of_group = deal(tuple(leaves[number] for number in numbers), of_group)
        found |= zip(numbers, updates, strict=True)
        new |= zip(numbers, of_group, strict=False)
    return [found[number] for number in range(len(leaves))], [new[number] for number in range(len(new))]


def _update_shards(
    work: _Update,
    sharding: _Sharding,
    sizes: Mapping[str, int],
    stacks: tuple[jax.Array, ...],
    moments: tuple[jax.Array, ...],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Return the shards of this device of the updates, from its shards of the matrices, and all new second moments."""
    shards_Kxmxn = jnp.concatenate([stack.reshape(-1, *stack.shape[-2:]) for stack in stacks])
    num_matrices, split = len(shards_Kxmxn), math.prod(sizes[axis] for axis in (*sharding.rows, *sharding.columns))
    # Devices with the same shards share the work as long as each has more than one matrix.
    sharing: tuple[str, ...] = ()
    for axis in sharding.others:
        if num_matrices > split:
            sharing, split = (*sharing, axis), split * sizes[axis]
    x = jnp.pad(shards_Kxmxn, ((0, -num_matrices % split), (0, 0), (0, 0)))
    if sharding.rows:
        x = lax.all_to_all(x, sharding.rows, 0, 1, tiled=True)
    if sharding.columns:
        x = lax.all_to_all(x, sharding.columns, 0, 2, tiled=True)
    if sharing:
        part = len(x) // math.prod(sizes[axis] for axis in sharing)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(sharing) * part, part)
    dealt, neurons = (*sharding.rows, *sharding.columns, *sharing), None
    if moments:
        neurons = jnp.concatenate([each.reshape(-1, each.shape[-1]) for each in moments])
        neurons = jnp.pad(neurons, ((0, -num_matrices % split), (0, 0)))
        if dealt:
            neurons = lax.dynamic_slice_in_dim(neurons, lax.axis_index(dealt) * len(x), len(x))
    x, neurons = work(x, neurons)
    if sharing:
        x = lax.all_gather(x, sharing, tiled=True)
    if sharding.columns:
        x = lax.all_to_all(x, sharding.columns, 2, 0, tiled=True)
    if sharding.rows:
        x = lax.all_to_all(x, sharding.rows, 1, 0, tiled=True)
    if neurons is not None and dealt:
        neurons = lax.all_gather(neurons, dealt, tiled=True)

    def split_stacks(x: jax.Array, like: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        ends = itertools.accumulate(math.prod(stack.shape[:-2]) for stack in stacks)
        parts = jnp.split(x[:num_matrices], [*ends][:-1])
        return tuple(part.reshape(each.shape) for part, each in zip(parts, like, strict=True))

    return split_stacks(x, stacks), () if neurons is None else split_stacks(neurons, moments)


def _iterate(matrices_MxN: jax.Array) -> jax.Array:
    """Return matrices whose singular values are near 1, by the Newton-Schulz iteration."""
    *_, M, N = matrices_MxN.shape
    # The iteration multiplies matrices of the size of the first axis, so that is made the shorter one.
    is_tall = M > N
    x = jnp.swapaxes(matrices_MxN, -1, -2) if is_tall else matrices_MxN
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + _NORM_MIN)
    # The norm bounds the largest singular value by 1, which the iteration needs to converge.
    a, b, c = _COEFFICIENTS

    def iterate(_: int, x: jax.Array) -> jax.Array:
        square = x @ jnp.swapaxes(x, -1, -2)
        return a * x + (b * square + c * square @ square) @ x

    x = lax.fori_loop(0, _NUM_ITERATIONS, iterate, x)
    return jnp.swapaxes(x, -1, -2) if is_tall else x
