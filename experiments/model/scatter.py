"""Gradients of matrices whose columns are cut: scattered, where libtpu would sum them up whole on every device.

libtpu makes a reduce-scatter of a sum of which each device keeps rows. Where it keeps columns, which are what lies
together in memory, it makes an all-reduce, which sends twice as much. So there the gradient is made the other way
round, which costs a matmul nothing, and each device turns its own part back. On other platforms nothing changes.
"""

import functools

import jax
from jax.sharding import PartitionSpec

from experiments.model.form import platform
from runner.train.mesh import STATE_AXES, axes_in


def scattered_back(matrix: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    """`matrix` (I, O), which lies as `spec` says; None is no mesh. On TPUs its gradient is scattered where O is cut."""
    if spec is None or platform() != "tpu":
        return matrix
    (rows, columns), mesh = spec, jax.sharding.get_abstract_mesh()
    is_cut = any(axis in STATE_AXES and mesh.shape[axis] > 1 for axis in axes_in(columns))
    return _turned_back(PartitionSpec(columns, rows), matrix) if is_cut else matrix


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _turned_back(turned: PartitionSpec, matrix: jax.Array) -> jax.Array:
    return matrix


def _turned_back_backward(turned: PartitionSpec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    columns, rows = turned
    scattered = jax.lax.with_sharding_constraint(gradient.T, turned)
    return (jax.lax.with_sharding_constraint(scattered.T, PartitionSpec(rows, columns)),)


_turned_back.defvjp(lambda turned, matrix: (matrix, None), _turned_back_backward)
