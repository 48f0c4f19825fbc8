"""LoRA adapters (arXiv 2106.09685): small matrices A and B are trained beside the frozen parameters of the model.

The parameters of the train state are A and B of each target, float32, below the target's name: optimizer, clipping,
weight decay and averages apply to them alone. The model's own parameters are the variables `base` of the train state,
without gradients or moments. Each micro-batch is computed with `base + alpha / rank * A @ B`. B is initialised to zero,
so the first step computes the same outputs as the base. Read-only tools get the merged weights, with the structure and
the types of the model's own parameters.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from runner.checkpoint.leaves import BASE, LORA_A, LORA_B, AdapterMerge, merge_params
from runner.config import AdapterConfig
from runner.errors import InvalidError
from runner.optim.groups import Parameter, describe_parameters, format_nearest_names
from runner.train.auxiliary import EMA
from runner.train.state import PARAMS, VARIABLES, TrainState, drop_params, get_merge, get_variables, get_weights

_INIT_KEY = 2**32 - 1  # folded into the run's key for A; no step has this number
DONATED = "it has donated the weights that it was given, which the next step needs; donate a copy of them"


def make_abstract_adapter(boxed: Any, config: AdapterConfig) -> Any:
    """Return abstract A and B with their logical axis names, from the boxed parameters of the model.

    Raises `InvalidError` for a target that matches no matrix.
    """

    def box(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
        return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names=axes)

    tree: Any = {}
    known = {leaf.name: (path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(describe_parameters(boxed))}
    for name in _match_targets([leaf for _, leaf in known.values()], config.targets):
        path, leaf = known[name]
        branch = functools.reduce(lambda branch, key: branch.setdefault(key.key, {}), path, tree)
        # Axes of stacked layers or experts come first; each element of a stack has an adapter of its own.
        stacked, (rows, columns) = leaf.shape[:-2], leaf.shape[-2:]
        stack_axes, (row_axis, column_axis) = leaf.axes[:-2], leaf.axes[-2:]
        branch[LORA_A] = box((*stacked, rows, config.rank), (*stack_axes, row_axis, None))
        branch[LORA_B] = box((*stacked, config.rank, columns), (*stack_axes, None, column_axis))
    return tree


def _match_targets(leaves: Sequence[Parameter], patterns: Sequence[str]) -> list[str]:
    """Return the names of the matrices that match, by their own names or by that of the module that holds them."""

    def is_matrix(parameter: Parameter) -> bool:
        return len(parameter.shape) - parameter.num_stack_axes == 2

    found: set[str] = set()
    for pattern in patterns:
        by_module = [
            leaf for leaf in leaves if (module := leaf.name.rpartition(".")[0]) and fnmatchcase(module, pattern)
        ]
        by_name = [leaf for leaf in leaves if fnmatchcase(leaf.name, pattern) and leaf not in by_module]
        matrices = [leaf for leaf in leaves if is_matrix(leaf)]
        near = format_nearest_names(pattern, matrices)
        if not by_module and not by_name:
            raise InvalidError(f"config.adapter.targets: {pattern!r} matches no parameter; the matrices are {near}")
        # A module may hold vectors besides its matrices (a bias), but it is a mistake to name a vector as a target.
        wrong = [leaf for leaf in by_name if not is_matrix(leaf)]
        fitting = [leaf for leaf in (*by_module, *by_name) if is_matrix(leaf)]
        if wrong or not fitting:
            leaf = (wrong or by_module)[0]
            shape = list(leaf.shape[leaf.num_stack_axes :])
            raise InvalidError(
                f"config.adapter.targets: {pattern!r} fits {leaf.name}, which is no matrix: its shape is {shape}; "
                f"needs matrices, such as {near}"
            )
        found |= {leaf.name for leaf in fitting}
    return [leaf.name for leaf in leaves if leaf.name in found]


def init_adapter(boxed: Any, key: jax.Array) -> Any:
    """Return A and B at step 0. Pure.

    A is uniform within 1 / sqrt(in), as in PEFT (Kaiming's initialisation with a = sqrt(5)), B is zero.
    """
    own_key = jax.random.fold_in(key, _INIT_KEY)
    paths, structure = jax.tree_util.tree_flatten_with_path(nn.unbox(boxed))
    # A key per leaf by its index, so that a matrix does not depend on the shapes of others.
    leaves = []
    for number, (path, leaf) in enumerate(paths):
        bound = 1 / math.sqrt(leaf.shape[-2]) if path[-1].key == LORA_A else 0.0
        draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
        leaves.append(draw(jax.random.fold_in(own_key, number), leaf.shape) if bound else jnp.zeros(leaf.shape))
    return jax.tree.unflatten(structure, leaves)


def combine_with_base(variables: Mapping[str, Any], adapter: Any) -> Any:
    """Return variables (or shapes, or shardings) with the adapter as `params` and the model's `params` as `base`.

    Raises `InvalidError` if the model has a collection called `base` itself.
    """
    if BASE in variables:
        raise InvalidError(f"config.adapter: the model has variables called {BASE!r} itself; give them another name")
    return {**drop_params(variables), BASE: variables[PARAMS], PARAMS: adapter}


def replace_base(state: TrainState, weights: Mapping[str, Any]) -> TrainState:
    """Return the state at step 0 with a model's weights (`get_model_weights`) as the base of its adapter."""
    if get_merge(state) is None:
        return state.replace(**weights)
    return state.replace(variables={**weights.get(VARIABLES, {}), BASE: weights[PARAMS]})


# Views for read-only tools and evaluators.


def merge_adapter(state: TrainState) -> TrainState:
    """Return the state with the model's own parameters, without averages and moments of an adapter.

    The state may be abstract. Without an adapter it is returned as it is.
    """
    if get_merge(state) is None:
        return state
    return state.replace(
        params=_merge(state, state.params), variables=get_variables(state), merge=None, riders={}, opt_state=()
    )


def get_model_weights(state: TrainState) -> Any:
    """Return the model's parameters, merged if an adapter is trained, and its other variables.

    The merged parameters have the types of the base. The state may be abstract. Called on every host.
    """
    return get_weights(merge_adapter(state))


class LazyMergedWeights(MutableMapping[str, Any]):
    """Weights by name that are merged on first access, since most rows are not evaluated."""

    def __init__(self, make_by_name: Mapping[str, Callable[[], Any]]):
        self._make = {name: functools.cache(make) for name, make in make_by_name.items()}

    def __getitem__(self, name: str) -> Any:
        return self._make[name]()

    def __setitem__(self, name: str, value: Any) -> None:
        self._make[name] = functools.cache(lambda: value)

    def __delitem__(self, name: str) -> None:
        del self._make[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)

    def copy_containers(self) -> "LazyMergedWeights":
        """Return a copy that shares the merged weights, but no mutable container."""
        own = {name: functools.partial(lambda make: copy_containers(make()), make) for name, make in self._make.items()}
        return LazyMergedWeights(own)


def copy_containers(weights: Any) -> Any:
    """Return weights in new containers, for user code, which may write into them.

    JAX arrays are shared, because they are immutable; NumPy arrays are copied.
    """

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, LazyMergedWeights):
            return leaf.copy_containers()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(copy, weights)


