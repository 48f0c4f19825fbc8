"""Per-parameter optimizer settings: learning-rate multiplier, weight decay, gradient clipping and frozen parameters.

`describe_parameters` turns the abstract parameters of a model into a tree of `Parameter`, and `make_parameter_settings`
applies the groups of a spec to it.

Frozen parameters have no optimizer state. `FrozenParametersState` keeps their names, and the train step computes no
gradient for them (`split_frozen`).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from runner.checkpoint.fingerprint import format_leaf_name
from runner.errors import InvalidError
from runner.optim.config import OptimizerConfig, ParameterGroup

_STACK_AXES = ("layers", "expert")  # axes along which a parameter stacks several matrices or vectors
_TABLE_AXES = ("vocab", "positions")  # axes of tables whose rows are looked up one by one
_EMBEDDING = "embedding"  # name of the table of flax's `nn.Embed`
_NAMES_SHOWN = 12  # in an error: the matrices of a layer, and the embeddings


@dataclass(frozen=True)
class Parameter:
    """Name, shape and axes of one parameter; a leaf of a tree like that of the parameters."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical axes, None for an axis without a name
    # Learning-rate multiplier that the model sets; that of the parameter's group comes on top of it.
    rate_multiplier: float = 1.0

    @property
    def is_matrix(self) -> bool:
        """True for two axes or more besides those that stack layers and experts. Only matrices have weight decay."""
        return len(self.shape) - self.num_stack_axes >= 2

    @property
    def holds_matrices(self) -> bool:
        """True if the last two axes are those of a matrix, and all axes before them stack layers or experts."""
        return len(self.shape) >= 2 and all(axis in _STACK_AXES for axis in self.axes[:-2])

    @property
    def num_stack_axes(self) -> int:
        """Number of leading axes that stack layers or experts."""
        return next((n for n, axis in enumerate(self.axes) if axis not in _STACK_AXES), len(self.axes))

    @property
    def is_table(self) -> bool:
        """True for embeddings and for the matrix that computes logits."""
        return any(axis in _TABLE_AXES for axis in self.axes) or self.name.rpartition(".")[2] == _EMBEDDING


def get_default_multiplier(parameter: Parameter) -> float:
    """Return 1, the default learning-rate multiplier of a parameter.

    A trainer whose parameters need different learning rates, as with mu-P, overrides `learning_rate_multiplier`. The
    optimizers of the library multiply the learning rate by the multiplier and divide the weight decay by it, so that
    adamw subtracts the same share of the parameter as without the multiplier.
    """
    return 1.0


def format_nearest_names(pattern: str, parameters: Iterable[Parameter]) -> str:
    """Return patterns that cover all parameters, the most similar to `pattern` first, for an error message.

    Names that differ in numbers alone, as those of unrolled layers do, are one pattern: `layer_*.mlp.up.kernel`.
    """
    groups: dict[str, list[str]] = {}
    for parameter in parameters:
        groups.setdefault(re.sub(r"\d+", "*", parameter.name), []).append(parameter.name)
    names = [names[0] if len(names) == 1 else group for group, names in groups.items()]
    # The sort is stable: names that are equally similar keep the order of the model.
    names.sort(key=lambda name: -SequenceMatcher(None, pattern.replace("*", ""), name.replace("*", "")).ratio())
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def describe_parameters(boxed: Any) -> Any:
    """Return a tree of `Parameter` for abstract parameters, with the logical axes of their boxes if they have any."""
    specs = nn.get_partition_spec(boxed)

    # A spec may be shorter than the shape, as for parameters without boxes; the remaining axes have no name.
    def describe(path: Any, leaf: jax.ShapeDtypeStruct, spec: Any) -> Parameter:
        axes = tuple(spec or ())
        return Parameter(format_leaf_name(path), leaf.shape, (*axes, *[None] * (len(leaf.shape) - len(axes))))

    return jax.tree_util.tree_map_with_path(
        describe, nn.unbox(boxed), specs, is_leaf=lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )


