"""What a compiler makes of one parameter on a mesh: gathered for a matmul, its gradient scattered, or all of it whole.

A program of one matmul takes the compiler a second or two, where the step takes minutes.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from runner.plan.hlo.collective import collectives
from runner.plan.mesh import Sizes
from runner.train.mesh import BATCH_AXES, STATE_AXES, make_mesh

_TOKENS = 4096  # of a device


def moves_whole(devices: Sequence[jax.Device], sizes: Sizes, leaf: Any, dtype: str) -> bool:
    """Whether `leaf`, an abstract parameter with a sharding on that mesh, is moved over `STATE_AXES` by all-reduce.

    Of one that stacks layers or experts it is a matrix that is tried, in `dtype` as it is sent.
    """
    mesh = make_mesh(dict(sizes), devices)
    shape = leaf.shape[-2:]
    spec = [None] * leaf.ndim
    spec[: len(leaf.sharding.spec)] = leaf.sharding.spec
    rows = (*BATCH_AXES, "sequence")
    num_tokens = _TOKENS * mesh.size // mesh.shape["tensor"]

    def argument(shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    weight = argument(shape, leaf.dtype, *spec[-2:])
    x, dy = (argument((num_tokens, width), jnp.dtype(dtype), rows) for width in shape)

    def step(weight: jax.Array, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient = (x.T @ dy).astype(weight.dtype)
        return x @ weight.astype(x.dtype), weight - gradient

    with jax.set_mesh(mesh):
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(dy.sharding, weight.sharding))
        text = jitted.lower(weight, x, dy).compile().as_text() or ""
    found = collectives(text, {axis: int(size) for axis, size in mesh.shape.items()})
    reduced = [one for one in found if one.kind == "all-reduce" and {*one.axes} & {*STATE_AXES}]
    return any(2 * math.prod(each) > math.prod(shape) for one in reduced for each in one.shapes)