def are_donated(weights: Any) -> bool:
    """Return True if weights were donated to a function (`donate_argnums` of `jax.jit`)."""
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(weights))


def make_lazy_weights(state: TrainState) -> Mapping[str, Any]:
    """Return the model weights of a state with an adapter, and its averages below `ema`, merged on first access."""
    # Merging costs a matmul per target and the memory of the model for each average, and most rows need no weights.
    variables, averages = get_variables(state), state.riders.get(EMA, {})
    make_by_name: dict[str, Callable[[], Any]] = {PARAMS: lambda: _merge(state, state.params)}
    make_by_name |= {VARIABLES: lambda: variables} if variables else {}
    merged_averages = {decay: functools.partial(_merge, state, params) for decay, params in averages.items()}
    return LazyMergedWeights(make_by_name | ({EMA: lambda: LazyMergedWeights(merged_averages)} if averages else {}))


def _merge(state: TrainState, adapter: Any) -> Any:
    """Return the state's base merged with an adapter, each leaf sharded as in the base."""
    assert state.merge is not None
    scale = state.merge.scale

    def merge_leaf(base: Any, a: Any, b: Any) -> Any:
        is_abstract = isinstance(base, jax.ShapeDtypeStruct)
        return base if is_abstract else _compile_merge(scale, base.sharding)(base, a, b)

    return merge_params(state.variables[BASE], adapter, merge_leaf)


@functools.lru_cache(maxsize=64)
def _compile_merge(scale: float, sharding: Any) -> Callable[..., jax.Array]:
    """Return a jitted merge; cached, since a new jit object would compile again."""
    return jax.jit(AdapterMerge(scale), out_shardings=sharding)
