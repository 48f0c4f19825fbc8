"""The train state, born sharded: abstract shapes, then shardings, then one jit with out_shardings. Does no I/O.

A parameter's logical axis names become mesh axes by the job's rules (`mesh.logical_rules`). Two more make it fit any
mesh: an axis that does not divide is left out, and what is still whole over fsdp is cut along its largest axis that
divides.
"""

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.checkpoint.adapted import Merge
from runner.checkpoint.leaves import strong
from runner.train.mesh import Rule, fitting_axes, rules_in_force, sharding_rules
from runner.train.recipe.average import has_average, restarted
from runner.train.rider import Rider, init_riders
from runner.train.variables import PARAMS, RIDERS, TrainState, others


def _fit(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> NamedSharding:
    """The sharding nearest to `spec` that divides `shape`, and that is cut over fsdp if any axis allows it."""
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    cuts = [fitting_axes(size, entry, mesh.shape) for size, entry in zip(shape, entries, strict=True)]
    if all("fsdp" not in axes for axes in cuts):
        num_shards = [math.prod(mesh.shape[axis] for axis in axes) for axes in cuts]
        sizes = [size // number for size, number in zip(shape, num_shards, strict=True)]
        fitting = [index for index, size in enumerate(sizes) if size % mesh.shape["fsdp"] == 0]
        if fitting:
            largest = max(fitting, key=lambda index: sizes[index])
            cuts[largest] = (*cuts[largest], "fsdp")
    return NamedSharding(mesh, PartitionSpec(*cuts))


def variable_shardings(boxed: Any, mesh: Mesh, rules: Sequence[Rule] | None = None) -> Any:
    """Shardings of a model's variables, from `boxed` abstract ones with logical axis names (or without).

    By `rules`, or else by those that are in force.
    """
    specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), rules or rules_in_force())
    return jax.tree.map(
        lambda leaf, spec: _fit(leaf.shape, spec or PartitionSpec(), mesh),
        nn.unbox(boxed),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    )


def sharded_init(model: nn.Module, key: jax.Array, *args: Any, mesh: Mesh, **kwargs: Any) -> tuple[Any, Any]:
    """Initialise a model's variables already cut over `mesh`; nothing is ever whole on one device.

    Returns (variables, shardings), without logical axis boxes. Called on every host; it may be traced, as it is for the
    state at step 0, of which parameters and moments come from one program.
    """
    shardings = variable_shardings(jax.eval_shape(lambda key: model.init(key, *args, **kwargs), key), mesh)
    with sharding_rules(mesh):
        init = jax.jit(lambda key: nn.unbox(model.init(key, *args, **kwargs)), out_shardings=shardings)
        return init(key), shardings


def make_state(model: nn.Module, key: jax.Array, tx: Any, *args: Any, **kwargs: Any) -> TrainState:
    """The state at step 0."""
    return state_of(model, nn.unbox(model.init(key, *args, **kwargs)), tx)


def state_of(
    model: nn.Module, variables: Any, tx: Any, riders: Sequence[Rider] = (), merge: Merge | None = None
) -> TrainState:
    """The state at step 0 with these variables, as `init` of the model makes them, and what rides along.

    With `merge`, `params` of them are an adapter.
    """
    params = variables[PARAMS]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        apply_fn=model.apply,
        params=params,
        tx=tx,
        opt_state=tx.init(params),
        variables=others(variables),
        riders=init_riders(riders, params),
        merge=merge,
    )


def begun_at_params(state: TrainState) -> TrainState:
    """The state at step 0, whose parameters may have been replaced: an optimizer that averages begins at them too."""
    if not has_average(state.opt_state):
        return state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
    begin = jax.jit(restarted, out_shardings=shardings)
    return state.replace(opt_state=begin(state.params, state.opt_state))


def abstract_state(
    make: Any, argument: Any, param_shardings: Any, mesh: Mesh, shardings_of_others: Any = None
) -> TrainState:
    """Shape, dtype and sharding of every leaf of `make(argument)`: moments lie like their parameter, by name and shape.

    So does what rides along, of which all else is on every device. The model's other variables lie as
    `shardings_of_others` says, if it has any. Nothing is computed: `argument` may be abstract.
    """
    shapes = jax.eval_shape(make, argument)
    params, _ = jax.tree_util.tree_flatten_with_path(shapes.params)
    known = {
        (_keys(path), leaf.shape): sharding
        for (path, leaf), sharding in zip(params, jax.tree.leaves(param_shardings), strict=True)
    }

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        keys = _keys(path)
        suffixes = (keys[start:] for start in range(len(keys)))
        found = next((known[suffix, leaf.shape] for suffix in suffixes if (suffix, leaf.shape) in known), None)
        other = NamedSharding(mesh, PartitionSpec()) if keys[0] == RIDERS else _fit(leaf.shape, PartitionSpec(), mesh)
        return _lying(leaf, found or other)

    abstract = jax.tree_util.tree_map_with_path(place, shapes)
    if not shardings_of_others:
        return abstract
    return abstract.replace(variables=jax.tree.map(_lying, shapes.variables, shardings_of_others))


def relaid(abstract: Any, mesh: Mesh) -> Any:
    """`abstract`, drawn on a mesh whose axes are all 1, as it would lie on another: every axis that may cut is named.

    Takes milliseconds, where a state is drawn in tenths of a second.
    """
    return jax.tree.map(lambda leaf: _lying(leaf, _relaid(leaf, mesh)), abstract)


def _relaid(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> NamedSharding:
    assert isinstance(leaf.sharding, NamedSharding), "every leaf of an abstract state says how it lies"
    is_whole = not any(leaf.sharding.spec)
    return NamedSharding(mesh, PartitionSpec()) if is_whole else _fit(leaf.shape, leaf.sharding.spec, mesh)


def _lying(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _keys(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def shardings_of(abstract: Any) -> Any:
    """The sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def init_state(make: Any, key: jax.Array, abstract: TrainState, mesh: Mesh) -> TrainState:
    """The state at step 0, every leaf born as `abstract` says. Called on every host."""
    with sharding_rules(mesh):
        return jax.jit(lambda key: strong(make(key)), out_shardings=shardings_of(abstract))(key)
