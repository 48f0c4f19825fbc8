"""The train state, born sharded: abstract shapes, then shardings, then one jit with out_shardings. Does no I/O.

A parameter's logical axis names become mesh axes by the job's rules (`mesh.logical_rules`). Two more make it fit any
mesh: an axis that does not divide is left out, and what is still whole over fsdp is cut along its largest axis that
divides.

A model's variables that no gradient moves: part of the train state, seen by `forward`, replaced by each step.

They are what `init` of the model makes besides `params`, by collection, such as the biases that balance the load of
experts. A model that has none has no leaf here, and its state is that of flax. They are saved, restored, compared and
fingerprinted like every leaf.

A step changes them by sums over its whole global batch: `forward` returns these as meta `statistics`, a pytree for one
micro-batch, and `BaseTrainer.update_variables` makes the next variables of their total. Counts are added up as
integers, in which no split of the batch moves a bit; all else in float32.

What rides along with the parameters in the train state, by name: averages of weights, counters of hooks.

A rider is a pytree below `riders` of the state, saved, restored, compared and fingerprinted like every leaf. What has
the name and the shape of a parameter lies as that does; all else is on every device. Where nothing asks for a rider
there is no leaf, and the state and the program are those without.

A rider that has an `update` changes with each step, inside the program of the step, after the optimizer. One that has
none stays as it is there, and is replaced on the host between two steps.
"""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.checkpoint.leaves import make_strongly_typed
from runner.checkpoint.weight_names import BASE, AdapterMerge, merge_params
from runner.errors import InvalidError
from runner.optim.transforms import is_averaged, restart_average
from runner.parallel.mesh import LogicalAxisRule, get_active_rules, select_dividing_axes, use_sharding_rules

BY_GRADIENT = "_overwrite_with_gradient"  # of flax's float8 operations
PARAMS, VARIABLES, RIDERS = "params", "variables", "riders"
STATISTICS = "statistics"
Meta = dict[str, jax.Array]
# (variables, statistics of the step) -> (variables of the next step, scalars for the step's row)
UpdateVariables = Callable[[Any, Any], tuple[Any, Meta]]


class TrainState(train_state.TrainState):
    """That of flax, with the model's variables other than `params`, by collection, and what rides along, by name.

    With `merge`, `params` are an adapter, and the model's own stand still in `variables.base`: see `adapter`.
    """

    variables: Any = struct.field(default_factory=dict)
    riders: Any = struct.field(default_factory=dict)  # see `runner.train.state`
    merge: AdapterMerge | None = struct.field(pytree_node=False, default=None)


def drop_params(variables: Mapping[str, Any]) -> Any:
    """What `init` of a model returns, without its parameters."""
    return {name: collection for name, collection in variables.items() if name != PARAMS}


def get_variables(state: Any) -> Any:
    """The model's variables of a train state, which a caller may have made as flax's own: that has none."""
    found = getattr(state, VARIABLES, {})
    return found if get_merge(state) is None else {name: own for name, own in found.items() if name != BASE}


def get_merge(state: Any) -> AdapterMerge | None:
    """How the adapter that a train state trains is merged; None: it trains the model's own parameters."""
    return getattr(state, "merge", None)


def replace_variables(state: TrainState, variables: Any) -> TrainState:
    """`state` with other variables of its model."""
    return state.replace(variables=variables if state.merge is None else {**variables, BASE: state.variables[BASE]})


def make_params_merger(state: Any) -> Callable[[Any], Any]:
    """From what is trained of a state to the parameters that the model is applied to: the same, or merged. Pure."""
    merge = get_merge(state)
    if merge is None:
        return lambda params: params
    return lambda params: merge_params(state.variables[BASE], params, merge)


