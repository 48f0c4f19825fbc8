"""Muon: the update of each matrix is orthogonalised, with the matrices dealt out over the devices.

optax's version has bias-corrected momentum, updates the other parameters by Adam with Nesterov momentum and a separate
weight decay, and keeps its coefficients in the state. This is the published version, with one learning rate for all
parameters. Source: arXiv:2502.16982.

The iteration multiplies a matrix by itself, so a device needs whole matrices. Left to the partitioner, each iteration
would gather every matrix on every device. Instead stacks of matrices that are sharded alike are dealt out: an
all-to-all over the axes that shard a matrix gives each device whole matrices, devices that hold the same shards each
take a part of these, and the results go the same way back. What is sent does not depend on the number of iterations.
Numbers of matrices that do not divide are padded with zeros.

Shape legend: M x N a matrix, m x n a device's shard of it, K matrices of one or several stacks. Leading axes stack
matrices.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from runner.optim.groups import Parameter
from runner.parallel.mesh import fit_sharding, get_active_rules, list_axes

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


def orthogonalise(parameters: Sequence[Parameter]) -> optax.GradientTransformation:
    """Return a transformation that makes each matrix nearly orthogonal, with the root mean square of adamw's updates.

    The last two axes of an update are those of matrices. It runs five Newton-Schulz iterations in float32, as
    published, in the default precision of the platform's matmuls (TF32 on GPUs, bfloat16 on TPUs); the singular values
    of the result are between 0.7 and 1.2. `parameters` are those of the updates, in the order of their leaves.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(updates)
        return jax.tree.unflatten(structure, _orthogonalise_leaves(leaves, parameters)), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _orthogonalise_leaves(leaves: Sequence[jax.Array], parameters: Sequence[Parameter]) -> list[jax.Array]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return [_orthogonalise_matrices(leaf) for leaf in leaves]
    groups, specs = defaultdict(list), []
    for number, (leaf, parameter) in enumerate(zip(leaves, parameters, strict=True)):
        spec = nn.logical_to_mesh_axes(parameter.axes, get_active_rules())
        specs.append(fit_sharding(leaf.shape, spec or PartitionSpec(), mesh).spec)
        axes = [tuple(axis for axis in list_axes(entry) if mesh.shape[axis] > 1) for entry in specs[-1]]
        used = {axis for each in axes for axis in each}
        others = tuple(axis for axis in reversed(mesh.axis_names) if axis not in used and mesh.shape[axis] > 1)
        groups[_Sharding((leaf.shape[-2], leaf.shape[-1]), axes[-2], axes[-1], others)].append(number)
    results = dict[int, jax.Array]()
    for sharding, numbers in groups.items():
        own = tuple(specs[number] for number in numbers)
        deal = jax.shard_map(
            functools.partial(_orthogonalise_shards, sharding, mesh.shape),
            in_specs=(own,),
            out_specs=own,
            check_vma=False,
        )
        results |= zip(numbers, deal(tuple(leaves[number] for number in numbers)), strict=True)
    return [results[number] for number in range(len(leaves))]


def _orthogonalise_shards(
    sharding: _Sharding, sizes: Mapping[str, int], stacks: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Return the shards of this device of the orthogonalised matrices, from its shards of the matrices."""
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
    x = _orthogonalise_matrices(x)
    if sharing:
        x = lax.all_gather(x, sharing, tiled=True)
    if sharding.columns:
        x = lax.all_to_all(x, sharding.columns, 2, 0, tiled=True)
    if sharding.rows:
        x = lax.all_to_all(x, sharding.rows, 1, 0, tiled=True)
    ends = itertools.accumulate(math.prod(stack.shape[:-2]) for stack in stacks)
    parts = jnp.split(x[:num_matrices], [*ends][:-1])
    return tuple(part.reshape(stack.shape) for part, stack in zip(parts, stacks, strict=True))


def _orthogonalise_matrices(matrices_MxN: jax.Array) -> jax.Array:
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
    x = jnp.swapaxes(x, -1, -2) if is_tall else x
    return x * (_RMS * math.sqrt(max(M, N)))