@dataclass(frozen=True)
class ParameterSettings:
    """Per-parameter optimizer settings, as trees like that of the parameters.

    Frozen parameters are `optax.MaskedNode` in `parameters`, and absent from all other trees.
    """

    parameters: Any
    decays: Any  # weight decay of each
    rates: Any | None  # learning-rate multiplier of each; None if all are 1
    # Pairs of a norm and a tree of bools that selects the parameters clipped together to that norm.
    clips: list[tuple[float, Any]]
    weight_decay: float | None  # weight decay of all matrices; None if groups differ in it
    frozen: frozenset[str]  # dotted names of the frozen parameters
    is_ordered: bool  # True if sums over whole matrices must not depend on the number of devices

    def add_weight_decay(self) -> optax.GradientTransformation:
        """Return a stateless transformation that adds weight decay times parameter to each update."""
        # If all matrices have the same weight decay, the transformation of optax is enough.
        if self.weight_decay is not None:
            is_matrix = jax.tree.map(lambda parameter: parameter.is_matrix, self.parameters)
            return optax.add_decayed_weights(self.weight_decay, is_matrix)

        def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
            return jax.tree.map(lambda u, p, decay: u + decay * p if decay else u, updates, params, self.decays), state

        return optax.GradientTransformation(optax.init_empty_state, update)

    def scale_by_learning_rate(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Return a transformation that multiplies each update by its negative learning rate."""
        inner = optax.scale_by_learning_rate(schedule)
        if self.rates is None:
            return inner

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            updates, state = inner.update(updates, state, params)
            return self.multiply_by_rates(updates), state

        return optax.GradientTransformation(inner.init, update)

    def multiply_by_rates(self, updates: Any) -> Any:
        """Multiply each update by the learning-rate multiplier of its parameter."""
        return updates if self.rates is None else jax.tree.map(lambda u, rate: u * rate, updates, self.rates)

    def add_clipping(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return `optimizer` preceded by gradient clipping, of each set in `clips` to its norm."""
        for norm, is_clipped in self.clips:
            clip: Any = optax.clip_by_global_norm(norm)
            # A set that contains all parameters needs no mask.
            is_whole = all(jax.tree.leaves(is_clipped))
            optimizer = optax.chain(clip if is_whole else optax.masked(clip, is_clipped), optimizer)
        return optimizer


def make_parameter_settings(config: OptimizerConfig, parameters: Any, is_ordered: bool = False) -> ParameterSettings:
    """Return the settings of a tree of `Parameter`. Raises InvalidError for a group without a match or an effect."""
    group_by_name = _match_groups(config.groups, jax.tree.leaves(parameters))
    # Parameters without a group have the settings of the optimizer.
    default = ParameterGroup(pattern="*")

    def get_group(parameter: Parameter) -> ParameterGroup:
        return group_by_name.get(parameter.name, default)

    def get_decay(parameter: Parameter) -> float:
        own = get_group(parameter).weight_decay
        return (config.weight_decay if own is None else own) / parameter.rate_multiplier if parameter.is_matrix else 0.0

    # A masked node has no leaves, so trees that are mapped from `trained` do not contain frozen parameters.
    frozen = frozenset(p.name for p in jax.tree.leaves(parameters) if get_group(p).frozen)
    trained = jax.tree.map(lambda p: optax.MaskedNode() if p.name in frozen else p, parameters)
    if not jax.tree.leaves(trained):
        raise InvalidError("groups freeze every parameter; leave one to train")
    # A model with its own rates needs a weight decay by parameter too, because `get_decay` divides it by the rate.
    has_own_rates = any(p.rate_multiplier != 1 for p in jax.tree.leaves(trained))
    has_decays = any(each.weight_decay is not None for each in config.groups) or has_own_rates
    has_rates = any(each.rate != 1 for each in config.groups) or has_own_rates
    # Groups with a norm of their own are clipped alone, and all other parameters together to the global norm.
    clips = [
        (each.clip_norm, jax.tree.map(lambda p, each=each: get_group(p) is each, trained))
        for each in config.groups
        if each.clip_norm is not None
    ]
    if config.clip_norm is not None:
        clips.append((config.clip_norm, jax.tree.map(lambda p: get_group(p).clip_norm is None, trained)))
    return ParameterSettings(
        parameters=trained,
        decays=jax.tree.map(get_decay, trained),
        rates=jax.tree.map(lambda p: get_group(p).rate * p.rate_multiplier, trained) if has_rates else None,
        clips=[(norm, is_clipped) for norm, is_clipped in clips if any(jax.tree.leaves(is_clipped))],
        weight_decay=None if has_decays else config.weight_decay,
        frozen=frozen,
        is_ordered=is_ordered,
    )


def _match_groups(groups: Sequence[ParameterGroup], parameters: Sequence[Parameter]) -> dict[str, ParameterGroup]:
    matched: dict[str, ParameterGroup] = {}
    for group in groups:
        fitting = [p for p in parameters if fnmatchcase(p.name, group.pattern)]
        if not fitting:
            names = format_nearest_names(group.pattern, parameters)
            raise InvalidError(f"groups: {group.pattern!r} matches no parameter; the parameters are {names}")
        # A weight decay of 0 is accepted for vectors, because they have none anyway.
        if group.weight_decay and not any(p.is_matrix for p in fitting):
            raise InvalidError(
                f"groups: {group.pattern!r} matches no matrix, and only matrices decay; leave out weight_decay"
            )
        for parameter in fitting:
            if (other := matched.get(parameter.name)) is not None:
                raise InvalidError(
                    f"groups: {parameter.name} matches both {other.pattern!r} and {group.pattern!r}; change one of them"
                )
            matched[parameter.name] = group
    return matched


def match_patterns(patterns: Sequence[str], parameters: Any, key: str) -> Any:
    """Return a tree of bools for the parameters that a glob matches. Raises InvalidError for a glob without a match."""
    # A pattern without effect is most likely a typo, so it is an error as for groups.
    leaves = jax.tree.leaves(parameters)
    for pattern in patterns:
        if not any(fnmatchcase(p.name, pattern) for p in leaves):
            names = format_nearest_names(pattern, leaves)
            raise InvalidError(f"{key}: {pattern!r} matches no trained parameter; the trained parameters are {names}")
    return jax.tree.map(lambda p: any(fnmatchcase(p.name, pattern) for pattern in patterns), parameters)


@struct.dataclass
class FrozenParametersState:
    """State of an optimizer that does not update the parameters with these dotted names."""

    inner: Any
    names: frozenset[str] = struct.field(pytree_node=False)


def freeze_parameters(optimizer: optax.GradientTransformation, frozen: frozenset[str]) -> optax.GradientTransformation:
    """Return `optimizer` for all parameters but the frozen ones; `optimizer` itself if there are none."""
    if not frozen:
        return optimizer

    def mask(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: optax.MaskedNode() if format_leaf_name(path) in frozen else leaf, tree
        )

    def is_masked(leaf: Any) -> bool:
        return isinstance(leaf, optax.MaskedNode)

    def init(params: Any) -> FrozenParametersState:
        return FrozenParametersState(optimizer.init(mask(params)), frozen)

    def update(grads: Any, state: FrozenParametersState, params: Any) -> tuple[Any, FrozenParametersState]:
        # The optimizer sees a tree without the frozen parameters, so that clipping and moments ignore them.
        updates, inner = optimizer.update(mask(grads), state.inner, mask(params))
        # Adding -0.0 leaves every value unchanged, also a negative zero; adding 0.0 would not.
        updates = jax.tree.map(
            lambda u, g: jnp.full_like(g, -0.0) if is_masked(u) else u, updates, grads, is_leaf=is_masked
        )
        return updates, FrozenParametersState(inner, frozen)

    return optax.GradientTransformation(init, update)


def split_frozen(params: Any, opt_state: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the trained parameters, with None for frozen ones, and a function that puts those back. Traceable."""
    if not isinstance(opt_state, FrozenParametersState):
        return params, lambda trained: trained
    frozen = opt_state.names
    trained = jax.tree_util.tree_map_with_path(lambda path, p: None if format_leaf_name(path) in frozen else p, params)

    def merge(trained: Any) -> Any:
        return jax.tree.map(lambda t, p: p if t is None else t, trained, params, is_leaf=lambda leaf: leaf is None)

    return trained, merge


def fill_frozen_gradients(grads: Any, params: Any) -> Any:
    """Return gradients with zeros for frozen parameters, which are None in `grads`."""
    return jax.tree.map(
        lambda g, p: jnp.zeros(p.shape, jnp.float32) if g is None else g,
        grads,
        params,
        is_leaf=lambda leaf: leaf is None,
    )
