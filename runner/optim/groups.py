"""How each parameter is treated, by the groups of a spec: its rate, its decay, its clip, whether it is frozen at all.

What is frozen is nowhere in the state of the optimizer; `FrozenParametersState` names it, and the step takes no
gradient of it.

What a recipe knows of one parameter: its name, its shape, and what its axes are called.
"""

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

STACK_AXES = ("layers", "expert")  # axes along which a parameter holds several matrices or vectors
_TABLE = ("vocab", "positions")  # axes of tables, whose rows are looked up one by one
_EMBEDDING = "embedding"  # what flax calls the table of an `nn.Embed`


@dataclass(frozen=True)
class Parameter:
    """One parameter: a leaf of a tree like that of the parameters. `axes` are the logical ones, None without a name.

    `rate` is what its model multiplies its learning rate by, whatever its group does.
    """

    name: str  # dotted
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    rate: float = 1.0

    @property
    def is_matrix(self) -> bool:
        """Whether it has two axes or more, not counting the axis that stacks layers: then it decays."""
        return len(self.shape) - ("layers" in self.axes) >= 2

    @property
    def holds_matrices(self) -> bool:
        """Whether its last two axes are those of a matrix, and those before stack layers or experts."""
        return len(self.shape) >= 2 and all(axis in STACK_AXES for axis in self.axes[:-2])

    @property
    def num_stack_axes(self) -> int:
        """The axes in front that stack what is a parameter each."""
        return next((n for n, axis in enumerate(self.axes) if axis not in STACK_AXES), len(self.axes))

    @property
    def is_table(self) -> bool:
        """Whether it is an embedding, or what makes logits."""
        return any(axis in _TABLE for axis in self.axes) or self.name.rpartition(".")[2] == _EMBEDDING


def get_unit_rate(parameter: Parameter) -> float:
    """What the learning rate of a parameter is multiplied by, besides what its group says: 1, of every one.

    A trainer whose parameters learn at rates of their own, as by mu-P, replaces it. The library's optimizers read it,
    and divide the decay by it, so that what adamw's takes off stays.
    """
    return 1.0


def list_nearest_names(text: str, parameters: Iterable[Parameter]) -> list[str]:
    """Their names, the most like a text first."""
    names = [parameter.name for parameter in parameters]
    return sorted(names, key=lambda name: -SequenceMatcher(None, text, name).ratio())


def describe_parameters(boxed: Any) -> Any:
    """A `Parameter` for every leaf of abstract parameters, from their boxes with logical axis names (or without)."""
    specs = nn.get_partition_spec(boxed)

    def known(path: Any, leaf: jax.ShapeDtypeStruct, spec: Any) -> Parameter:
        axes = tuple(spec or ())
        return Parameter(format_leaf_name(path), leaf.shape, (*axes, *[None] * (len(leaf.shape) - len(axes))))

    return jax.tree_util.tree_map_with_path(
        known, nn.unbox(boxed), specs, is_leaf=lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )


_NAMES_SHOWN = 4  # in an error


