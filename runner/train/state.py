"""Train state, created in its shardings: abstract shapes first, then shardings, then one jit with out_shardings.

The job's logical axis rules (`runner.parallel.mesh.LogicalAxisRule`) map the logical axis names of a parameter to mesh
axes. Two more rules make any parameter fit any mesh: a mesh axis that does not divide the array axis is left out, and a
parameter that is not sharded over fsdp yet is sharded over it, along the largest axis that fsdp divides.

**Variables without gradient.** Collections that `init` of the model returns besides `params`, such as the biases that
balance the load of experts, are part of the train state: `forward` reads them and each step replaces them. The train
state of a model without such collections has no leaf for them. A step updates them from sums over its whole global
batch: `forward` returns a pytree for one micro-batch as meta `statistics`, and `BaseTrainer.update_variables` computes
the next variables from the total. Integers are summed as int32, so that the split of the batch does not change a bit;
other statistics are summed in float32.

Nothing here does I/O.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.accelerator import HOST_MEMORY
from runner.checkpoint.leaves import BASE, AdapterMerge, is_on_host, make_strongly_typed, merge_params
from runner.errors import InvalidError
from runner.optim.transforms import is_made_from_params, restart_from_params
from runner.parallel.mesh import LogicalAxisRule, fit_sharding, get_active_rules, shard_over_data, use_sharding_rules
from runner.train.auxiliary import AuxiliaryState, Scalars, init_auxiliary

PARAMS, VARIABLES, OPTIMIZER = "params", "variables", "opt_state"
RIDERS = "riders"  # field of the auxiliary states; part of leaf names in checkpoints, so it cannot be renamed
STATISTICS = "statistics"
_OVERWRITTEN_BY_GRADIENT = "_overwrite_with_gradient"  # collection in which flax.linen.fp8_ops keeps its scales
# (variables, statistics summed over the step) -> (variables of the next step, scalars for the step's metrics)
UpdateVariables = Callable[[Any, Any], tuple[Any, Scalars]]


class ShardedOptimizer(NamedTuple):
    """Optimizer whose moments are sharded over `data` too, beside parameters that are not (ZeRO-1).

    `moments` and `params` are the shardings of the moments and of the parameters, by leaf of the parameters.
    """

    init: Callable[[Any], Any]
    update: Callable[..., Any]
    moments: tuple[PartitionSpec, ...]
    params: tuple[PartitionSpec, ...]


def make_sharded_optimizer(optimizer: optax.GradientTransformation, shapes: Any, shardings: Any) -> ShardedOptimizer:
    """Return `optimizer` with the shardings of moments that `make_abstract_state` chooses with `shard_optimizer`."""
    leaves = [*zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)]
    moments = tuple(shard_over_data(leaf.shape, sharding).spec for leaf, sharding in leaves)
    return ShardedOptimizer(optimizer.init, optimizer.update, moments, tuple(sharding.spec for _, sharding in leaves))


def get_moment_specs(state: Any) -> Any:
    """Return a tree like the parameters with the shardings of their moments; None if they are not sharded further."""
    if not isinstance(state.tx, ShardedOptimizer):
        return None
    return jax.tree.unflatten(jax.tree.structure(state.params), state.tx.moments)


def shard_like_moments(state: Any, params: Any) -> Any:
    """Return parameters of which each device has the part whose moments it has. For traced code."""
    specs = get_moment_specs(state)
    return params if specs is None else jax.tree.map(jax.lax.with_sharding_constraint, params, specs)


def gather_params(state: Any, params: Any) -> Any:
    """Return updated parameters in their own sharding again. For traced code."""
    if not isinstance(state.tx, ShardedOptimizer):
        return params
    specs = jax.tree.unflatten(jax.tree.structure(state.params), state.tx.params)
    return jax.tree.map(jax.lax.with_sharding_constraint, params, specs)


class TrainState(train_state.TrainState):
    """Flax's train state with the model's other variables and the auxiliary states.

    Attributes:
        variables: collections of the model besides `params`; `base` holds the frozen weights of a run with an adapter.
        riders: auxiliary states by name, see `runner.train.auxiliary`. The name is part of leaf names in checkpoints.
        merge: arithmetic that merges the adapter `params` with `variables.base`; None without an adapter.
    """

    variables: Any = struct.field(default_factory=dict)
    riders: Any = struct.field(default_factory=dict)
    merge: AdapterMerge | None = struct.field(pytree_node=False, default=None)

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Any:
        """Return the state after an update. Moments that are sharded over `data` update one part of a parameter."""
        if not isinstance(self.tx, ShardedOptimizer):
            return super().apply_gradients(grads=grads, **kwargs)
        params = shard_like_moments(self, self.params)
        updates, opt_state = self.tx.update(grads, self.opt_state, params)
        params = gather_params(self, optax.apply_updates(params, shard_like_moments(self, updates)))
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)


# Variables of the model.


def drop_params(variables: Mapping[str, Any]) -> Any:
    """Return the collections of a model without its parameters."""
    return {name: collection for name, collection in variables.items() if name != PARAMS}


def get_merge(state: Any) -> AdapterMerge | None:
    """Return the arithmetic that merges the adapter of a train state; None if it trains the model's own parameters."""
    return getattr(state, "merge", None)


