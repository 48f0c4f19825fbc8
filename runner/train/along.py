"""What a function finds that each device calls for itself along some axes of the mesh. Pure.

Where all other axes are 1 that is no mesh: what is traced is the program of one device. But a TPU's compiler would then
lay what kernels of attention read and write in an order that it has to copy, 39 of 382 ms of a step of
`specs/gpt2_124m.yaml` by its own estimates: there the other axes stay, and are 1.
"""

import contextlib
import math
from collections.abc import Iterator

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh

from runner.train.mesh import rules_in_force, rules_without


def is_of_tpus(mesh: AbstractMesh) -> bool:
    """Whether a mesh is of TPUs."""
    return mesh.abstract_device is not None and mesh.abstract_device.platform == "tpu"


def named_axes(axes: tuple[str, ...]) -> set[str]:
    """The axes that `jax.shard_map` is to name, so that each device is by itself along `axes`."""
    mesh = jax.sharding.get_abstract_mesh()
    return {*mesh.axis_names} if _is_alone(mesh, axes) else {*axes}


@contextlib.contextmanager
def inside(axes: tuple[str, ...], outside: AbstractMesh) -> Iterator[None]:
    """Trace what stands in such a `jax.shard_map`, which was called under the mesh `outside`."""
    if _is_alone(outside, axes):
        nowhere = AbstractMesh((), (), abstract_device=outside.abstract_device)
        with nn.logical_axis_rules(()), jax.sharding.use_abstract_mesh(nowhere):
            yield
    else:
        with nn.logical_axis_rules(rules_without(axes, rules_in_force())):
            yield


def _is_alone(mesh: AbstractMesh, axes: tuple[str, ...]) -> bool:
    return mesh.size == math.prod(mesh.shape[axis] for axis in axes) and not is_of_tpus(mesh)