@dataclass(frozen=True)
class ParameterSettings:
    """Trees like that of the parameters; frozen ones are `optax.MaskedNode` there, and so in no tree below.

    Attributes:
        parameters: what is trained.
        decays: weight decay of each.
        rates: what the learning rate is multiplied by; None: by nothing.
        clips: (norm, tree of bools) of those that are clipped together.
        weight_decay: of all matrices alike; None where a group has its own.
        frozen: dotted names.
    """

    parameters: Any
    decays: Any
    rates: Any | None
    clips: list[tuple[float, Any]]
    weight_decay: float | None
    frozen: frozenset[str]

    def decay(self) -> optax.GradientTransformation:
        """Add to each update its parameter times its decay. Without state."""
        if self.weight_decay is not None:
            is_matrix = jax.tree.map(lambda parameter: parameter.is_matrix, self.parameters)
            return optax.add_decayed_weights(self.weight_decay, is_matrix)

        def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
            return jax.tree.map(lambda u, p, decay: u + decay * p if decay else u, updates, params, self.decays), state

        return optax.GradientTransformation(optax.init_empty_state, update)

    def at_rate(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Multiply each update by its learning rate, and turn it downhill."""
        inner = optax.scale_by_learning_rate(schedule)
        if self.rates is None:
            return inner

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            updates, state = inner.update(updates, state, params)
            return self.multiplied(updates), state

        return optax.GradientTransformation(inner.init, update)

    def multiplied(self, updates: Any) -> Any:
        """Updates times the rates of their groups."""
        return updates if self.rates is None else jax.tree.map(lambda u, rate: u * rate, updates, self.rates)

    def clipped(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """`optimizer` that sees gradients clipped, those of each clip to its norm."""
        for norm, is_clipped in self.clips:
            clip: Any = optax.clip_by_global_norm(norm)
            is_whole = all(jax.tree.leaves(is_clipped))
            optimizer = optax.chain(clip if is_whole else optax.masked(clip, is_clipped), optimizer)
        return optimizer


def make_parameter_settings(config: OptimizerConfig, parameters: Any) -> ParameterSettings:
    """How each of `parameters`, a tree of `Parameter`, is treated.

    Raises `InvalidError` for a group that fits none or one that another fits too, and for one whose keys have no use.
    """
    group_of = _groups_by_name(config.groups, jax.tree.leaves(parameters))
    default = ParameterGroup(pattern="*")

    def group(parameter: Parameter) -> ParameterGroup:
        return group_of.get(parameter.name, default)

    def decay(parameter: Parameter) -> float:
        own = group(parameter).weight_decay
        return (config.weight_decay if own is None else own) / parameter.rate if parameter.is_matrix else 0.0

    frozen = frozenset(p.name for p in jax.tree.leaves(parameters) if group(p).frozen)
    trained = jax.tree.map(lambda p: optax.MaskedNode() if p.name in frozen else p, parameters)
    if not jax.tree.leaves(trained):
        raise InvalidError("groups freeze every parameter; leave one to train")
    has_own_rates = any(p.rate != 1 for p in jax.tree.leaves(trained))
    has_decays = any(each.weight_decay is not None for each in config.groups) or has_own_rates
    has_rates = any(each.rate != 1 for each in config.groups) or has_own_rates
    return ParameterSettings(
        parameters=trained,
        decays=jax.tree.map(decay, trained),
        rates=jax.tree.map(lambda p: group(p).rate * p.rate, trained) if has_rates else None,
        clips=_clips(config, trained, group),
        weight_decay=None if has_decays else config.weight_decay,
        frozen=frozen,
    )


def _groups_by_name(groups: Sequence[ParameterGroup], parameters: Sequence[Parameter]) -> dict[str, ParameterGroup]:
    """The group of each parameter that has one."""
    found: dict[str, ParameterGroup] = {}
    for group in groups:
        fitting = [p for p in parameters if fnmatchcase(p.name, group.pattern)]
        if not fitting:
            raise InvalidError(f"groups: {group.pattern!r} fits no parameter; {_nearest(group.pattern, parameters)}")
        if group.weight_decay and not any(p.is_matrix for p in fitting):
            raise InvalidError(f"groups: {group.pattern!r} fits no matrix, and only matrices decay; leave weight_decay")
        for parameter in fitting:
            if (other := found.get(parameter.name)) is not None:
                raise InvalidError(
                    f"groups: {parameter.name} fits both {other.pattern!r} and {group.pattern!r}; needs one group"
                )
            found[parameter.name] = group
    return found


def _nearest(pattern: str, parameters: Sequence[Parameter]) -> str:
    """Names to choose a pattern by, the most alike first."""
    names = list_nearest_names(pattern, parameters)
    more = len(names) - _NAMES_SHOWN
    return "there are " + ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def match_patterns(patterns: Sequence[str], parameters: Any, key: str) -> Any:
    """A bool for each of `parameters`: whether a pattern fits. Raises `InvalidError` for a pattern that fits none."""
    known = jax.tree.leaves(parameters)
    for pattern in patterns:
        if not any(fnmatchcase(p.name, pattern) for p in known):
            raise InvalidError(f"{key}: {pattern!r} fits no parameter that is trained; {_nearest(pattern, known)}")
    return jax.tree.map(lambda p: any(fnmatchcase(p.name, pattern) for pattern in patterns), parameters)


def _clips(
    config: OptimizerConfig, trained: Any, group: Callable[[Parameter], ParameterGroup]
) -> list[tuple[float, Any]]:
    """The norms to clip to, and whose: those of groups alone, and one for all others."""
    own = [each for each in config.groups if each.clip_norm is not None]
    clips = [
        (each.clip_norm, jax.tree.map(lambda p, each=each: group(p) is each, trained))
        for each in own
        if each.clip_norm is not None
    ]
    if config.clip_norm is not None:
        clips.append((config.clip_norm, jax.tree.map(lambda p: group(p).clip_norm is None, trained)))
    return [(norm, of) for norm, of in clips if any(jax.tree.leaves(of))]


@struct.dataclass
class FrozenParametersState:
    """The state of an optimizer that leaves the parameters of these dotted names out."""

    inner: Any
    names: frozenset[str] = struct.field(pytree_node=False)


def freeze_parameters(optimizer: optax.GradientTransformation, frozen: frozenset[str]) -> optax.GradientTransformation:
    """`optimizer` of all parameters but the frozen ones; the same if there are none."""
    if not frozen:
        return optimizer

    def init(params: Any) -> FrozenParametersState:
        return FrozenParametersState(optimizer.init(_left_out(params, frozen)), frozen)

    def update(grads: Any, state: FrozenParametersState, params: Any) -> tuple[Any, FrozenParametersState]:
        updates, inner = optimizer.update(_left_out(grads, frozen), state.inner, _left_out(params, frozen))
        # Of zeros only the negative one leaves every value as it is, a negative zero too.
        updates = jax.tree.map(
            lambda u, g: jnp.full_like(g, -0.0) if _is_left_out(u) else u, updates, grads, is_leaf=_is_left_out
        )
        return updates, FrozenParametersState(inner, frozen)

    return optax.GradientTransformation(init, update)


def split_frozen(params: Any, opt_state: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The parameters that are trained, None in place of the others, and what puts these back. Called in the step."""
    if not isinstance(opt_state, FrozenParametersState):
        return params, lambda trained: trained
    frozen = opt_state.names
    trained = jax.tree_util.tree_map_with_path(lambda path, p: None if format_leaf_name(path) in frozen else p, params)

    def whole(trained: Any) -> Any:
        return jax.tree.map(lambda t, p: p if t is None else t, trained, params, is_leaf=lambda leaf: leaf is None)

    return trained, whole


def fill_frozen_gradients(grads: Any, params: Any) -> Any:
    """Gradients of what is trained, with zeros for what is not; the same if all is."""
    return jax.tree.map(
        lambda g, p: jnp.zeros(p.shape, jnp.float32) if g is None else g,
        grads,
        params,
        is_leaf=lambda leaf: leaf is None,
    )


def _left_out(tree: Any, frozen: frozenset[str]) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: optax.MaskedNode() if format_leaf_name(path) in frozen else leaf, tree
    )


def _is_left_out(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)