def get_variables(state: Any) -> Any:
    """Return the model's variables besides its parameters; none for a plain Flax `TrainState`."""
    variables = getattr(state, VARIABLES, {})
    return variables if get_merge(state) is None else {name: own for name, own in variables.items() if name != BASE}


def replace_variables(state: TrainState, variables: Any) -> TrainState:
    """Return the state with other variables of its model; the frozen weights of an adapter stay."""
    return state.replace(variables=variables if state.merge is None else {**variables, BASE: state.variables[BASE]})


def get_weights(state: Any) -> Any:
    """Return parameters and variables of a state without an adapter, as evaluators and checkpoints name them."""
    variables = get_variables(state)
    return {PARAMS: state.params} | ({VARIABLES: variables} if variables else {})


def make_params_merger(state: Any) -> Callable[[Any], Any]:
    """Return a pure function from trained parameters to model parameters: the identity, or the merge of an adapter."""
    merge = get_merge(state)
    if merge is None:
        return lambda params: params
    return lambda params: merge_params(state.variables[BASE], params, merge)


def bind_variables(apply_fn: Callable[..., Any], variables: Any) -> Callable[..., Any]:
    """Return `apply_fn` of a model with `variables` added to its first argument; itself if there are none."""
    if not variables:
        return apply_fn

    @functools.wraps(apply_fn)
    def apply(given: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return apply_fn({**variables, **given}, *args, **kwargs)

    return apply


def get_bound_module(apply_fn: Callable[..., Any]) -> Any:
    """Return the module that `apply_fn` is a method of, also after `bind_variables`; None for a plain function."""
    method = inspect.unwrap(apply_fn, stop=lambda function: hasattr(function, "__self__"))
    return getattr(method, "__self__", None)


def validate_no_gradient(variables: Mapping[str, Any]) -> None:
    """Raise `InvalidError` for collections that Flax overwrites with gradients: a step would never update them."""
    if _OVERWRITTEN_BY_GRADIENT in variables:
        raise InvalidError(
            f"the model has variables {_OVERWRITTEN_BY_GRADIENT} (flax.linen.fp8_ops), whose gradients are their next "
            "values, and no step here applies them, so their scales would stay constant; use an operation whose scales "
            "are variables that update_variables makes, or a train_step of your own"
        )


def keep_variables(variables: Any, statistics: Any) -> tuple[Any, Scalars]:
    """Return (variables of the next step, scalars for the step's metrics) from the step's summed statistics.

    This default changes nothing. An experiment whose `forward` returns `statistics` replaces it. Pure.
    """
    return variables, {}


def drop_statistics(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the meta of a forward pass without its statistics, which metrics cannot hold."""
    return {name: value for name, value in meta.items() if name != STATISTICS}


def sum_statistics(meta: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """Return the statistics of all micro-batches, if `meta` has any; with several, axis 0 of each leaf counts them."""
    if STATISTICS not in meta:
        return {}

    def add(leaf: Any) -> jax.Array:
        is_float = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        # Sums over many micro-batches would overflow or round in narrower types.
        wide = jnp.asarray(leaf, jnp.float32 if is_float else jnp.int32)
        return wide if num_steps == 1 else jnp.sum(wide, axis=0)

    return {STATISTICS: jax.tree.map(add, meta[STATISTICS])}


# Shardings.


def compute_variable_shardings(boxed: Any, mesh: Mesh, rules: Sequence[LogicalAxisRule] | None = None) -> Any:
    """Return the shardings of a model's abstract variables, with or without boxes (`nn.LogicallyPartitioned`).

    The logical axis rules are by default the active ones (`use_sharding_rules`).
    """
    specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), rules or get_active_rules())
    return jax.tree.map(
        lambda leaf, spec: fit_sharding(leaf.shape, spec or PartitionSpec(), mesh),
        nn.unbox(boxed),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    )


def get_shardings(abstract: Any) -> Any:
    """Return the sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _place(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def make_abstract_state(
    make: Any,
    argument: Any,
    param_shardings: Any,
    mesh: Mesh,
    variable_shardings: Any = None,
    offload_optimizer: bool = False,
    shard_optimizer: bool = False,
) -> TrainState:
    """Return shape, dtype and sharding of every leaf of the train state `make(argument)`, which is only traced.

    Moments and auxiliary states are sharded like the parameter of the same name and shape. Other auxiliary leaves are
    replicated. With `offload_optimizer` the arrays of the optimizer state are placed in pinned host memory, and its
    scalars stay on the device; with `shard_optimizer` they are sharded over `data` too.
    """

    def get_keys(path: Any) -> tuple[str, ...]:
        return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)

    # Moments mirror the tree of parameters, so a parameter is recognised by its path and shape.
    shapes = jax.eval_shape(make, argument)
    params, _ = jax.tree_util.tree_flatten_with_path(shapes.params)
    known = {
        (get_keys(path), leaf.shape): sharding
        for (path, leaf), sharding in zip(params, jax.tree.leaves(param_shardings), strict=True)
    }

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # The moments of `a.b` have paths such as `opt_state.0.mu.a.b`: the longest suffix that is a parameter decides.
        keys = get_keys(path)
        suffixes = (keys[start:] for start in range(len(keys)))
        found = next((known[suffix, leaf.shape] for suffix in suffixes if (suffix, leaf.shape) in known), None)
        is_auxiliary = keys[0] == RIDERS
        other = (
            NamedSharding(mesh, PartitionSpec()) if is_auxiliary else fit_sharding(leaf.shape, PartitionSpec(), mesh)
        )
        sharding = found or other
        if shard_optimizer and keys[0] == OPTIMIZER:
            sharding = shard_over_data(leaf.shape, sharding)
        is_offloaded = offload_optimizer and keys[0] == OPTIMIZER and leaf.ndim > 0
        return _place(leaf, sharding.with_memory_kind(HOST_MEMORY) if is_offloaded else sharding)

    abstract = jax.tree_util.tree_map_with_path(place, shapes)
    if not variable_shardings:
        return abstract
    return abstract.replace(variables=jax.tree.map(_place, shapes.variables, variable_shardings))


def reshard_abstract_state(abstract: TrainState, mesh: Mesh, shard_optimizer: bool = False) -> TrainState:
    """Return an abstract state, built on a mesh whose axes are all 1, with the shardings it would have on another mesh.

    On a mesh of ones every axis divides every leaf, so the partition specs name each axis that may shard a leaf. This
    takes milliseconds; building an abstract state takes tenths of a second.
    """

    def reshard(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(leaf.sharding, NamedSharding), "every leaf of an abstract state has a sharding"
        is_replicated = not any(leaf.sharding.spec)
        replicated = NamedSharding(mesh, PartitionSpec())
        sharding = replicated if is_replicated else fit_sharding(leaf.shape, leaf.sharding.spec, mesh)
        return _place(leaf, sharding.with_memory_kind(HOST_MEMORY) if is_on_host(leaf) else sharding)

    resharded: TrainState = jax.tree.map(reshard, abstract)
    if not shard_optimizer:
        return resharded
    place = lambda leaf: _place(leaf, shard_over_data(leaf.shape, leaf.sharding))  # noqa: E731
    return resharded.replace(opt_state=jax.tree.map(place, resharded.opt_state))


# Host offload.


def move_to_device(tree: Any, like: Any) -> Any:
    """Return `tree` with the leaves that `like` has in host memory on the device. For traced code."""
    return _move(tree, like, jax.memory.Space.Device)


def move_to_host(tree: Any, like: Any) -> Any:
    """Return `tree` with the leaves in host memory that `like` has there. For traced code."""
    return _move(tree, like, jax.memory.Space.Host)


def _move(tree: Any, like: Any, space: Any) -> Any:
    return jax.tree.map(lambda leaf, to: jax.device_put(leaf, space) if is_on_host(to) else leaf, tree, like)


# Initialisation.


def sharded_init(model: nn.Module, key: jax.Array, *args: Any, mesh: Mesh, **kwargs: Any) -> tuple[Any, Any]:
    """Initialise a model's variables sharded over `mesh`, without materialising a whole array on one device.

    Called on every host, with the arguments of `model.init`. It may be traced: parameters and moments of the state at
    step 0 are computed by one program. Returns (variables, shardings), without logical axis boxes.
    """
    shardings = compute_variable_shardings(jax.eval_shape(lambda key: model.init(key, *args, **kwargs), key), mesh)

    def init(key: jax.Array) -> Any:
        # Without rules Flax adds no constraints. If an axis is sharded here but not by the rules, its constraint would
        # make every device compute the whole array, with other fusions and other last bits.
        with nn.logical_axis_rules(()):
            return nn.unbox(model.init(key, *args, **kwargs))

    with use_sharding_rules(mesh):
        return jax.jit(init, out_shardings=shardings)(key), shardings


def make_state_from_variables(
    model: nn.Module,
    variables: Any,
    tx: Any,
    auxiliary_states: Sequence[AuxiliaryState] = (),
    merge: AdapterMerge | None = None,
) -> TrainState:
    """Return the state at step 0 with variables like those that `init` of the model returns.

    With `merge`, their `params` are an adapter.
    """
    params = variables[PARAMS]
    # Flax's `TrainState.create` would set `step` to a Python integer, which is weakly typed.
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        apply_fn=model.apply,
        params=params,
        tx=tx,
        opt_state=tx.init(params),
        variables=drop_params(variables),
        riders=init_auxiliary(auxiliary_states, params),
        merge=merge,
    )


def init_state(make: Any, key: jax.Array, abstract: TrainState, mesh: Mesh) -> TrainState:
    """Return the state at step 0, each leaf created in the sharding of `abstract`. Called on every host."""
    with use_sharding_rules(mesh):
        # One program makes the whole state, so no leaf exists unsharded on any device.
        return jax.jit(lambda key: make_strongly_typed(make(key)), out_shardings=get_shardings(abstract))(key)


def restart_averages(state: TrainState) -> TrainState:
    """Initialise what the optimizer of a state at step 0 keeps of the parameters, after these were replaced."""
    if not is_made_from_params(state.opt_state):
        return state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
    abstract = jax.tree.map(lambda leaf: _place(leaf, leaf.sharding), state.opt_state)

    def begin(params: Any, opt_state: Any) -> Any:
        return move_to_host(restart_from_params(params, move_to_device(opt_state, abstract)), abstract)

    return state.replace(opt_state=jax.jit(begin, out_shardings=shardings)(state.params, state.opt_state))
