"""Muon and its variants on a mesh: the steps of one device, by an iteration that communicates nothing."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from runner.optim.groups import Parameter
from runner.optim.muon import keep_norms, orthogonalise
from runner.parallel.mesh import fit_sharding, get_active_rules, make_mesh, use_sharding_rules
from tests.support.tiny_jobs import format_mesh

KINDS = ("muon", "normuon", "muonh")
Leaves = list[Any]
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
ORDERED_MESHES = [{"fsdp": 2}, {"fsdp": 8}, {"data": 2, "fsdp": 4}, {"data": 8}]


def make_case(names: list[str]) -> tuple[list[Parameter], list[np.ndarray]]:
    parameters = [Parameter(name, *STACKS[name]) for name in names]
    return parameters, [np.random.default_rng(7).normal(size=each.shape).astype(np.float32) for each in parameters]


def make_transform(kind: str, parameters: list[Parameter], is_ordered: bool = False) -> optax.GradientTransformation:
    """Return what updates the matrices, with the learning rate before the step on a sphere."""
    transform = orthogonalise(parameters, kind, 0.95, 1e-8, is_ordered)
    return optax.chain(transform, optax.scale(-0.1), keep_norms(is_ordered)) if kind == "muonh" else transform


def run_steps(transform: optax.GradientTransformation, values: Leaves, noise: Leaves) -> tuple[Leaves, Any]:
    """Return the sum of two updates, and the state after them."""
    state, total = transform.init(values), values
    for sign in (1.0, -0.5):
        updates, state = transform.update(
            [value + sign * each for value, each in zip(total, noise, strict=True)], state, total
        )
        total = [value + update for value, update in zip(total, updates, strict=True)]
    return total, state


def compile_steps(
    sizes: dict[str, int], parameters: list[Parameter], kind: str = "muon", is_ordered: bool = False
) -> tuple[jax.stages.Compiled, list]:
    """Return two compiled steps on matrices that are sharded as parameters are, and their shardings."""
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    with use_sharding_rules(mesh):
        shardings = [
            fit_sharding(each.shape, nn.logical_to_mesh_axes(each.axes, get_active_rules()), mesh)
            for each in parameters
        ]
        transform = make_transform(kind, parameters, is_ordered)
        arrays = [
            jax.ShapeDtypeStruct(each.shape, jnp.float32, sharding=sharding)
            for each, sharding in zip(parameters, shardings, strict=True)
        ]
        whole = NamedSharding(mesh, PartitionSpec())

        def run(values: Leaves, noise: Leaves) -> tuple[Leaves, Any]:
            return run_steps(transform, values, noise)

        return jax.jit(run, out_shardings=(shardings, whole)).lower(arrays, arrays).compile(), shardings


def list_collectives(compiled: jax.stages.Compiled) -> list[str]:
    """Return the lines of a program that communicate."""
    text = compiled.as_text()
    assert text is not None
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return [line for line in text.splitlines() if re.search(rf" (?:{names})(?:-start)?\(", line)]


def compute_steps(
    kind: str, names: list[str], sizes: dict[str, int], is_ordered: bool = False
) -> list[tuple[str, np.ndarray]]:
    """Return the matrices and the state after two steps on a mesh."""
    parameters, values = make_case(names)
    compiled, shardings = compile_steps(sizes, parameters, kind, is_ordered)
    noise = [np.flip(each, -1) for each in values]
    found = compiled(*([*map(jax.device_put, each, shardings)] for each in (values, noise)))
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in leaves]


@pytest.mark.parametrize("sizes", MESHES, ids=format_mesh)
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        *((kind, [*STACKS]) for kind in KINDS),
        *(pytest.param(kind, [name], marks=pytest.mark.soak) for kind in KINDS for name in STACKS),
    ],
    ids=lambda each: each if isinstance(each, str) else "+".join(each),
)
def test_steps_are_those_of_one_device(kind: str, names: list[str], sizes: dict[str, int]) -> None:
    parameters, values = make_case(names)
    wanted = run_steps(make_transform(kind, parameters), values, [np.flip(each, -1) for each in values])
    found = compute_steps(kind, names, sizes)
    for (path, leaf), other in zip(found, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", ORDERED_MESHES, ids=format_mesh)
def test_ordered_steps_have_the_bits_of_one_device(sizes: dict[str, int], kind: str) -> None:
    """Without order products of a batch of another size have other last bits, as in every case here."""
    names = [name for name in STACKS if name != "experts"]
    wanted, found = (compute_steps(kind, names, each, is_ordered=True) for each in ({"data": 1}, sizes))
    for (path, leaf), (_, other) in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(leaf, other, err_msg=path)


@pytest.mark.parametrize("kind", ["muon", "normuon"])
@pytest.mark.parametrize("sizes", MESHES, ids=format_mesh)
def test_the_iteration_communicates_nothing(sizes: dict[str, int], kind: str) -> None:
    parameters, _ = make_case([name for name in STACKS if name != "indivisible"])
    lines = list_collectives(compile_steps(sizes, parameters, kind)[0])
    assert lines
    assert not [line for line in lines if "while/body" in line]
    # Whole matrices are gathered only from devices that share the work.
    if not {"data", "sequence", "expert"} & {*sizes} and kind == "muon":
        assert not [line for line in lines if " all-gather" in line]


def test_fewer_matrices_than_devices_are_spread_over_as_many_as_there_are() -> None:
    """Devices with the same shards divide the work only while each has more than one matrix."""
    compiled, _ = compile_steps({"data": 2, "fsdp": 4}, [Parameter("wide", (4, 8, 24), ("layers", *AXES))])
    lines = list_collectives(compiled)
    assert len(lines) == 4
    assert all(" all-to-all" in line for line in lines)