def bind_variables(apply_fn: Callable[..., Any], variables: Any) -> Callable[..., Any]:
    """`apply_fn` of a model, which sees `variables` beside what it is given; the same function if there are none."""
    if not variables:
        return apply_fn

    @functools.wraps(apply_fn)
    def apply(given: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return apply_fn({**variables, **given}, *args, **kwargs)

    return apply


def get_bound_module(apply_fn: Callable[..., Any]) -> Any:
    """The object whose method `apply_fn` is, or was before `bind_variables`; None for a plain function."""
    method = inspect.unwrap(apply_fn, stop=lambda function: hasattr(function, "__self__"))
    return getattr(method, "__self__", None)


def validate_no_gradient(variables: Mapping[str, Any]) -> None:
    """Raise `InvalidError` for variables whose gradients are their next values: a step would leave them as they are."""
    if BY_GRADIENT in variables:
        raise InvalidError(
            f"the model has variables {BY_GRADIENT}, of flax.linen.fp8_ops, whose gradients are their next values, and "
            "no step here does that: their scales would stand still; use an operation whose scales are variables that "
            "update_variables makes, or a train_step of your own"
        )


def sum_statistics(meta: Mapping[str, Any], num_steps: int) -> Meta:
    """The statistics of all micro-batches, if `meta` has any; of several they are the first axis of each leaf."""
    if STATISTICS not in meta:
        return {}

    def added(leaf: Any) -> jax.Array:
        wide = jnp.asarray(leaf, _wide(jnp.result_type(leaf)))
        return wide if num_steps == 1 else jnp.sum(wide, axis=0)

    return {STATISTICS: jax.tree.map(added, meta[STATISTICS])}


def keep_variables(variables: Any, statistics: Any) -> tuple[Any, Meta]:
    """(variables of the next step, scalars for the step's row) from the sums of the step's statistics; none here.

    Pure. An experiment replaces it where its `forward` returns `statistics`.
    """
    return variables, {}


def get_weights(state: Any) -> Any:
    """What is trained of a state, which must not be an adapter, and the model's other variables where it has any."""
    variables = get_variables(state)
    return {PARAMS: state.params} | ({VARIABLES: variables} if variables else {})


def drop_statistics(meta: Mapping[str, Any]) -> Meta:
    """What a row may hold of a forward's meta."""
    return {name: value for name, value in meta.items() if name != STATISTICS}


def _wide(dtype: Any) -> Any:
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


@dataclass(frozen=True)
class HalfBatchGradients:
    """What the gradients over the two halves of a global batch, by the order of its examples, have in common.

    Attributes:
        squares: the square of the norm of each half's mean gradient; float32[2].
        product: their scalar product.
        counts: what the targets of each half count for; float32[2].
    """

    squares: jax.Array
    product: jax.Array
    counts: jax.Array


@dataclass(frozen=True)
class StepObservation:
    """What a step shows its riders. All of it is traced.

    Attributes:
        step: completed steps, with this one; int32.
        params: those of the next step, in the type in which they are stored.
        grads: of the mean loss over the whole batch, float32, before any clipping.
        halves: only where a rider `needs_halves`.
    """

    step: jax.Array
    params: Any
    grads: Any
    halves: HalfBatchGradients | None = None


@dataclass(frozen=True)
class AuxiliaryState:
    """One pytree that rides along, and how it changes. Its functions are pure: nothing else of it is kept.

    Attributes:
        name: its branch below `riders` of the state.
        init: what it is before the first step, from the parameters; arrays of its own, as a step donates them. Also
            where the parameters of another run are begun with.
        update: (what it is, what the step shows) -> (what it is then, scalars for the step's row), of the same shapes
            and types; None: steps leave it alone.
        sees_halves: whether it needs the gradients of both halves of the batch, which cost the memory of one more, and
            an even number of micro-batches.
    """

    name: str
    init: Callable[[Any], Any]
    update: Callable[[Any, StepObservation], tuple[Any, Meta]] | None = None
    needs_halves: bool = False


def compare_halves(first: Any, both: Any, counts: jax.Array, divisor: jax.Array | None) -> HalfBatchGradients:
    """What two halves of a batch have in common, from the gradients of the first and of both, added up.

    Gradients are of sums that were divided by `divisor`, if any; `counts` is of each half.
    """
    second = jax.tree.map(jnp.subtract, both, first)
    shares = jnp.maximum(counts, jnp.finfo(jnp.float32).tiny) / (1.0 if divisor is None else divisor)
    products = [
        jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, *pair))
        for pair in [(first, first), (second, second), (first, second)]
    ]
    squares = jnp.stack(products[:2]) / shares**2
    return HalfBatchGradients(squares, products[2] / (shares[0] * shares[1]), counts)


