"""Gradients of matrices whose columns are cut: scattered, where libtpu would sum them up whole on every device.

libtpu makes a reduce-scatter of a sum of which each device keeps rows. Where it keeps columns, which are what lies
together in memory, it makes an all-reduce, which sends twice as much. So there the gradient is made the other way
round, which costs a matmul nothing, and each device turns its own part back (`form.scatters_rows_alone`).
"""

import functools

import jax
from jax.sharding import PartitionSpec

from experiments.model.form import scatters_rows_alone, with_gradient_in_order
from runner.train.mesh import STATE_AXES, axes_in


def scattered_back(matrix: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    """`matrix` (I, O), which lies as `spec` says; None is no mesh. On TPUs its gradient is scattered where O is cut."""
    if spec is None or not scatters_rows_alone():
        return matrix
    rows, columns = spec
    is_cut = any(axis in STATE_AXES for axis in cutting(columns))
    return _turned_back(PartitionSpec(columns, rows), matrix) if is_cut else matrix


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _turned_back(turned: PartitionSpec, matrix: jax.Array) -> jax.Array:
    return matrix


def _turned_back_backward(turned: PartitionSpec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    columns, rows = turned
    scattered = jax.lax.with_sharding_constraint(gradient.T, turned)
    return (jax.lax.with_sharding_constraint(scattered.T, PartitionSpec(rows, columns)),)


_turned_back.defvjp(lambda turned, matrix: (matrix, None), _turned_back_backward)


def whole_on_each(matrix: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    """For each device along mesh axes, the matrix (I, O), which lies as `spec` says, turned: (devices, O, I).

    O is whole on each, I as it lies. Backwards each device's gradient is scattered over those of the axes that cut O,
    and what it then has is summed up over the others.
    """
    axes, rows, columns = (cutting(entry) for entry in (axes, *spec))
    columns = tuple(axis for axis in columns if axis in axes)
    others = tuple(axis for axis in axes if axis not in columns)

    def on_device(part: jax.Array) -> jax.Array:
        part = jax.lax.pcast(part, others, to="varying").T
        whole = jax.lax.all_gather(part, columns, tiled=True) if columns else part
        return (with_gradient_in_order(whole) if scatters_rows_alone() else whole)[None]

    specs = PartitionSpec(rows, columns), PartitionSpec(axes, None, rows)
    return jax.shard_map(on_device, in_specs=specs[0], out_specs=specs[1])(matrix)


def cutting(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of an entry of a `PartitionSpec` along which there are several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in axes_in(entry) if mesh.shape[axis] > 1)
