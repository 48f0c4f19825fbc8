"""Muon on a mesh: matrices are dealt out, with the updates of one device; the iteration communicates nothing."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runner.optim.groups import Parameter
from runner.optim.muon import orthogonalise
from runner.parallel.mesh import fit_sharding, get_active_rules, make_mesh, use_sharding_rules
from tests.support.tiny_jobs import format_mesh

AXES = ("embed", "mlp")
# Name, shape and logical axes of a stack of matrices.
STACKS = {
    "wide": ((3, 8, 24), ("layers", *AXES)),
    "wide as well": ((5, 8, 24), ("layers", *AXES)),
    "tall": ((4, 24, 8), ("layers", "mlp", "embed")),
    "one": ((16, 8), AXES),
    "square": ((16, 16, 16), ("layers", "embed", "heads")),
    "experts": ((2, 4, 8, 16), ("layers", "expert", *AXES)),
    "indivisible": ((2, 6, 10), ("layers", *AXES)),
}
MESHES = [
    {"fsdp": 8},
    {"data": 2, "fsdp": 4},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 8},
    {"fsdp": 2, "expert": 4},
    {"data": 2, "sequence": 2, "fsdp": 2},
]


def make_case(names: list[str]) -> tuple[list[Parameter], list[np.ndarray]]:
    parameters = [Parameter(name, *STACKS[name]) for name in names]
    return parameters, [np.random.default_rng(7).normal(size=each.shape).astype(np.float32) for each in parameters]


def compile_update(sizes: dict[str, int], parameters: list[Parameter]) -> tuple[jax.stages.Compiled, list]:
    """Return the compiled update of matrices that are sharded as parameters are, and their shardings."""
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    with use_sharding_rules(mesh):
        shardings = [
            fit_sharding(each.shape, nn.logical_to_mesh_axes(each.axes, get_active_rules()), mesh)
            for each in parameters
        ]
        transform = orthogonalise(parameters)
        arrays = [
            jax.ShapeDtypeStruct(each.shape, jnp.float32, sharding=sharding)
            for each, sharding in zip(parameters, shardings, strict=True)
        ]
        update = jax.jit(lambda *leaves: transform.update([*leaves], transform.init(None))[0], out_shardings=shardings)
        return update.lower(*arrays).compile(), shardings


def list_collectives(compiled: jax.stages.Compiled) -> list[str]:
    """Return the lines of a program that communicate."""
    text = compiled.as_text()
    assert text is not None
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return [line for line in text.splitlines() if re.search(rf" (?:{names})(?:-start)?\(", line)]


@pytest.mark.parametrize("sizes", MESHES, ids=format_mesh)
@pytest.mark.parametrize("names", [[*STACKS], *([name] for name in STACKS)], ids="+".join)
def test_updates_are_those_of_one_device(names: list[str], sizes: dict[str, int]) -> None:
    parameters, values = make_case(names)
    wanted = orthogonalise(parameters).update(values, None)[0]
    compiled, shardings = compile_update(sizes, parameters)
    found = compiled(*map(jax.device_put, values, shardings))
    for one, other, name in zip(found, wanted, names, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("sizes", MESHES, ids=format_mesh)
def test_the_iteration_communicates_nothing(sizes: dict[str, int]) -> None:
    parameters, _ = make_case([name for name in STACKS if name != "indivisible"])
    lines = list_collectives(compile_update(sizes, parameters)[0])
    assert lines
    assert not [line for line in lines if "while/body" in line]
    # Whole matrices are gathered only from devices that share the work.
    if not {"data", "sequence", "expert"} & {*sizes}:
        assert not [line for line in lines if " all-gather" in line]


def test_fewer_matrices_than_devices_are_spread_over_as_many_as_there_are() -> None:
    """Devices with the same shards divide the work only while each has more than one matrix."""
    compiled, _ = compile_update({"data": 2, "fsdp": 4}, [Parameter("wide", (4, 8, 24), ("layers", *AXES))])
    lines = list_collectives(compiled)
    assert len(lines) == 2
    assert all(" all-to-all" in line for line in lines)