def init_auxiliary(riders: Sequence[AuxiliaryState], params: Any) -> Any:
    """All of `riders` by name, as they are before the first step. Raises `InvalidError` if two have one name."""
    for name, count in Counter(rider.name for rider in riders).items():
        if count > 1:
            raise InvalidError(f"{count} riders of the job are called {name!r}; give each a name of its own")
    return {rider.name: rider.init(params) for rider in riders}


def update_auxiliary(riders: Sequence[AuxiliaryState], own: Any, seen: StepObservation) -> tuple[Any, Meta]:
    """(all that rides along after a step, scalars for its row), from what it was before. To be traced."""
    after = dict(own)
    scalars: Meta = {}
    for rider in riders:
        if rider.update is not None:
            after[rider.name], own_scalars = rider.update(own[rider.name], seen)
            scalars |= own_scalars
    return after, scalars


def validate_auxiliary(riders: Sequence[AuxiliaryState], before: Any, after: Any) -> None:
    """Raise `InvalidError` if a traced step hands a rider on as it was, though it has an update."""
    for rider in riders:
        pairs = list(zip(jax.tree.leaves(before[rider.name]), jax.tree.leaves(after.get(rider.name)), strict=False))
        if rider.update is not None and pairs and all(old is new for old, new in pairs):
            raise InvalidError(
                f"train_step of the job leaves riders.{rider.name} as it is; call that of BaseTrainer, "
                f"or `update_auxiliary` of "
                "runner.train.state after the optimizer"
            )


def _fit(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> NamedSharding:
    """The sharding nearest to `spec` that divides `shape`, and that is cut over fsdp if any axis allows it."""
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    cuts = [select_dividing_axes(size, entry, mesh.shape) for size, entry in zip(shape, entries, strict=True)]
    if all("fsdp" not in axes for axes in cuts):
        num_shards = [math.prod(mesh.shape[axis] for axis in axes) for axes in cuts]
        sizes = [size // number for size, number in zip(shape, num_shards, strict=True)]
        fitting = [index for index, size in enumerate(sizes) if size % mesh.shape["fsdp"] == 0]
        if fitting:
            largest = max(fitting, key=lambda index: sizes[index])
            cuts[largest] = (*cuts[largest], "fsdp")
    return NamedSharding(mesh, PartitionSpec(*cuts))


def compute_variable_shardings(boxed: Any, mesh: Mesh, rules: Sequence[LogicalAxisRule] | None = None) -> Any:
    """Shardings of a model's variables, from `boxed` abstract ones with logical axis names (or without).

    By `rules`, or else by those that are in force.
    """
    specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), rules or get_active_rules())
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
    shardings = compute_variable_shardings(jax.eval_shape(lambda key: model.init(key, *args, **kwargs), key), mesh)
    with use_sharding_rules(mesh):
        init = jax.jit(lambda key: nn.unbox(model.init(key, *args, **kwargs)), out_shardings=shardings)
        return init(key), shardings


def make_state(model: nn.Module, key: jax.Array, tx: Any, *args: Any, **kwargs: Any) -> TrainState:
    """The state at step 0."""
    return make_state_from_variables(model, nn.unbox(model.init(key, *args, **kwargs)), tx)


def make_state_from_variables(
    model: nn.Module, variables: Any, tx: Any, riders: Sequence[AuxiliaryState] = (), merge: AdapterMerge | None = None
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
        variables=drop_params(variables),
        riders=init_auxiliary(riders, params),
        merge=merge,
    )


def restart_averages(state: TrainState) -> TrainState:
    """The state at step 0, whose parameters may have been replaced: an optimizer that averages begins at them too."""
    if not is_averaged(state.opt_state):
        return state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
    begin = jax.jit(restart_average, out_shardings=shardings)
    return state.replace(opt_state=begin(state.params, state.opt_state))


def make_abstract_state(
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


def reshard_abstract_state(abstract: Any, mesh: Mesh) -> Any:
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


def get_shardings(abstract: Any) -> Any:
    """The sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def init_state(make: Any, key: jax.Array, abstract: TrainState, mesh: Mesh) -> TrainState:
    """The state at step 0, every leaf born as `abstract` says. Called on every host."""
    with use_sharding_rules(mesh):
        return jax.jit(lambda key: make_strongly_typed(make(key)), out_shardings=get_shardings(abstract))(key)
